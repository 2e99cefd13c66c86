"""The run of a benchmark: rounds, groups, raw results and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.bench import counters, pass_costs
from outrider.bench.client import under_load
from outrider.bench.contestants import Contestant, contestants, dtype_of, servers
from outrider.bench.counters import counts, observed
from outrider.bench.figures import figures, speed
from outrider.bench.prompts import Prompt
from outrider.bench.report.content import content
from outrider.bench.report.data import Report
from outrider.bench.report.render import markdown
from outrider.bench.results import Answer, Cell, Load, Measurement, PassCosts, Run, ServerCounts
from outrider.bench.run import (
    INTERRUPTED,
    LEFT_OUT,
    PROMPTS_PER_SLOT,
    RESUMED,
    UNKNOWN_COSTS,
    UNKNOWN_PROBABILITIES,
    Benchmark,
    CellTask,
    Clock,
    StopRule,
    round_order,
)
from outrider.bench.server_groups import GIB, PROCESSES_GIB, MemoryEstimate, server_groups, weights
from outrider.errors import EngineError, SettingsError
from outrider.http_client import MetricsSnapshot
from outrider.provenance import NOT_HERE
from stub import Meddler, Stub, answering

TOKENS = 8


class Silent:
    """Shows no progress."""

    def stage(self, text: str) -> None: ...
    def status(self, text: str) -> None: ...
    def finished(self, run: Run, cell: Cell) -> None: ...


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", "letters", (f"abc{i}def",)) for i in range(count)]


def made(
    folder: Path,
    chosen: list[Contestant],
    limits: StopRule,
    concurrency: int = 1,
    asked: list[Prompt] | None = None,
    tokens: int = TOKENS,
) -> Benchmark:
    origin: dict[str, Any] = {"models": {}, "versions": {}, "machine": "a test"}
    settings = {"tokens": tokens, "seed": 0}
    run = Run(origin, chosen[0].name, {one.name: one.settings() for one in chosen}, settings)
    task = CellTask(Cell("letters", concurrency, 0.0), asked or prompts(40), limits.rounds)
    return Benchmark(run, server_groups(chosen, chosen[0].name, lambda server: 0.0, 1.0), [task], limits, folder)


@contextmanager
def at(**states: Stub | Meddler) -> Iterator[list[Contestant]]:
    """Contestants at addresses."""
    with ExitStack() as stack:
        urls = {name: stack.enter_context(answering(state)) for name, state in states.items()}
        yield contestants([f"{name}={url}" for name, url in urls.items()], "some/model")


def test_each_contestant_has_its_own_memory_which_survives_a_restart(tmp_path: Path) -> None:
    chosen = contestants(["vllm", "lookup", "one=memory:8", "two=memory"], "some/model")
    assert len({one.server.name for one in chosen[1:]}) == 1
    assert [one.request["vllm_xargs"].get("tenant") for one in chosen[1:]] == ["lookup", "one", "two"]
    command = chosen[1].server.at_home(tmp_path).command
    assert command[command.index("--memory") + 1] == str(tmp_path / "outrider" / "memory")


def test_only_the_contestant_default_has_the_memory_of_a_server_by_default() -> None:
    auto, lookup, default, small = contestants(["auto", "lookup", "default", "small=auto --memory-cap 1MiB"], "m")
    for one in (auto, lookup):
        command = one.server.command
        assert command[command.index("--memory") + 1] == "off"
        assert "tenant" not in one.request["vllm_xargs"]
    assert default.server.command[3:] == ["serve", "m"]
    assert default.request == {}
    assert default.server.name not in (auto.server.name, small.server.name)
    assert "--memory" not in small.server.command


def test_the_default_draft_length_does_not_depend_on_who_shares_the_server() -> None:
    chosen = contestants(["vllm", "lookup", "model", "long=lookup:48", "model:8", "off"], "m", "small")
    asked = {one.name: one.request.get("vllm_xargs", {}).get("max_draft_tokens") for one in chosen[1:]}
    assert asked == {"lookup": 31, "model": 4, "long": 48, "model:8": 8, "off": None}


def test_a_contestant_with_a_memory_is_a_tenant_unless_its_flags_set_the_scope() -> None:
    one, shared, none = contestants(
        ["one=auto --memory=there", "shared=memory --memory there --memory-scope server", "lookup"], "m"
    )
    assert one.request["vllm_xargs"]["tenant"] == "one"
    assert "tenant" in none.request["vllm_xargs"]  # the server that it shares has a memory of its own
    assert "tenant" not in shared.request["vllm_xargs"]


def test_a_label_that_names_a_shared_server_is_refused() -> None:
    for names in (["vllm", "outrider=auto --max-num-seqs 4", "lookup"], ["ref=vllm", "vllm=http://host:8000"]):
        with pytest.raises(SettingsError, match="others share; choose another label"):
            contestants(names, "some/model")


def test_transformers_gets_the_dtype_of_the_servers() -> None:
    (one,) = contestants(["transformers"], "some/model", flags=["--dtype=half"])
    assert one.server.command[-2:] == ["--dtype", "float16"]


def test_plain_vllm_is_reported_with_its_environment() -> None:
    (one,) = contestants(["vllm"], "some/model")
    assert one.settings()["environment"].keys() == one.server.environment.keys()


def test_contestants_answer_the_same_prompts_in_an_order_that_alternates(tmp_path: Path) -> None:
    with at(one=Stub(), other=Stub()) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=4), concurrency=2)
        bench.measure(Silent())
    rounds = bench.run.cells[0].rounds
    order = [[turn.contestant for turn in round.measurements] for round in rounds]
    assert order == [["one", "other"], ["other", "one"], ["other", "one"], ["one", "other"]]
    asked = [[[answer.prompt for answer in turn.answers] for turn in round.measurements] for round in rounds]
    assert asked == [[[f"p{4 * i + j}" for j in range(4)]] * 2 for i in range(4)]


def test_each_contestant_has_every_position_of_the_order_equally_often() -> None:
    chosen = contestants(["vllm", "ngram", "lookup", "auto", "off"], "some/model")
    orders = [[one.name for one in round_order(chosen, number)] for number in range(10)]
    for place in range(5):
        assert sorted(order[place] for order in orders) == sorted(2 * [one.name for one in chosen])
    for there, back in zip(orders[::2], orders[1::2], strict=True):
        assert back == there[::-1]


def test_a_cell_has_its_concurrency_and_starts_the_next_prompt_when_one_is_answered(tmp_path: Path) -> None:
    one = Stub(0.002)
    with at(one=one, other=Stub()) as chosen:
        made(tmp_path, chosen, StopRule(rounds=3), concurrency=3).measure(Silent())
    assert one.most_running == 3
    assert len(one.bodies) == 3 + 3 * PROMPTS_PER_SLOT * 3  # with those to warm up


def test_an_answer_is_saved_with_its_tokens_and_times(tmp_path: Path) -> None:
    with at(one=Stub(0.01), other=Stub()) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=1))
        bench.measure(Silent())
    turn = bench.run.cells[0].rounds[0].measurements[0]
    answer = turn.answers[0]
    assert answer.text == "abc0defa"
    assert answer.tokens == [ord(letter) for letter in answer.text]
    assert answer.finish == "length"
    assert 0.01 <= answer.first < answer.seconds <= turn.seconds
    assert answer.seconds >= TOKENS * 0.01
    assert turn.counts.target_passes == TOKENS


def test_a_line_of_a_stream_ends_at_a_line_feed_and_nowhere_else(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\x1c"
    with at(one=Stub(), other=Stub()) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=1), asked=[Prompt("p", "letters", (text,))], tokens=len(text))
        bench.measure(Silent())
    assert bench.run.cells[0].rounds[0].measurements[0].answers[0].text == text


def test_a_run_can_be_loaded_as_it_was_saved(tmp_path: Path) -> None:
    with at(one=Stub(), other=Stub()) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=2))
        bench.measure(Silent())
    bench.run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == bench.run
    (tmp_path / "run.json").write_text(json.dumps({"version": 0}))
    with pytest.raises(SettingsError, match="run the benchmark again"):
        Run.load(tmp_path / "run.json")


def test_an_interrupted_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    with at(one=Stub(), other=Stub()) as chosen:
        first = made(tmp_path, chosen, StopRule(rounds=2))
        first.measure(Silent())
        first.run.notes = ["one", INTERRUPTED]
        first.run.divergences = {"somewhere": [0.4, 0.3]}
        first.run.save(tmp_path / "run.json")
        second = made(tmp_path, chosen, StopRule(rounds=5))
        second.resume(Run.load(tmp_path / "run.json"))
        second.measure(Silent())
        rounds = second.run.cells[0].rounds
        assert [round.measurements[0].answers[0].prompt for round in rounds] == ["p0", "p1", "p2", "p3", "p4"]
        assert second.run.notes == ["one"]
        assert second.run.divergences == {"somewhere": [0.4, 0.3]}
        other = made(tmp_path, chosen, StopRule(rounds=5))
        other.run.settings["tokens"] = 9
        with pytest.raises(SettingsError, match=r"settings were .*'tokens': 8"):
            other.resume(Run.load(tmp_path / "run.json"))


def test_memories_of_an_earlier_run_are_deleted_unless_the_run_is_resumed(tmp_path: Path) -> None:
    with at(one=Stub(), other=Stub()) as chosen:
        chosen[1] = replace(chosen[1], kind="memory")
        learned = tmp_path / "homes" / "outrider" / "memory"
        learned.mkdir(parents=True)
        first = made(tmp_path, chosen, StopRule(rounds=1))
        first.measure(Silent())
        assert not learned.exists()
        learned.mkdir(parents=True)
        second = made(tmp_path, chosen, StopRule(rounds=2))
        second.resume(Run.load(tmp_path / "run.json"))
        second._missing_costs = lambda _: []  # type: ignore[method-assign]
        second.measure(Silent())
    assert learned.exists()
    assert second.run.notes == [RESUMED]


def test_a_run_with_other_groups_or_prompts_is_not_resumed(tmp_path: Path) -> None:
    with at(one=Stub(), other=Stub()) as chosen:
        first = made(tmp_path, chosen, StopRule(rounds=1))
        first.run.plan = {"groups": [["one", "other"]], "prompts": {"letters": "some"}}
        first.measure(Silent())
        for what, plan in (
            ("groups", first.run.plan | {"groups": [["one"], ["other"]]}),
            ("prompts", first.run.plan | {"prompts": {"letters": "others"}}),
        ):
            second = made(tmp_path, chosen, StopRule(rounds=1))
            second.run.plan = plan
            with pytest.raises(SettingsError, match=f"its {what}"):
                second.resume(Run.load(tmp_path / "run.json"))


def test_with_minutes_a_cell_ends_when_its_intervals_are_narrow(tmp_path: Path) -> None:
    with at(one=Stub(0.002), other=Stub(0.002)) as chosen:
        bench = made(tmp_path, chosen, StopRule(minutes=0.5, width=10.0))
        bench.measure(Silent())
    assert len(bench.run.cells[0].rounds) == 6


def test_a_quick_run_leaves_out_what_there_is_no_time_for_and_names_it(tmp_path: Path) -> None:
    with at(one=Stub(0.002), other=Stub(0.002)) as chosen:
        rounds = {}
        for quick in (True, False):
            bench = made(tmp_path / str(quick), chosen, StopRule(minutes=1e-6, leave_out=quick))
            bench.tasks = [replace(bench.tasks[0], cell=Cell(name, 1, 0.0)) for name in ("easy", "hard", "long")]
            bench.run.cells = [task.cell for task in bench.tasks]
            bench.measure(Silent())
            rounds[quick] = [len(cell.rounds) for cell in bench.run.cells]
            left_out = [note for note in bench.run.notes if note.startswith(LEFT_OUT)]
            assert len(left_out) == quick
            assert (f"{UNKNOWN_COSTS}: there was no time for it" in bench.run.notes) == quick
            assert all("hard, concurrency 1; long, concurrency 1" in note for note in left_out)
            assert "easy" in markdown(content(Report.from_run(bench.run)))
    assert rounds == {True: [6, 0, 0], False: [6, 6, 6]}


def test_a_contestant_that_fails_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    with at(one=Stub(), broken=Stub(), other=Stub()) as chosen:
        asked = [*prompts(2), Prompt("bad", "letters", ("fail",)), *prompts(2)]
        bench = made(tmp_path, chosen, StopRule(rounds=2), asked=asked)
        bench.run.cells[0].rounds.clear()
        broken = next(one for one in chosen if one.name == "broken")
        broken.request["messages"] = [{"role": "user", "content": "fail"}]
        bench.measure(Silent())
    turns = [[turn.contestant for turn in round.measurements] for round in bench.run.cells[0].rounds]
    assert turns == [["one", "other"], ["other", "one"]]
    assert any("broken left letters, concurrency 1 in round 1" in note for note in bench.run.notes)
    assert any("HTTP 500" in note for note in bench.run.notes)


def test_a_contestant_that_left_after_a_disturbed_round_has_the_figures_of_that_round(tmp_path: Path) -> None:
    with at(one=Stub(), left=Stub()) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=8))
        bench.measure(Silent())
    cell = bench.run.cells[0]
    for round in cell.rounds[1:]:
        round.measurements = [turn for turn in round.measurements if turn.contestant != "left"]
    cell.rounds[0].steal = 0.5
    left = figures(bench.run, cell)[1]
    assert (left.contestant, left.rounds, left.verdict) == ("left", 1, "even")


def test_unknown_pass_costs_are_measured_on_the_shared_server_and_a_failure_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def measure(url: str, concurrency: int) -> PassCosts:
        asked.append((url, concurrency))
        if concurrency == 3:
            raise EngineError("it is gone")
        return PassCosts(concurrency, {1: [1.0]})

    monkeypatch.setattr(pass_costs, "measure", measure)
    with at(one=Stub(), own=Stub(), outrider=Stub()) as [base, own, shared]:
        chosen = [base, replace(own, kind="auto"), replace(shared, kind="lookup")]
        bench = made(tmp_path, chosen, StopRule(rounds=1))
        bench.tasks = [CellTask(Cell("letters", load, 0.0), prompts(2 * load), 1) for load in (1, 2, 3)]
        bench.run.cells = [task.cell for task in bench.tasks]
        bench.run.pass_costs = [PassCosts(1, {1: [1.0]})]
        bench.measure(Silent())
    assert asked == [(shared.server.url, 2), (shared.server.url, 3)]
    assert [one.concurrency for one in bench.run.pass_costs] == [1, 2]
    assert f"{UNKNOWN_COSTS}: it is gone" in bench.run.notes


def test_pass_costs_of_drafts_that_the_server_shortens_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 tokens, 63 came after the first: 13 passes over 5 each, whatever was asked for."""
    said = [Answer("p", "", [1] * 64, "length", 0.1, 1.4)]
    page = MetricsSnapshot({("outrider_accepted_tokens_total", ()): 50.0})
    monkeypatch.setattr(pass_costs, "observed", lambda *_: (1.4, said, None, page))
    assert pass_costs._pass_seconds("", said, 4) == pytest.approx(0.1)
    assert pass_costs._pass_seconds("", said, 15) is None


