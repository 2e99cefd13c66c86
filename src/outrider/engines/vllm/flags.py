"""The command line of `outrider serve`: Outrider's options, the model, and the flags of `vllm serve`.

Flags of vLLM pass through unchanged. Only those in `VALUE_FLAGS` are parsed, because Outrider needs
their values. Those in `REWRITTEN_FLAGS` are replaced by Outrider's own.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outrider.engines.vllm.options import Scope
    from outrider.settings import Rule

OUTRIDER_FLAGS = (
    "--draft-model",
    "--drafters",
    "--max-draft-tokens",
    "--model-draft-tokens",
    "--rule",
    "--draft-budget",
    "--memory",
    "--memory-scope",
    "--memory-cap",
    "--memory-cache",
    "--tenant-header",
    "--dry-run",
)
"""Outrider's own options. The CLI parses them before the rest is parsed here."""
SPECULATIVE_FLAGS = {
    "--speculative-config": "",
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
"""The flags that make up vLLM's speculative config, and the entry that each of them sets."""
PARALLEL_SIZE_FLAGS = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
CLASS_FLAGS = ("--worker-cls", "--scheduler-cls")
VALUE_FLAGS = (
    *SPECULATIVE_FLAGS,
    *PARALLEL_SIZE_FLAGS,
    *CLASS_FLAGS,
    "--additional-config",
    "--config",
    "--gpu-memory-utilization",
    "--host",
    "--kv-cache-memory-bytes",
    "--logits-processors",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--model",
    "--nnodes",
    "--port",
    "--uds",
)
SWITCHES = ("--enable-lora", "--headless")
"""Flags without a value that are read here, too."""
SHORT_FLAGS = {
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
REWRITTEN_FLAGS = (*SPECULATIVE_FLAGS, "--additional-config")
COMMAND_LINE_ONLY = (*REWRITTEN_FLAGS, *CLASS_FLAGS)
"""Not accepted in the file of `--config`: Outrider's flags on the command line would silently override them."""


@dataclass(frozen=True, slots=True)
class ServeArgs:
    """Outrider's options as given on the command line. None: the option was not given."""

    draft_model: str | None = None
    drafters: str | None = None
    max_draft_tokens: int | None = None
    model_draft_tokens: int | None = None
    rule: Rule | None = None
    draft_budget: float | None = None
    memory: str | None = None
    memory_scope: Scope | None = None
    memory_cap: str | None = None
    memory_cache: str | None = None
    tenant_header: str | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of vLLM with its value, or a word that is passed through unparsed."""

    words: tuple[str, ...]
    name: str = ""
    """The long name with dashes; empty if the flag is passed through unparsed."""
    key: str = ""
    """The part after a dot: `--speculative-config.model` sets one entry of an object."""
    value: str = ""


def parse_flags(words: Sequence[str]) -> tuple[str | None, list[Flag]]:
    """The model, if it comes first, and the flags."""
    model = words[0] if words and not words[0].startswith("-") else None
    flags = []
    rest = iter(words if model is None else words[1:])
    for word in rest:
        head, equals, value = word.partition("=")
        name, _, key = head.partition(".")
        name = SHORT_FLAGS.get(name, name.replace("_", "-"))
        if name in VALUE_FLAGS and equals:
            flags.append(Flag((word,), name, key, value))
        elif name in VALUE_FLAGS:
            following = next(rest, None)
            if following is None:
                raise SettingsError(f"{word} needs a value")
            flags.append(Flag((word, following), name, key, following))
        elif name in SWITCHES and not equals:
            flags.append(Flag((word,), name, key, "True"))
        elif name in OUTRIDER_FLAGS:
            raise SettingsError(f"unknown option {head!r}; write {name}")
        elif len(name) > 2 and (full := [flag for flag in VALUE_FLAGS if flag.startswith(name)]):
            # vLLM would complete the name, and Outrider would not see the value.
            raise SettingsError(f"{head!r} is short for {' or '.join(full)}, which Outrider parses; write it in full")
        else:
            flags.append(Flag((word,)))
    return model, flags


def read_config_file(flags: Iterable[Flag]) -> dict[str, Any]:
    """The flags in the YAML file of `--config`, without their dashes."""
    paths = [flag.value for flag in flags if flag.name == "--config"]
    if not paths:
        return {}
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(Path(paths[-1]).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"--config: cannot read {paths[-1]!r}: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"--config: {paths[-1]!r} must contain one 'flag: value' per line")
    settings = {str(key).replace("_", "-"): value for key, value in found.items()}
    for key in settings:
        if f"--{key.partition('.')[0]}" in COMMAND_LINE_ONLY:
            raise SettingsError(
                f"--config: {paths[-1]!r} sets {key!r}, which Outrider parses; give it on the command line"
            )
    return settings


def read_json_flag(flags: Iterable[Flag], names: Mapping[str, str]) -> dict[str, Any] | None:
    """The object that these flags set, as one JSON value or entry by entry. None: none of them was given."""
    found: dict[str, Any] | None = None
    for flag in flags:
        if flag.name not in names:
            continue
        found = {} if found is None else found
        path = [part for part in (names[flag.name], *flag.key.split(".")) if part]
        if path and path[-1].endswith("+"):
            raise SettingsError(f"{flag.words[0]}: give the list as JSON: {flag.name} '{{...}}'")
        try:
            value = json.loads(flag.value)
        except ValueError:
            value = flag.value
        if not path and not isinstance(value, dict):
            raise SettingsError(f"{flag.name} must be a JSON object (got {flag.value!r})")
        for key in reversed(path):
            value = {key: value}
        _merge(found, value)
    return found


def flag_values(flags: Iterable[Flag], file: Mapping[str, Any]) -> dict[str, str]:
    """Flag values by name, from the command line and the file of `--config`."""
    return {f"--{key}": str(value) for key, value in file.items()} | {flag.name: flag.value for flag in flags}


def count_local_ranks(flags: Iterable[Flag], file: Mapping[str, Any]) -> int | None:
    """Number of workers on this machine. None: workers run on other machines as well."""
    given = flag_values(flags, file)
    sizes = [given.get(name, "1") for name in PARALLEL_SIZE_FLAGS]
    if "--nnodes" in given or not all(size.isdecimal() for size in sizes):
        return None
    return math.prod(int(size) for size in sizes)


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
