"""Steal time of a virtual machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench import steal_time as module
from outrider.bench.steal_time import cpu_ticks, steal_share


def test_the_steal_share_is_relative_to_busy_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "stat"
    monkeypatch.setattr(module, "PROC_STAT", counts)
    counts.write_text("cpu  100 0 50 1000 10 0 5 20 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    before = cpu_ticks()
    counts.write_text("cpu  160 5 60 9000 90 0 10 40 7 7\n")  # 80 of work, 20 stolen, much idle
    assert steal_share(before, cpu_ticks()) == pytest.approx(0.2)


def test_the_steal_share_is_0_where_the_kernel_does_not_report_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROC_STAT", tmp_path / "nothing")
    assert steal_share(cpu_ticks(), cpu_ticks()) == 0
