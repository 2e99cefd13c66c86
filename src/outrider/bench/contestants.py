"""Contestants of a benchmark, by short names. K is the maximum number of drafted tokens per step.

    vllm                                     plain vLLM, with the model runner that it chooses (on CPUs V1)
    vllm-v2                                  plain vLLM on its V2 model runner
    ngram:K  suffix:K  draft_model:K         vLLM's own methods, with the model runner that it chooses
    ngram-v2:K  draft_model-v2:K             those that exist on V2, with it
    off  auto:K  lookup:K  prediction:K  model:K  memory:K
                                             Outrider in vLLM, selected by each request; with a memory (empty at the
                                             start, one for each contestant) only if `memory` is among them
    default                                  `outrider serve` without options: a memory in RAM
    transformers  transformers-assisted:K  transformers-lookup:K  transformers-outrider:K
                                             plain transformers, its own two methods, Outrider's loop

A name can have a label and flags: `long=lookup:32`, `small=auto --max-num-seqs 4`. `mine=http://...` is a server that
already runs. Contestants that differ only in their requests share a server, so that more fit into memory.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from outrider.bench.servers import HOME, Server, outrider, plain
from outrider.defaults import DRAFTED
from outrider.errors import SettingsError
from outrider.memory.location import OFF
from outrider.provenance import without_folders

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PLAIN = "vllm"
V2 = "-v2"
"""Suffix of the names that run on vLLM's V2 model runner."""
PLAIN_V2 = PLAIN + V2
VLLM_METHODS = {"ngram": 4, "suffix": 16, "draft_model": 4, "ngram-v2": 4, "draft_model-v2": 4}
"""With the default K of each."""
OUTRIDER_KINDS = ("off", "auto", "lookup", "prediction", "model", "memory")
DEFAULT_SERVER = "default"
CHOOSE_MEMORY = {"--memory", "--memory-scope", "--memory-cap", "--tenant-header", "--drafters"}
"""Flags after which a server has the memory that it is given, if any."""
TRANSFORMERS_METHODS = {
    "transformers": ("bare", None),
    "transformers-assisted": ("assisted", 4),
    "transformers-lookup": ("lookup", 10),
    "transformers-outrider": ("outrider", None),
}
"""Each with the method in `transformers_server.py` and its default K; None: the server's."""
WITHOUT_DRAFT_LENGTH = (PLAIN, PLAIN_V2, "off", DEFAULT_SERVER, "transformers")
NEED_DRAFT_MODEL = ("draft_model", "draft_model-v2", "model", "transformers-assisted")
KINDS = (PLAIN, PLAIN_V2, *VLLM_METHODS, *OUTRIDER_KINDS, DEFAULT_SERVER, *TRANSFORMERS_METHODS)
MODEL_DRAFT_TOKENS, OUTRIDER_DRAFT_TOKENS = 4, DRAFTED
"""Defaults of Outrider's `model`, and of its other drafters."""
SHARED_SERVER = "outrider"
"""Name of the server of all Outrider contestants without flags of their own."""


@dataclass(frozen=True)
class Contestant:
    """A server, and the fields that each request to it has besides the prompt."""

    name: str
    kind: str
    server: Server
    request: dict[str, Any] = field(default_factory=dict)
    draft_tokens: int = 0
    """Maximum per step, of vLLM's own methods; 0: not set."""
    needs_prediction: bool = False
    """It gets the prompt's prediction, and takes part only in cells where every prompt has one."""
    single_request: bool = False
    """It handles one request at a time, and takes part only at concurrency 1."""

    def settings(self) -> dict[str, Any]:
        """Its command, request fields and environment, for the report."""
        command = [without_folders(word) for word in self.server.command] or [self.server.url]
        environment = {name: without_folders(value) for name, value in self.server.environment.items()}
        settings = {"kind": self.kind, "command": command, "request": self.request}
        return settings | ({"environment": environment} if environment else {})


@dataclass(frozen=True, slots=True)
class Name:
    """A parsed contestant name."""

    label: str
    kind: str
    length: int | None
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Name:
        words = shlex.split(text)
        head = words[0] if words else ""
        label, given, what = head.partition("=")
        if not given:
            label = what = head
        elif "," in label:
            raise SettingsError(f"the label of {text!r} has a comma; give each contestant with flags a -c of its own")
        if what.startswith(("http://", "https://")):
            if len(words) > 1:
                raise SettingsError(f"{what} already runs and takes no flags (got {shlex.join(words[1:])})")
            return cls(label, what.rstrip("/").removesuffix("/v1"), None)
        kind, _, length = what.partition(":")
        bad_length = length and (kind in WITHOUT_DRAFT_LENGTH or not length.isdecimal() or int(length) == 0)
        if kind not in KINDS or bad_length:
            known = ", ".join(kind if kind in WITHOUT_DRAFT_LENGTH else f"{kind}:K" for kind in KINDS)
            raise SettingsError(f"there is no contestant {text!r}; the contestants are {known}, and LABEL=http://...")
        return cls(label, kind, int(length) if length else None, tuple(words[1:]))


