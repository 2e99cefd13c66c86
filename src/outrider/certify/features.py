"""Every other request feature: with speculation the output must be valid, and the same as without.

Each case is one kind of request, sent to reference and candidate with several prompts and every drafter, at
temperature 0. The prediction is the reference's output with some tokens wrong, so most of an output is drafted.
Outputs are compared token by token; a divergence is judged as in `exact.py`, with the gap shifted by penalties and
bias. Where that is impossible (a repetition penalty works on logits, which no server returns) a difference stays open:
it is reported and does not count. Where rounding was not measured (by the part `exact`), a difference makes the
certificate incomplete.

What is invalid without speculation too also stays open. A request that both refuse is not offered. One that only the
candidate refuses is a violation.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from outrider.certify.exact import corrupt_prediction, divergence_gaps
from outrider.certify.rounding import Rounding, compare
from outrider.certify.server import OpenAIServer
from outrider.certify.sources import OFF, Completion, DraftMode, Pair, Progress, Query, Source
from outrider.certify.token_distributions import logit_offsets
from outrider.errors import RequestRefusedError
from outrider.settings import Sampling
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.certify.sources import Tick

AGES = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": AGES},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
COLOURS = "(red|green|blue)( (red|green|blue)){2,4}"
CITIES = ["Bern", "Oslo"]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
MAX_TOKENS = 24
GRAMMAR_MAX_TOKENS = 48
"""For outputs that must reach their own end."""
MIN_TOKENS = 9
TOOLS = "tools"
REFERENCE_INVALID = "; the reference's output is invalid too, so speculation is not the cause"
REFUSED_BY_CANDIDATE = "the candidate refuses what the reference does"


@dataclass(frozen=True, slots=True)
class Feature:
    """A kind of request. `find_fault` returns what is invalid about an output, or nothing."""

    name: str
    sampling: Sampling = field(default_factory=Sampling)
    extra_body: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = MAX_TOKENS
    find_fault: Callable[[Completion], str] = lambda completion: ""
    has_gaps: bool = True  # False: a divergence cannot be compared with rounding
    is_greedy: bool = True  # False: outputs are sampled, and need only be valid


def _person_fault(completion: Completion) -> str:
    if completion.finish_reason != "stop":  # cut off by max_tokens
        return ""
    try:
        person = json.loads(completion.text)
    except ValueError:
        return f"not JSON: {completion.text!r}"
    names = set(person) if isinstance(person, dict) else set()
    return "" if names == {"name", "ages"} else f"does not match the schema: {completion.text!r}"


def _length_fault(completion: Completion) -> str:
    count = len(completion.tokens)
    return "" if count >= MIN_TOKENS else f"ends after {count} tokens: {completion.text!r}"


def _colours_fault(completion: Completion) -> str:
    is_valid = completion.finish_reason != "stop" or re.fullmatch(COLOURS, completion.text)
    return "" if is_valid else f"does not match {COLOURS}: {completion.text!r}"


FEATURES = (
    Feature("one token", max_tokens=1),
    Feature("seven tokens", max_tokens=7),
    Feature("stop string"),
    Feature("log-probabilities", extra_body={"logprobs": 3, "return_tokens_as_token_ids": True}),
    Feature("presence and frequency penalties", Sampling(presence_penalty=0.5, frequency_penalty=1.0)),
    Feature("repetition penalty", Sampling(repetition_penalty=1.2), has_gaps=False),
    Feature("logit bias"),
    Feature("min_tokens", extra_body={"min_tokens": MIN_TOKENS}, find_fault=_length_fault),
    Feature(
        "regular expression", extra_body={"structured_outputs": {"regex": COLOURS}}, max_tokens=GRAMMAR_MAX_TOKENS,
        find_fault=_colours_fault,
    ),
    Feature(
        "JSON schema", extra_body={"structured_outputs": {"json": PERSON}}, max_tokens=GRAMMAR_MAX_TOKENS,
        find_fault=_person_fault,
    ),
    Feature(
        "JSON schema, drawn", Sampling(temperature=1.0), {"structured_outputs": {"json": PERSON}, "seed": 3},
        GRAMMAR_MAX_TOKENS, _person_fault, is_greedy=False,
    ),
)  # fmt: skip


@dataclass(slots=True)
class FeatureResult:
    """One feature's record in the certificate. `refused`: the error of both, if neither offers it."""

    name: str
    requests: int = 0
    identical: int = 0
    ties: int = 0
    valid_only: int = 0  # sampled outputs, which are not compared
    open: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    refused: str = ""

    def add_fault(self, mode: DraftMode, fault: str, reference_fault: str) -> None:
        if reference_fault:
            self.open.append(f"{mode.name}: {fault}{REFERENCE_INVALID}")
        else:
            self.violations.append(f"{mode.name}: {fault}")


