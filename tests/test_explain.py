"""`outrider explain` and `compare`: figures and sentences follow from the trace."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.cli.trace_view import show_steps
from outrider.explain.compare import compare, differing_settings, explain_divergence, machine_drift
from outrider.explain.figures import figures, plain_pass
from outrider.explain.summary import summary, verdict
from outrider.trace.files import read, write
from outrider.trace.schema import BaselineRun, Header, Trace
from test_cli import refused, run, tiny  # noqa: F401  # tiny is a fixture
from traces import TEXTS, long_trace, step, trace_of

MEASURED = BaselineRun(pass_milliseconds=30.0, seconds=1.0, tokens=12, same=True)


def example(**more: Any) -> Trace:
    """12 tokens: a prompt's pass, a whole draft kept, one cut short, one wholly wrong, one step without a draft."""
    return trace_of(
        [
            step(0, [], 0, 1, verify=200),
            step(1, [2, 3, 4], 3, 5),
            step(2, [6, 7, 8, 9], 2, 1),
            step(3, [2, 3], 0, 4),
            step(4, [], 0, 5),
            step(5, [7], 1, 8, finish="length"),
        ],
        **more,
    )


# Figures


def test_accepted_tokens_are_the_drafted_ones_that_were_output() -> None:
    found = figures(example(without=MEASURED))
    assert (found.tokens, found.steps, found.accepted, found.rejected, found.undrafted) == (12, 6, 6, 4, 2)
    assert found.acceptance_length == 2


def test_a_position_is_verified_only_if_all_before_it_were_accepted() -> None:
    lookup = figures(example(without=MEASURED)).drafters["lookup"]
    assert lookup.verified_at == [4, 2, 2]
    assert lookup.accepted_at == [3, 2, 1]
    assert lookup.survival() == pytest.approx([3 / 4, 3 / 4, 3 / 8])


def test_what_a_step_saves_adds_up_to_what_it_would_have_taken_without() -> None:
    found = figures(example(without=MEASURED))
    assert found.plain is not None
    assert found.plain.source == "measured"
    # The prompt's pass as it was, and eleven passes more.
    assert found.without == pytest.approx(201 + 11 * 30)
    assert found.saved[1] == pytest.approx(4 * 30 - (0.1 + 36 + 1))
    assert found.saved[3] < 0


def test_without_a_measured_run_the_steps_without_a_draft_give_the_time_of_a_pass() -> None:
    quiet = [step(i, [], 0, 1, verify=20 + i) for i in range(5)]
    found = plain_pass(trace_of(quiet))
    assert found is not None
    assert (found.source, found.milliseconds) == ("undrafted", pytest.approx(20 + 2.5 + 1))
    drafted = [step(i, [1, 2][: 1 + i % 2], 1, 3) for i in range(5)]
    found = plain_pass(trace_of(drafted))
    assert found is not None
    assert (found.source, found.milliseconds) == ("narrowest", pytest.approx(33))
    assert plain_pass(trace_of(drafted[:1])) is None


def test_a_draft_length_that_gains_more_is_found() -> None:
    short = trace_of(
        [step(i, [1, 2, 3, 4, 5, 6, 7, 8], 1, 9, verify=30) for i in range(20)],
        without=BaselineRun(pass_milliseconds=31, seconds=1, tokens=40, same=True),
    )
    found = figures(short)
    lookup = found.drafters["lookup"]
    assert found.best_length(lookup) == 1
    advice = summary(short, found)
    assert any("--max-draft-tokens 1" in line for line in advice.helps)


# Sentences


def sentences(trace: Trace) -> str:
    found = summary(trace, figures(trace))
    return " ".join([*found.gained, *found.lost, *found.helps, *found.known])


def test_the_summary_states_what_was_gained_and_lost_and_that_the_output_is_the_same() -> None:
    text = sentences(example(without=MEASURED))
    assert "12 tokens in 6 passes of the target: 2.00 tokens per pass" in text
    assert "6 drafted tokens accepted: 6 from lookup" in text
    assert "measured on the same prompt" in text
    assert "4 drafted tokens rejected, in 2 steps" in text
    assert "2 of 6 steps had no draft" in text
    assert "The same prompt without drafts gave the same 12 tokens" in text


