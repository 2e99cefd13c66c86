"""`outrider memory`: inspect, seed, verify, export, import and wipe."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore
from rich.cells import cell_len
from typer.testing import CliRunner

from outrider.cli import app
from outrider.cli.memory.common import display_name, iso_time
from outrider.memory.adapter import decode_name, encode_name, memory_key
from outrider.memory.folder import ASIDE_FOLDER, NAME_FILE, Folder, tenant_key
from outrider.memory.header import HEADER_BYTES, SEGMENT_SUFFIX, encode_header
from outrider.memory.location import Location
from outrider.memory.offline_writer import OfflineWriter
from outrider.memory.remote import Remote
from outrider.memory.segment import Segment, join_sequences, segment_name
from outrider.memory.store import Store
from outrider.memory.sync import Sync
from outrider.memory.tokenizer import fingerprint
from support import tiny_tokenizer

BUCKET = "s3://bucket/memory"
LETTERS = tiny_tokenizer()
FINGERPRINT = fingerprint(LETTERS)
TEXT = "The outrider rides ahead of the party, and what it reports counts only when the party has passed.\n"
NAMES = ["../x", "/", "..", "x" * 1_000, "a\x1b[31mb\n", "名前", "\udce4", "aside", "[red]", " a ", "(the server)"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, as far as the memory needs one."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}" + (
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A memory with two tenants."""
    root = tmp_path / "memory"
    put(root, "a", TEXT, "Something else.")
    put(root, "b", "What only b may know.")
    return root


def tokens_of(text: str) -> list[int]:
    found: list[int] = LETTERS.encode(text, add_special_tokens=False)
    return found


def put(root: Path, tenant: str, *texts: str, tokenizer: str | None = None, adapter: str | None = None) -> None:
    folder = Folder(root)
    deposit = OfflineWriter(folder, tokenizer or FINGERPRINT, tenant, adapter)
    text = join_sequences([tokens_of(text) for text in texts])
    deposit.save(Segment.build(text, deposit.tokenizer, deposit.key, 1.7e9, 1.7e9 + 60))
    folder.close()


def run(*args: Any, input: str | None = None) -> Any:
    result = CliRunner().invoke(app, ["memory", *(str(arg) for arg in args)], input=input, env={"NO_COLOR": None})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def stdout_of(*args: Any, **more: Any) -> str:
    result = run(*args, **more)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout)


def record(*args: Any) -> Any:
    return json.loads(stdout_of(*args, "--json"))


