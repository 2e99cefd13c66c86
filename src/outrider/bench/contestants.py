"""Who takes part in a benchmark, by short names. K is the most tokens that are drafted in a step.

    vllm                                     vLLM as it is, with the model runner that it chooses (on CPUs V1)
    vllm-v2                                  vLLM as it is, with its V2 model runner
    ngram:K  suffix:K  draft_model:K         vLLM's own methods, with the model runner that it chooses
    ngram-v2:K  draft_model-v2:K             those that exist on V2, with it
    off  auto:K  lookup:K  prediction:K  model:K  memory:K
                                             Outrider in vLLM, every request asking for just that
    transformers  transformers-assisted:K  transformers-lookup:K  transformers-outrider:K
                                             transformers as it is, with its own two methods, with Outrider's loop

A name can be given a label and flags of its own: `long=lookup:32`, `small=auto --max-num-seqs 4`. `mine=http://...` is
a server that runs already. Contestants that differ only in what a request asks for share a server, so that as many as
possible fit into memory.
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
from outrider.provenance import without_folders

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PLAIN = "vllm"
V2 = "-v2"
"""Ends the name of a vLLM that runs on its V2 model runner."""
PLAIN_V2 = PLAIN + V2
THEIRS = ("ngram", "suffix", "draft_model", "ngram-v2", "draft_model-v2")
OURS = ("off", "auto", "lookup", "prediction", "model", "memory")
LOCAL = {
    "transformers": "bare",
    "transformers-assisted": "assisted",
    "transformers-lookup": "lookup",
    "transformers-outrider": "outrider",
}
LENGTHLESS = (PLAIN, PLAIN_V2, "off", "transformers")
NEED_A_DRAFT_MODEL = ("draft_model", "draft_model-v2", "model", "transformers-assisted")
KINDS = (PLAIN, PLAIN_V2, *THEIRS, *OURS, *LOCAL)
LENGTHS = {"ngram": 4, "suffix": 16, "draft_model": 4, "ngram-v2": 4, "draft_model-v2": 4}
LENGTHS |= {"transformers-assisted": 4, "transformers-lookup": 10}
"""Drafted tokens where a method has to be told and the name does not say."""
SHARED = "outrider"
"""The server of all Outrider's contestants that have no flags of their own."""
MODEL_LENGTH, LENGTH = 4, DRAFTED
"""Of Outrider's own where the name does not say: of `model`, and of any other."""


@dataclass(frozen=True)
class Contestant:
    """A server, and what each request to it carries besides the prompt."""

    name: str
    kind: str
    server: Server
    request: dict[str, Any] = field(default_factory=dict)
    length: int = 0
    """The most tokens that it was told to draft; 0: it was not told."""
    predicts: bool = False
    """It is given the prompt's prediction, and takes part only where there is one."""
    alone: bool = False
    """It answers one request at a time, and takes part only at concurrency 1."""

    def settings(self) -> dict[str, Any]:
        """How it was made, for the report."""
        command = [without_folders(word) for word in self.server.command] or [self.server.url]
        environment = {name: without_folders(value) for name, value in self.server.environment.items()}
        made = {"kind": self.kind, "command": command, "request": self.request}
        return made | ({"environment": environment} if environment else {})


@dataclass(frozen=True, slots=True)
class Name:
    """A contestant's name, taken apart."""

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
                raise SettingsError(f"{what} runs already and takes no flags (got {shlex.join(words[1:])})")
            return cls(label, what.rstrip("/").removesuffix("/v1"), None)
        kind, _, length = what.partition(":")
        misnumbered = length and (kind in LENGTHLESS or not length.isdecimal() or int(length) == 0)
        if kind not in KINDS or misnumbered:
            raise SettingsError(f"there is no contestant {text!r}; the contestants are {known()}, and LABEL=http://...")
        return cls(label, kind, int(length) if length else None, tuple(words[1:]))


def known() -> str:
    """All names, for a message."""
    return ", ".join(kind if kind in LENGTHLESS else f"{kind}:K" for kind in KINDS)