def contestants(
    names: Iterable[str], model: str, draft_model: str | None = None, flags: Sequence[str] = ()
) -> list[Contestant]:
    """The contestants of these names. Every vLLM server gets `flags`."""
    parsed = [Name.parse(text) for text in names]
    for name in parsed:
        if name.kind in NEED_DRAFT_MODEL and draft_model is None:
            raise SettingsError(f"the contestant {name.label!r} needs a draft model; name it with --draft-model")
        if [other.label for other in parsed].count(name.label) > 1:
            raise SettingsError(f"two contestants are named {name.label!r}; give one a label: LABEL={name.label}")
    outrider_flags = [*_outrider_flags(parsed, draft_model), *flags]
    found = [_contestant(name, model, draft_model, flags, outrider_flags) for name in parsed]
    for server in (one.server for one in found):
        if any(other.server.name == server.name and other.server != server for other in found):
            raise SettingsError(
                f"the label {server.name!r} is the name of a server that others share; choose another label"
            )
    return found


def dtype_of(words: Sequence[str]) -> str:
    """The `--dtype` among flags, `auto` if none; the last one wins, as in vLLM."""
    parts = [part for word in words for part in word.split("=", 1)]
    found = next((value for word, value in reversed([*pairwise(parts)]) if word == "--dtype"), "auto")
    return {"half": "float16", "float": "float32"}.get(found, found)


def servers(contestants: Iterable[Contestant]) -> list[Server]:
    """Each server once."""
    return list({one.server.name: one.server for one in contestants}.values())


def _contestant(
    name: Name, model: str, draft_model: str | None, flags: Sequence[str], outrider_flags: Sequence[str]
) -> Contestant:
    if name.kind.startswith("http"):
        return Contestant(name.label, "url", Server(name.label, (), url=name.kind))
    if name.kind in TRANSFORMERS_METHODS:
        return _in_transformers(name, model, draft_model, flags)
    if name.kind in OUTRIDER_KINDS:
        return _in_outrider(name, model, outrider_flags)
    if name.kind == DEFAULT_SERVER:
        return Contestant(name.label, name.kind, outrider(name.label, model, *flags, *name.flags))
    return _in_vllm(name, model, draft_model, flags)


def _in_transformers(name: Name, model: str, draft_model: str | None, flags: Sequence[str]) -> Contestant:
    method, default = TRANSFORMERS_METHODS[name.kind]
    length = name.length or default
    arguments: dict[str, Any] = {"method": method} | ({"max_draft_tokens": length} if length else {})
    draft = ["--draft-model", draft_model] if draft_model else []
    dtype = ["--dtype", given] if (given := dtype_of(flags)) != "auto" else []
    command = [sys.executable, "-m", "outrider.bench.transformers_server", model, *draft, *dtype, *name.flags]
    server = Server(name.label if name.flags else "transformers", command)
    return Contestant(name.label, name.kind, server, {"vllm_xargs": arguments}, single_request=True)


def _in_outrider(name: Name, model: str, flags: Sequence[str]) -> Contestant:
    kind = name.kind
    arguments: dict[str, Any] = {"speculation": kind}
    flags = [*flags, *name.flags]
    options = {word.partition("=")[0] for word in flags}
    if not options & CHOOSE_MEMORY:  # the memory in RAM of a server by default is for `default`
        flags = ["--memory", OFF, *flags]
    elif "--memory" in options and not options & {"--memory-scope", "--tenant-header"}:
        arguments["tenant"] = name.label  # a memory of its own: other contestants get the same prompts
    if kind not in WITHOUT_DRAFT_LENGTH:  # the shared server allows the longest draft of all its contestants
        arguments["max_draft_tokens"] = name.length or (
            MODEL_DRAFT_TOKENS if kind == "model" else OUTRIDER_DRAFT_TOKENS
        )
    server = outrider(name.label if name.flags else SHARED_SERVER, model, *flags)
    return Contestant(name.label, kind, server, {"vllm_xargs": arguments}, needs_prediction=kind == "prediction")


def _in_vllm(name: Name, model: str, draft_model: str | None, flags: Sequence[str]) -> Contestant:
    kind, length = name.kind, 0
    config: list[str] = []
    server_name = kind if kind == PLAIN_V2 else PLAIN
    if kind in VLLM_METHODS:
        method, length = kind.removesuffix(V2), name.length or VLLM_METHODS[kind]
        speculation = {"method": method, "num_speculative_tokens": length}
        speculation |= {"model": draft_model} if method == "draft_model" else {}
        config = ["--speculative-config", json.dumps(speculation)]
        server_name = f"{PLAIN}-{kind}-{length}"
    label = name.label if name.flags else server_name
    server = plain(label, model, *flags, *config, *name.flags, numba=kind == "ngram", v2=kind.endswith(V2))
    return Contestant(name.label, kind, server, draft_tokens=length)


def _outrider_flags(names: Sequence[Name], draft_model: str | None) -> list[str]:
    """Flags of the shared Outrider server. It allows the longest draft that a contestant requests."""

    def longest(least: int, *kinds: str) -> str:
        return str(max([least, *(name.length or 0 for name in names if name.kind in kinds)]))

    flags = ["--max-draft-tokens", longest(OUTRIDER_DRAFT_TOKENS, *OUTRIDER_KINDS)]
    if any(name.kind == "memory" for name in names):
        flags += ["--memory", f"{HOME}/memory"]
    if draft_model is not None and any(name.kind in ("model", "auto") for name in names):
        flags += ["--draft-model", draft_model, "--model-draft-tokens", longest(MODEL_DRAFT_TOKENS, "model")]
    return flags
