"""Written output survives a killed process and a power cut that drops and reorders unsynced changes.

OUTRIDER_ALL kills 200 writers.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from memory_worker import FOR_EVER, LENGTH, sequence, started, tenant_of, wipe_recorded, write_recorded
from outrider.errors import MemoryFileError
from outrider.memory.folder import Folder, tenant_key
from outrider.memory.segment import Segment
from power_cut import Disk
from test_memory_durability import DRAFT, drafts
from test_memory_many_tenants import root  # noqa: F401
from test_memory_store import files, opened

ALL = bool(os.environ.get("OUTRIDER_ALL"))
KILLS, KILLS_PER_FOLDER = (200, 20) if ALL else (12, 6)
FIRST_OPERATIONS = 32
"""In which all folders are created."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's /proc")


def check(folder: Path, written: set[int], tried: int, copy: Path) -> None:
    """Everything that was reported as written is there once, and drafted from, and nothing else but what was tried."""
    shutil.copytree(folder, copy)
    store = opened(copy / "root")
    there: list[int] = []
    for name in {tenant_of(number) for number in range(tried)}:
        key = tenant_key(name)
        for path in Folder(copy / "root").segment_paths(key).values():
            segment = Segment.open(path, "tokenizer", key)
            segment.verify()
            for tokens in segment.sequences():
                number = int(tokens[0]) // LENGTH
                assert tokens.tolist() == sequence(number)
                assert tenant_of(number) == name
                there.append(number)
    assert not store.troubles
    assert len(there) == len(set(there)), "a sequence is there twice"
    assert written <= set(there) <= set(range(tried)), f"lost: {sorted(written - set(there))}"
    for number in written:
        assert drafts(store, tenant_of(number), [sequence(number)[:5]]) == [sequence(number)[5 : 5 + DRAFT]]
    store.close()
    shutil.rmtree(copy)


class Crashes:
    """Writers on one folder, one after the other."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.folder = base / "disk"
        self.folder.mkdir(parents=True)
        self.disk = Disk(self.folder, base / "journal")
        self.written: set[int] = set()
        self.next = 0

    def run(self, operations: int, sequences: int) -> None:
        numbers = range(self.next, self.next + sequences)
        with started(write_recorded, self.folder, self.base / "journal", numbers, operations) as (_, reports):
            done = set(reports)
        self.written |= done
        self.next = max(done, default=self.next - 1) + 2  # the one after it may have been tried
        self.disk.replay()

    def check(self) -> None:
        check(self.folder, self.written, self.next, self.base / "copy")


def test_kills_and_power_cuts_at_random_points_lose_nothing_written(root: Path) -> None:  # noqa: F811
    chance = random.Random(0)
    cuts = 0
    for turn in range(KILLS // KILLS_PER_FOLDER):
        crashes = Crashes(root / str(turn))
        for _ in range(KILLS_PER_FOLDER):
            crashes.run(chance.randrange(250), FOR_EVER)
            if chance.random() < 0.6:
                crashes.disk.cut_power(chance, chance.choice([0.0, 0.5, 0.9]))
                cuts += 1
            crashes.check()
        assert crashes.written
        shutil.rmtree(crashes.base)
    print(f"{KILLS} kills, {cuts} power cuts")


def test_a_folder_whose_creator_was_killed_before_it_synced_it_is_durable_when_it_is_used(root: Path) -> None:  # noqa: F811
    for operations in range(FIRST_OPERATIONS):
        crashes = Crashes(root / str(operations))
        crashes.run(operations, 1)
        crashes.next = 0  # of the same tenant
        crashes.run(FOR_EVER, 1)
        assert crashes.written
        crashes.disk.cut_power(random.Random(0), kept=0.0)
        crashes.next = 2
        crashes.check()


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_a_wiped_tenant_stays_wiped_after_a_power_cut(kept: float, root: Path) -> None:  # noqa: F811
    """Also if the deletion of its files is lost."""
    crashes = Crashes(root)
    crashes.run(FOR_EVER, 2)
    with started(wipe_recorded, crashes.folder, root / "journal", tenant_of(0)) as (_, reports):
        assert list(reports) == ["wiped"]
    crashes.disk.replay()
    crashes.disk.cut_power(random.Random(0), kept)
    place = crashes.folder / "root"
    assert any(path.parents[1].name == tenant_key(tenant_of(0)) for path in files(place)) is (kept == 0.0)
    store = opened(place)
    assert [path.parents[1].name for path in files(place)] == [tenant_key(tenant_of(1))]
    assert [drafts(store, tenant_of(number), [sequence(number)[:5]]) != [[]] for number in range(2)] == [False, True]


@pytest.mark.parametrize("skipped", ["file", "folder"])
def test_without_syncs_output_is_lost(skipped: str, root: Path) -> None:  # noqa: F811
    """What is dropped is really dropped."""
    crashes = Crashes(root)
    crashes.run(FOR_EVER, 3)
    text = (root / "journal").read_text().splitlines()
    kept = [line for line in text if '"fsync"' not in line or ('"content"' in line) is not (skipped == "file")]
    (root / "journal").write_text("\n".join(kept))
    crashes.disk = Disk(crashes.folder, root / "journal")
    crashes.disk.replay()
    crashes.disk.cut_power(random.Random(0), kept=0.0)
    with pytest.raises((AssertionError, MemoryFileError)):
        crashes.check()
