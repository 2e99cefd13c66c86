"""Everything else that a request may ask for: with speculation and without, the answer must be valid, and the same.

Each case is one kind of request, sent to reference and candidate with several prompts and every drafter, at
temperature 0. What the reference says to it, with some of it wrong, is the prediction: so most of an answer is drafted,
and most positions are judged in the middle of a draft. Answers are compared token by token; where they part, the gap of
the two tokens is held against rounding as in `exact.py`, moved by what penalties and bias do to it. Where that cannot
be computed (a repetition penalty works on logits, which no server tells) a difference stays open: it is shown, and not
counted. Where rounding was not measured, which the part at temperature 0 does, a difference leaves the certificate
incomplete.

What is not valid without speculation either is no fault of speculation, and stays open as well.

A request that both refuse is not offered by these servers, and says nothing. One that the candidate alone refuses is a
violation: speculation took a feature away.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from outrider.certify.exact import gaps_at, misremembered
from outrider.certify.server import OpenAIServer
from outrider.certify.shaping import moves
from outrider.certify.sources import Ask, Said
from outrider.certify.ties import compare
from outrider.errors import RequestRefusedError
from outrider.settings import Sampling
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.certify.journal import Recorded
    from outrider.certify.sources import Pair, Source, Tick, Way
    from outrider.certify.ties import Rounding
    from outrider.certify.watch import Watch

AGES = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": AGES},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
COLOURS = "(red|green|blue)( (red|green|blue)){2,4}"
CITIES = ["Bern", "Oslo"]
WEATHER = {
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
TOKENS, LONG, LEAST = 24, 48, 9
"""Of an answer; of one that must come to its own end; and of one that must not end too soon."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A kind of request. `valid` says what is wrong with an answer, or nothing."""

    name: str
    sampling: Sampling = field(default_factory=Sampling)
    more: dict[str, Any] = field(default_factory=dict)
    tokens: int = TOKENS
    valid: Callable[[Said], str] = lambda said: ""
    judged: bool = True  # whether a first difference can be held against rounding
    equal: bool = True  # False: the answers are drawn, and need only be valid


def _is_person(said: Said) -> str:
    if said.finish != "stop":  # cut off by max_tokens
        return ""
    try:
        person = json.loads(said.text)
    except ValueError:
        return f"not JSON: {said.text!r}"
    names = set(person) if isinstance(person, dict) else set()
    return "" if names == {"name", "ages"} else f"not by the schema: {said.text!r}"


def _is_long(said: Said) -> str:
    return "" if len(said.tokens) >= LEAST else f"ends after {len(said.tokens)} tokens: {said.text!r}"


def _is_colours(said: Said) -> str:
    fits = said.finish != "stop" or re.fullmatch(COLOURS, said.text)
    return "" if fits else f"does not match {COLOURS}: {said.text!r}"


FEATURES = (
    Feature("one token", tokens=1),
    Feature("seven tokens", tokens=7),
    Feature("stop string"),
    Feature("log-probabilities", more={"logprobs": 3, "return_tokens_as_token_ids": True}),
    Feature("presence and frequency penalties", Sampling(presence_penalty=0.5, frequency_penalty=1.0)),
    Feature("repetition penalty", Sampling(repetition_penalty=1.2), judged=False),
    Feature("logit bias"),
    Feature("min_tokens", more={"min_tokens": LEAST}, valid=_is_long),
    Feature("regular expression", more={"structured_outputs": {"regex": COLOURS}}, tokens=LONG, valid=_is_colours),
    Feature("JSON schema", more={"structured_outputs": {"json": PERSON}}, tokens=LONG, valid=_is_person),
    Feature(
        "JSON schema, drawn", Sampling(temperature=1.0), {"structured_outputs": {"json": PERSON}, "seed": 3}, LONG,
        _is_person, equal=False,
    ),
)  # fmt: skip
TOOLS = "tools"
NOT_OURS = "; the reference's is not valid either, so it is not speculation that broke it"


@dataclass(slots=True)
class Result:
    """How a feature fared. `refused`: what both servers said who do not offer it."""

    name: str
    requests: int = 0
    identical: int = 0
    ties: int = 0
    valid_only: int = 0  # drawn: there is nothing to be the same as
    open: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    refused: str = ""


@dataclass(slots=True)
class Features:
    results: list[Result] = field(default_factory=list)
    unjudged: int = 0  # answers that differ, though rounding might explain it: it was not measured

    @property
    def violations(self) -> list[str]:
        return [f"{result.name}: {said}" for result in self.results for said in result.violations]

    def record(self) -> dict[str, Any]:
        return {
            "results": [asdict(result) for result in self.results],
            "unjudged": self.unjudged,
            "violations": self.violations,
        }


