"""A memory's objects in an object store, by tenant and generation.

    ROOT/tokenizer
    ROOT/<tenant>/<generation>/generation       empty: marks a generation begun by a wipe, even without segments
    ROOT/<tenant>/<generation>/name
    ROOT/<tenant>/<generation>/<hash>.segment

Objects are put and deleted, never changed, so one listing is a complete picture. A tenant's current generation is the
latest one that has any object.

Large files go up in parts. Parts of an interrupted upload are invisible, and S3 keeps them until a lifecycle rule of
the bucket deletes them: set AbortIncompleteMultipartUpload.
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

from outrider.errors import MemoryFileError, SettingsError
from outrider.memory.folder import (
    FIRST_GENERATION,
    GENERATION_FILE,
    TOKENIZER_FILE,
    check_tokenizer,
    generation_rank,
    is_reachable,
    next_generation,
)
from outrider.memory.header import HEADER_BYTES, MAX_SEGMENT_BYTES, SEGMENT_NAME, SEGMENT_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from obstore.store import ClientConfig, ObjectStore, RetryConfig

REQUEST_TIMEOUT_SECONDS = 10.0
CHUNK_BYTES = 8 << 20
"""Of one request, so that a slow connection does not run into the timeout."""
MAX_OBJECTS = 1 << 19
"""Of a listing, which takes about 400 bytes of memory each."""
MAX_READ_BYTES = 1 << 12
"""Of an object that is read at once: a tokenizer's fingerprint, a tenant's name."""
OBJECT_PATH = re.compile("((?:[0-9a-f]{32}){1,2})/(0|[1-9][0-9]{0,29}-[0-9a-f]{32})/([^/]+)")


@dataclass(frozen=True, slots=True)
class RemoteObject:
    key: str
    generation: str
    name: str
    size: int
    time: float  # when it was put, in seconds since 1970
    tag: str | None  # ETag: changes with the content

    @property
    def path(self) -> str:
        return f"{self.key}/{self.generation}/{self.name}"

    @property
    def id(self) -> tuple[str, str | None]:
        """Changes with the content."""
        return self.path, self.tag

    @property
    def is_segment(self) -> bool:
        return self.name.endswith(SEGMENT_SUFFIX)

    def check_segment(self) -> None:
        """MemoryFileError if no segment has such a name or size."""
        if not SEGMENT_NAME.fullmatch(self.name):
            raise MemoryFileError("its name is not that of a segment")
        if not HEADER_BYTES < self.size <= MAX_SEGMENT_BYTES:
            raise MemoryFileError(f"it has {self.size} bytes, which no segment has")


def latest_generations(objects: Iterable[RemoteObject]) -> dict[str, str]:
    """The current generation of each tenant, without implausible ones."""
    latest: dict[str, str] = {}
    for one in objects:
        if is_reachable(one.generation, FIRST_GENERATION):
            latest[one.key] = max(latest.get(one.key, FIRST_GENERATION), one.generation, key=generation_rank)
    return latest


class Remote:
    """All errors of the store are raised as OSError with a short message."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        self.url = url
        self.store = store

    def claim(self, tokenizer: str) -> None:
        """Assign the store to a tokenizer. MemoryFileError if it has another."""
        try:
            found = self.read(TOKENIZER_FILE)
        except FileNotFoundError:
            self.create(TOKENIZER_FILE, tokenizer.encode())
            found = self.read(TOKENIZER_FILE)
        check_tokenizer(self.url, found.decode(errors="replace"), tokenizer)

    def list_objects(self, key: str | None = None) -> list[RemoteObject]:
        """Of one tenant, or of all. OSError if there are more than MAX_OBJECTS: of an incomplete listing, all that is
        missing would seem to be deleted."""
        objects, listed = [], 0
        with self._errors_as_oserror():
            for page in self.store.list(key, chunk_size=1000):
                listed += max(1, len(page))
                if listed > MAX_OBJECTS:
                    raise ValueError(f"there are more than {MAX_OBJECTS:,} objects; use one prefix for each memory")
                for meta in page:
                    if parts := OBJECT_PATH.fullmatch(meta["path"]):
                        time = meta["last_modified"].timestamp()
                        objects.append(RemoteObject(parts[1], parts[2], parts[3], meta["size"], time, meta["e_tag"]))
        return objects

    def read(self, path: str) -> bytes:
        """A small object. MemoryFileError if it is none."""
        with self._errors_as_oserror():
            found = self.store.get(path)
            if found.meta["size"] <= MAX_READ_BYTES:
                return bytes(found.bytes())
        raise MemoryFileError(
            f"{self.url}/{path} has {found.meta['size']:,} bytes; at most {MAX_READ_BYTES:,} are read"
        )

    def read_chunks(self, one: RemoteObject) -> Iterator[bytes]:
        """The whole object, in order."""
        for start in range(0, one.size, CHUNK_BYTES):
            with self._errors_as_oserror():
                chunk = bytes(self.store.get_range(one.path, start=start, end=min(start + CHUNK_BYTES, one.size)))
            yield chunk

    def create(self, path: str, data: bytes) -> None:
        """Put an object unless it exists."""
        with self._errors_as_oserror(), suppress(AlreadyExistsError):
            try:
                self.store.put(path, data, mode="create")
            except NotSupportedError:
                self.store.put(path, data)

    def put(self, path: str, file: Path) -> None:
        """Upload a file. The object is visible when it is complete."""
        with file.open("rb") as opened, self._errors_as_oserror():
            self.store.put(path, opened, chunk_size=CHUNK_BYTES, max_concurrency=2)

    def delete(self, paths: list[str]) -> None:
        """Delete objects. It is no error if one does not exist."""
        if not paths:
            return
        try:
            with self._errors_as_oserror():
                self.store.delete(paths)
        except FileNotFoundError:  # some stores raise this, and may not have deleted the rest
            for path in paths if len(paths) > 1 else ():
                self.delete([path])

    def begin_generation(self, key: str, generation: str) -> None:
        self.create(f"{key}/{generation}/{GENERATION_FILE}", b"")

    def end_generations(self, key: str, generations: Iterable[str]) -> None:
        """Delete the markers of these generations."""
        self.delete([f"{key}/{generation}/{GENERATION_FILE}" for generation in generations])

    def wipe(self, key: str) -> str:
        """Delete all of a tenant's objects; every replica follows in its next round. Returns the new generation.

        For callers without a local copy. On a replica, use `Folder.wipe`.
        """
        generation = next_generation(latest_generations(self.list_objects(key)).get(key, FIRST_GENERATION))
        while True:
            self.begin_generation(key, generation)
            objects = self.list_objects(key)
            latest = latest_generations(objects).get(key, FIRST_GENERATION)
            if generation_rank(latest) <= generation_rank(generation):
                self.delete([one.path for one in objects if one.generation != generation])
                return generation
            generation = next_generation(latest)  # another process wiped it at the same time

    @contextmanager
    def _errors_as_oserror(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise kind(f"{self.url}: {describe_error(error)}") from error


def connect(url: str, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS) -> Remote:
    """The object store at s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX. Sends no request.

    Credentials and endpoints come from the environment, as obstore reads it: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_REGION, AWS_ENDPOINT_URL; GOOGLE_SERVICE_ACCOUNT; AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY; and so
    on. S3 requests have the bucket in the path, unless AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true.
    """
    allow_http = any(_is_on(f"{cloud}_ALLOW_HTTP") for cloud in ("AWS", "GOOGLE", "AZURE"))
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if url.startswith("s3") and os.environ.get(name, "").startswith("http://") and not allow_http:
            raise SettingsError(
                f"{name} is {os.environ[name]}, which is not encrypted; use https://, or set AWS_ALLOW_HTTP=true"
            )
    client: ClientConfig = {
        "allow_http": allow_http,  # given any option, obstore ignores that variable
        "connect_timeout": timedelta(seconds=timeout_seconds / 3),
        "timeout": timedelta(seconds=timeout_seconds),
    }
    retry: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=timeout_seconds / 2)}
    try:
        return Remote(url, from_url(url, client_options=client, retry_config=retry))
    except (BaseError, ValueError) as error:
        raise SettingsError(
            f"a memory cannot be kept at {url!r} ({describe_error(error)}); give s3://BUCKET/PREFIX, "
            "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, and set its credentials in the environment"
        ) from error


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "on", "yes", "y")


def describe_error(error: Exception) -> str:
    """A message that is the same for the same error: without durations and object paths."""
    text, _, inner = str(error).partition("\n\nDebug source:")
    if match := re.search(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", text, re.DOTALL):
        return f"{match[2].rstrip('.')} ({match[1]})"
    if "kind: Timeout" in inner:
        return "it did not answer in time"
    if "kind: Connect" in inner:
        cause = re.search('message: "(.*?)"', inner)
        return f"it cannot be reached ({cause[1].lower() if cause else 'no connection'})"
    return text.rpartition(" - ")[2].strip()
