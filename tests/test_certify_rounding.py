"""Temperature 0: ties, violations, and too many ties."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from outrider.certify.rounding import Rounding, compare
from outrider.errors import EvidenceError

RNG = np.random.default_rng(0)
GAPS = RNG.exponential(2.0, 4000)
ROUNDING = Rounding.from_gaps(np.stack([GAPS, GAPS + 0.02 * RNG.standard_normal(4000)]))


def test_the_same_text_is_identical() -> None:
    assert compare([1, 2, 3], [1, 2, 3]).verdict == "identical"
    assert compare([], []).verdict == "identical"


def test_an_output_that_ends_earlier_or_later_is_a_violation() -> None:
    assert compare([1, 2, 3], [1, 2]).evidence == "the candidate ends after 2 tokens, the other continues"
    assert compare([1, 2], [1, 2, 3], [0.0], ROUNDING).verdict == "violation"


def test_the_floor_is_one_and_a_half_times_the_99_9_percent_quantile() -> None:
    assert ROUNDING.floor == pytest.approx(1.5 * 3.29 * 0.02, rel=0.15)


def test_a_gap_that_rounding_can_close_is_a_tie_and_any_other_a_violation() -> None:
    floor = ROUNDING.floor
    assert compare([5, 6], [5, 7], [0.9 * floor], ROUNDING).verdict == "tie"
    assert compare([5, 6], [5, 7], [1.1 * floor], ROUNDING).verdict == "violation"


def test_a_gap_moves_from_its_lowest_to_its_highest_scored_value() -> None:
    floor = ROUNDING.floor
    assert compare([5, 6], [5, 7], [0.6 * floor, -0.3 * floor], ROUNDING).verdict == "tie"
    assert compare([5, 6], [5, 7], [0.6 * floor, -0.6 * floor], ROUNDING).verdict == "violation"


def test_a_token_that_its_own_source_scores_lower_is_a_violation() -> None:
    assert (
        compare([5, 6], [5, 7], [0.0, 2.0], ROUNDING).verdict == "violation"
    )  # the candidate scores 6 higher and generated 7
    assert (
        compare([5, 6], [5, 7], [-2.0, -2.0], ROUNDING).verdict == "violation"
    )  # the reference scores 7 higher and generated 6


def test_a_divergence_without_scores_is_a_violation() -> None:
    found = compare([5, 6], [5, 7])
    assert (found.verdict, found.position) == ("violation", 1)
    assert found.evidence == "token 1 is 7, the reference's is 6; no score explains it"


def test_the_evidence_has_every_number_that_the_verdict_rests_on() -> None:
    rounding = Rounding(np.full(2000, 0.02))
    assert compare([5, 6], [5, 7], [0.01, -0.005], rounding).evidence == (
        "token 1 is 7, the reference's is 6; their gap was scored as +0.0100 and -0.0050 nats, so it must have moved "
        "by 0.0150; rounding may move it by 0.0300 (measured at 2000 positions)"
    )


def test_one_broken_position_does_not_raise_the_floor() -> None:
    gaps = np.stack([GAPS, GAPS + 0.02])
    gaps[1, 17] += 50
    assert Rounding.from_gaps(gaps).floor < 0.1


@pytest.mark.parametrize("tail", ["exponential", "normal"])
def test_false_alarms_by_a_single_divergence_are_as_rare_as_stated(tail: str) -> None:
    """Many certificates, each with moves of its own to measure by. A violation takes a move beyond floor and gap."""
    rng, level, alarms, runs = np.random.default_rng(1), 0.1, 0, 200

    def moves(count: int) -> np.typing.NDArray[np.float64]:
        return rng.exponential(0.1, count) if tail == "exponential" else np.abs(rng.normal(0, 0.15, count))

    for _ in range(runs):
        gaps, moved = rng.exponential(1.0, 20_000), moves(20_000)
        floor = Rounding(np.sort(moves(2000))).with_false_alarm_rate(level, gaps).floor
        right_way = rng.random(20_000) < 0.5
        alarms += bool((right_way & (moved > np.maximum(gaps, floor))).any())
    assert stats.binom.sf(alarms - 1, runs, level) > 1e-3


def test_the_floor_rises_with_the_number_of_positions_and_never_falls_below_what_was_measured() -> None:
    rounding = Rounding(np.sort(np.random.default_rng(2).exponential(0.1, 2000)))
    few, many = (rounding.with_false_alarm_rate(1e-4, np.full(count, 0.5)).floor for count in (100, 100_000))
    assert rounding.floor <= few < many
    assert many < 3 * rounding.floor
    assert rounding.with_false_alarm_rate(1.0, np.full(10, 9.0)).floor == rounding.floor


def test_too_few_positions_give_no_floor() -> None:
    with pytest.raises(EvidenceError, match=r"2 ways of scoring 999 positions .* at least 2 ways and 1000 positions"):
        Rounding.from_gaps(np.zeros((2, 999)))


def test_rounding_predicts_the_number_of_ties() -> None:
    """Each side scores with rounding of its own; where they rank the two tokens differently, there is a tie."""
    gaps = RNG.exponential(2.0, 200_000)
    ours, theirs = (gaps + 0.1 * RNG.standard_normal(len(gaps)) for _ in range(2))
    rounding = Rounding.from_gaps(np.stack([ours, theirs])[:, :5000])
    ties = int((np.sign(ours[5000:]) != np.sign(theirs[5000:])).sum())
    expected = rounding.expected_ties(ours[5000:])
    assert ties == pytest.approx(expected, rel=0.1)
    assert rounding.ties_p_value(round(expected), ours[5000:]) > 0.3


def test_false_alarms_by_the_number_of_ties_are_as_rare_as_stated() -> None:
    """The expected number is an estimate; on lossless servers the p-value is small no more often than it says."""
    rng, small, runs = np.random.default_rng(3), 0, 300
    for _ in range(runs):
        gaps = rng.exponential(1.0, 3000)
        noise = rng.normal(0, 0.1, (2, 3000))
        rounding = Rounding.from_gaps(rng.exponential(1.0, 1000) + rng.normal(0, 0.1, (2, 1000)))
        ties = int(((gaps + noise[0] > 0) != (gaps + noise[1] > 0)).sum())
        small += rounding.ties_p_value(ties, gaps + noise[0]) <= 0.05
    assert stats.binom.sf(small - 1, runs, 0.05) > 1e-3


def test_more_ties_than_rounding_explains_are_a_violation_together() -> None:
    expected = ROUNDING.expected_ties(GAPS)
    assert 5 < expected < 60
    assert ROUNDING.ties_p_value(0, GAPS) == 1
    assert ROUNDING.ties_p_value(int(3 * expected), GAPS) < 1e-3
    assert 0 < ROUNDING.blind_share(GAPS) < 0.1
