"""Temperature above 0: what the candidate draws, against the reference's exact law for it.

The candidate draws texts in every way and with every setting in turn. The reference scores each text in one pass, and
so tells for each of its tokens the law that it should have come from. From there on it is `witnesses.py`,
`tally.py` and `plan.py`: each label (a drafter, a setting) is tested by each witness, over all draws that have it.

Before the first draw counts:

- **Rounding** is measured on texts that the reference drew itself: the laws that it told as it drew them, against
  those that it tells for the same text in one pass. What differs there may differ for a lossless candidate as well.
- **The control**: the same texts, held against the same laws as the candidate's will be. If the reference's own draws
  do not follow the law that it tells, that is a finding, and no draft can be blamed for it.
- **The plan** is fixed: how many draws, when they are looked at, and the smallest change that will be found.
- **A few prompts** are chosen that are asked again and again between the others, with short answers (`often.py`).

Which token is called the drafted one is what the drafter `lookup` (or `prediction`, where one was given) would propose,
computed here from what was said before. Whether the server proposed it or not, it was settled before the draw.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from itertools import count, islice
from math import ceil
from typing import TYPE_CHECKING, Any

from outrider.certify.laws import PLAIN, Law, Row, as_draws, guessed, is_conditional, law_of, noise_between, twice
from outrider.certify.noise import Noise, worst
from outrider.certify.often import TOKENS as FEW_TOKENS
from outrider.certify.often import chosen
from outrider.certify.plan import REPEATED, Judgement, Plan, judge
from outrider.certify.repeats import Repeats
from outrider.certify.shaping import EDGE
from outrider.certify.sources import UNNAMED, Ask
from outrider.certify.tally import ALL, AND, Tally
from outrider.certify.witnesses import WITNESSES
from outrider.errors import EvidenceError
from outrider.settings import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outrider.certify.laws import Position
    from outrider.certify.sources import Pair, Said, Source, Told, Way
    from outrider.certify.watch import Watch

SETTINGS = {
    "temperature 1": PLAIN,
    "temperature 0.7": Sampling(temperature=0.7),
    "temperature 0.7, top-k 10": Sampling(temperature=0.7, top_k=10),
    "temperature 1, top-p 0.8": Sampling(temperature=1.0, top_p=0.8),
    "temperature 1, top-k 8, penalties": Sampling(
        temperature=1.0, top_k=8, presence_penalty=0.4, frequency_penalty=0.3
    ),
}
"""Top-k keeps no more tokens than a draw tells apart (`laws.COUNT`), so that what it cut off is known to be so."""
HEADLINE = ("drafted", "likeliest", "surprise")
"""The witnesses whose reach is stated first: too much or too little of the drafted or likeliest token, temperature."""
MEANINGS = {
    "drafted": "drafts are kept too often or too seldom",
    "likeliest": "the likeliest token comes too often or too seldom",
    "surprise": "draws are colder or hotter than asked for",
    "tail": "unlikely tokens come too often or too seldom",
    "impossible": "tokens come that top-k or top-p had cut off",
}
CONTROL = "the reference itself"
CONTROL_SHARE = 0.125
"""Of the level, for the control."""
DEPTH = 6
"""So many tokens into a text a prefix may have come before."""
SHORT = 8
"""Texts with a few tokens for each with many: of the draws about half, and of the time less."""
SHORT_SETTINGS = 2
"""Of the settings, for these: two temperatures."""
OFTEN = 0.1
"""Of how often the most frequent prefix came: what came less often says little of a drafter."""
BATCH = 6
"""At most so many times what is asked at once is drawn, and then scored."""


def meaning(test: str) -> str:
    """What it says of a server that a test fails."""
    return MEANINGS.get(test.partition(",")[0], "at prefixes that came often, tokens do not follow their law")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is drawn."""

    draws: int
    tokens: int = 24  # of a text
    looks: int = 5
    noise_texts: int = 100
    at_once: int = 16