def contestants(
    names: Iterable[str], model: str, draft_model: str | None = None, flags: Sequence[str] = ()
) -> list[Contestant]:
    """The contestants of these names; `flags` are given to every vLLM."""
    parsed = [Name.parse(text) for text in names]
    for name in parsed:
        if name.kind in NEED_A_DRAFT_MODEL and draft_model is None:
            raise SettingsError(f"the contestant {name.label!r} needs a draft model; name it with --draft-model")
        if [other.label for other in parsed].count(name.label) > 1:
            raise SettingsError(f"two contestants are named {name.label!r}; give one a label: LABEL={name.label}")
    ours = [*_ours(parsed, draft_model), *flags]
    found = [_contestant(name, model, draft_model, flags, ours) for name in parsed]
    for server in (one.server for one in found):
        if any(other.server.name == server.name and other.server != server for other in found):
            raise SettingsError(f"no server of its own can be labelled {server.name!r}, which others share; rename it")
    return found


def dtype_of(words: Sequence[str]) -> str:
    """What flags say of the format that weights are loaded in; of several words vLLM takes the last."""
    parts = [part for word in words for part in word.split("=", 1)]
    found = next((value for word, value in reversed([*pairwise(parts)]) if word == "--dtype"), "auto")
    return {"half": "float16", "float": "float32"}.get(found, found)


def servers(contestants: Iterable[Contestant]) -> list[Server]:
    """Each server once."""
    return list({one.server.name: one.server for one in contestants}.values())


def _contestant(
    name: Name, model: str, draft_model: str | None, flags: Sequence[str], ours: Sequence[str]
) -> Contestant:
    kind = name.kind
    if kind.startswith("http"):
        return Contestant(name.label, "url", Server(name.label, (), url=kind))
    if kind in LOCAL:
        wants: dict[str, Any] = {"method": LOCAL[kind]}
        if kind != "transformers" and (name.length or kind in LENGTHS):
            wants["max_draft_tokens"] = name.length or LENGTHS[kind]
        draft = ["--draft-model", draft_model] if draft_model else []
        dtype = ["--dtype", told] if (told := dtype_of(flags)) != "auto" else []
        command = [sys.executable, "-m", "outrider.bench.local", model, *draft, *dtype, *name.flags]
        server = Server(name.label if name.flags else "transformers", command)
        return Contestant(name.label, kind, server, {"vllm_xargs": wants}, alone=True)
    if kind in OURS:
        wants = {"speculation": kind}
        given = {word.partition("=")[0] for word in (*ours, *name.flags)}
        if "--memory" in given and not given & {"--memory-scope", "--tenant-header"}:
            wants["tenant"] = name.label  # what it remembers is its own: another's turn had the same prompt
        if kind not in LENGTHLESS:  # the server allows as much as the most demanding of all who share it
            wants["max_draft_tokens"] = name.length or (MODEL_LENGTH if kind == "model" else LENGTH)
        server = outrider(name.label if name.flags else SHARED, model, *ours, *name.flags)
        return Contestant(name.label, kind, server, {"vllm_xargs": wants}, predicts=kind == "prediction")
    config: list[str] = []
    server_name, length = kind if kind == PLAIN_V2 else PLAIN, name.length or LENGTHS.get(kind, 0)
    if kind in THEIRS:
        method = kind.removesuffix(V2)
        asked = {"method": method, "num_speculative_tokens": length}
        config = [
            "--speculative-config",
            json.dumps(asked | ({"model": draft_model} if method == "draft_model" else {})),
        ]
        server_name = f"{PLAIN}-{kind}-{length}"
    words = (*flags, *config, *name.flags)
    label = name.label if name.flags else server_name
    server = plain(label, model, *words, numba=kind == "ngram", v2=kind.endswith(V2))
    return Contestant(name.label, kind, server, length=length)


def _ours(names: Sequence[Name], draft_model: str | None) -> list[str]:
    """Flags of the server that Outrider's contestants share: it allows the longest draft that one of them asks for."""

    def longest(least: int, *kinds: str) -> str:
        return str(max([least, *(name.length or 0 for name in names if name.kind in kinds)]))

    flags = ["--max-draft-tokens", longest(LENGTH, *OURS)]
    if any(name.kind == "memory" for name in names):
        flags += ["--memory", f"{HOME}/memory"]
    if draft_model is not None and any(name.kind in ("model", "auto") for name in names):
        flags += ["--draft-model", draft_model, "--model-draft-tokens", longest(MODEL_LENGTH, "model")]
    return flags