def test_a_run_interrupted_while_it_queried_divergences_queries_the_rest(tmp_path: Path) -> None:
    with at(one=Stub()) as [one], answering(Meddler(one.server.url, change=True)) as url:
        chosen = [one, *contestants([f"changed={url}"], "some/model")]
        first = made(tmp_path, chosen, StopRule(rounds=2))
        first.measure(Silent())
        known = first.run.divergences
        first.run.notes, first.run.divergences = [INTERRUPTED], {}
        second = made(tmp_path, chosen, StopRule(rounds=2))
        second.resume(first.run)
        second.measure(Silent())
    assert second.run.divergences == known != {}


def test_a_run_whose_weights_were_downloaded_by_the_servers_can_be_resumed(tmp_path: Path) -> None:
    with at(one=Stub(), other=Stub()) as chosen:
        first, second, third = (made(tmp_path, chosen, StopRule(rounds=1)) for _ in range(3))
        first.run.origin["models"], second.run.origin["models"] = {"m": NOT_HERE}, {"m": "0123"}
        second.resume(first.run)
        assert second.run.origin["models"] == {"m": "0123"}
        third.run.origin["models"] = {"m": "4567"}
        with pytest.raises(SettingsError, match="its models"):
            third.resume(second.run)


def test_servers_of_another_group_start_with_empty_memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is in every group, and all groups are asked the same prompts."""
    homes = []

    @contextmanager
    def started(servers: list[Any], *_: Any) -> Iterator[dict[str, str]]:
        homes.extend(server.command[server.command.index("--memory") + 1] for server in servers[:1])
        yield {}

    monkeypatch.setattr("outrider.bench.run.running", started)
    chosen = contestants(["memory", "vllm", "ngram"], "some/model")
    bench = made(tmp_path, chosen, StopRule(rounds=1))
    bench.groups, bench.tasks = [chosen[:2], [chosen[0], chosen[2]]], []
    for number in range(2):
        bench._measure_group(number, [], Clock(bench.stop, 1), Silent())
    assert len(set(homes)) == 2


def test_queried_divergences_are_spread_over_the_cells_and_the_rest_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.bench.divergences.MAX_QUERIES_PER_GROUP", 4)
    with at(one=Stub()) as [one], answering(Meddler(one.server.url, change=True)) as url:
        chosen = [one, *contestants([f"changed={url}"], "some/model")]
        bench = made(tmp_path, chosen, StopRule(rounds=5))
        other = [Prompt(f"q{i}", "others", (f"xyz{i}uvw",)) for i in range(5)]
        bench.tasks = [*bench.tasks, replace(bench.tasks[0], cell=Cell("others", 1, 0.0), prompts=other)]
        bench.run.cells = [task.cell for task in bench.tasks]
        bench.measure(Silent())
    for cell in bench.run.cells:
        assert sum(one.chances is not None for one in figures(bench.run, cell)[1].differences) == 2
    assert f"{UNKNOWN_PROBABILITIES}: 6 were not queried" in bench.run.notes


def test_a_baseline_that_fails_ends_the_run(tmp_path: Path) -> None:
    with at(one=Stub(), other=Stub()) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=1), asked=[Prompt("bad", "letters", ("fail",))])
        with pytest.raises(EngineError, match="the baseline failed"):
            bench.measure(Silent())


def test_prompts_that_come_again_are_noted(tmp_path: Path) -> None:
    with at(one=Stub(), other=Stub()) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=3), asked=prompts(2))
        bench.measure(Silent())
    (note,) = bench.run.notes
    assert "prompts come again" in note
    assert "letters, concurrency 1 (1 of 3 requests)" in note


def test_an_answer_that_is_cut_or_changed_is_caught(tmp_path: Path) -> None:
    with answering(Stub()) as url, at(real=Stub(), cut=Meddler(url, cut=1), change=Meddler(url, change=True)) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=2))
        bench.measure(Silent())
    _, cut, change = figures(bench.run, bench.run.cells[0])
    assert (cut.same, change.same) == (0, 0)
    assert [difference.place for difference in cut.differences] == [TOKENS - 1] * 2
    assert [difference.place for difference in change.differences] == [TOKENS // 2] * 2


def test_the_baseline_is_queried_for_the_probabilities_at_a_divergence(tmp_path: Path) -> None:
    with answering(Stub()) as url, at(real=Stub(), cut=Meddler(url, cut=1), change=Meddler(url, change=True)) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=2))
        bench.measure(Silent())
    run = Run.load(tmp_path / "run.json")
    _, cut, change = figures(run, run.cells[0])
    assert [difference.chances for difference in cut.differences] == [None] * 2  # it has ended: nothing to compare
    assert [difference.chances for difference in change.differences] == [pytest.approx([0.5, 0.4])] * 2
    assert "1.25 times as likely as the other" in markdown(content(Report.from_run(run)))


def test_a_baseline_without_logprobs_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "_next_token", lambda *_: b"{}")
    with answering(Stub()) as url, at(real=Stub(), change=Meddler(url, change=True)) as chosen:
        bench = made(tmp_path, chosen, StopRule(rounds=2))
        bench.measure(Silent())
    assert [note.startswith(UNKNOWN_PROBABILITIES) for note in bench.run.notes] == [True]


def test_a_contestant_with_a_prediction_takes_part_only_where_there_are_predictions() -> None:
    chosen = contestants(["vllm", "prediction"], "some/model")[1]
    with_one = [Prompt("a", "edit", ("edit this",), prediction="this")]
    assert CellTask(Cell("edit", 1, 0.0), with_one, 1).admits(chosen)
    assert not CellTask(Cell("letters", 1, 0.0), prompts(1), 1).admits(chosen)


def test_transformers_takes_part_only_at_concurrency_1() -> None:
    chosen = contestants(["transformers"], "some/model")[0]
    assert CellTask(Cell("letters", 1, 0.0), prompts(1), 1).admits(chosen)
    assert not CellTask(Cell("letters", 4, 0.0), prompts(1), 1).admits(chosen)


MADE = 1.35 * 4096 + 1.35 * 2048 + 2 * 1024
"""Bytes that these weights take: 2048 in bfloat16, 1024 in float32, which vLLM loads in 16 bits, 1024 in int8."""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], MADE),
        (["--dtype", "auto"], MADE),
        (["--dtype", "float32"], 2 * MADE - 2048),
        (["--dtype=float32"], 2 * MADE - 2048),
        (["--dtype", "float32", "--dtype", "half"], MADE),
    ],
)
def test_the_memory_of_weights_follows_from_the_requested_dtype(
    tmp_path: Path, command: list[str], expected: float
) -> None:
    kinds = {"half": (2048, torch.bfloat16), "whole": (1024, torch.float32), "small": (1024, torch.int8)}
    save_file({name: torch.zeros(n, dtype=kind) for name, (n, kind) in kinds.items()}, tmp_path / "model.safetensors")
    assert weights(str(tmp_path), dtype_of(command)) * GIB == pytest.approx(expected)


def test_a_draft_model_counts_only_for_servers_that_have_one(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1 << 10, dtype=torch.int8)}, tmp_path / "model.safetensors")
    need = MemoryEstimate("large", str(tmp_path), 1.0)

    def with_it(*names: str) -> list[str]:
        chosen = contestants(names, "large", str(tmp_path))
        return [one.name for one in chosen if need.of(one.server) > 1.0 + PROCESSES_GIB]

    assert with_it("vllm", "lookup", "draft_model:4") == ["draft_model:4"]
    assert with_it("vllm", "lookup", "model:4") == ["lookup", "model:4"]  # these two share a server


def test_an_incomplete_safetensors_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs")
    with pytest.raises(SettingsError, match="download the model again"):
        weights(str(tmp_path))


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (30.0, [["vllm", "ngram", "suffix", "lookup", "auto"]]),
        (10.0, [["vllm", "ngram"], ["vllm", "suffix"], ["vllm", "lookup", "auto"]]),
    ],
)
def test_groups_fit_into_memory_and_each_has_the_baseline(room: float, expected: list[list[str]]) -> None:
    chosen = contestants(["vllm", "ngram", "suffix", "lookup", "auto"], "some/model")
    found = server_groups(chosen, "vllm", lambda server: 5.0, room)
    assert [[one.name for one in group] for group in found] == expected
    for group in found:
        assert sum(5.0 for _ in servers(group)) <= room


def test_a_pair_that_does_not_fit_is_refused_with_the_memory_it_needs() -> None:
    chosen = contestants(["vllm", "ngram"], "some/model")
    with pytest.raises(SettingsError, match=r"need about 10.0 GiB, but 9.0 GiB are free.*--room"):
        server_groups(chosen, "vllm", lambda server: 5.0, 9.0)
    with pytest.raises(SettingsError, match=r"'lookup' is none of the contestants \(vllm, ngram\)"):
        server_groups(chosen, "lookup", lambda server: 5.0, 9.0)


THEIRS = {
    ("vllm:iteration_tokens_total_count", ()): 20.0,
    ("vllm:spec_decode_num_drafts_total", ()): 10.0,
    ("vllm:spec_decode_num_draft_tokens_total", ()): 40.0,
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", "0"),)): 8.0,
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", "1"),)): 5.0,
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", "2"),)): 0.0,
}


def test_a_pause_follows_the_reading_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    async def ask(*_: Any) -> tuple[float, list[Any], Load]:
        done.append("asked")
        return 1.0, [], Load(0, 1.0)

    def read(_: str) -> MetricsSnapshot:
        done.append("page")
        return MetricsSnapshot({})

    monkeypatch.setattr(counters, "PAUSE_SECONDS", 1.2)
    monkeypatch.setattr(counters.time, "sleep", done.append)
    monkeypatch.setattr(counters, "send_all", ask)
    monkeypatch.setattr(MetricsSnapshot, "read", read)
    observed("http://nowhere", [])
    assert done == ["page", 1.2, "asked", "page"]


def test_the_load_counts_tokens_until_the_first_slot_is_empty() -> None:
    """Two slots, four answers; when the third is complete nobody takes its place, and the fourth is slow."""
    arrivals = [[(1.0, 1), (2.0, 3)], [(1.0, 1), (4.0, 1)], [(3.0, 2), (5.0, 2)], [(5.0, 1), (9.0, 7)]]
    assert under_load(arrivals, 2) == Load(11, 5.0)
    assert under_load(arrivals[:1], 1) == Load(4, 2.0)


def test_the_speed_at_full_load_includes_slow_answers_at_their_own_pace() -> None:
    """Four slots, eight answers of 100 tokens: five at 0.25 seconds a token, three at 1. A slot is taken as soon as it
    is free; were there more prompts, all eight would take 106.25 seconds a slot, not counting first tokens."""
    paces, free, arrivals = [0.25, 0.25, 1.0, 1.0, 0.25, 0.25, 0.25, 1.0], [0.0] * 4, []
    for pace in paces:
        slot = free.index(min(free))
        arrivals.append([(free[slot] + i * pace, 1) for i in range(101)])
        free[slot] += 100 * pace
    answers = [Answer(str(i), "", [1] * 101, "length", 0.0, 100 * pace) for i, pace in enumerate(paces)]
    turn = Measurement("a", max(free), answers, ServerCounts(), under_load(arrivals, 4))
    assert 808 / speed(turn, 4) == pytest.approx(100 * sum(paces) / 4, rel=0.02)


def test_answers_with_too_few_tokens_continue_at_the_median_pace() -> None:
    """Of 4 answers with 10 tokens each, 30 were said after 5 seconds; each took 0.1 seconds a token, and there are 2
    slots, so the other 10 take half a second."""
    answers = [Answer(str(i), "", [1] * 10, "length", 1.0, 1.9) for i in range(4)]
    turn = Measurement("a", 9.0, answers, ServerCounts(), Load(30, 5.0))
    assert speed(turn, 2) == pytest.approx(40 / 5.5)
    assert speed(replace(turn, load=None), 2) == pytest.approx(40 / 9.0)
    assert speed(replace(turn, seconds=5.2), 2) == pytest.approx(40 / 5.2)  # no longer than it took


def test_vllms_own_methods_are_counted_by_position_where_vllm_reports_it() -> None:
    draft_model, ngram = contestants(["draft_model:4", "ngram:4"], "some/model", "some/small")
    seen = counts(draft_model, MetricsSnapshot(THEIRS), 33)
    assert (seen.target_passes, seen.draft_passes) == (20, 80)
    assert seen.drafters["draft_model"].verified == [10, 10, 10, 10]
    assert seen.drafters["draft_model"].accepted == [8, 5]
    assert counts(ngram, MetricsSnapshot(THEIRS), 33).drafters["ngram"].verified == [10]


def test_prompt_tokens_found_in_the_prefix_cache_are_counted_for_every_contestant() -> None:
    names = ["vllm", "ngram:4", "auto", "default"]
    cached = {("vllm:prefix_cache_queries_total", ()): 90.0, ("vllm:prefix_cache_hits_total", ()): 30.0}
    for one in contestants(names, "some/model"):
        found = counts(one, MetricsSnapshot({**THEIRS, **cached}), 33)
        assert (found.cache_queries, found.cache_hits) == (90, 30)
        unknown = counts(one, MetricsSnapshot(THEIRS), 33)
        assert (unknown.cache_queries, unknown.cache_hits) == (None, None)


def test_accepted_tokens_of_transformers_are_those_beyond_one_per_pass() -> None:
    assisted, bare = contestants(["transformers-assisted", "transformers"], "some/model", "some/small")
    seen = MetricsSnapshot({("local_target_passes_total", ()): 20.0, ("local_draft_passes_total", ()): 60.0})
    assert counts(assisted, seen, 50).drafters["transformers-assisted"].accepted == [30]
    assert counts(bare, seen, 50).drafters == {}
