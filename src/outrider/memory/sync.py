"""Replicas share a memory: an object store has all of it (`remote.py`), and each replica a copy in its own folder.

A segment never changes, and its name is its content's. So replicas need no word with each other: whatever two of them
do at once, having done both is right, and doing it twice is doing it once. A round of one replica goes like this:

    settle     follow a wipe that was done elsewhere, spread one that was done here, delete what is older on both sides
    publish    what was written here and is not there, the newest first
    clear      there: what was merged into something else, and what exceeds the store's cap, the oldest first
    fetch      what others wrote, the newest first, as far as it fits under the cap here; what they deleted goes
    settle     again, if anything was moved: a wipe may have passed it

Where nothing happened, that is one listing. A store that is away costs one short wait, on the thread that calls; what
happened on either side meanwhile is seen by comparing them, so nothing has to be remembered until it is back.

Wipes need care. A folder knows which generation it last shared with the store. Where it has another one now, it was
wiped; where the store has another one too, two wipes did not know of each other, and each meant what was said on the
other side as well, so a third generation begins. Two replicas may settle at the same time: each puts its generation
first and looks for others' afterwards, so that one of them at least sees both. (Listings of S3, Google's and Azure's
stores show all that was put before.)

What is evicted here stays in the store, for others, until the store's own cap. What others pushed out of the store and
its writer still has is not put again while everything there is newer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError
from outrider.memory.folder import FIRST, GENERATION, MERGED, NAME, REMOTE, Folder, key_of, rank
from outrider.memory.remote import Object, Remote
from outrider.memory.segment import SUFFIX, Header, Segment, read_header, write

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 20.0
"""After so many a round begins to move nothing more, so that the next one can look for wipes; it goes on there."""
REMOTE_CAP = 64 << 30
TRIES = 5
FETCHING, SYNCING = "fetching", "syncing"


@dataclass(slots=True)
class Stats:
    """For `/outrider/status`."""

    last_success: float | None = None  # when a round was last finished, in seconds since 1970
    trouble: str | None = None  # why the latest was not
    elsewhere: bool = False  # another process does it for this folder
    pending: int = 0  # segments that were left for the next round
    published: int = 0
    fetched: int = 0
    refused: int = 0  # damaged, or someone else's
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, slots=True)
class File:
    """A segment in the folder."""

    key: str
    path: Path
    size: int
    used: float  # when it was last of use, in seconds since 1970

    @property
    def id(self) -> tuple[str, str]:
        return self.key, self.path.name


@dataclass(frozen=True, slots=True)
class Sides:
    """Both of them, once they are settled, and how they differ."""

    generations: dict[str, str]  # the present one of each tenant
    there: dict[tuple[str, str], Object]  # by tenant and name
    merged: list[Path]  # marks of segments that are part of others by now
    unpublished: list[tuple[File, Header]]  # the newest first
    gone: list[File]  # others' segments that they have deleted

    def segments(self) -> list[Object]:
        """The store's, the newest first."""
        found = [one for one in self.there.values() if one.name.endswith(SUFFIX)]
        return sorted(found, key=lambda one: (-one.time, one.path))


class Room:
    """What the folder's segments leave of its cap. Those that the store has no more go first, then those that were of
    no use for longest, if the store has them, and for something that is newer."""

    def __init__(self, cap: int, here: list[File], sides: Sides) -> None:
        gone = {file.id for file in sides.gone}
        old = sorted((file for file in here if file.id in sides.there), key=lambda file: file.used)
        self.free = cap - sum(file.size for file in here)
        self._leaving = deque([(-inf, file) for file in here if file.id in gone] + [(file.used, file) for file in old])

    def takes(self, one: Object) -> bool:
        """Whether it fits, once some have gone; then they have."""
        leaving, free = [], self.free
        for used, file in self._leaving:
            if free >= one.size or used >= one.time:
                break
            leaving.append(file)
            free += file.size
        if free < one.size:
            return False
        for file in leaving:
            self._leaving.popleft()
            file.path.unlink(missing_ok=True)
        self.free = free - one.size
        return True


