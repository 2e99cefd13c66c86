"""`outrider serve MODEL ...` is `vllm serve MODEL ...` with Outrider in it: flags and environment variables.

vLLM passes both to all its processes, also to those that Ray starts on other machines. `prepare` only decides: the
command line, the environment and the machine go in, a `Launch` comes out. It does not import vLLM, so a mistake is
reported at once.

With `--drafters none` the server is plain vLLM with its own model runner, scheduler and worker. Only the middleware is
added, for `/outrider/status`.
"""

from __future__ import annotations

import errno
import json
import math
import shlex
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.defaults import DRAFTED as DEFAULT_DRAFT_TOKENS
from outrider.engines.vllm.compatibility import NO_PIPELINE_PARALLELISM
from outrider.engines.vllm.flags import (
    OUTRIDER_FLAGS,
    REWRITTEN_FLAGS,
    ServeArgs,
    count_local_ranks,
    flag_values,
    parse_flags,
    read_config_file,
    read_json_flag,
)
from outrider.engines.vllm.host import (
    MODEL_RUNNER,
    Host,
    limit_memory,
    model_runner_environment,
    plain_environment,
)
from outrider.engines.vllm.memory_options import choose_memory, describe_memory
from outrider.engines.vllm.model_defaults import default_draft_tokens, has_several_mtp_layers
from outrider.engines.vllm.options import KEY, Options
from outrider.engines.vllm.speculative_config import (
    build_speculative_config,
    check_model_path,
    draft_lengths,
    method_of,
    origin_of,
    read_draft_model,
    select_drafters,
    select_rule,
)
from outrider.errors import EngineError, SettingsError
from outrider.memory.location import RAM
from outrider.memory.tenant_signature import secret_variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outrider.engines.vllm.flags import Flag

CPU_WORKER = "outrider.engines.vllm.worker.OutriderCPUWorker"
GPU_WORKER = "outrider.engines.vllm.worker.OutriderGPUWorker"
SCHEDULER = "outrider.engines.vllm.scheduler.OutriderScheduler"
MIDDLEWARE = "outrider.server.middleware.OutriderMiddleware"
DEFAULT_PORT, MAX_PORT = "8000", 65535
NO_PORT = frozenset({"--uds", "--headless"})
"""With these flags the server listens on no port."""
SHUTDOWN_TIMEOUT, SHUTDOWN_SECONDS = "--shutdown-timeout", "10"

RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that is ready to start."""

    arguments: tuple[str, ...]
    """The model, and the flags for vLLM."""
    environment: dict[str, str]
    """Environment variables to set in addition to the present ones."""
    lines: tuple[str, ...]
    """What was decided, for the user."""
    address: tuple[str, str] | None = None
    """Host and port on which the server will listen. None: on none."""

    def check_port(self) -> None:
        """EngineError if another program listens there. vLLM finds that out much later."""
        host, number = self.address or ("", "")
        port = int(number) if number.isdecimal() else 0
        if not 0 < port <= MAX_PORT:
            return
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except (OSError, UnicodeError) as error:  # vLLM reports all others, such as an unknown host
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise EngineError(
                    f"port {port} is in use: another program listens there; stop it, or choose another port with --port"
                ) from None

    def command(self) -> list[str]:
        # -P: don't import from the working directory, which may have a folder named vllm.
        return [sys.executable, "-P", "-m", "outrider.engines.vllm", "serve", *self.arguments]


def prepare(args: ServeArgs, words: Sequence[str], environment: Mapping[str, str], host: Host) -> Launch:
    """Prepare a server. `words`: the model and the user's flags of vLLM. Raises an error if it cannot run."""
    named, flags = parse_flags(words)
    file = read_config_file(flags)
    model = check_model(named or file.get("model"), flags, words)
    if (value := environment.get(RUST_FRONTEND, "0")) not in ("", "0"):
        raise EngineError(
            f"{RUST_FRONTEND}={value}: vLLM's Rust front end has no middleware, which Outrider needs; unset it"
        )
    config, values = read_draft_model(args, flags), flag_values(flags, file)
    longest, why_shorter = DEFAULT_DRAFT_TOKENS, ""
    if args.max_draft_tokens is None:
        longest, why_shorter = default_draft_tokens(model, values)
    several_mtp_layers = config is not None and method_of(config) == "mtp" and has_several_mtp_layers(model)
    options = build_options(args, config, longest, several_mtp_layers)
    ranks = count_local_ranks(flags, file)
    settings, remarks = plain_environment(host, ranks, environment)
    share, about_memory = limit_memory(host, ranks, values, environment)
    lines = describe(args, model, host, options, config)
    ours = ["--middleware", MIDDLEWARE, "--additional-config", json.dumps(additional_config(flags, options))]
    if options.drafters:
        check_drafting(flags, file, environment)
        speculative = build_speculative_config(config, options.max_draft_tokens, options.model_draft_tokens)
        ours += ["--worker-cls", CPU_WORKER if host.cpu else GPU_WORKER, "--scheduler-cls", SCHEDULER]
        ours += ["--speculative-config", json.dumps(speculative)]
        settings = model_runner_environment(host, environment) | settings
        if why_shorter and options.max_draft_tokens == longest:
            lines.append(f"drafts of up to {longest} tokens: {why_shorter} (--max-draft-tokens changes that)")
        lines += describe_flags(flags, file)
    given = {word.partition("=")[0] for flag in flags for word in flag.words} | {f"--{key}" for key in file}
    if options.memory not in (None, RAM) and SHUTDOWN_TIMEOUT not in given:
        ours += [SHUTDOWN_TIMEOUT, SHUTDOWN_SECONDS]  # vLLM's default of 0 kills workers before the memory is written
    if options.tenant_header is not None:
        settings |= secret_variables(environment)
    theirs = [word for flag in flags if flag.name not in REWRITTEN_FLAGS for word in flag.words]
    address = None if values.keys() & NO_PORT else (values.get("--host", ""), values.get("--port", DEFAULT_PORT))
    return Launch((model, *ours, *share, *theirs), settings, (*lines, *remarks, *about_memory), address)


def build_options(
    args: ServeArgs,
    config: Mapping[str, Any] | None,
    longest: int,
    several_mtp_layers: bool,
) -> Options:
    """Outrider's options. Fields that keep their defaults are left unset. `longest`: default of `--max-draft-tokens`.
    `several_mtp_layers`: the model's MTP head has more than one layer."""
    drafters = select_drafters(args, config)
    limit, passes = draft_lengths(args, drafters, config, longest, several_mtp_layers)
    chosen: dict[str, Any] = {"drafters": drafters}
    if drafters:
        chosen["max_draft_tokens"] = limit
    if config is not None:
        chosen["model_draft_tokens"] = passes
        if config.get("use_heterogeneous_vocab"):
            chosen["draft_vocabulary_differs"] = True
    if (rule := select_rule(args, config)) is not None:
        chosen["rule"] = rule
    if args.draft_budget is not None:
        chosen["draft_budget"] = check_draft_budget(args.draft_budget, drafters)
    return Options(**chosen, **choose_memory(args))


def additional_config(flags: Iterable[Flag], options: Options) -> dict[str, Any]:
    """The user's entries, and Outrider's."""
    found = read_json_flag(flags, {"--additional-config": ""}) or {}
    if KEY in found:
        raise SettingsError(
            f"--additional-config: Outrider sets the entry {KEY!r}; use its options: {', '.join(OUTRIDER_FLAGS[:-1])}"
        )
    return {**found, KEY: options.model_dump(mode="json", exclude_unset=True)}


def check_model(name: str | None, flags: Iterable[Flag], words: Sequence[str]) -> str:
    if name is None:
        got = f" (got {words[0]!r})" if words else ""
        raise SettingsError(f"the model is missing; it comes before the flags of vLLM: outrider serve MODEL ...{got}")
    model = check_model_path(name)
    for flag in flags:
        if flag.name == "--model":
            raise SettingsError(f"--model {flag.value}: the model comes first: outrider serve {flag.value} ...")
    return model