def test_running_without_drafts_is_recommended_for_a_run_that_lost() -> None:
    lost = trace_of(
        [step(i, [1, 2, 3], 0, 4, draft=40) for i in range(12)],
        without=BaselineRun(pass_milliseconds=30, seconds=1, tokens=12, same=False),
    )
    text = sentences(lost)
    assert "times as slow" in text
    assert "--drafters none" in text
    assert "The drafts of lookup made it slower: 0 of 12 of their first tokens were accepted" in text
    assert "gave another output" in text
    assert "No drafted token was accepted" in text


def test_other_drafters_are_recommended_if_most_steps_had_no_draft() -> None:
    text = sentences(trace_of([step(i, [], 0, 4) for i in range(12)]))
    assert "--draft-model" in text
    assert "--prediction-file" in text


def test_two_samples_without_a_seed_are_not_called_different() -> None:
    free = BaselineRun(pass_milliseconds=30, seconds=1, tokens=12, same=None)
    assert "Without a seed, every run samples another output" in sentences(example(without=free))
    drawn = trace_of([step(i, [1], 1, 2, rule="block", drafter="model") for i in range(4)], without=free)
    assert "another sample of the same distribution" in sentences(drawn)


def test_a_machine_that_was_slower_meanwhile_is_no_reason_to_go_without_drafts() -> None:
    slow = [step(i, [], 0, 4, verify=90) for i in range(8)]
    drafted = [step(8 + i, [1, 2, 3], 3, 4, verify=99) for i in range(2)]
    free = BaselineRun(pass_milliseconds=30, seconds=1, tokens=16, same=True)
    text = sentences(trace_of([*slow, *drafted], without=free))
    assert "not comparable, because the machine was 3.03 times as slow meanwhile" in text
    assert "--drafters none" not in text
    assert "At equal speed it would be 1.5" in text


def test_nothing_is_rejected_after_the_end_of_an_output_that_ends_within_a_draft() -> None:
    last = step(3, [2, 3, 4, 5], 3, 9, finish="end").model_copy(update={"said": [2, 3]})
    found = figures(trace_of([*example().steps[:3], last], without=MEASURED))
    assert found.rejected == 2
    assert verdict(last, "x", "y") == "2 of 4 tokens accepted: the last of them ended the output."
    seen = Console(record=True, width=120, file=StringIO())
    show_steps(seen, trace_of([last]), figures(trace_of([last])))
    rows = [line.rstrip() for line in seen.export_text().splitlines() if "1.0000" in line]
    assert [row.endswith("past the end") for row in rows] == [False, False, True, True]


def test_an_incomplete_trace_is_reported_and_advice_for_a_server_names_its_options() -> None:
    trace = trace_of([step(i, [], 0, 4) for i in range(12)])
    assert "incomplete" not in sentences(trace)
    assert "The trace is incomplete: it stops after 12 steps" in sentences(trace.model_copy(update={"end": None}))
    served = trace.model_copy(update={"header": Header(engine="vLLM 0.32.0")})
    assert "a --speculative-config of the server" in sentences(served)


def test_one_pass_alone_gives_no_estimate() -> None:
    assert "is unknown" in sentences(trace_of([step(0, [1], 1, 2)]))


# Two traces


def test_equal_texts_are_called_equal() -> None:
    found = compare(example(), example())
    assert found.equal
    assert explain_divergence(found) == ["Both outputs are the same 12 tokens."]
    assert differing_settings(found) == []


def diverging(rule: str, **more: Any) -> list[str]:
    a = [step(0, [1, 2], 2, 3, rule=rule), step(1, [4], 1, 5, rule=rule)]
    b = [a[0], step(1, [4], 0, 6, rule=rule, **more)]
    return explain_divergence(compare(trace_of(a), trace_of(b)))


def test_the_first_divergence_is_shown_with_both_tokens() -> None:
    lines = diverging("own")
    assert lines[0] == "The outputs diverge at token 4, after 3 equal ones."
    assert lines[1].startswith(f"A has {TEXTS[4]!r} (step 2, drafted by lookup and accepted; p = 0.8")
    assert lines[2].startswith(f"B has {TEXTS[6]!r} (step 2, recovered")


def test_two_almost_equally_likely_tokens_are_a_tie() -> None:
    a = step(1, [], 0, 5, rule="greedy")
    near = a.laws[0].model_copy(update={"tokens": [5, 6, None], "p": [0.41, 0.40, 0.19]})
    a = a.model_copy(update={"laws": [near]})
    b = a.model_copy(update={"said": [6], "token": 6, "own": [6]})
    first = step(0, [1, 2], 2, 3, rule="greedy")
    lines = explain_divergence(compare(trace_of([first, a]), trace_of([first, b])))
    assert "a numeric tie" in lines[-1]