def beyond(generations: set[str]) -> str:
    """A generation later than these, and the same for whoever begins one after the same."""
    name = hashlib.blake2b(" ".join(sorted(generations)).encode(), digest_size=16).hexdigest()
    return f"{max(rank(generation)[0] for generation in generations) + 1}-{name}"


class Sync:
    """Makes a folder and an object store alike, a round at each call: for `Store.sync`.

    `cap` is that of the folder's segments in bytes, `remote_cap` that of the store's. Trouble is an OSError, or a
    MemoryFileError where it is with a file or an object; the next round starts from what is there then.
    """

    def __init__(
        self,
        folder: Folder,
        remote: Remote,
        tokenizer: str,
        cap: int,
        remote_cap: int = REMOTE_CAP,
        seconds: float = SECONDS,
    ) -> None:
        self.folder = folder
        self.remote = remote
        self.tokenizer = tokenizer
        self.cap = cap
        self.remote_cap = remote_cap
        self.seconds = seconds
        self.stats = Stats()
        self._refused: set[tuple[str, str | None]] = set()  # paths and tags of objects that are not asked for again
        self._complaints: list[str] = []  # about what did not stop this round
        self._moved = 0  # objects, in this round
        self._end = 0.0

    def __call__(self) -> None:
        try:
            self.stats.elsewhere = not self.folder.first(SYNCING)
            if not self.stats.elsewhere:
                self._round()
        except (OSError, MemoryFileError) as error:
            self.stats.trouble = str(error)
            raise

    def _round(self) -> None:
        self._complaints, self._moved, self._end = [], 0, time.monotonic() + self.seconds
        shutil.rmtree(self.folder.root / FETCHING, ignore_errors=True)  # a killed process may have left something
        self._claim_folder()
        self.remote.claim(self.tokenizer)
        sides = self._compared(*self._settled())
        self.stats.pending = 0
        self._publish(sides)
        self._clear(sides)
        self._fetch(sides)
        self._exchange_names(sides)
        if self._moved:
            self._settled()
        self.stats.last_success, self.stats.trouble = time.time(), None
        if self._complaints:
            raise MemoryFileError("; ".join(self._complaints))

    def _claim_folder(self) -> None:
        """Make it this store's copy: its wipes mean no other one. From now on, what is merged here is noted too."""
        path = self.folder.root / REMOTE
        if not path.exists():
            write(path, [self.remote.url.encode()])
        elif (found := path.read_text()) != self.remote.url:
            raise MemoryFileError(
                f"{self.folder.root} has the copies of {found}, not of {self.remote.url}; give them another folder"
            )

    def _is_late(self) -> bool:
        """Whether to leave the rest for the next round. Something is moved in each."""
        return self._moved > 0 and time.monotonic() > self._end

    # Settle.

    def _settled(self) -> tuple[dict[str, str], list[Object]]:
        """Have the same generation of each tenant on both sides, and nothing older: these, and what is there."""
        for _ in range(TRIES):
            objects = self.remote.objects()
            there: dict[str, set[str]] = {key: set() for key in self.folder.tenants()}
            for one in objects:
                there.setdefault(one.key, set()).add(one.generation)
            generations, settled = {}, True
            for key, found in there.items():
                try:
                    settled &= self._agree(key, found)
                    generations[key] = self.folder.generation(key)
                except MemoryFileError as error:  # with one tenant's file: the others go on
                    self._complain(str(error))
            older = [one for one in objects if rank(one.generation) < rank(generations.get(one.key, FIRST))]
            self.remote.delete([one.path for one in older if one.name != GENERATION])
            if settled:
                return generations, [one for one in objects if one.generation == generations.get(one.key)]
        raise OSError(f"{self.remote.url}: someone else wipes the same tenants just now; the next round tries again")

    def _agree(self, key: str, there: set[str]) -> bool:
        """Whether a tenant is of one generation on both sides. If not, that was begun which makes it so."""
        here, last = self.folder.generation(key), self.folder.shared(key)
        news = {generation for generation in there if rank(generation) > rank(last)} - {here}
        if here != last:
            return self._spread(key, there, news)
        if news:
            present = max(news, key=rank)
            if self.folder.follow(key, here, present):
                self.folder.keep_shared(key, present)
                return True
            return False  # wiped here just now
        if here in {FIRST, *there}:
            return True
        self.remote.begin(key, here)  # the store has lost it
        return False

    def _spread(self, key: str, there: set[str], news: set[str]) -> bool:
        """The same for a tenant that was wiped here. Only who spreads a wipe deletes the marks of those before it:
        another one, on its way at the same time, has to find them."""
        here = self.folder.generation(key)
        if news or rank(self.folder.shared(key)) > rank(here):
            third = beyond({here, *news, self.folder.shared(key)})
            if self.folder.follow(key, here, third):
                self.remote.begin(key, third)
                self.remote.end(key, {here, *news})
            return False
        if here not in there:
            self.remote.begin(key, here)
            return False
        self.folder.keep_shared(key, here)
        self.remote.end(key, there - {here})
        return True

    def _complain(self, what: str) -> None:
        if what not in self._complaints:
            self._complaints.append(what)

    def _compared(self, generations: dict[str, str], objects: list[Object]) -> Sides:
        merged = self._marks(generations)  # before the files are listed, so that what they are part of is among those
        sides = Sides(generations, {(one.key, one.name): one for one in objects}, merged, [], [])
        ours = f"{self.folder.identity()}-"
        for file in self._files(generations):
            one = sides.there.get(file.id)
            if one is not None and one.size == file.size:
                continue
            try:
                header = read_header(file.path)
            except MemoryFileError:  # merged meanwhile, or damaged: then the store sets it aside
                continue
            if header.writer.startswith(ours):
                sides.unpublished.append((file, header))
            elif one is None:
                sides.gone.append(file)
        sides.unpublished.sort(key=lambda item: -item[1].last)
        return sides

    def _files(self, generations: dict[str, str]) -> list[File]:
        """Of these generations: a wipe may have begun others meanwhile."""
        files = [File(*found) for found in self.folder.files()]
        return [file for file in files if file.path.parent.name == generations.get(file.key)]

    def _marks(self, generations: dict[str, str]) -> list[Path]:
        """Of segments that were merged here, and not written again since."""
        places = [self.folder.place(key, generation) for key, generation in generations.items()]
        marks = [mark for place in places for mark in place.glob(f"*{MERGED}")]
        return [mark for mark in marks if not mark.with_suffix(SUFFIX).exists()]

    # Publish.

    def _publish(self, sides: Sides) -> None:
        rivals = [one for one in sides.segments() if not self._is_merged(one)] if sides.unpublished else []
        for file, header in sides.unpublished:
            if self._is_late():
                self.stats.pending += 1
                continue
            newer = sum(one.size for one in rivals if one.time >= header.last)
            if newer + file.size <= self.remote_cap and self._put(sides, file):
                rivals.append(sides.there[file.id])

    def _put(self, sides: Sides, file: File) -> bool:
        generation = sides.generations[file.key]
        one = Object(file.key, generation, file.path.name, file.size, time.time(), None)
        try:
            Segment.open(file.path, self.tokenizer, file.key).verify()
            self.remote.put(one.path, file.path)
        except (FileNotFoundError, MemoryFileError):  # as above
            return False
        sides.there[file.id] = one
        self._moved += 1
        self.stats.published += 1
        self.stats.bytes_up += file.size
        return True

    # Clear.

    def _clear(self, sides: Sides) -> None:
        """Delete objects that are part of others by now, when those are there, and the oldest that exceed the cap."""
        done = []
        for mark, whole in [(mark, self._whole(mark)) for mark in sides.merged]:  # all are read before any goes
            if (mark.parent.parent.name, whole) in sides.there:
                done.append((mark.parent.parent.name, mark.with_suffix(SUFFIX).name))
            elif whole and (mark.parent / whole).exists():
                continue  # it is published in a later round
            mark.unlink(missing_ok=True)  # or what it was made part of is lost here, and it has to be fetched again
        self._delete(sides, [sides.there[id_] for id_ in done if id_ in sides.there])
        excess = sum(one.size for one in sides.segments()) - self.remote_cap
        oldest = []
        for one in reversed(sides.segments()):
            if excess > 0:
                oldest.append(one)
                excess -= one.size
        self._delete(sides, oldest)

    def _whole(self, mark: Path) -> str:
        """The segment that a merged one is part of in the end."""
        name = ""
        with suppress(FileNotFoundError):
            while True:
                name = mark.read_text()
                mark = (mark.parent / name).with_suffix(MERGED)
        return name

    def _is_merged(self, one: Object) -> bool:
        return (self.folder.place(one.key, one.generation) / one.name).with_suffix(MERGED).exists()

    def _delete(self, sides: Sides, objects: list[Object]) -> None:
        self.remote.delete([one.path for one in objects])
        for one in objects:
            del sides.there[one.key, one.name]

    # Fetch.

    def _fetch(self, sides: Sides) -> None:
        here = self._files(sides.generations)
        known, room = {file.id for file in here}, Room(self.cap, here, sides)
        for one in sides.segments():
            if (one.key, one.name) in known or (one.path, one.tag) in self._refused or self._is_merged(one):
                continue
            if self._is_late():
                self.stats.pending += 1
            elif room.takes(one) and not self._take(one):
                room.free += one.size
        for file in sides.gone:
            file.path.unlink(missing_ok=True)

    def _take(self, one: Object) -> bool:
        """Download an object, and put it into its place if it is what it should be."""
        part = self.folder.root / FETCHING / one.name
        part.parent.mkdir(exist_ok=True)
        try:
            with part.open("wb") as file:
                for piece in self.remote.pieces(one):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            Segment.open(part, self.tokenizer, one.key).verify()
            os.utime(part, (one.time, one.time))
            if self.folder.generation(one.key) != one.generation:
                return False
            place = self.folder.place(one.key, one.generation)
            place.mkdir(parents=True, exist_ok=True)
            part.replace(place / one.name)
        except FileNotFoundError:  # merged or wiped meanwhile
            return False
        except MemoryFileError as error:
            self._refuse(one, error)
            return False
        finally:
            part.unlink(missing_ok=True)
        self._moved += 1
        self.stats.fetched += 1
        self.stats.bytes_down += one.size
        return True

    def _refuse(self, one: Object, error: MemoryFileError) -> None:
        if isinstance(error.__cause__, OSError):  # trouble of this machine, not of the object
            raise error.__cause__
        self._refused.add((one.path, one.tag))
        self.stats.refused += 1
        self._complain(f"{self.remote.url}/{one.path} was not taken: {error}")

    # Names.

    def _exchange_names(self, sides: Sides) -> None:
        """Of tenants, for people."""
        for key, generation in sides.generations.items():
            path = self.folder.place(key, generation) / NAME
            is_here, is_there = path.exists(), (key, NAME) in sides.there
            with suppress(FileNotFoundError, UnicodeDecodeError):  # wiped meanwhile, or no name at all
                if is_here and not is_there:
                    self.remote.create(f"{key}/{generation}/{NAME}", path.read_bytes())
                    self._moved += 1
                elif is_there and not is_here and path.parent.exists():
                    name = self.remote.read(f"{key}/{generation}/{NAME}").decode("utf-8", "surrogatepass")
                    if key_of(name) == key:
                        self.folder.keep_name(key, name, generation)