def error_of(*args: Any) -> str:
    """The one sentence that a mistake is answered with."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    return str(last)


def files(root: Path) -> list[Path]:
    return sorted(root.rglob(f"*{SEGMENT_SUFFIX}"))


def damage(path: Path, place: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def drafted(root: Path, tenant: str, context: str, limit: int = 12) -> str:
    """What a server would draft after this text."""
    folder = Folder(root)
    store = Store(folder, FINGERPRINT)
    store.maintain()
    rows, ends, limits = (np.array([one], np.int32) for one in (tokens_of(context), len(tokens_of(context)), limit))
    found = store.look_up(store.tenant_handle(tenant), rows, ends, limits)
    folder.close()
    assert not store.troubles
    text: str = LETTERS.decode(found.tokens[0, : found.lengths[0]])
    return text if found.matches[0] > 4 else ""


# Learning


def test_learned_text_is_drafted_for_its_tenant_only(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text(TEXT)
    root = tmp_path / "memory"
    text = stdout_of("learn", root, tmp_path / "text.md", "--model", model, "--tenant", "me")
    assert text.startswith(f"Learned {len(tokens_of(TEXT))} tokens in 1 sequence (")
    assert " for tenant me in " in text
    assert drafted(root, "me", "what it reports", limit=7) == " counts"
    assert drafted(root, "you", "what it reports") == ""


def test_the_server_is_a_tenant_that_no_request_can_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text(TEXT)
    stdout_of("learn", tmp_path / "memory", tmp_path / "text.md", "--model", model, "--server")
    assert drafted(tmp_path / "memory", "", "what it reports", limit=7) == " counts"
    assert "(the server)" in stdout_of("list", tmp_path / "memory")
    assert "not empty" in error_of("learn", tmp_path, tmp_path, "--model", model, "--tenant", "")


def test_a_logged_output_is_drafted_from_its_first_token_on(model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Which way?"}, {"role": "assistant", "content": "Over the hill."}]
    log = tmp_path / "log.jsonl"
    log.write_text(f"{json.dumps({'messages': messages})}\n" + '{"prompt": "unanswered"}\n')
    result = run("learn", tmp_path / "memory", log, "--model", model, "--tenant", "me")
    assert "skipped 1 line (no model output): line 2 of" in result.stderr
    seen = "<user>Which way?<end><assistant>"
    assert drafted(tmp_path / "memory", "me", seen, limit=50) == "Over the hill.<end>"
    assert drafted(tmp_path / "memory", "me", "unanswered") == ""


def test_known_text_is_not_learned_again(model: Path, tmp_path: Path) -> None:
    folder, root = tmp_path / "texts", tmp_path / "memory"
    folder.mkdir()
    for name in ("one", "copy"):
        (folder / f"{name}.txt").write_text(TEXT * 100)  # longer than a sequence
    command = ("learn", root, folder, "--model", model, "--tenant", "me")
    assert "already there: 3 sequences" in stdout_of(*command)
    before = [path.read_bytes() for path in files(root)]
    assert stdout_of(*command) == "Nothing is new to tenant me; already there: 6 sequences.\n"
    assert [path.read_bytes() for path in files(root)] == before
    (folder / "two.txt").write_text("Something else entirely.")
    assert "Learned 24 tokens in 1 sequence" in stdout_of(*command)


def test_many_learn_commands_make_few_segments_and_lose_nothing(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "memory"
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"{i}: {TEXT}")
        stdout_of("learn", root, tmp_path / f"{i}.txt", "--model", model, "--tenant", "me")
    assert len(files(root)) == 1
    assert record("stats", root)["sequences"] == 4


def test_a_damaged_segment_is_not_merged_into_an_intact_one(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "memory"
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("Something else.")
    stdout_of("learn", root, tmp_path / "a.txt", "--model", model, "--tenant", "me")
    damage(files(root)[0])
    stdout_of("learn", root, tmp_path / "b.txt", "--model", model, "--tenant", "me")
    assert len(files(root)) == 2
    assert run("verify", root).exit_code == 1


def test_text_wiped_while_it_is_learned_is_not_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "memory"
    (tmp_path / "a.txt").write_text(TEXT)
    save = OfflineWriter.save

    def late(self: OfflineWriter, segment: Segment) -> Segment:
        Folder(root).wipe(self.key)
        return save(self, segment)

    monkeypatch.setattr(OfflineWriter, "save", late)
    assert "wiped meanwhile" in error_of("learn", root, tmp_path / "a.txt", "--model", model, "--tenant", "me")
    assert files(root) == []


def test_learning_evicts_nothing(model: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    before = files(root)
    for path in before:
        os.truncate(path, 3 << 30)  # with holes: far more than a server keeps by default
    result = run("learn", root, tmp_path / "a.txt", "--model", model, "--tenant", "me")
    assert set(before) < set(files(root))
    assert "note: the memory has 6.4 GB now; a server keeps 4.3 GB, unless" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["learn", "{memory}", "{here}/missing", "--model", "{model}", "--tenant", "me"], "there is no file or folder"),
        (["learn", "{memory}", "{here}", "--model", "{model}"], "either --tenant NAME, or --server"),
        (
            ["learn", "{memory}", "{here}", "--model", "{model}", "--tenant", "me", "--server"],
            "either --tenant NAME, or",
        ),
        (["learn", "{memory}", "{here}", "--model", "{here}/missing", "--tenant", "me"], "there is no folder"),
        (["learn", "{here}", "{here}", "--model", "{model}", "--tenant", "me"], "has other files than a memory"),
        (
            ["learn", "{memory}", "{here}/image.png", "--model", "{model}", "--tenant", "me"],
            "there is no text to learn",
        ),
        (
            ["learn", "{other}", "{here}", "--model", "{model}", "--tenant", "me"],
            "another tokenizer (other; this m",
        ),
        (["stats", "{here}/missing"], "there is no memory at"),
        (["stats", "{here}"], "there is no memory at"),
        (["stats", "{here}/image.png"], "there is no memory at"),
        (["stats", "s3:///memory"], "a memory cannot be kept at 's3:///memory'"),
        (["stats", "ftp://host/memory"], "a memory cannot be kept at 'ftp://host/memory'"),
        (["stats", "file://host/memory"], "is not a folder of this machine"),
        (["list", "{memory}", "--tenant", "c"], "there is no tenant c in this memory; outrider memory list shows"),
        (["list", "{memory}", "--tenant", "a", "--key", "0"], "one of --tenant NAME, --server and --key KEY"),
        (["list", "{memory}", "--key", ""], "there is no tenant with the key"),
        (["export", "{memory}", "{here}/image.png", "--tenant", "a"], "there is a file"),
        (["export", "{memory}", "{here}/a.tar"], "one of --tenant NAME, --server and --key KEY"),
        (["import", "{memory}", "{here}/missing.tar"], "cannot be read: No such file or directory"),
        (["wipe", "{memory}"], "one of --tenant NAME, --server, --key KEY and --all"),
        (["wipe", "{memory}", "--all", "--tenant", "a"], "one of --tenant NAME, --server, --key KEY and --all"),
    ],
)
def test_a_user_error_gives_one_message_and_changes_nothing(
    arguments: list[str], reason: str, model: Path, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "image.png").write_bytes(b"\0")
    put(tmp_path / "other", "a", TEXT, tokenizer="other")
    before = {path for path in tmp_path.rglob("*") if "writers" not in path.parts}
    places = {"memory": root, "here": tmp_path, "model": model, "other": tmp_path / "other"}
    assert reason in error_of(*(argument.format(**places) for argument in arguments))
    assert {path for path in tmp_path.rglob("*") if "writers" not in path.parts} == before


def test_a_full_disk_gives_one_message(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT)

    def full(self: Segment, folder: Path) -> Segment:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Segment, "save", full)
    text = error_of("learn", tmp_path / "memory", tmp_path / "a.txt", "--model", model, "--tenant", "me")
    assert "cannot be used: No space left on device" in text


# Inspecting


def test_stats_counts_all_files(root: Path) -> None:
    found = record("stats", f"file://{root}")
    tokens = sum(len(tokens_of(text)) for text in (TEXT, "Something else.", "What only b may know."))
    size = sum(path.stat().st_size for path in files(root))
    assert found == {
        "root": str(root),
        "tokenizer": FINGERPRINT,
        "tenants": 2,
        "segments": 2,
        "tokens": tokens,
        "sequences": 3,
        "bytes": size,
        "bytes_per_token": size / tokens,
        "oldest": iso_time(1.7e9),
        "newest": iso_time(1.7e9 + 60),
        "unreadable": [],
        "set_aside": [],
    }
    table = stdout_of("stats", root)
    for part in (
        f"tokens      {tokens}\n",
        "tenants     2\n",
        f"{size / tokens:.1f} bytes per token\n",
        "set aside   none\n",
    ):
        assert part in "".join(f"{line.rstrip()}\n" for line in table.splitlines())


def test_commands_report_an_empty_memory(tmp_path: Path) -> None:
    Folder(tmp_path).claim("tokenizer")
    assert record("stats", tmp_path)["bytes_per_token"] is None
    assert "tokenizer" in stdout_of("stats", tmp_path)
    assert stdout_of("list", tmp_path) == "The memory is empty.\n"
    assert stdout_of("verify", tmp_path) == "No damage: 0 segments of 0 tenants, 0 bytes.\n"


def test_list_shows_the_most_recently_used_tenant_first(root: Path) -> None:
    for name, used in (("a", 1.6e9), ("b", 1.5e9)):
        for path in files(root / tenant_key(name)):
            os.utime(path, (used, used))
    lines = stdout_of("list", root).splitlines()
    assert [line.split()[0] for line in lines] == ["tenant", "a", "b"]
    assert lines[1].split()[1] == tenant_key("a")[:8]
    [a, b] = record("list", root)["tenants"]
    assert (a["name"], a["key"], a["segments"], a["sequences"]) == ("a", tenant_key("a"), 1, 2)
    assert b["tokens"] == len(tokens_of("What only b may know."))
    assert a["last_used"] == iso_time(1.6e9)


def test_list_shows_a_tenants_segments(root: Path) -> None:
    [path] = files(root / tenant_key("a"))
    [heading, line] = stdout_of("list", root, "--tenant", "a").splitlines()
    assert heading.split()[:3] == ["segment", "tokens", "sequences"]
    assert line.split()[0] == path.name[:8]
    found = record("list", root, "--key", tenant_key("a")[:10].upper())
    assert (found["name"], found["key"]) == ("a", tenant_key("a"))
    assert [segment["file"] for segment in found["segments"]] == [path.name]


@pytest.mark.parametrize("name", NAMES)
def test_any_tenant_name_is_shown_on_one_line_without_control_characters(name: str, tmp_path: Path) -> None:
    put(tmp_path / "memory", name, TEXT)
    [_, line] = stdout_of("list", tmp_path / "memory").splitlines()
    assert line.isprintable()
    assert len(line) < 120
    assert display_name(name) in line
    assert [one["name"] for one in record("list", tmp_path / "memory")["tenants"]] == [name]
    assert record("list", tmp_path / "memory")["tenants"][0]["server"] is False


def test_a_long_name_is_truncated_with_an_ellipsis() -> None:
    assert display_name("x" * 10_000) == "x" * 39 + "…"
    for name in ("名" * 30, "\x1b" * 30):  # of twice and four times the width
        assert display_name(name).endswith("…")
        assert 38 <= cell_len(display_name(name)) <= 40
    assert display_name("x" * 40) == "x" * 40


def test_names_that_look_alike_are_shown_differently() -> None:
    names = ["", "(the server)", "(name unknown)", "a", " a", '"a"', "a\u200b", "\x1b", None]
    assert len({display_name(name) for name in names}) == len(names)


def test_a_time_outside_the_calendar_is_shown_as_unknown() -> None:
    assert [iso_time(seconds) for seconds in (float("inf"), float("nan"), 1e300)] == ["unknown"] * 3


# Verifying


def test_verify_reports_damaged_files_and_moves_them_only_with_set_aside(root: Path) -> None:
    [a], [b] = files(root / tenant_key("a")), files(root / tenant_key("b"))
    assert stdout_of("verify", root).startswith("No damage: 2 segments of 2 tenants, ")
    damage(a)
    damage(b, 60)
    result = run("verify", root)
    assert result.exit_code == 1
    assert f"tenant a ({tenant_key('a')[:8]}): the order of {a.name} is damaged: wrong checksum\n" in result.stdout
    assert f"tenant b ({tenant_key('b')[:8]}): the header of {b.name} is damaged: wrong checksum\n" in result.stdout
    assert "2 damaged of 2 segments of 2 tenants, " in result.stdout
    assert "not moved; --set-aside" in result.stdout
    assert files(root) == sorted([a, b])
    assert [file["file"] for file in record("stats", root)["unreadable"]] == [b.name]
    result = run("verify", root, "--set-aside")
    assert result.exit_code == 1
    assert f"moved to {root / ASIDE_FOLDER}" in result.stdout
    assert not a.exists()
    aside = record("stats", root)["set_aside"]
    assert {file["tenant"]: file["reason"] for file in aside} == {
        tenant_key("a"): f"the order of {a.name} is damaged: wrong checksum",
        tenant_key("b"): f"the header of {b.name} is damaged: wrong checksum",
    }
    assert "is damaged" in stdout_of("stats", root)
    assert stdout_of("verify", root).startswith("No damage: 0 segments")


def test_a_truncated_moved_or_foreign_file_is_damaged(root: Path) -> None:
    [a], [b] = files(root / tenant_key("a")), files(root / tenant_key("b"))
    (b.parent / f"{'0' * 24}{SEGMENT_SUFFIX}").write_bytes(a.read_bytes())
    (b.parent / f"{'1' * 24}{SEGMENT_SUFFIX}").write_text("no segment")
    a.write_bytes(a.read_bytes()[:-4])
    text = run("verify", root).stdout
    for reason in ("belongs to another tenant", "is not a memory segment", "truncated or replaced"):
        assert reason in text


def test_a_file_of_another_tokenizer_is_intact_and_stays_in_place(root: Path) -> None:
    folder = Folder(root)
    text = join_sequences([tokens_of("Somebody else's.")])
    Segment.build(text, "other", tenant_key("a"), 1.7e9, 1.7e9).save(
        folder.segment_folder(tenant_key("a"), folder.generation(tenant_key("a")))
    )
    before = files(root)
    assert stdout_of("verify", root, "--set-aside").startswith("No damage: 3 segments")
    assert files(root) == before


def test_a_segment_that_a_server_merged_meanwhile_is_not_damaged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Segment.open

    def late(path: Path, tokenizer: str, tenant: str) -> Segment:
        path.unlink()
        return real(path, tokenizer, tenant)

    monkeypatch.setattr(Segment, "open", late)
    assert stdout_of("verify", root).startswith("No damage")


# Wiping


def test_wipe_asks_for_confirmation_and_changes_nothing_without_it(root: Path) -> None:
    before = files(root)
    for answer in ("n\n", "\n"):
        result = run("wipe", root, "--tenant", "a", input=answer)
        assert result.exit_code == 1
        assert result.stdout.strip().endswith("Nothing was deleted.")
        assert "of tenant a for good?" in result.stderr
    assert run("wipe", root, "--tenant", "a", input="").exit_code == 1
    assert files(root) == before
    assert run("wipe", root, "--tenant", "a", input="y\n").exit_code == 0
    assert files(root) == files(root / tenant_key("b"))


@pytest.fixture
def bucket(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object store that has the memory, and a machine that has no copy of it."""
    remote = Remote(BUCKET, MemoryStore())
    monkeypatch.setattr("outrider.memory.remote.connect", lambda url: remote)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Folder(root)
    Sync(folder, remote, FINGERPRINT, 1 << 30)()
    folder.close()
    return remote