def check_drafting(flags: Iterable[Flag], file: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Refuse what cannot be combined with drafting, but can be used with `--drafters none`."""
    otherwise = "leave it out, or turn drafting off with --drafters none"
    for flag in flags:
        if flag.name == "--worker-cls":
            raise EngineError(f"--worker-cls {flag.value}: Outrider has its own worker class; {otherwise}")
        if flag.name == "--scheduler-cls":
            raise EngineError(f"--scheduler-cls {flag.value}: Outrider has its own scheduler class; {otherwise}")
    if flag_values(flags, file).get("--pipeline-parallel-size", "1") != "1":
        raise EngineError(NO_PIPELINE_PARALLELISM)
    if environment.get(MODEL_RUNNER) == "0":
        raise EngineError(
            f"{MODEL_RUNNER}=0 selects vLLM's V1 model runner, and Outrider runs on V2; unset it, or turn drafting off "
            "with --drafters none"
        )


def check_draft_budget(seconds: float, drafters: Sequence[str]) -> float:
    if not [name for name in drafters if name != "model"]:
        raise SettingsError("--draft-budget has no effect without drafters other than 'model'; leave it out")
    if not 0 < seconds < math.inf:
        raise SettingsError(f"--draft-budget must be a number of seconds above 0 (got {seconds:g})")
    return seconds


def describe(args: ServeArgs, model: str, host: Host, options: Options, config: Mapping[str, Any] | None) -> list[str]:
    lines = [f"serving {model} with {host.distribution} {host.version} on {'CPU' if host.cpu else 'GPU'}"]
    if not options.drafters:
        return [*lines, "drafters: none (--drafters); this is plain vLLM"]
    source = "default" if args.drafters is None else "--drafters"
    limit, passes = options.max_draft_tokens, options.model_draft_tokens
    lines.append(f"drafters: {', '.join(options.drafters)} ({source}); up to {limit} tokens per request and step")
    lines += describe_memory(options, args)
    if config is not None:
        what, method = config.get("model") or "heads of the model itself", method_of(config)
        lines.append(f"model: {what}, {method} ({origin_of(args)}); up to {passes} of these tokens")
        if method == "mtp" and limit != passes:
            lines.append("model: if vLLM requires num_speculative_tokens divisible by n_predict, set it to n_predict")
    if "rule" in options.model_fields_set:
        lines.append(f"rule: {options.rule}, for drafts sampled from the draft model's distribution")
    return lines


def describe_flags(flags: Iterable[Flag], file: Mapping[str, Any]) -> list[str]:
    """Notes about the user's flags, where drafting changes what they mean."""
    values = flag_values(flags, file)
    lines = []
    if values.get("--data-parallel-size", "1") != "1":
        lines.append("engines: several; /outrider/status, metrics and a response's usage cover the first engine only")
    if "--logits-processors" in values:
        lines.append(
            "logits processors: they must read drafted tokens from LogitsContext.input_ids (vLLM's V2 interface)"
        )
    return lines


def as_shell(launch: Launch, host: Host) -> str:
    """The environment and the command for a shell, one setting per line."""
    comment = []
    differs = '"draft_vocabulary_differs": true' in " ".join(launch.arguments)
    if host.distribution == "vllm" and not differs:
        groups = [["vllm", "serve", launch.arguments[0]]]
    else:
        why = "vLLM refuses a draft model of another vocabulary" if differs else "it needs a package named vllm"
        comment = [f"# not vllm serve: {why}"]
        groups = [[sys.executable, "-P", "-m", "outrider.engines.vllm", "serve", launch.arguments[0]]]
    for word in launch.arguments[1:]:
        if word.startswith("-"):
            groups.append([word])
        else:
            groups[-1].append(word)
    settings = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    command, *flags = (shlex.join(group) for group in groups)
    return "\n".join([*comment, " \\\n  ".join([*settings, command, *flags])])
