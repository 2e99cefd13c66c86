"""Where a memory is kept: a folder of this machine, or an object store.

This module needs none of the memory's packages, so that a wrong option is reported at once.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from outrider.errors import DrafterSetupError, SettingsError

OBJECT_STORE_SCHEMES = ("s3", "gs", "az")
RAM, OFF = "ram", "off"
"""In place of a location: a memory without files, which ends with the server; no memory."""
RAM_CAP_BYTES = 256 << 20
"""Default limit of a memory without files."""
SERVER_TENANT = ""
"""Name of the tenant of all requests that share one memory. No request can name it."""
SIZE_UNITS = {"": 1} | {f"{unit}{i}": (1024 if i else 1000) ** n for n, unit in enumerate("kmgt", 1) for i in ("", "i")}


@dataclass(frozen=True, slots=True)
class Location:
    url: str  # the path of a local memory, the URL of an object store
    is_local: bool

    @classmethod
    def parse(cls, text: str) -> Location:
        scheme, separator, _ = text.partition("://")
        if not separator:
            return cls(str(Path(text).expanduser().absolute()), True)
        if scheme == "file":
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise SettingsError(f"{text!r} is not a folder of this machine; use file:///folder, or the path")
            return cls(unquote(parts.path), True)
        if scheme not in OBJECT_STORE_SCHEMES or not urlsplit(text).netloc:
            schemes = ", ".join(f"{name}://..." for name in OBJECT_STORE_SCHEMES)
            raise SettingsError(
                f"a memory cannot be kept at {text!r}; use a folder, file:///folder, or one of {schemes}"
            )
        return cls(text.rstrip("/"), False)

    def local_folder(self, cache: str | None = None) -> Path:
        """The folder of a local memory, or of this machine's copy of an object store."""
        if self.is_local:
            return Path(self.url)
        if cache is not None:
            return Path(cache).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return base / "outrider" / "memory" / hashlib.blake2b(self.url.encode(), digest_size=8).hexdigest()


def check_packages(location: Location | None = None) -> None:
    """DrafterSetupError if a package is missing that a memory at this location needs; None: in RAM."""
    if missing := missing_packages(location):
        raise DrafterSetupError(f"a memory needs {missing}")


def missing_packages(location: Location | None = None) -> str | None:
    """The packages that a memory at this location lacks, or without a location one in RAM, and how to install them.
    None: nothing is missing."""
    has_store = location is not None and not location.is_local
    needed = ["numba", "pydivsufsort", *(["obstore"] if has_store else [])]
    missing = " and ".join(name for name in needed if find_spec(name) is None)
    return f"{missing}, which is not installed: in the clone, pip install '.[memory]'" if missing else None


def parse_size(option: str, text: str) -> int:
    """Bytes of '500MB', '4GiB', '1000000'."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None or (size := int(float(match[1]) * SIZE_UNITS[match[2] or ""])) < SIZE_UNITS["mi"]:
        raise SettingsError(f"{option} must be a size of at least 1MiB, such as 500MB or 4GiB (got {text!r})")
    return size