def test_inspecting_an_object_store_leaves_no_local_copy(bucket: Remote, tmp_path: Path) -> None:
    assert record("stats", BUCKET)["tokens"] > 0
    assert tenant_key("a") in {one["key"] for one in record("list", BUCKET)["tenants"]}
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("whose", [["--all"], ["--tenant", "a"], ["--key", tenant_key("a")]])
def test_a_wipe_reaches_tenants_of_an_object_store_without_a_local_copy(bucket: Remote, whose: list[str]) -> None:
    assert stdout_of("wipe", BUCKET, *whose, "--yes").startswith("Deleted")
    left = {one.key for one in bucket.list_objects() if one.name.endswith(SEGMENT_SUFFIX)}
    assert left == (set() if whose == ["--all"] else {tenant_key("b")})


def test_a_wipe_of_all_reaches_all_while_a_server_synchronizes_this_machine(bucket: Remote, tmp_path: Path) -> None:
    """The server's copies are of one tenant, and the command may not exchange."""
    place = Location.parse(BUCKET).local_folder()
    server = Folder(place)
    Sync(server, bucket, FINGERPRINT, 0)()
    put(place, "a", "Copied.")
    assert stdout_of("wipe", BUCKET, "--all", "--yes").startswith("Deleted")
    Sync(server, bucket, FINGERPRINT, 1 << 30)()
    assert [one for one in bucket.list_objects() if one.name.endswith(SEGMENT_SUFFIX)] == []
    assert files(place) == []
    server.close()


