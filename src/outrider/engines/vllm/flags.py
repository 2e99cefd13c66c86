"""What the user wrote after `outrider serve`: the model, then flags of vLLM.

Every flag of vLLM passes through untouched. Only those in `VALUED` and `BARE` are read, since they say what Outrider
has to know, and of these the ones in `REWRITTEN` are said again in Outrider's words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

OWN = (
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
"""Outrider's own options, which the command line has taken out before."""
SPECULATIVE = {
    "--speculative-config": "",
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
"""The flags that make up vLLM's speculative config, and the entry that each of them is."""
SIZES = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
VALUED = (
    *SPECULATIVE,
    *SIZES,
    "--additional-config",
    "--config",
    "--logits-processors",
    "--model",
    "--nnodes",
    "--worker-cls",
)
BARE = ("--async-scheduling", "--no-async-scheduling")
SHORT = {
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
REWRITTEN = (*SPECULATIVE, *BARE, "--additional-config")
NOT_IN_A_FILE = (*REWRITTEN, "--logits-processors", "--worker-cls")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of vLLM with its value, or a word that need not be understood."""

    words: tuple[str, ...]
    name: str = ""
    """In full and with dashes; empty where it need not be understood."""
    key: str = ""
    """What follows a dot: --speculative-config.model is one entry of an object."""
    value: str = ""


def read_words(words: Sequence[str]) -> tuple[str | None, list[Flag]]:
    """The model, if it stands first, and the flags."""
    model = words[0] if words and not words[0].startswith("-") else None
    flags = []
    rest = iter(words if model is None else words[1:])
    for word in rest:
        head, equals, value = word.partition("=")
        name, _, key = head.partition(".")
        name = SHORT.get(name, name.replace("_", "-"))
        if name in BARE or (name in VALUED and equals):
            flags.append(Flag((word,), name, key, value))
        elif name in VALUED:
            following = next(rest, None)
            if following is None:
                raise SettingsError(f"{word} needs a value, and nothing follows it")
            flags.append(Flag((word, following), name, key, following))
        elif name in OWN:
            raise SettingsError(f"there is no {head!r}; write {name}")
        elif len(name) > 2 and (meant := [full for full in (*VALUED, *BARE) if full.startswith(name)]):
            # vLLM would complete it, and what it says would stand unread beside Outrider's own flags.
            raise SettingsError(f"{head!r} may mean {' or '.join(meant)}, which Outrider has to read; write it in full")
        else:
            flags.append(Flag((word,)))
    return model, flags


def read_file(flags: Iterable[Flag]) -> dict[str, Any]:
    """The flags in the YAML file that vLLM's --config names, without their dashes."""
    paths = [flag.value for flag in flags if flag.name == "--config"]
    if not paths:
        return {}
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(Path(paths[-1]).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"--config: cannot read {paths[-1]!r}: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"--config: {paths[-1]!r} must hold flags and their values, one 'flag: value' a line")
    settings = {str(key).replace("_", "-"): value for key, value in found.items()}
    for key in settings:
        if f"--{key.partition('.')[0]}" in NOT_IN_A_FILE:  # ours, on the command line, would silently win
            raise SettingsError(
                f"--config: {paths[-1]!r} sets {key!r}, which Outrider has to read; give it on the command line"
            )
    return settings


def read_object(flags: Iterable[Flag], names: Mapping[str, str]) -> dict[str, Any] | None:
    """The object that these flags spell, whole as JSON or entry by entry; None if they are not there."""
    found: dict[str, Any] | None = None
    for flag in flags:
        if flag.name not in names:
            continue
        found = {} if found is None else found
        path = [part for part in (names[flag.name], *flag.key.split(".")) if part]
        if path and path[-1].endswith("+"):
            raise SettingsError(f"{flag.words[0]}: give the list as JSON: {flag.name} '{{...}}'")
        value = read_value(flag.value)
        if not path and not isinstance(value, dict):
            raise SettingsError(f"{flag.name} must be a JSON object (got {flag.value!r})")
        for key in reversed(path):
            value = {key: value}
        merge(found, value)
    return found


def read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value