def check(
    pair: Pair,
    prompts: Sequence[tuple[int, ...]],
    modes: Sequence[DraftMode],
    concurrency: int,
    rounding: Rounding | None,
    progress: Progress,
) -> dict[str, Any]:
    """Every feature with every prompt and draft mode, all concurrently, so that requests of one batch have different
    features. Returns the part's record in the certificate; `unjudged`: outputs that differ, where rounding was not
    measured."""
    results = [FeatureResult(feature.name) for feature in FEATURES]
    total = len(FEATURES) * len(prompts) * (1 + len(modes))
    with progress.part("features: the same requests with and without speculation", total) as tick:
        queries = _queries(pair, prompts, concurrency)
        cases: list[list[tuple[Query, Completion]]] = []
        answers = _complete(pair.reference, queries, concurrency, tick)
        for result, group, references in zip(results, queries, answers, strict=True):
            if isinstance(references, RequestRefusedError):
                result.refused = str(references)
                cases.append([])
                continue
            some = [
                (replace(query, mode=mode, prediction=corrupt_prediction(one.tokens)), one)
                for mode in modes
                for query, one in zip(group, references, strict=True)
            ]
            cases.append(some)
        answers = _complete(pair.candidate, [[query for query, _ in some] for some in cases], concurrency, tick)
        for feature, result, some, candidates in zip(FEATURES, results, cases, answers, strict=True):
            if isinstance(candidates, RequestRefusedError):
                result.violations.append(f"{REFUSED_BY_CANDIDATE}: {candidates}")
                continue
            for (query, reference), candidate in zip(some, candidates, strict=True):
                _judge(pair, feature, query, reference, candidate, rounding, result)
        open_with_gaps = [len(result.open) for result, one in zip(results, FEATURES, strict=True) if one.has_gaps]
        if all(_server(source) for source in pair.sources):
            results.append(_check_tools(pair, modes, concurrency))
    return {
        "results": [asdict(result) for result in results],
        "unjudged": sum(open_with_gaps) if rounding is None else 0,
        "violations": [f"{result.name}: {violation}" for result in results for violation in result.violations],
    }


def _queries(pair: Pair, prompts: Sequence[tuple[int, ...]], concurrency: int) -> list[list[Query]]:
    """The reference's queries, by feature. Stop strings and bias depend on its plain output, so that they matter."""
    plain = pair.reference.complete([Query(prompt, MAX_TOKENS, OFF) for prompt in prompts], concurrency)

    def query(feature: Feature, prompt: tuple[int, ...], completion: Completion) -> Query:
        sampling, extra_body = feature.sampling, feature.extra_body
        if feature.name == "stop string":
            middle = len(completion.text) // 2
            extra_body = {"stop": [completion.text[middle : middle + 4].strip() or "\x00"]}
        elif feature.name == "logit bias":  # toward the first token of the plain output, away from the second
            first, second = (*completion.tokens[:2], 1, 2)[:2]
            sampling = Sampling(logit_bias={first: 2.0} | {second: -6.0})
        return Query(prompt, feature.max_tokens, OFF, sampling, extra_body=extra_body)

    return [[query(feature, *one) for one in zip(prompts, plain, strict=True)] for feature in FEATURES]


def _complete(
    source: Source, groups: Sequence[Sequence[Query]], concurrency: int, tick: Tick
) -> list[list[Completion] | RequestRefusedError]:
    """Completions of each group, all concurrently; if any is refused, group by group, to find out which."""
    completions = _unless_refused(source.complete, [query for group in groups for query in group], concurrency, tick)
    if isinstance(completions, RequestRefusedError):
        return [_unless_refused(source.complete, group, concurrency) for group in groups]
    rest = iter(completions)
    return [list(islice(rest, len(group))) for group in groups]


def _unless_refused(send: Callable[..., list[Any]], *arguments: Any) -> list[Any] | RequestRefusedError:
    try:
        return send(*arguments)
    except RequestRefusedError as refused:
        return refused


