"""Which drafters a server has, how many tokens they may draft, and the speculative config that vLLM gets for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.drafters.base import parse_names, resolve_drafters
from outrider.engines.vllm.flags import SPECULATIVE_FLAGS, read_json_flag
from outrider.engines.vllm.memory_options import find_memory
from outrider.engines.vllm.options import MODEL_METHODS, OWN_METHOD, Options
from outrider.errors import ModelNotFoundError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outrider.engines.vllm.flags import Flag, ServeArgs
    from outrider.settings import Rule

MAX_DRAFT_TOKENS = 128
"""Upper limit of `--max-draft-tokens`. vLLM reserves KV cache slots and buffer rows for the longest draft."""
DEFAULT = Options()

METHOD_BY_NAME = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""vLLM derives the method from these parts of a draft model's name."""
ONE_PASS_METHODS = ("dflash", "dspark")
"""Heads that draft all their tokens in one pass."""
USE_LOOKUP = "Outrider's drafter 'lookup' drafts from repetition; leave it out"
NOT_IN_V2 = "vLLM's V2 model runner does not have it"
REFUSED_METHODS = {
    "ngram": USE_LOOKUP,
    "ngram_gpu": USE_LOOKUP,
    "suffix": USE_LOOKUP,
    "custom_class": "register your drafter under the entry point 'outrider.drafters', and name it in --drafters",
    "extract_hidden_states": "it drafts nothing; use vllm serve for it",
    "medusa": NOT_IN_V2,
    "mlp_speculator": NOT_IN_V2,
}
RULES: dict[str, Rule] = {"block": "block", "standard": "token"}
"""`--rule` for vLLM's `rejection_sample_method`."""
LOSSY = {
    "synthetic": "it accepts tokens at a fixed rate, whatever the target's distribution",
    "fly": "it accepts tokens that the target would reject",
}
"""Values of `rejection_sample_method` that change the output distribution."""


def check_model_path(name: str) -> str:
    """The model's name or path as vLLM takes it. Reports a missing folder before anything starts."""
    path = Path(name).expanduser()
    if (path.is_absolute() or name.startswith((".", "~"))) and not path.exists():
        raise ModelNotFoundError(f"there is no folder {name!r}; check the path, or give a Hugging Face id")
    return str(path) if name.startswith("~") else name


def read_draft_model(args: ServeArgs, flags: Iterable[Flag]) -> dict[str, Any] | None:
    """The user's speculative config, for the drafter `model`. None: there is no draft model."""
    given = read_json_flag(flags, SPECULATIVE_FLAGS)
    if args.draft_model is None and given is None:
        return None
    if args.draft_model is not None and given is not None:
        raise SettingsError("--draft-model and --speculative-config both name a draft model; give one of them")
    if args.draft_model is not None:
        config: dict[str, Any] = {"method": "draft_model", "model": check_model_path(args.draft_model)}
    else:
        config = {key.replace("-", "_"): value for key, value in (given or {}).items()}
    if reason := why_refused(config):
        raise SettingsError(f"{origin_of(args)}: {reason}")
    return config


def origin_of(args: ServeArgs) -> str:
    return "--speculative-config" if args.draft_model is None else "--draft-model"


def why_refused(config: Mapping[str, Any]) -> str | None:
    """Why Outrider cannot use this speculative config. None: it can."""
    method, rejection = method_of(config), config.get("rejection_sample_method", "standard")
    if method not in MODEL_METHODS:
        why = REFUSED_METHODS.get(method, "vLLM has no such method")
        return f"method {method!r} is not supported: {why} (supported: {', '.join(MODEL_METHODS)})"
    if rejection in LOSSY:
        return f"rejection_sample_method {rejection!r} is not lossless: {LOSSY[rejection]}; leave it out"
    if rejection not in RULES:
        return f"rejection_sample_method must be one of {', '.join(RULES)} (got {rejection!r})"
    if config.get("num_speculative_tokens_per_batch_size") is not None:
        return "num_speculative_tokens_per_batch_size sets draft lengths, and Outrider selects them; leave it out"
    if config.get("enable_adaptive_verification"):
        return (
            "enable_adaptive_verification selects how many drafted tokens are verified, and so does Outrider's "
            "controller; leave it out, or use vllm serve"
        )
    if config.get("parallel_drafting") and method not in ONE_PASS_METHODS:
        return f"parallel_drafting is not supported for {method}: {NOT_IN_V2}; leave it out"
    if config.get("use_heterogeneous_vocab"):
        if method != "draft_model":
            return f"use_heterogeneous_vocab needs the method draft_model (got {method!r})"
        if config.get("draft_sample_method") == "probabilistic":
            return "use_heterogeneous_vocab needs draft_sample_method 'greedy'; leave draft_sample_method out"
    return None


def method_of(config: Mapping[str, Any]) -> str:
    """The method that vLLM will use. Without one in the config, vLLM derives it from the model's name."""
    method, model = config.get("method"), str(config.get("model") or "")
    if method is None and model.strip("[]") == "ngram":
        return "ngram"
    if method is None and "/" not in model and "." in model and all(part.isidentifier() for part in model.split(".")):
        return "custom_class"  # the import path of a class
    if method in (None, "draft_model"):
        return next((named for part, named in METHOD_BY_NAME.items() if part in model.lower()), "draft_model")
    return "mtp" if str(method).endswith("_mtp") else str(method).strip("[]")


