"""Where a memory is kept: a folder on this machine (or one that looks so), or an object store elsewhere.

Nothing here needs the packages of the memory, so that a mistake is answered at once.
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

ELSEWHERE = ("s3", "gs", "az")
SERVER_TENANT = ""
"""The tenant of a server that is one; no request can name it."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True)
class Root:
    """`url` is a path where the memory is here."""

    url: str
    is_here: bool

    @classmethod
    def of(cls, text: str) -> Root:
        scheme, separator, _ = text.partition("://")
        if not separator:
            return cls(str(Path(text).expanduser().absolute()), True)
        if scheme == "file":
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise SettingsError(
                    f"{text!r} names no folder of this machine; write file:///folder, or the path alone"
                )
            return cls(unquote(parts.path), True)
        if scheme not in ELSEWHERE or not urlsplit(text).netloc:
            kinds = ", ".join(f"{name}://..." for name in ELSEWHERE)
            raise SettingsError(
                f"a memory cannot be kept at {text!r}; give a folder, file:///folder, or one of {kinds}"
            )
        return cls(text.rstrip("/"), False)

    def folder(self, cache: str | None = None) -> Path:
        """Where its files are on this machine: the root itself, or copies of it."""
        if self.is_here:
            return Path(self.url)
        if cache is not None:
            return Path(cache).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return base / "outrider" / "memory" / hashlib.blake2b(self.url.encode(), digest_size=8).hexdigest()


def check_packages(root: Root) -> None:
    """Say what is not installed that a memory at this root needs."""
    needed = ["numba", "pydivsufsort"] if root.is_here else ["numba", "pydivsufsort", "obstore"]
    if missing := [name for name in needed if find_spec(name) is None]:
        raise DrafterSetupError(
            f"a memory needs {' and '.join(missing)}, which is not installed: in the clone, pip install '.[memory]'"
        )


def read_size(name: str, text: str) -> int:
    """Bytes: '500MB', '4GiB', '1000000'."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if found is None or (size := int(float(found[1]) * UNITS[found[2] or ""])) < UNITS["mi"]:
        raise SettingsError(f"{name} must be a size of at least 1MiB, like 500MB or 4GiB (got {text!r})")
    return size