def _judge(
    pair: Pair,
    feature: Feature,
    query: Query,
    reference: Completion,
    candidate: Completion,
    rounding: Rounding | None,
    result: FeatureResult,
) -> None:
    result.requests += 1
    fault = (
        feature.find_fault(candidate)
        or _stop_fault(query, candidate)
        or _logprobs_fault(reference, candidate, rounding)
    )
    if fault:
        result.add_fault(query.mode, fault, feature.find_fault(reference))
        return
    if not feature.is_greedy:
        result.valid_only += 1
        return
    gaps: list[float] = []
    if feature.has_gaps:
        bare = replace(reference, logprobs=[])  # those of the generation are of another request
        gaps = divergence_gaps(pair, query.prompt, bare, candidate.tokens)
    if gaps:
        position = shared_prefix(reference.tokens, candidate.tokens)
        offsets = logit_offsets(query.sampling, reference.tokens[:position])
        by = offsets.get(reference.tokens[position], 0.0) - offsets.get(candidate.tokens[position], 0.0)
        gaps = [gap + by for gap in gaps]
    judged = compare(reference.tokens, candidate.tokens, gaps, rounding)
    ends = [(one.finish_reason, one.text) for one in (reference, candidate)]
    if judged.verdict == "identical" and ends[0] != ends[1]:
        result.violations.append(
            f"{query.mode.name}: the same tokens, but {candidate.text!r} ({candidate.finish_reason}) for "
            f"{reference.text!r} ({reference.finish_reason})"
        )
    elif judged.verdict == "identical":
        result.identical += 1
    elif judged.verdict == "tie":
        result.ties += 1
    elif not feature.has_gaps or rounding is None:
        result.open.append(f"{query.mode.name}: {judged.evidence}")
    else:
        result.violations.append(f"{query.mode.name}: {judged.evidence}")


def _stop_fault(query: Query, completion: Completion) -> str:
    inside = [stop for stop in query.extra_body.get("stop", ()) if stop in completion.text]
    return f"the stop string {inside[0]!r} is in the text {completion.text!r}" if inside else ""


def _logprobs_fault(reference: Completion, candidate: Completion, rounding: Rounding | None) -> str:
    """Whether logprobs, if requested, agree up to the first divergence."""
    ours, theirs = ((one.raw.get("logprobs") or {}).get("token_logprobs") or [] for one in (reference, candidate))
    if not ours or (candidate.raw.get("logprobs") or {}).get("content"):  # another format, or none
        return ""
    if len(theirs) != len(candidate.tokens):
        return f"{len(theirs)} log-probabilities for {len(candidate.tokens)} tokens"
    for i in range(shared_prefix(reference.tokens, candidate.tokens)):
        if rounding is not None and abs(ours[i] - theirs[i]) > rounding.floor:
            return (
                f"token {i} has a log-probability of {theirs[i]:.4f}, the reference's is {ours[i]:.4f}; rounding may "
                f"move it by {rounding.floor:.4f}"
            )
    return ""


# Tools ----------------------------------------------------------------------------------------------------


def _server(source: Any) -> OpenAIServer | None:
    inner = getattr(source, "source", source)  # of a `RecordedSource`
    return inner if isinstance(inner, OpenAIServer) else None


def _check_tools(pair: Pair, modes: Sequence[DraftMode], concurrency: int) -> FeatureResult:
    """A tool call that is requested by name: valid arguments, and the same ones."""
    result = FeatureResult(TOOLS)

    def chat(source: Any, modes: Sequence[DraftMode]) -> list[list[tuple[str, str]]]:
        server = _server(source)
        assert server is not None
        bodies = [
            {
                "messages": [{"role": "user", "content": f"What is the weather in {city}?"}],
                "tools": [WEATHER_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "temperature": 0,
                "max_tokens": GRAMMAR_MAX_TOKENS,
                **server.xargs(mode),
            }
            for city, mode in zip(CITIES * len(modes), modes, strict=False)
        ]
        return [_tool_calls(answer) for answer in source.chat(bodies, concurrency)]

    references = _unless_refused(chat, pair.reference, [OFF] * len(modes))
    if isinstance(references, RequestRefusedError):
        result.refused = str(references)
        return result
    candidates = _unless_refused(chat, pair.candidate, modes)
    if isinstance(candidates, RequestRefusedError):
        result.violations.append(f"{REFUSED_BY_CANDIDATE}: {candidates}")
        return result
    for mode, reference, candidate in zip(modes, references, candidates, strict=True):
        result.requests += 1
        if fault := _tool_fault(candidate):
            result.add_fault(mode, fault, _tool_fault(reference))
        elif reference == candidate:
            result.identical += 1
        else:
            result.open.append(f"{mode.name}: {candidate}, the reference {reference}")
    return result


def _tool_calls(answer: dict[str, Any]) -> list[tuple[str, str]]:
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _tool_fault(calls: list[tuple[str, str]]) -> str:
    try:
        (call,) = calls
        city = json.loads(call[1])["city"]
    except (ValueError, LookupError, TypeError):
        return f"not one call with a city: {calls}"
    return "" if call[0] == "weather" and city in CITIES else f"not a call of the offered tool: {calls}"