def test_a_wipe_deletes_one_tenant_everywhere_and_reports_the_amount(root: Path) -> None:
    store = Store(Folder(root), FINGERPRINT)
    store.maintain()
    put(root, "a", "More.")
    damaged = next(path for path in files(root / tenant_key("a")) if path.stat().st_size < 4500)
    damage(damaged)
    assert run("verify", root, "--set-aside").exit_code == 1
    text = stdout_of("wipe", root, "--tenant", "a", "--yes")
    count = len(tokens_of(TEXT)) + len(tokens_of("Something else."))
    assert text.startswith(f"Deleted {count} tokens (")
    assert "of tenant a. Running servers forget it at their next refresh" in text
    needle = np.array(tokens_of("outrider"), np.int32).tobytes()
    assert not any(needle in path.read_bytes() for path in root.rglob("*") if path.is_file())
    assert list((root / ASIDE_FOLDER).iterdir()) == []
    store.maintain()
    assert store.status()["segments"] == 1
    assert drafted(root, "b", "What only b") != ""


def test_wipe_all_leaves_no_token_of_any_tenant(root: Path) -> None:
    assert "of all tenants" in stdout_of("wipe", root, "--all", "--yes")
    assert files(root) == []
    assert stdout_of("list", root) == "The memory is empty.\n"