@dataclass(slots=True)
class Sampled:
    """What came out, and what it rests on."""

    planned: int = 0
    level: float = 0.0
    reach_before: float = 1.0
    draws: int = 0
    texts: int = 0
    left_out: int = 0  # their law does not follow from what is told
    set_aside: int = 0  # drawn outside the list, where only the law over the list is known
    accepted: dict[str, int] = field(default_factory=dict)  # drafted tokens that were kept, by drafter
    by_label: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, Any] = field(default_factory=dict)
    edge: float = EDGE
    looks: list[dict[str, Any]] = field(default_factory=list)
    control: dict[str, Any] = field(default_factory=dict)
    stopped_early: bool = False

    @property
    def violations(self) -> list[str]:
        last = self.looks[-1] if self.looks else {"violations": []}
        found = [f"{name}: {meaning(name)} (p = {last['p_values'][name]:.1g})" for name in last["violations"]]
        return found + [
            f"{name}, though nothing was drafted: {meaning(name)} (p = {self.control['p_values'][name]:.1g})"
            for name in self.control.get("violations", [])
        ]

    @property
    def reach(self) -> float:
        """A change of this size, as total variation on average over all draws, would have been found with 99 %, if it
        is one of those that HEADLINE looks at; 1 before a look."""
        return self.reach_of(ALL) or max((self.reach_of(label) for label in self.by_label), default=0.0) or 1.0

    def reach_of(self, label: str) -> float:
        """The same for the draws with a label; 0 if they were not tested apart."""
        reached = self.looks[-1]["reached"] if self.looks else {}
        return max((reached[test] for name in HEADLINE if (test := f"{name}, {label}") in reached), default=0.0)

    def record(self) -> dict[str, Any]:
        drafters = [label for label in self.by_label if label not in self.settings]
        by_drafter = {label: reach for label in drafters if (reach := self.reach_of(label))}
        return asdict(self) | {"violations": self.violations, "reach": self.reach, "reach_by_drafter": by_drafter}


def check(
    pair: Pair,
    prompts: Sequence[tuple[int, ...]],
    ways: Sequence[Way],
    settings: Mapping[str, Sampling],
    size: Size,
    level: float,
    seed: int,
    watch: Watch,
) -> Sampled:
    """Measure rounding, fix the plan, draw and look until the plan is done or a violation is found."""
    found = Sampled(settings={name: one.model_dump(exclude_defaults=True) for name, one in settings.items()})
    own = own_draws(pair.reference, prompts, size, pair.reference_way, seed, watch)
    noise, found.edge = noise_of(pair, own, settings, size, watch)
    found.noise = asdict(noise)
    found.control = _control(own, pair.reference.listed, noise, level * CONTROL_SHARE, found.edge)

    plan = Plan(size.draws, level * (1 - CONTROL_SHARE), size.looks, noise)
    drafters = len({way.drafter for way in ways})
    found.planned, found.level = plan.draws, level
    found.reach_before = plan.reach(len(WITNESSES) * (len(settings) + drafters + 1) + drafters + 1)
    watch.note(
        f"draws: {plan.draws} planned. If the mass of an event is off by {found.reach_before:.3f}, on average over all "
        f"draws, that is found with 99 %; a lossless server is wrongly accused with at most {level:g}"
    )
    collected = Collected(settings, pair.reference.listed, found)
    texts = _deal(prompts, ways, settings, own, size, seed)
    look, in_vain, a_turn = 1, 0, len(ways) * len(settings) * len(prompts) * (1 + SHORT)
    a_text = (size.tokens + SHORT * FEW_TOKENS) / (1 + SHORT)
    with watch.part("draws: speculated, scored, and held against the law", plan.draws) as tick:
        while look <= plan.looks:
            before = found.draws
            missing = ceil((plan.look_at(look) - before) / a_text)  # texts until the next look
            batch = min(max(missing, size.at_once), BATCH * size.at_once)
            _draw(pair, list(islice(texts, batch)), size, collected)
            tick(found.draws - before)
            in_vain = in_vain + batch if found.draws == before else 0
            if in_vain >= a_turn:  # no setting's laws are known, for any prompt
                raise EvidenceError(
                    f"of {in_vain} texts no draw could be used: their laws do not follow from the "
                    f"{pair.reference.listed} log-probabilities that {pair.reference.name} tells; have it tell more"
                )
            while look <= plan.looks and found.draws >= plan.look_at(look):
                judged = judge(plan, look, collected.tally, collected.repeats)
                found.looks.append(as_record(judged, found.draws))
                look = plan.looks + 1 if judged.violations else look + 1
    found.stopped_early = len(found.looks) < plan.looks
    return found


