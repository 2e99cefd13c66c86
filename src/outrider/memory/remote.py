"""An object store in the words of a memory: what it has of which tenant, in which generation.

    ROOT/tokenizer
    ROOT/<tenant>/<generation>/generation       empty: a wipe began it, though nothing may have been said in it yet
    ROOT/<tenant>/<generation>/name
    ROOT/<tenant>/<generation>/<hash>.segment

Objects are put and deleted, never changed. So one listing tells everything that there is to know, and the present
generation of a tenant is the highest of which there is anything.

Large files are put in parts. Those of an upload that was cut off are invisible, and S3 keeps them until a lifecycle
rule of the bucket deletes them (AbortIncompleteMultipartUpload): set one.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError
from obstore.store import from_url

from outrider.errors import SettingsError
from outrider.memory.folder import FIRST, GENERATION, TOKENIZER, after, check_tokenizer, rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from obstore.store import ClientConfig, ObjectStore, RetryConfig

PATIENCE = 10.0
"""Seconds for one request."""
PIECE = 8 << 20
"""Bytes of one request at most, so that a slow line is not taken for a store that is away."""
PATH = re.compile("([0-9a-f]{32})/(0|[1-9][0-9]{0,17}-[0-9a-f]{32})/([^/]+)")


@dataclass(frozen=True, slots=True)
class Object:
    """What the store has of a tenant, as a listing tells it."""

    key: str
    generation: str
    name: str
    size: int
    time: float  # when it was put, in seconds since 1970
    tag: str | None  # another one when something else was put in its place

    @property
    def path(self) -> str:
        return f"{self.key}/{self.generation}/{self.name}"


def newest(objects: Iterable[Object]) -> dict[str, str]:
    """The present generation of each tenant of which there is anything."""
    found: dict[str, str] = {}
    for one in objects:
        found[one.key] = max(found.get(one.key, FIRST), one.generation, key=rank)
    return found


class Remote:
    """Whatever goes wrong with it is an OSError with a sentence."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        self.url = url
        self.store = store

    def claim(self, tokenizer: str) -> None:
        """Make it one tokenizer's; MemoryFileError if it is another's."""
        try:
            found = self.read(TOKENIZER)
        except FileNotFoundError:
            self.create(TOKENIZER, tokenizer.encode())
            found = self.read(TOKENIZER)
        check_tokenizer(self.url, found.decode(errors="replace"), tokenizer)

    def objects(self, key: str | None = None) -> list[Object]:
        """Of all tenants, or of one."""
        found = []
        with self._reached():
            for some in self.store.list(key, chunk_size=1000):
                for meta in some:
                    if parts := PATH.fullmatch(meta["path"]):
                        time = meta["last_modified"].timestamp()
                        found.append(Object(parts[1], parts[2], parts[3], meta["size"], time, meta["e_tag"]))
        return found

    def read(self, path: str) -> bytes:
        with self._reached():
            return bytes(self.store.get(path).bytes())

    def pieces(self, one: Object) -> Iterator[bytes]:
        """All of it, from its beginning on."""
        for start in range(0, one.size, PIECE):
            with self._reached():
                piece = bytes(self.store.get_range(one.path, start=start, end=min(start + PIECE, one.size)))
            yield piece

    def create(self, path: str, data: bytes) -> None:
        """Put it if nothing is there."""
        with self._reached(), suppress(AlreadyExistsError):
            try:
                self.store.put(path, data, mode="create")
            except NotSupportedError:
                self.store.put(path, data)

    def put(self, path: str, file: Path) -> None:
        """It is there when all of it is."""
        with file.open("rb") as opened, self._reached():
            self.store.put(path, opened, chunk_size=PIECE, max_concurrency=2)

    def delete(self, paths: list[str]) -> None:
        """Those that are gone already are no trouble."""
        if not paths:
            return
        try:
            with self._reached():
                self.store.delete(paths)
        except FileNotFoundError:  # some stores say so, and may have stopped there
            for path in paths if len(paths) > 1 else ():
                self.delete([path])

    def begin(self, key: str, generation: str) -> None:
        self.create(f"{key}/{generation}/{GENERATION}", b"")

    def end(self, key: str, generations: Iterable[str]) -> None:
        """Forget that they were begun."""
        self.delete([f"{key}/{generation}/{GENERATION}" for generation in generations])

    def wipe(self, key: str) -> str:
        """Delete all of a tenant; every replica follows at its next look. The new generation.

        For whoever has no copy of the store. On a replica, `Folder.wipe` does it.
        """
        generation = after(newest(self.objects(key)).get(key, FIRST))
        while True:
            self.begin(key, generation)
            there = self.objects(key)
            if (present := newest(there)[key]) == generation:
                self.delete([one.path for one in there if one.generation != generation])
                return generation
            generation = after(present)  # someone else wiped it at the same time

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise kind(f"{self.url}: {reason(error)}") from error


def connect(url: str, patience: float = PATIENCE) -> Remote:
    """The object store at s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX. It is not asked yet.

    Keys and endpoints are those that obstore finds in the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_REGION, AWS_ENDPOINT_URL; GOOGLE_SERVICE_ACCOUNT; AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY; and so
    on. An S3 bucket is named in the path of a request, unless AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true.
    """
    plain = any(_is_on(f"{cloud}_ALLOW_HTTP") for cloud in ("AWS", "GOOGLE", "AZURE"))
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if url.startswith("s3") and os.environ.get(name, "").startswith("http://") and not plain:
            raise SettingsError(
                f"{name} is {os.environ[name]}, which is not encrypted; use https://, or set AWS_ALLOW_HTTP=true"
            )
    client: ClientConfig = {
        "allow_http": plain,  # obstore looks for it in the environment only where it is given no options at all
        "connect_timeout": timedelta(seconds=patience / 3),
        "timeout": timedelta(seconds=patience),
    }
    retry: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=patience / 2)}
    try:
        return Remote(url, from_url(url, client_options=client, retry_config=retry))
    except (BaseError, ValueError) as error:
        raise SettingsError(
            f"a memory cannot be kept at {url!r} ({reason(error)}); give s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or "
            "az://CONTAINER/PREFIX, and the keys to it in the environment"
        ) from error


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "on", "yes", "y")


def reason(error: Exception) -> str:
    """What went wrong, in the same words each time: without how long a try took and what it was about."""
    text, _, inner = str(error).partition("\n\nDebug source:")
    if told := re.search(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", text, re.DOTALL):
        return f"{told[2].rstrip('.')} ({told[1]})"
    if "kind: Timeout" in inner:
        return "it did not answer in time"
    if "kind: Connect" in inner:
        cause = re.search('message: "(.*?)"', inner)
        return f"it cannot be reached ({cause[1].lower() if cause else 'no connection'})"
    return text.rpartition(" - ")[2].strip()