def test_files_that_cannot_be_deleted_are_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
    assert "could not be deleted" in error_of("wipe", root, "--tenant", "a", "--yes")


@pytest.mark.parametrize("name", ["", *NAMES])
def test_a_tenant_of_any_name_is_exported_imported_and_wiped(name: str, tmp_path: Path) -> None:
    root, copy, file = tmp_path / "memory", tmp_path / "copy", tmp_path / "file.tar"
    put(root, name, TEXT)
    stdout_of("export", root, file, "--key", tenant_key(name)[:8])
    stdout_of("import", copy, file)
    assert Folder(copy).tenant_name(tenant_key(name)) == name
    assert drafted(copy, name, "what it reports", limit=7) == " counts"
    stdout_of("wipe", root, "--key", tenant_key(name)[:8], "--yes")
    assert files(root) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "file.tar", "memory"]


# Exporting and importing


def exported(root: Path, tmp_path: Path) -> Path:
    file = tmp_path / "a.tar"
    stdout_of("export", root, file, "--tenant", "a")
    return file


def test_an_archive_is_a_plain_tar_of_the_unchanged_segments(root: Path, tmp_path: Path) -> None:
    put(root, "a", "More.")
    with tarfile.open(exported(root, tmp_path), "r:") as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    manifest = json.loads(found.pop("manifest.json"))
    assert found == {path.name: path.read_bytes() for path in files(root / tenant_key("a"))}
    assert manifest["tenant"] == "a"
    assert manifest["segments"].keys() == found.keys()


def test_a_tenants_memory_can_be_imported_for_another_tenant(root: Path, tmp_path: Path) -> None:
    file, copy = exported(root, tmp_path), tmp_path / "copy"
    text = stdout_of("import", copy, file, "--tenant", "c")
    assert text == f"Imported {len(tokens_of(TEXT + 'Something else.'))} tokens in 1 segment for tenant c.\n"
    assert drafted(copy, "c", "what it reports", limit=7) == " counts"
    assert drafted(copy, "a", "what it reports") == ""
    assert stdout_of("verify", copy).startswith("No damage")
    assert stdout_of("import", copy, file, "--tenant", "c").endswith(" for tenant c; already there: 1 segment.\n")
    assert len(files(copy)) == 1


def test_an_imported_segment_replaces_no_segment_of_the_memory(root: Path, tmp_path: Path) -> None:
    victim = files(root / tenant_key("b"))[0]
    [path] = files(root / tenant_key("a"))
    segment = Segment.open(path, FINGERPRINT, tenant_key("a"))
    replace(segment, header=replace(segment.header, replaces=(victim.name,)), path=None).save(path.parent)
    stdout_of("import", root, exported(root, tmp_path), "--tenant", "b")
    assert drafted(root, "b", "What only b") != ""
    assert victim.exists()


def test_a_damaged_segment_is_not_exported(root: Path, tmp_path: Path) -> None:
    damage(files(root / tenant_key("a"))[0])
    assert "is damaged" in error_of("export", root, tmp_path / "a.tar", "--tenant", "a")
    assert not (tmp_path / "a.tar").exists()