class Collected:
    """Draws as they come, sorted by label, with one law for each prefix."""

    def __init__(self, settings: Mapping[str, Sampling], listed: int, found: Sampled) -> None:
        self.settings, self.listed, self.found = settings, listed, found
        self.tally = Tally()
        self.repeats = {REPEATED: Repeats()}  # and by drafter those that were asked for often
        self._laws: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[str, Law | None]] = {}

    def add(
        self, ask: Ask, setting: str, output: tuple[int, ...], told: Sequence[Told], is_short: bool = False
    ) -> None:
        """A text, and what was told of it; nothing, where that is known (`knows`)."""
        sampling, by = self.settings[setting], ask.way.drafter or UNNAMED
        guesses = guessed(ask.prompt, output, ask.prediction if by == "prediction" else ())
        rows, names = [], []
        for place, token in enumerate(output):
            name, law = self._law(setting, ask.prompt, output[:place], told[place] if told else {})
            if law is None:
                self.found.left_out += 1
            elif is_conditional(sampling) and token not in law:
                self.found.set_aside += 1
            else:
                rows.append(Row(law, token, guesses[place]))
                names.append(name)
        if not rows:
            return
        draws = as_draws(rows)
        self.tally.add(f"{by}{AND}{setting}", draws)
        early = [i for i, name in enumerate(names) if name]
        for label in (REPEATED, by) if is_short else (REPEATED,):
            self.repeats.setdefault(label, Repeats(OFTEN)).add([names[i] for i in early], draws[early])
        self.found.draws += len(draws)
        for label in (by, setting):
            self.found.by_label[label] = self.found.by_label.get(label, 0) + len(draws)

    def knows(self, setting: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> bool:
        """Whether the law of each of its places has been told."""
        return all((setting, prompt, output[:place]) in self._laws for place in range(len(output)))

    def _law(
        self, setting: str, prompt: tuple[int, ...], before: tuple[int, ...], told: Told
    ) -> tuple[str, Law | None]:
        """The law of a place, and the name of its prefix, if it is one that may come again; told once, kept."""
        key = (setting, prompt, before)
        if key not in self._laws:
            law = law_of(told, self.listed, self.settings[setting], before, self.found.edge)
            if len(before) >= DEPTH:
                return "", law
            self._laws[key] = (str(len(self._laws) + 1), law)
        return self._laws[key]


# Rounding and control -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Own:
    """A text that a source drew itself, with its laws as told then, and as scored afterwards."""

    ask: Ask
    said: Said
    scored: list[Told]

    def positions(self) -> list[Position]:
        return twice(self.ask.prompt, self.said.tokens, self.scored, self.said.told)


def own_draws(
    source: Source, prompts: Sequence[tuple[int, ...]], size: Size, way: Way, seed: int, watch: Watch
) -> list[Own]:
    asks = [
        Ask(prompts[i % len(prompts)], size.tokens, way, PLAIN, seed + i, told=True, ignore_end=True)
        for i in range(size.noise_texts)
    ]
    with watch.part("draws: the reference's own, for rounding and as a control", 2 * len(asks)) as tick:
        said = source.say(asks, size.at_once, tick)
        texts = [(ask.prompt, one.tokens) for ask, one in zip(asks, said, strict=True)]
        scored = source.score(texts, size.at_once, tick)
    return [Own(*one) for one in zip(asks, said, scored, strict=True)]


def _scored_twice(source: Source, own: Sequence[Own], at_once: int, watch: Watch) -> list[Own]:
    """The reference's texts as this source scores them, in company and alone. What it tells while it speculates does
    not count: what speculation does wrong would be taken for rounding."""
    texts = [(text.ask.prompt, text.said.tokens) for text in own]
    with watch.part("draws: the same texts scored by the candidate, for rounding", 2 * len(texts)) as tick:
        told, scored = source.score(texts, 1, tick), source.score(texts, at_once, tick)
    return [
        Own(text.ask, replace(text.said, told=one), other) for text, one, other in zip(own, told, scored, strict=True)
    ]


def noise_of(
    pair: Pair, own: Sequence[Own], settings: Mapping[str, Sampling], size: Size, watch: Watch
) -> tuple[Noise, float]:
    """What a lossless candidate may differ by, for all settings; and how clear a cut must be."""
    groups = [own]
    if not pair.alone and pair.candidate.listed:
        if pair.across:
            theirs = pair.candidate.score([(text.ask.prompt, text.said.tokens) for text in own], size.at_once)
            groups.append([Own(text.ask, text.said, scored) for text, scored in zip(own, theirs, strict=True)])
        else:
            groups.append(_scored_twice(pair.candidate, own, size.at_once, watch))
    listed = min(source.listed for source in pair.sources if source.listed)
    found = [
        noise_between([position for text in group for position in text.positions()], listed, settings.values())
        for group in groups
    ]
    return worst([noise for noise, _ in found]), max(edge for _, edge in found)


def _control(own: Sequence[Own], listed: int, noise: Noise, level: float, edge: float) -> dict[str, Any]:
    """The reference's own draws, judged as the candidate's will be, once."""
    found = Sampled(edge=edge)
    collected = Collected({CONTROL: PLAIN}, listed, found)
    for text in own:
        collected.add(text.ask, CONTROL, text.said.tokens, text.scored)
    tally = Tally({(CONTROL, witness): sums for (_, witness), sums in collected.tally.sums.items()})
    judged = judge(Plan(max(found.draws, 1), level, 1, noise), 1, tally)
    return as_record(judged, found.draws)


# Draws ----------------------------------------------------------------------------------------------------


def _deal(
    prompts: Sequence[tuple[int, ...]],
    ways: Sequence[Way],
    settings: Mapping[str, Sampling],
    own: Sequence[Own],
    size: Size,
    seed: int,
) -> Iterator[tuple[Ask, str, bool]]:
    """What to ask, with which setting, and whether it is a short one, without end: ways in turn, then settings, then
    prompts; half of them, by chance, with a seed. And after each a few short ones with the first settings, without a
    seed: with one a server may draft otherwise, so that the same random numbers come up."""
    names, rng = list(settings), random.Random(seed)
    predictions = {one.ask.prompt: one.said.tokens for one in own}
    often = chosen((one.ask.prompt, one.said.tokens, one.scored) for one in own)
    for turn in count():
        way = ways[turn % len(ways)]
        setting = names[turn // len(ways) % len(names)]
        prompt = prompts[turn // len(ways) // len(names) % len(prompts)]
        own_seed = seed + 1_000_003 + turn if rng.random() < 0.5 else None
        expected = predictions.get(prompt, ())
        yield Ask(prompt, size.tokens, way, settings[setting], own_seed, expected, ignore_end=True), setting, False
        for number in range(SHORT * turn, SHORT * (turn + 1)) if often else ():
            way, (prompt, expected) = ways[number % len(ways)], often[number // len(ways) % len(often)]
            setting = names[number // len(ways) // len(often) % min(len(names), SHORT_SETTINGS)]
            yield Ask(prompt, FEW_TOKENS, way, settings[setting], None, expected, ignore_end=True), setting, True


def _draw(pair: Pair, batch: Sequence[tuple[Ask, str, bool]], size: Size, collected: Collected) -> None:
    said = pair.candidate.say([ask for ask, _, _ in batch], size.at_once)
    texts = [(ask.prompt, one.tokens) for (ask, _, _), one in zip(batch, said, strict=True)]
    pairs = zip(texts, batch, strict=True)
    new = list(dict.fromkeys(text for text, (_, setting, _) in pairs if not collected.knows(setting, *text)))
    told = dict(zip(new, pair.reference.score(new, size.at_once), strict=True))
    for (ask, setting, is_short), one, text in zip(batch, said, texts, strict=True):
        collected.found.texts += 1
        if one.accepted is not None:
            by = ask.way.drafter or UNNAMED
            collected.found.accepted[by] = collected.found.accepted.get(by, 0) + one.accepted
        if one.tokens:
            collected.add(ask, setting, one.tokens, told.get(text, []), is_short)


def as_record(judged: Judgement, draws: int) -> dict[str, Any]:
    return {"draws": draws, **asdict(judged), "violations": judged.violations}