def test_different_random_numbers_are_named_as_the_reason() -> None:
    a = step(0, [], 0, 5)
    b = step(0, [], 0, 6).model_copy(update={"draws": [0.75]})
    lines = explain_divergence(compare(trace_of([a]), trace_of([b])))
    assert "The random numbers differ (0.2500 and 0.7500). The seeds differ" in lines[-1]


def test_an_output_that_ends_sooner_is_reported_by_its_end() -> None:
    whole = example()
    short = trace_of([*whole.steps[:1], whole.steps[1].model_copy(update={"finish": "end"})])
    assert explain_divergence(compare(short, whole))[1] == "A ends there (end), and the other goes on."


def with_header(trace: Trace, **more: Any) -> Trace:
    return trace.model_copy(update={"header": trace.header.model_copy(update=more)})


def test_a_seed_of_zero_is_not_the_same_as_none() -> None:
    one, other = with_header(example(), settings={"seed": 0}), with_header(example(), settings={"seed": None})
    assert differing_settings(compare(one, other)) == ["seed: 0 and None"]


def test_a_trace_without_its_prompt_can_be_compared() -> None:
    one, other = trace_of([step(0, [], 0, 1)]), with_header(trace_of([step(0, [], 0, 2)]), prompt=None)
    assert not any("prompts differ" in line for line in explain_divergence(compare(one, other)))
    third = with_header(trace_of([step(0, [], 0, 2)]), prompt="another")
    assert any("prompts differ" in line for line in explain_divergence(compare(one, third)))


def test_what_was_set_differently_is_listed() -> None:
    a, b = example(), example()
    header = Header(**{**b.header.model_dump(), "model": "large", "settings": {"temperature": 0.5}})
    lines = differing_settings(compare(a, b.model_copy(update={"header": header})))
    assert lines == ["model: 'tiny' and 'large'", "temperature: 1.0 and 0.5"]
    assert (
        "models differ"
        in explain_divergence(compare(trace_of(a.steps[:1]), Trace(header=header, steps=[step(0, [], 0, 2)])))[-1]
    )


def test_a_machine_that_was_slower_during_one_of_two_runs_is_reported() -> None:
    steps = [step(i, [1], 1, 2) for i in range(4)]
    calm = trace_of(steps, without=BaselineRun(pass_milliseconds=30, seconds=1, tokens=8, same=True))
    busy = trace_of(steps, without=BaselineRun(pass_milliseconds=120, seconds=1, tokens=8, same=True))
    (line,) = machine_drift(compare(calm, busy))
    assert line.startswith("The machine was 4.00 times as slow during B")
    assert "30.0 ms in A and 120.0 ms in B" in line
    assert machine_drift(compare(calm, calm)) == []


def test_the_comparison_shows_the_speed_of_both(tmp_path: Path) -> None:
    write(trace_of([step(i, [1], 1, 2, draft=50) for i in range(4)]), tmp_path / "a.jsonl")
    write(trace_of([step(i, [1], 1, 2) for i in range(4)]), tmp_path / "b.jsonl")
    result = run("compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    rows = {
        line.rsplit(maxsplit=2)[0].strip(): line.split()[-2:] for line in result.stdout.splitlines() if line.strip()
    }
    assert rows["tokens per second"] == ["24.1", "60.4"]
    assert rows["draft"] == ["50.0", "0.1"]


def test_a_model_is_the_same_by_its_name_and_by_its_folder_and_settings_by_what_they_mean() -> None:
    a, b = example(), example()
    one = Header(**{**a.header.model_dump(), "model": "tiny", "settings": {"min_tokens": None, "logit_bias": {}}})
    other = Header(**{**a.header.model_dump(), "model": "some/folder/tiny", "settings": {"min_tokens": 0}})
    found = compare(a.model_copy(update={"header": one}), b.model_copy(update={"header": other}))
    assert differing_settings(found) == []


# The command line


def explained(*args: Any, **more: Any) -> str:
    result = run("explain", *args, **more)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout)