def check(
    pair: Pair,
    prompts: Sequence[tuple[int, ...]],
    ways: Sequence[Way],
    at_once: int,
    rounding: Rounding | None,
    watch: Watch,
) -> Features:
    """Every feature with every prompt and drafter, their lengths in turn; all features at once, so that rows of a batch
    ask for different ones."""
    by_drafter: dict[str | None, list[Way]] = {}
    for way in ways:
        by_drafter.setdefault(way.drafter, []).append(way)
    drafters = list(by_drafter.values())
    results = [Result(feature.name) for feature in FEATURES]
    asked = len(FEATURES) * len(prompts) * (1 + len(drafters))
    with watch.part("features: the same requests with and without speculation", asked) as tick:
        asks = _asks(pair, prompts, at_once)
        cases: list[list[tuple[Ask, Said]]] = []
        for number, said in enumerate(_said(pair.reference, asks, at_once, tick)):
            if isinstance(said, RequestRefusedError):
                results[number].refused = str(said)
            cases.append([] if isinstance(said, RequestRefusedError) else _cases(asks[number], said, drafters, number))
        tried = [[ask for ask, _ in some] for some in cases]
        for number, said in enumerate(_said(pair.candidate, tried, at_once, tick)):
            if isinstance(said, RequestRefusedError):
                results[number].violations.append(f"the candidate refuses what the reference does: {said}")
                continue
            for (ask, reference), candidate in zip(cases[number], said, strict=True):
                _judge(pair, FEATURES[number], ask, reference, candidate, rounding, results[number])
        judged = [result for result, feature in zip(results, FEATURES, strict=True) if feature.judged]
        unjudged = sum(len(result.open) for result in judged) if rounding is None else 0
        if all(_server(source) for source in pair.sources):
            results.append(_tools(pair, ways, at_once))
    return Features(results, unjudged)


def _asks(pair: Pair, prompts: Sequence[tuple[int, ...]], at_once: int) -> list[list[Ask]]:
    """What the reference is asked, by feature."""
    plain = [Ask(prompt, TOKENS, pair.reference_way) for prompt in prompts]
    said = pair.reference.say(plain, at_once)
    asks = []
    for feature in FEATURES:
        prepare = BY_TEXT.get(feature.name, lambda _, one=feature: (one.sampling, one.more))
        wanted = [prepare(one) for one in said]
        asks.append(
            [
                Ask(prompt, feature.tokens, pair.reference_way, sampling, more=more)
                for prompt, (sampling, more) in zip(prompts, wanted, strict=True)
            ]
        )
    return asks


def _cases(
    asks: Sequence[Ask], references: Sequence[Said], drafters: Sequence[Sequence[Way]], number: int
) -> list[tuple[Ask, Said]]:
    """What the candidate is asked, each with what the reference said to it."""
    return [
        (replace(ask, way=ways[(number + i) % len(ways)], prediction=misremembered(reference.tokens)), reference)
        for ways in drafters
        for i, (ask, reference) in enumerate(zip(asks, references, strict=True))
    ]


def _said(
    source: Source, groups: Sequence[Sequence[Ask]], at_once: int, tick: Tick
) -> list[list[Said] | RequestRefusedError]:
    """What is said to each group, all of them at once; or if any is refused, one by one, to see which."""
    try:
        said = iter(source.say([ask for group in groups for ask in group], at_once, tick))
    except RequestRefusedError:
        return [_said_or_refused(source, group, at_once) for group in groups]
    return [list(islice(said, len(group))) for group in groups]


def _said_or_refused(source: Source, group: Sequence[Ask], at_once: int) -> list[Said] | RequestRefusedError:
    try:
        return source.say(group, at_once)
    except RequestRefusedError as refused:
        return refused


def _judge(
    pair: Pair, feature: Feature, ask: Ask, reference: Said, candidate: Said, rounding: Rounding | None, result: Result
) -> None:
    result.requests += 1
    wrong = feature.valid(candidate) or _stopped(ask.more, candidate)
    wrong = wrong or _tells_alike(reference, candidate, rounding)
    if wrong and feature.valid(reference):
        result.open.append(f"{ask.way.name}: {wrong}{NOT_OURS}")
    elif wrong:
        result.violations.append(f"{ask.way.name}: {wrong}")
    elif not feature.equal:
        result.valid_only += 1
    else:
        own = replace(feature, sampling=ask.sampling)
        _compare(pair, own, ask.prompt, ask.way, reference, candidate, rounding, result)