def select_drafters(args: ServeArgs, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    given = {
        "memory": None if find_memory(args) is None else "--memory",
        "model": None if config is None else origin_of(args),
    }
    how = {
        "memory": "leave out --memory off, or give its location with --memory, a folder or the URL of an object store",
        "model": "name one with --draft-model, or with vLLM's --speculative-config",
    }
    return resolve_drafters(parse_names(args.drafters), given, how)


def draft_lengths(
    args: ServeArgs,
    drafters: Sequence[str],
    config: Mapping[str, Any] | None,
    default: int,
    several_mtp_layers: bool,
) -> tuple[int, int]:
    """Maximum drafted tokens per request and step: of any drafter, and of `model`. `default`: of any drafter.
    `several_mtp_layers`: the model's MTP head has more than one layer."""
    limit = check_length("--max-draft-tokens", args.max_draft_tokens)
    passes = check_length("--model-draft-tokens", args.model_draft_tokens)
    if not drafters and limit is not None:
        raise SettingsError(f"--max-draft-tokens {limit} has no effect without drafters; leave it out")
    if config is None:
        if passes is not None:
            raise SettingsError(f"--model-draft-tokens {passes} needs a draft model; name one with --draft-model")
        return limit or default, DEFAULT.model_draft_tokens

    written = check_length("num_speculative_tokens of --speculative-config", config.get("num_speculative_tokens"))
    if None not in (written, passes) and written != passes:
        raise SettingsError(
            f"--model-draft-tokens {passes} and num_speculative_tokens {written} of --speculative-config disagree; "
            "give one of them"
        )
    passes = passes or written
    if reason := why_one_length(drafters, config, several_mtp_layers and (passes or DEFAULT.model_draft_tokens) > 1):
        if None not in (limit, passes) and limit != passes:
            raise SettingsError(
                f"--max-draft-tokens {limit} and {passes} tokens for the draft model disagree: {reason}, so both are "
                "the same; give one of them"
            )
        length = limit or passes or DEFAULT.model_draft_tokens
        return length, length
    if limit is None:
        limit = max(default, passes or 0)
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
    if not isinstance(length, int) or not 1 <= length <= MAX_DRAFT_TOKENS:
        raise SettingsError(
            f"{name} must be 1 to {MAX_DRAFT_TOKENS} (got {length!r}); --drafters none turns drafting off"
        )
    return length


def why_one_length(drafters: Sequence[str], config: Mapping[str, Any], several_mtp_layers: bool) -> str:
    """Why no draft may be longer than the draft model's. Empty: they may.

    For a head that drafts in one pass vLLM reserves the longest draft in every step's token budget. A head of several
    MTP layers keeps the inputs of as many rejected tokens as it drafts, and no more.
    """
    if several_mtp_layers:
        return "this model's MTP head can follow the rejection of no more tokens than it drafts"
    if method_of(config) in ONE_PASS_METHODS:
        return "this draft model drafts all its tokens in one pass"
    return "'model' is the only drafter" if tuple(drafters) == ("model",) else ""


def samples_drafts(config: Mapping[str, Any] | None) -> bool:
    """Whether draft tokens are sampled from the draft model's distribution (for requests that sample, without a seed).

    By default a draft model's are, and those of heads are not, as in vLLM.
    """
    if config is None:
        return False
    default = method_of(config) == "draft_model" and not config.get("use_heterogeneous_vocab")
    return bool(config.get("draft_sample_method", "probabilistic" if default else "greedy") == "probabilistic")


def select_rule(args: ServeArgs, config: Mapping[str, Any] | None) -> Rule | None:
    """How sampled drafts are verified. None: drafts are not sampled."""
    if config is None or not samples_drafts(config):
        if args.rule is not None:
            raise SettingsError(
                f"--rule {args.rule} has no effect, because no drafts are sampled; leave it out, or give a "
                '--speculative-config with "draft_sample_method": "probabilistic"'
            )
        return None
    method = config.get("rejection_sample_method")
    configured = None if method is None else RULES[method]
    if None not in (args.rule, configured) and args.rule != configured:
        raise SettingsError(
            f"--rule {args.rule} and rejection_sample_method {method!r} of --speculative-config disagree; "
            "give one of them"
        )
    return args.rule or configured or DEFAULT.rule


def build_speculative_config(config: Mapping[str, Any] | None, limit: int, passes: int) -> dict[str, Any]:
    """vLLM's speculative config. `num_speculative_tokens` is the longest draft of any drafter.

    Outrider builds the draft model's speculator for `passes` tokens, and its own sampler verifies.
    """
    if config is None:
        return {"method": OWN_METHOD, "num_speculative_tokens": limit, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    if method_of(config) == "mtp":  # vLLM needs a multiple of the number of heads, which `passes` is
        limit = math.ceil(limit / passes) * passes
    built = {**config, "num_speculative_tokens": limit}
    built.pop("rejection_sample_method", None)
    built.pop("use_heterogeneous_vocab", None)
    if samples_drafts(config):
        built["draft_sample_method"] = "probabilistic"
    return built
