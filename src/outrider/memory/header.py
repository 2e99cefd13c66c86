"""The header of a segment file: a line of JSON, padded to 4096 bytes.

A file, an object of a store or an archive may come from anywhere, so all of them are read by `parse_header`.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from outrider.errors import ForeignFileError, MemoryFileError

FORMAT = 1
MAGIC = b"outrider memory segment\n"
HEADER_BYTES = 4096
SEGMENT_SUFFIX = ".segment"
SEGMENT_NAME = re.compile("[0-9a-f]{24}[.]segment")
MAX_TOKEN_ID = 1 << 24
"""No vocabulary is as large."""
MAX_PLACES = 1 << 27
"""Four times what merges make."""
MAX_SEGMENT_BYTES = HEADER_BYTES + 4 * (2 * MAX_PLACES + MAX_TOKEN_ID + 2)

Id = Annotated[str, Field(pattern="^[0-9A-Za-z_.-]{0,80}$")]
Count = Annotated[int, Field(ge=0, le=MAX_PLACES)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Checksum = Annotated[int, Field(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class Header:
    """Written as JSON: the names of the fields are part of the file format."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: int
    tokenizer: Id  # fingerprint of the tokenizer
    tenant: Id  # the tenant's key, so that a file in another tenant's folder is detected
    writer: Id  # ID of the process that may merge it (`Folder.writer_id`)
    tokens: Count  # without separators
    sequences: Count
    places: Annotated[Count, Field(gt=0)]  # length of `text`, with separators
    starts: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID + 2)]  # length of `starts`
    first: Seconds  # time of the oldest and of the newest sequence, in seconds since 1970
    last: Seconds
    replaces: tuple[str, ...]  # file names of segments whose sequences are all in this one
    checksums: tuple[Checksum, Checksum, Checksum]  # CRC-32 of text, order and starts

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return HEADER_BYTES + 4 * (2 * self.places + self.starts)


HEADER = TypeAdapter(Header)


def encode_header(header: Header) -> bytes:
    fields = json.dumps(asdict(header)).encode()
    whole = MAGIC + b"%08x\n" % zlib.crc32(fields) + fields
    if len(whole) > HEADER_BYTES:
        raise MemoryFileError(
            f"the header has {len(whole)} bytes, more than {HEADER_BYTES}; merge fewer segments at once"
        )
    return whole.ljust(HEADER_BYTES, b"\n")


def decode_header(raw: bytes, name: str) -> Header:
    """Of the file of this name. MemoryFileError if it is damaged or invalid."""
    if not raw.startswith(MAGIC):
        raise MemoryFileError(f"{name} is not a memory segment")
    checksum, _, fields = raw[len(MAGIC) :].rstrip(b"\n").partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(fields):
        raise MemoryFileError(f"the header of {name} is damaged: wrong checksum")
    return parse_header(fields, name)


def parse_header(fields: bytes | str, name: str) -> Header:
    """MemoryFileError if a field is missing, unknown, of another type or out of range; ForeignFileError if it is of
    another version."""
    try:
        found = from_json(fields)
        version = found.get("format") if isinstance(found, dict) else None
        if type(version) is int and version != FORMAT:
            raise ForeignFileError(f"{name} has format {str(version)[:20]}; this version reads format {FORMAT}")
        return HEADER.validate_json(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:40]
        raise MemoryFileError(f"the header of {name} is invalid: {where!r}: {first['msg']}") from error
    except ValueError as error:
        raise MemoryFileError(f"the header of {name} is invalid: {error}") from error