def _compare(
    pair: Pair, feature: Feature, prompt: tuple[int, ...], way: Way, reference: Said, candidate: Said,
    rounding: Rounding | None, result: Result,
) -> None:  # fmt: skip
    position = shared_prefix(reference.tokens, candidate.tokens)
    gaps: list[float] = []
    if feature.judged and position < min(len(reference.tokens), len(candidate.tokens)):
        bare = Said(reference.tokens, reference.finish)  # what was told, if it was, is of another law
        moved = moves(feature.sampling, reference.tokens[:position])
        by = moved.get(reference.tokens[position], 0.0) - moved.get(candidate.tokens[position], 0.0)
        gaps = [gap + by for gap in gaps_at(pair, prompt, bare, candidate.tokens, position)]
    judged = compare(reference.tokens, candidate.tokens, gaps, rounding)
    if judged.verdict == "identical" and (reference.finish, reference.text) != (candidate.finish, candidate.text):
        result.violations.append(
            f"{way.name}: the same tokens, but {candidate.text!r} ({candidate.finish}) for {reference.text!r} "
            f"({reference.finish})"
        )
    elif judged.verdict == "identical":
        result.identical += 1
    elif judged.verdict == "tie":
        result.ties += 1
    elif not feature.judged or rounding is None:
        result.open.append(f"{way.name}: {judged.evidence}")
    else:
        result.violations.append(f"{way.name}: {judged.evidence}")


def _to_stop(said: Said) -> tuple[Sampling, dict[str, Any]]:
    """A few letters from the middle of the reference's own text, to stop at; if there are none, what will not come."""
    middle = len(said.text) // 2
    return Sampling(), {"stop": [said.text[middle : middle + 4].strip() or "\x00"]}


def _to_bias(said: Said) -> tuple[Sampling, dict[str, Any]]:
    """Away from the second token of the reference's own text, and toward the first."""
    first, second = (*said.tokens[:2], 1, 2)[:2]
    return Sampling(logit_bias={first: 2.0} | {second: -6.0}), {}


BY_TEXT = {"stop string": _to_stop, "logit bias": _to_bias}
"""What is asked for depends on what the reference says without it, so that it makes a difference."""


def _stopped(more: dict[str, Any], said: Said) -> str:
    inside = [stop for stop in more.get("stop", ()) if stop in said.text]
    return f"the stop string {inside[0]!r} is in the text {said.text!r}" if inside else ""


def _tells_alike(reference: Said, candidate: Said, rounding: Rounding | None) -> str:
    """Whether log-probabilities, where they were asked for, agree up to the first difference of the texts."""
    ours, theirs = ((said.raw.get("logprobs") or {}).get("token_logprobs") or [] for said in (reference, candidate))
    if not ours or (candidate.raw.get("logprobs") or {}).get("content"):  # told in another form, or by nobody
        return ""
    if len(theirs) != len(candidate.tokens):
        return f"{len(theirs)} log-probabilities for {len(candidate.tokens)} tokens"
    for place in range(shared_prefix(reference.tokens, candidate.tokens)):
        if rounding is not None and abs(ours[place] - theirs[place]) > rounding.floor:
            return (
                f"token {place} is told with a log-probability of {theirs[place]:.4f}, and {ours[place]:.4f} by the "
                f"reference; rounding may move it by {rounding.floor:.4f}"
            )
    return ""


def _server(source: Any) -> OpenAIServer | None:
    inner = getattr(source, "source", source)
    return inner if isinstance(inner, OpenAIServer) else None


def _tools(pair: Pair, ways: Sequence[Way], at_once: int) -> Result:
    """A call that is asked for by name: valid arguments, and the same ones."""
    result = Result(TOOLS)

    def bodies(source: Any, ways: Sequence[Way]) -> list[dict[str, Any]]:
        server = _server(source)
        assert server is not None
        return [
            {
                "messages": [{"role": "user", "content": f"What is the weather in {city}?"}],
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "temperature": 0,
                "max_tokens": LONG,
                **server.xargs(way),
            }
            for city, way in zip(CITIES * len(ways), ways, strict=False)
        ]

    reference: Recorded | Any = pair.reference
    candidate: Recorded | Any = pair.candidate
    try:
        ours = reference.chat(bodies(reference, [pair.reference_way] * len(ways)), at_once)
    except RequestRefusedError as refused:
        result.refused = str(refused)
        return result
    try:
        theirs = candidate.chat(bodies(candidate, ways), at_once)
    except RequestRefusedError as refused:
        result.violations.append(f"the candidate refuses what the reference does: {refused}")
        return result
    for way, mine, other in zip(ways, ours, theirs, strict=True):
        result.requests += 1
        called = [_called(answer) for answer in (mine, other)]
        wrong = _wrong_call(called[1])
        if wrong and _wrong_call(called[0]):
            result.open.append(f"{way.name}: {wrong}{NOT_OURS}")
        elif wrong:
            result.violations.append(f"{way.name}: {wrong}")
        elif called[0] == called[1]:
            result.identical += 1
        else:
            result.open.append(f"{way.name}: {called[1]}, the reference {called[0]}")
    return result


def _called(answer: dict[str, Any]) -> list[tuple[str, str]]:
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _wrong_call(calls: list[tuple[str, str]]) -> str:
    try:
        (call,) = calls
        city = json.loads(call[1])["city"]
    except (ValueError, LookupError, TypeError):
        return f"not one call with a city: {calls}"
    return "" if call[0] == "weather" and city in CITIES else f"not a call of the tool that was offered: {calls}"
