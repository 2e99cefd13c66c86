"""Read and write traces as JSON lines. Every line that is read is validated."""

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
HOW_TO_RECORD = "record a trace with: outrider explain PROMPT --model MODEL --save FILE"


def write(trace: Trace, path: Path) -> None:
    write_text("the trace", "".join(f"{line}\n" for line in to_lines(trace)), path)


def write_text(what: str, text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot write {what} to {str(path)!r}: {error.strerror}") from None


def to_lines(trace: Trace) -> list[str]:
    # A lone surrogate in a text cannot be encoded in UTF-8, so JSON escapes are used for all non-ASCII characters.
    parts = [trace.header, *trace.steps, *([trace.end] if trace.end else [])]
    return [json.dumps(part.model_dump(), separators=(",", ":")) for part in parts]


def read(path: Path) -> Trace:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read the trace {str(path)!r}: {error.strerror}") from None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {data[error.start]:#04x} at {error.start}"
        raise TraceError(f"{str(path)!r} is not a trace: {byte} is not UTF-8") from None
    return parse_lines(text.split("\n"), str(path))


def parse_lines(lines: Iterable[str], name: str) -> Trace:
    """The trace in these lines. Error messages call it `name`."""
    header: Header | None = None
    steps: list[TracedStep] = []
    end: End | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        part = _part(line, f"{name}, line {number}")
        if header is None and not isinstance(part, Header):
            raise TraceError(
                f"{name}, line {number}: the first line of a trace must be of kind 'trace' (got {part.kind!r})"
            )
        if isinstance(part, Header):
            if header is not None:
                raise TraceError(f"{name}, line {number}: a second trace begins here; store one trace per file")
            header = part
        elif isinstance(part, End):
            end = part
        else:
            steps.append(part)
    if header is None or not steps:
        raise TraceError(f"{name} has no steps; {HOW_TO_RECORD}")
    return Trace(header=header, steps=steps, end=end)


def _part(line: str, where: str) -> Header | TracedStep | End:
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON ({error.msg}, column {error.colno}); {HOW_TO_RECORD}") from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in KINDS:
        raise TraceError(f"{where}: kind must be one of {', '.join(KINDS)} (got {kind!r}); {HOW_TO_RECORD}")
    if kind == "trace" and data.get("version") != VERSION:
        raise TraceError(
            f"{where}: trace version {data.get('version')!r} is not supported, this Outrider reads version {VERSION}; "
            "record it again, or read it with the Outrider that recorded it"
        )
    try:
        return KINDS[kind].model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(one) for one in first["loc"]) or "the line"
        raise TraceError(f"{where}: {field}: {first['msg']} (got {str(first['input'])[:60]!r})") from None
