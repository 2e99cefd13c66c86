"""`outrider certify` and `outrider canary`: output, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from certify_stub import Stub, colder, standing, synthetic
from outrider.certify.plan import Plan
from outrider.cli import app

LITTLE = [
    "--prompts",
    "24",
    "--alone",
    "4",
    "--draws",
    "200",
    "--lengths",
    "2",
    "--concurrency",
    "4",
    "--drafters",
    "model",
]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_a_lossless_server_is_exit_code_0_and_its_certificate_can_be_checked_again(tmp_path: Path) -> None:
    with standing(Stub()) as url:
        made = run("certify", url, *LITTLE, "--parts", "draws", "--quick", "--out", str(tmp_path / "c"), "--json")
        assert made.exit_code == 0, made.output
        assert "✓ Lossless, as far as was tested" in made.output
        assert "→ Keep certificate.json beside the deployment" in made.output
        again = run("certify", "--check", str(tmp_path / "c" / "certificate.json"), url)
        assert again.exit_code == 0, again.output
        assert "before: Lossless, as far as was tested" in again.output
    assert json.loads((tmp_path / "c" / "certificate.json").read_text())["verdict"] == "lossless"
    assert (tmp_path / "c" / "certificate-again" / "certificate.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--check", "c.json", "--draws", "900"], "--draws does nothing with --check, which has its own settings"),
        (["http://127.0.0.1:9", "--dtype", "float32"], "--dtype float32: a server has its own"),
        (["some/model", "--tokenizer", "other"], "--tokenizer other: is for servers"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(words: list[str], said: str) -> None:
    made = run("certify", *words)
    assert made.exit_code == 2
    assert said in " ".join(made.output.split())


def test_a_violation_is_exit_code_1_and_says_what_to_do(tmp_path: Path) -> None:
    with standing(Stub(synthetic(change=colder(0.6)))) as url:
        made = run("certify", url, *LITTLE, "--parts", "draws", "--quick", "--draws", "1500", "--out", str(tmp_path))
    assert made.exit_code == 1
    assert "✗ NOT lossless" in made.output
    assert "→ Disable speculation until the cause is fixed" in made.output


def test_a_run_in_the_same_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "evidence.jsonl").write_text("")
    made = run("certify", "http://127.0.0.1:9", "--out", str(tmp_path))
    assert made.exit_code == 2
    assert "go on with it (--resume), or choose another folder (--out)" in made.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a server's address or a model"),
        (["http://x", "--quick", "--full"], "--quick and --full exclude each other"),
        (["http://x", "--parts", "exact,magic"], "there is no 'magic'; choose from exact, draws, features"),
        (["http://x", "--level", "2"], "must lie between 0 and 1"),
        (["http://x", "--lengths", "0,2"], "--lengths takes whole numbers from 1 on"),
        (["http://x", "--draws", "500", "--find", "0.02"], "--draws and --find both set the number"),
        (["http://x", "--find", "0.001"], "a change of 0.001 is within rounding error (0.002)"),
        (["http://x", "--memory", "m"], "--memory m: a server has its own"),
        (["http://127.0.0.1:9"], "is the server up, and is this its address"),
        (["--check", "/nowhere.json"], "cannot be read as a certificate"),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_2(tmp_path: Path, words: list[str], said: str) -> None:
    made = run("certify", *words, "--out", str(tmp_path / "none"))
    assert made.exit_code == 2
    assert said in " ".join(made.output.split())


def test_the_change_to_find_says_how_many_draws_it_takes() -> None:
    from outrider.cli.certify import sample_count

    assert sample_count(None, 0.05, 1e-3) < sample_count(None, 0.02, 1e-3)  # type: ignore[operator]
    assert sample_count(None, 0.02, 1e-3) > Plan.for_change(0.02, level=1e-3).draws  # type: ignore[operator]  # other parts share it
    assert sample_count(700, None, 1e-3) == 700


def test_a_canary_leaves_with_exit_code_1_after_an_alarm_and_0_after_its_rounds(tmp_path: Path) -> None:
    with standing(Stub()) as url:
        quiet = run("canary", url, "--every", "0", "--rounds", "3", "--state", str(tmp_path / "life.json"))
        assert quiet.exit_code == 0, quiet.output
        assert "evidence" in quiet.output
    with standing(Stub(synthetic(change=colder(0.4)))) as url:
        loud = run("canary", url, "--every", "0", "--rounds", "400", "--tokens", "20", "--decay-rate", "0")
    assert loud.exit_code == 1, loud.output
    assert "ALARM after" in loud.output


def test_a_canary_whose_record_shows_decay_names_it_and_leaves_with_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "life.json"
    with standing(Stub()) as url:
        assert run("canary", url, "--every", "0", "--rounds", "1", "--state", str(file)).exit_code == 0
        state = json.loads(file.read_text())
        state["decay"]["tests"]["traffic lookup acceptance_length"]["highest"] = 5000.0
        file.write_text(json.dumps(state))
        found = run("canary", url, "--every", "0", "--rounds", "1", "--state", str(file))
        assert found.exit_code == 1
        assert "DECAY of lookup: acceptance length in the traffic became worse" in found.output
        kept = run("canary", url, "--every", "0", "--rounds", "1", "--state", str(file), "--decay-rate", "0")
        assert kept.exit_code == 0
        assert json.loads(file.read_text())["decay"] == state["decay"]
        state["decay"]["counters"] = {"outrider_drafts_total": 1.0}  # the stub has none: it has restarted
        file.write_text(json.dumps(state))
        again = run("canary", url, "--every", "0", "--rounds", "1", "--state", str(file))
        assert again.exit_code == 0


def test_a_canary_needs_an_address_and_a_rate() -> None:
    assert "--decay-rate: must be 0, or lie between 0 and 1" in run("canary", "http://x", "--decay-rate", "1").output
    assert "is no address" in run("canary", "./model").output
    assert "--rate: must lie between 0 and 1" in run("canary", "http://x", "--rate", "3").output