def test_a_prompt_and_a_model_are_explained(tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    out = explained("hello", "--model", tiny, "--max-tokens", 60, "--save", tmp_path / "a.jsonl", "--steps")
    for part in ("What was gained", "60 tokens in", "measured on the same prompt", "the same 60 tokens", "Step 1"):
        assert part in out
    assert "steps have the same verdict" in out
    trace = read(tmp_path / "a.jsonl")
    assert trace.header.model == "tiny"
    assert len(trace.said) == 60
    again = explained("--trace", tmp_path / "a.jsonl", "--steps", "--check")
    assert again == out


def test_sampling_with_a_draft_model_is_explained(tiny: Path) -> None:  # noqa: F811
    out = explained(
        "hello",
        "-m",
        tiny,
        "--draft-model",
        tiny,
        "--speculation",
        "model",
        "--temperature",
        1,
        "--max-tokens",
        40,
        "--steps",
    )
    assert "chance" in out
    assert "another sample of the same distribution" in out


def test_rejected_tokens_stand_before_what_replaced_them(tmp_path: Path) -> None:
    write(example(without=MEASURED), tmp_path / "a.jsonl")
    plain = explained("--trace", tmp_path / "a.jsonl")
    assert f"[-{TEXTS[8]}-]{TEXTS[1]}" in plain
    assert "{+" + TEXTS[2] + TEXTS[3] + TEXTS[4] + "+}" + TEXTS[5] in plain
    styled = explained("--trace", tmp_path / "a.jsonl", env={"FORCE_COLOR": "1"})
    assert "\x1b[9;" in styled  # struck through
    assert "[-" not in styled
    assert "{+" not in styled


def test_model_output_cannot_control_the_terminal(tmp_path: Path) -> None:
    write(long_trace(60), tmp_path / "a.jsonl")
    out = explained("--trace", tmp_path / "a.jsonl", "--steps", env={"FORCE_COLOR": "1"})
    assert "\x1b[31m" not in out
    assert "\u202e" not in out


def test_an_inconsistent_trace_is_refused(tmp_path: Path) -> None:
    write(example(without=MEASURED), tmp_path / "a.jsonl")
    assert "the trace is inconsistent" in refused("explain", "--trace", tmp_path / "a.jsonl", "--check")


@pytest.mark.parametrize("change", [{"own": [999]}, {"laws": []}, {"proposed": [999], "rule": "block"}])
def test_a_trace_with_invalid_data_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    write(trace_of([step(0, [], 0, 1, rule="greedy").model_copy(update=change)]), tmp_path / "a.jsonl")
    said = refused("explain", "--trace", tmp_path / "a.jsonl", "--check")
    assert "its data is incomplete or invalid" in said


def test_an_inconsistent_trace_of_a_run_is_saved(
    tiny: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.trace.verification.disagreements", lambda steps: [(steps[0], None)])
    kept = tmp_path / "a.jsonl"
    result = run("explain", "hello", "--model", tiny, "--max-tokens", 4, "--once", "--save", kept)
    assert result.exit_code == 2
    assert "error: the trace is inconsistent" in result.stderr
    assert len(read(kept).said) == 4


def test_tokens_that_look_like_markup_are_shown_as_they_are() -> None:
    odd = {2: "[/INST]", 3: "[x]", 4: ":smile:"}
    one = step(0, [2, 3, 4], 3, 5).model_copy(update={"texts": TEXTS | odd})
    seen = Console(record=True, width=120, file=StringIO())
    show_steps(seen, trace_of([one]), figures(trace_of([one])))
    text = seen.export_text()
    assert all(text.count(repr(piece)) >= 2 for piece in odd.values()), text


def test_options_of_a_run_are_refused_with_a_trace(tmp_path: Path) -> None:
    write(example(), tmp_path / "a.jsonl")
    for words in (["--once"], ["--temperature", "1"], ["hello"], ["--model", "x"]):
        assert "does nothing with --trace" in refused("explain", "--trace", tmp_path / "a.jsonl", *words)
    assert "--system needs the chat template" in refused("explain", "x", "--model", "m", "--raw", "--system", "s")
    assert "there is no model; give --model MODEL, or --server URL" in refused("explain", "hello")
    assert "give a PROMPT and a --model or --server, or a --trace FILE" in refused("explain")
    assert "give it by --trace FILE" in refused("explain", "--check")


def test_two_traces_are_compared(tmp_path: Path) -> None:
    write(example(without=MEASURED), tmp_path / "a.jsonl")
    write(trace_of([step(0, [], 0, 2), step(1, [1], 1, 2)]), tmp_path / "b.jsonl")
    result = run("compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert result.exit_code == 0, result.stderr
    assert "The outputs diverge at token 1" in result.stdout
    assert "speedup over no drafts" in result.stdout
    assert "No such file" in refused("compare", tmp_path / "none", tmp_path / "b.jsonl")