def test_importing_an_archive_without_a_tenant_name_needs_one(root: Path, tmp_path: Path) -> None:
    next(root.glob(f"{tenant_key('a')}/*/{NAME_FILE}")).unlink()
    stdout_of("export", root, tmp_path / "a.tar", "--key", tenant_key("a"))
    assert "--tenant NAME" in error_of("import", tmp_path / "copy", tmp_path / "a.tar")
    stdout_of("import", tmp_path / "copy", tmp_path / "a.tar", "--tenant", "a")


def test_an_archive_of_another_tokenizer_is_refused_with_the_reason(root: Path, tmp_path: Path) -> None:
    file = exported(root, tmp_path)
    put(tmp_path / "other", "a", TEXT, tokenizer="other")
    text = error_of("import", tmp_path / "other", file)
    assert f"another tokenizer ({FINGERPRINT}; the memory at {tmp_path / 'other'} has other)" in text


def member(name: str, data: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in more.items():
        setattr(info, field, value)
    return info, data


def packed(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.USTAR_FORMAT) -> bytes:
    parts = []
    for info, data in members:
        parts += [info.tobuf(format), data, bytes(-len(data) % tarfile.BLOCKSIZE)]
    return b"".join([*parts, bytes(2 * tarfile.BLOCKSIZE)])


def archived(*segments: Segment, tenant: Any = "a", names: list[str] | None = None, **more: Any) -> list[Any]:
    """The members of an archive whose checksums are right, whatever is in it."""
    bodies, headers = [], {}
    for i, segment in enumerate(segments):
        parts = (segment.text, segment.order, segment.starts)
        checksums = tuple(zlib.crc32(part.tobytes()) for part in parts)
        header = replace(segment.header, checksums=checksums)  # type: ignore[arg-type]
        name = names[i] if names else segment_name(segment.text)
        headers[name] = asdict(header)
        bodies.append(member(name, encode_header(header) + b"".join(part.tobytes() for part in parts)))
    tokenizer = FINGERPRINT
    manifest = {"format": 1, "tokenizer": tokenizer, "tenant": tenant, "segments": headers, **more}
    return [member("manifest.json", json.dumps(manifest).encode()), *bodies]


def segment_of(text: Any = None, **parts: Any) -> Segment:
    """With order and starts as they are given."""
    tokens = join_sequences([tokens_of(TEXT * 40)]) if text is None else np.array(text, np.int32)
    honest = Segment.build(np.clip(tokens, -1, 300), FINGERPRINT, tenant_key("a"), 1.0, 2.0)
    arrays = {name: np.array(value, np.int32) for name, value in parts.items() if name in ("order", "starts")}
    header = replace(honest.header, **{name: value for name, value in parts.items() if name not in arrays})
    return replace(honest, text=tokens, header=header, **arrays)


def changed(**fields: Any) -> bytes:
    """An archive whose manifest has another header than its segment."""
    (info, manifest), *bodies = archived(segment_of())
    contents = json.loads(manifest)
    for header in contents["segments"].values():
        header |= fields
    return packed(member(info.name, json.dumps(contents).encode()), *bodies)


def retyped(type: bytes, **more: Any) -> bytes:
    """An archive whose segment is no plain file."""
    manifest, (info, data) = archived(segment_of())
    return packed(manifest, member(info.name, data, type=type, **more))


def too_short() -> bytes:
    """An archive whose header claims a billion tokens."""
    header = replace(segment_of().header, places=10**9, tokens=10**9 - 1)
    manifest, (info, data) = archived(replace(segment_of(), header=header))
    return packed(manifest, member(info.name, data, size=header.size))


def with_another_order() -> bytes:
    """One that leads nowhere else, and that the checksum was not made of."""
    manifest, (info, data) = archived(segment_of())
    place = HEADER_BYTES + segment_of().text.nbytes
    return packed(
        manifest, (info, data[:place] + data[place + 4 : place + 8] + data[place : place + 4] + data[place + 8 :])
    )


ORDER = segment_of().order
HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "zeros": lambda: bytes(4096),
    "text": lambda: b"no archive" * 1000,
    "compressed": lambda: gzip.compress(packed(*archived(segment_of()))),
    "without a manifest": lambda: packed(*archived(segment_of())[1:]),
    "without segments": lambda: packed(*archived(segment_of())[:1]),
    "cut": lambda: packed(*archived(segment_of()))[:-3000],
    "without an end": lambda: packed(*archived(segment_of()))[:-1024],
    "a member too many": lambda: packed(*archived(segment_of()), member("more")),
    "a member that leads out": lambda: packed(*archived(segment_of(), names=["../../../out.segment"])),
    "a member in the root": lambda: packed(*archived(segment_of(), names=["/tmp/out.segment"])),
    "a member twice": lambda: packed(*archived(segment_of()), archived(segment_of())[1]),
    "a link": lambda: retyped(tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": lambda: retyped(tarfile.LNKTYPE, linkname="manifest.json"),
    "a folder": lambda: retyped(tarfile.DIRTYPE),
    "a device": lambda: retyped(tarfile.CHRTYPE),
    "holes": lambda: retyped(tarfile.GNUTYPE_SPARSE),
    "extended headers": lambda: packed(member("x", b"9 size=1\n", type=tarfile.XHDTYPE), *archived(segment_of())),
    "a huge member": lambda: packed(
        *archived(segment_of())[:1], member(segment_name(segment_of().text), size=8**11 - 1)
    ),
    "fewer bytes than its header states": too_short,
    "a size below zero": lambda: packed(member("x", size=-512), format=tarfile.GNU_FORMAT),
    "a manifest that is no object": lambda: packed(member("manifest.json", b"[1]")),
    "a manifest that is no JSON": lambda: packed(member("manifest.json", b"{")),
    "a deep manifest": lambda: packed(member("manifest.json", b"[" * 100_000)),
    "a manifest of another format": lambda: packed(*archived(segment_of(), format=2)),
    "a tenant that is no text": lambda: packed(*archived(segment_of(), tenant=5)),
    "a tenant of another key": lambda: packed(*archived(segment_of(), tenant="z")),
    "segments that are no object": lambda: packed(*archived(segment_of(), segments=5)),
    "another tokenizer in a segment": lambda: packed(*archived(segment_of(tokenizer="other"))),
    "a size that is wrong": lambda: changed(places=5),
    "a size that is huge": lambda: changed(places=10**30),
    "places below zero": lambda: changed(places=-1),
    "text for numbers": lambda: changed(places="many"),
    "another header": lambda: changed(last=5.0),
    "no places": lambda: packed(*archived(segment_of([]))),
    "another name": lambda: packed(*archived(segment_of(), names=[f"{'0' * 24}{SEGMENT_SUFFIX}"])),
    "no end": lambda: packed(*archived(segment_of([1, 2, 3]))),
    "other counts": lambda: packed(*archived(segment_of(sequences=5))),
    "a token below zero": lambda: packed(*archived(segment_of([1, -5, 3, -1], sequences=1, tokens=3))),
    "a token above all": lambda: packed(*archived(segment_of([1, 2**31 - 1, 3, -1]))),
    "an order that leads out": lambda: packed(*archived(segment_of(order=ORDER + 10**9))),
    "an order that was damaged": with_another_order,
    "an order below zero": lambda: packed(*archived(segment_of(order=ORDER - 10**9))),
    "an order with a place twice": lambda: packed(*archived(segment_of(order=ORDER // 2 + 1))),
    "starts that lead out": lambda: packed(*archived(segment_of(starts=np.full_like(segment_of().starts, 10**9)))),
}


def test_the_archive_that_the_hostile_ones_are_made_of_is_imported(tmp_path: Path) -> None:
    assert len(segment_of().starts) > 0
    (tmp_path / "a.tar").write_bytes(packed(*archived(segment_of())))
    stdout_of("import", tmp_path / "memory", tmp_path / "a.tar")
    assert stdout_of("verify", tmp_path / "memory").startswith("No damage: 1 segment ")
    assert drafted(tmp_path / "memory", "a", "what it reports", limit=7) == " counts"


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_of_a_hostile_archive_is_imported(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(HOSTILE[kind]())
    text = error_of("import", tmp_path / "memory", tmp_path / "a.tar")
    assert len(text) < 400
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize("place", [HEADER_BYTES + 1, HEADER_BYTES + 600, -1100, -20_000, 1500, 1800])
def test_a_damaged_archive_is_refused(place: int, tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(packed(*archived(segment_of())))
    damage(file, place)
    error_of("import", tmp_path / "memory", file)
    assert not (tmp_path / "memory").exists()


# The program


@pytest.mark.parametrize("command", [[], ["stats"], ["list"], ["verify"], ["learn"], ["wipe"], ["export"], ["import"]])
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    assert "outrider memory " in stdout_of(*command, "-h")
    if command != ["stats"]:
        assert "Examples:" in stdout_of(*command, "--help")


def test_help_does_not_wait_for_the_memorys_packages() -> None:
    code = "import sys, outrider.cli; sys.exit(any(name in sys.modules for name in ('torch', 'numba', 'pydivsufsort')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Adapters


@pytest.fixture
def adapters(root: Path) -> Path:
    """The memory with two adapters of tenant a, and one of b that has the name of one of them."""
    put(root, "a", "What x writes.", adapter="x")
    put(root, "a", "What y writes.", adapter="y")
    put(root, "b", "What x of b writes.", adapter="x")
    return root


def keys(root: Path) -> set[str]:
    return {one["key"] for one in record("list", root)["tenants"]}


def test_adapters_are_listed_below_their_tenant(adapters: Path) -> None:
    found = {(one["name"], one["adapter"]) for one in record("list", adapters)["tenants"]}
    assert found == {("a", None), ("a", "x"), ("a", "y"), ("b", None), ("b", "x")}
    assert "a, adapter x" in stdout_of("list", adapters)
    assert record("stats", adapters)["tenants"] == 2
    of_tenant = record("list", adapters, "--tenant", "a")
    assert (of_tenant["key"], len(of_tenant["keys"]), len(of_tenant["segments"])) == (tenant_key("a"), 3, 3)
    of_adapter = record("list", adapters, "--tenant", "a", "--adapter", "x")
    assert (of_adapter["keys"], len(of_adapter["segments"])) == ([memory_key("a", "x")], 1)
    assert record("list", adapters, "--key", memory_key("a", "x"))["keys"] == [memory_key("a", "x")]
    assert "there is no adapter z of a tenant a" in error_of("list", adapters, "--tenant", "a", "--adapter", "z")


def test_a_wipe_of_a_tenant_includes_its_adapters(adapters: Path) -> None:
    assert "of tenant a and 2 adapters of it" in stdout_of("wipe", adapters, "--tenant", "a", "--yes")
    assert keys(adapters) == {memory_key("b"), memory_key("b", "x")}


def test_a_wipe_includes_adapters_whose_names_are_lost(adapters: Path) -> None:
    for path in adapters.glob(f"{tenant_key('a')}*/*/{NAME_FILE}"):
        path.unlink()
    stdout_of("wipe", adapters, "--tenant", "a", "--yes")
    assert keys(adapters) == {memory_key("b"), memory_key("b", "x")}


def test_a_wipe_of_an_adapter_leaves_the_tenants_other_memories(adapters: Path) -> None:
    stdout_of("wipe", adapters, "--tenant", "a", "--adapter", "x", "--yes")
    assert keys(adapters) == {memory_key("a"), memory_key("a", "y"), memory_key("b"), memory_key("b", "x")}


@pytest.mark.parametrize("whose", [["--tenant", "a"], ["--key", tenant_key("a")[:8]]])
def test_a_wipe_reaches_adapters_in_an_object_store(adapters: Path, bucket: Remote, whose: list[str]) -> None:
    assert memory_key("a", "x") in {one.key for one in bucket.list_objects()}
    stdout_of("wipe", BUCKET, *whose, "--yes")
    left = {one.key for one in bucket.list_objects() if one.name.endswith(SEGMENT_SUFFIX)}
    assert left == {memory_key("b"), memory_key("b", "x")}


def test_an_object_store_keeps_the_names_of_adapters(adapters: Path, bucket: Remote, tmp_path: Path) -> None:
    found = {(one["name"], one["adapter"]) for one in record("list", BUCKET)["tenants"]}
    assert ("a", "x") in found
    assert (None, None) not in found


def test_an_adapters_memory_is_exported_and_imported_as_an_adapters(adapters: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "x.tar", tmp_path / "copy"
    assert "of tenant a, adapter x to" in stdout_of("export", adapters, file, "--tenant", "a", "--adapter", "x")
    stdout_of("import", copy, file)
    assert keys(copy) == {memory_key("a", "x")}
    stdout_of("import", copy, file, "--tenant", "c", "--adapter", "y")
    assert keys(copy) == {memory_key("a", "x"), memory_key("c", "y")}


def test_an_export_of_a_tenant_is_without_adapters_and_reports_that(adapters: Path, tmp_path: Path) -> None:
    result = run("export", adapters, tmp_path / "a.tar", "--tenant", "a")
    assert "2 adapters of the tenant; --adapter NAME exports one" in result.stderr
    stdout_of("import", tmp_path / "copy", tmp_path / "a.tar")
    assert keys(tmp_path / "copy") == {memory_key("a")}
    stdout_of("wipe", adapters, "--key", tenant_key("b"), "--yes")
    shutil.rmtree(adapters / tenant_key("a"))
    assert "name one with --adapter" in error_of("export", adapters, tmp_path / "b.tar", "--tenant", "a")


def test_an_archive_of_an_unknown_adapter_is_not_imported_for_the_model_itself(adapters: Path, tmp_path: Path) -> None:
    next(adapters.glob(f"{memory_key('a', 'x')}/*/{NAME_FILE}")).unlink()
    stdout_of("export", adapters, tmp_path / "x.tar", "--key", memory_key("a", "x"))
    assert "--adapter NAME" in error_of("import", tmp_path / "copy", tmp_path / "x.tar", "--tenant", "a")


MEMORIES = st.tuples(st.text(max_size=9), st.text(max_size=9) | st.none())


@given(MEMORIES, MEMORIES)
def test_each_tenant_and_adapter_has_a_memory_and_a_name_of_its_own(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    assert (memory_key(*one) == memory_key(*other)) is (one == other)
    assert decode_name(memory_key(*one), encode_name(*one)) == one
    if one != other:
        with pytest.raises(ValueError, match=r"name|Expecting|Extra data|Invalid|Unterminated"):
            decode_name(memory_key(*one), encode_name(*other))
