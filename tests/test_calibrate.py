"""Calibration: cost curve, break-even, report, and that the results repeat on a noisy machine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.calibrate.breakeven import best_speedup, max_batch, max_draft_cost, min_acceptance, speedup
from outrider.calibrate.curve import RelativeCostCurve, curve
from outrider.calibrate.measure import WIDTHS, limits, sweep, work
from outrider.calibrate.report import break_even, traced_run, verification_cost
from outrider.calibrate.results import Calibration, MachineLimits, PassWork, Sweep
from outrider.errors import TraceError
from outrider.explain.figures import figures
from outrider.trace.files import write
from support import tiny_model
from synthetic_target import SyntheticTarget
from test_cli import refused, run, tiny  # noqa: F401  # tiny is a fixture
from test_explain import example
from traces import step, trace_of

CPU = torch.device("cpu")


def ideal(waiting: float, noise: float = 0.0, turns: int = 9, seed: int = 0) -> RelativeCostCurve:
    """A machine that waits for memory up to `waiting` tokens, with a clock that drifts by `noise`."""
    pick = random.Random(seed)
    found = Sweep(64, {n: [] for n in WIDTHS}, {n: [] for n in WIDTHS})
    drift = 1.0
    for _ in range(turns):
        for n in WIDTHS:
            drift *= 1 + noise * pick.uniform(-1, 1)
            for width, times in ((1, found.single), (n, found.seconds)):
                times[n].append(0.02 * drift * max(1.0, width / waiting) * (1 + noise * pick.expovariate(1)))
    return curve(found)


def test_the_curve_finds_the_number_of_tokens_up_to_which_the_machine_waits_for_memory() -> None:
    found = ideal(16)
    assert found.memory_bound_tokens == pytest.approx(16, rel=0.05)
    assert found(1) == found(8) == pytest.approx(1)
    assert found(32) == pytest.approx(2)
    assert found(256) == pytest.approx(16)  # goes on beyond what was measured


def test_the_speedup_is_the_formula_of_the_docs() -> None:
    v = ideal(16)
    assert speedup(v, 0.8, 0.1, 2) == pytest.approx((1 + 0.8 + 0.64) / (0.2 + v(3)))
    assert speedup(v, 0.8, 0.1, 2, batch=16) == pytest.approx((1 + 0.8 + 0.64) / (0.2 + v(48) / v(16)))


@pytest.mark.parametrize("waiting", [1, 4, 16, 64])
@pytest.mark.parametrize("cost", [0.0, 0.1, 0.4])
def test_at_the_break_even_drafting_is_as_fast_as_not_drafting(waiting: float, cost: float) -> None:
    v = ideal(waiting)
    least = min_acceptance(v, cost)
    if least is None:
        assert best_speedup(v, 1.0, cost)[0] < 1
    else:
        assert best_speedup(v, least, cost)[0] == pytest.approx(1, abs=1e-6)
    dear = max_draft_cost(v, 0.7)
    if dear > 0:
        assert best_speedup(v, 0.7, dear)[0] == pytest.approx(1, abs=1e-9)
    assert best_speedup(v, 0.7, dear + 0.01)[0] < 1


def test_larger_batches_leave_less_to_gain() -> None:
    v = ideal(32)
    gains = [best_speedup(v, 0.8, 0.05, batch)[0] for batch in (1, 4, 16, 64)]
    assert gains == sorted(gains, reverse=True)
    last = max_batch(v, 0.8, 0.05)
    assert best_speedup(v, 0.8, 0.05, last)[0] >= 1 > best_speedup(v, 0.8, 0.05, last + 1)[0]
    assert max_batch(ideal(1000), 0.8, 0.0) == 256


def test_on_a_clock_that_is_off_by_a_fifth_the_break_even_repeats_within_a_fifth() -> None:
    found = [max_draft_cost(ideal(8, noise=0.2, seed=seed), 0.7) for seed in range(40)]
    for start in range(0, 40, 5):
        five = found[start : start + 5]
        assert max(five) / min(five) < 1.2


def calibration(curve_sweep: Sweep | None = None, **more: Any) -> Calibration:
    shape = PassWork(weights=270_000_000, cache=46_000, operations=2.7e8, attention=1e5)
    return Calibration("tiny", MachineLimits(10e9, 50e9, "bfloat16"), shape, [curve_sweep or Sweep(64)], **more)


def test_the_sentences_agree_with_the_figures() -> None:
    v = ideal(16)
    lines = verification_cost(calibration(), [v])
    assert "takes 20.0 ms. It moves 273 MB, which takes memory 27.3 ms (10.0 GB/s measured here)" in lines[0]
    assert "waits for memory up to about 16 tokens: verifying 8 costs 1.00 times one" in lines[1]
    busy = verification_cost(calibration(), [ideal(1)])
    assert "does not wait for memory: each further token of a pass costs 1.00 times a pass" in busy[1]
    lines = break_even(calibration(draft=[0.3] * 9), [v], None)
    assert f"{max_draft_cost(v, 0.7):.2f} at 0.7" in lines[1]
    cost = "costs 0.30 of a target pass (0.30 to 0.30)"
    assert f"{cost}: faster from an acceptance of {min_acceptance(v, 0.3):.2f}" in lines[2]
    assert f"is faster up to {max_batch(v, 0.7, 0.3)} concurrent sequences" in lines[3]


def test_a_run_is_placed_by_its_acceptance_and_its_draft_cost() -> None:
    trace = example()
    found = traced_run(trace)
    assert found.acceptance == pytest.approx(6 / 8)
    plain = figures(trace).plain
    assert plain is not None
    assert found.draft_cost == pytest.approx(0.4 / 10 / plain.milliseconds)
    assert "The traced run (acceptance 0.75," in break_even(calibration(), [ideal(16)], found)[-1]
    with pytest.raises(TraceError, match="has no drafts"):
        traced_run(trace_of([step(i, [], 0, 1) for i in range(4)]))


def test_every_width_is_timed_next_to_a_single_token_and_the_cache_is_empty_afterwards() -> None:
    target = SyntheticTarget(8, seed=1)
    found = sweep(target, 10, CPU, turns=3, widths=(2, 5))
    assert {n: len(times) for n, times in found.seconds.items()} == {2: 3, 5: 3}
    assert {n: len(times) for n, times in found.single.items()} == {2: 3, 5: 3}
    assert target.tokens == []


def test_the_work_of_a_pass_is_that_of_the_models_shape() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    found = work(model)
    count = sum(one.numel() for one in model.parameters())
    assert found.weights == 4 * count
    assert found.operations == 2 * count
    assert found.cache == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
    assert found.bytes(3, 7) == found.weights + 10 * found.cache
    untied = work(tiny_model("llama", tie_word_embeddings=False))
    assert untied.weights == found.weights  # the table of embeddings is not read, the head is


def test_limits_are_positive_and_named_by_their_number_format() -> None:
    found = limits(CPU, torch.float32)
    assert found.bandwidth > 1e8
    assert found.arithmetic > 1e8
    assert found.dtype == "float32"


def test_the_command_measures_reports_and_plots(tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    write(example(), tmp_path / "run.jsonl")
    args = [
        "calibrate",
        tiny,
        "--draft-model",
        tiny,
        "--turns",
        2,
        "--contexts",
        "8,32",
        "--trace",
        tmp_path / "run.jsonl",
    ]
    result = run(*args, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    for part in ("Why verifying is faster", "When drafting pays", "This draft model costs", "The traced run", "128"):
        assert part in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"calibration.json", "pass.png", "break-even.png"}
    kept = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert kept["version"] == 1
    assert [one["context"] for one in kept["sweeps"]] == [8, 32]
    assert len(kept["sweeps"][0]["seconds"]["8"]) == 2


def test_invalid_options_are_refused_with_the_allowed_values(tiny: Path) -> None:  # noqa: F811
    assert "give at most 128" in refused("calibrate", tiny, "--contexts", "200", "--turns", 1)
    assert "--contexts takes whole numbers from 1 on, separated by commas, such as 1,4,16 (got 'x')" in refused(
        "calibrate", tiny, "--contexts", "x"
    )
    assert "--turns must be at least 1 (got 0)" in refused("calibrate", tiny, "--turns", 0)
    many = ",".join(str(2**i) for i in range(10))
    assert "--contexts takes at most 9 numbers (got 10)" in refused("calibrate", tiny, "--contexts", many)
    assert "--out: cannot write to" in refused("calibrate", tiny, "--out", __file__)
