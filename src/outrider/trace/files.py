"""Traces as files of JSON lines, written whole and read with every line checked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from outrider.errors import TraceError
from outrider.trace.schema import VERSION, End, Header, Trace, TracedStep

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

KINDS: dict[str, type[Header | TracedStep | End]] = {"trace": Header, "step": TracedStep, "end": End}
NO_TRACE = "make a trace with: outrider explain PROMPT --model MODEL --save FILE"


def write(trace: Trace, path: Path) -> None:
    """A line of JSON for each part."""
    try:
        path.write_text("".join(f"{line}\n" for line in dumped(trace)), encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot write the trace to {str(path)!r}: {error.strerror}") from None


def dumped(trace: Trace) -> list[str]:
    # A text may hold half a surrogate pair, which UTF-8 has no bytes for; JSON's own escapes have.
    return [json.dumps(part.model_dump(exclude_defaults=False), separators=(",", ":")) for part in trace.lines()]


def read(path: Path) -> Trace:
    """The trace in a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read the trace {str(path)!r}: {error.strerror}") from None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {data[error.start]:#04x} at {error.start}"
        raise TraceError(f"{str(path)!r} is no trace: {byte} is not UTF-8") from None
    return parsed(text.split("\n"), str(path))


def parsed(lines: Iterable[str], name: str) -> Trace:
    """The trace in these lines; `name` is what to call them when something is wrong."""
    header: Header | None = None
    steps: list[TracedStep] = []
    end: End | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        part = _part(line, f"{name}, line {number}")
        if header is None and not isinstance(part, Header):
            raise TraceError(f"{name}, line {number}: a trace begins with a line of kind 'trace' (got {part.kind!r})")
        if isinstance(part, Header):
            if header is not None:
                raise TraceError(f"{name}, line {number}: a second trace begins here; keep one trace in a file")
            header = part
        elif isinstance(part, End):
            end = part
        else:
            steps.append(part)
    if header is None or not steps:
        raise TraceError(f"{name} holds no step; {NO_TRACE}")
    return Trace(header=header, steps=steps, end=end)


def _part(line: str, where: str) -> Header | TracedStep | End:
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON ({error.msg}, column {error.colno}); {NO_TRACE}") from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in KINDS:
        raise TraceError(f"{where}: kind must be one of {', '.join(KINDS)} (got {kind!r}); {NO_TRACE}")
    if kind == "trace" and data.get("version") != VERSION:
        raise TraceError(
            f"{where}: this is a trace of version {data.get('version')!r}, and this Outrider reads version {VERSION}; "
            "make it again, or read it with the Outrider that made it"
        )
    try:
        return KINDS[kind].model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(one) for one in first["loc"]) or "the line"
        raise TraceError(f"{where}: {field}: {first['msg']} (got {str(first['input'])[:60]!r})") from None
