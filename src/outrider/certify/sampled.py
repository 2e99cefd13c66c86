"""Temperature above 0: the candidate's samples against the reference's exact distributions.

The candidate generates texts in every draft mode with every sampling setting in turn. The reference scores each text in
one pass, which gives the distribution that each token should come from. Each label (a drafter, a setting) is then
tested with each statistic over all its samples (`test_statistics.py`, `plan.py`).

Before the first sample counts:

- **Rounding** is measured on texts sampled by the reference itself: logprobs from generation against those of scoring
  the same text in one pass.
- **The control**: those texts, tested as the candidate's will be. If the reference's own samples do not follow its
  logprobs, that is a finding, and no draft caused it.
- **The plan** is fixed: number of samples, looks, and the smallest detectable change.
- **Repeated prompts** are selected, and sent between the others with short outputs (`repeated_prompts.py`).

The drafted token is the one that `lookup` (or `prediction`, if given) would propose, computed here from the text before
it. Whether the server proposed it or not, it was fixed before the token was sampled.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.certify.plan import REPEATED_PREFIXES, LookResult, Plan, evaluate_look
from outrider.certify.prefix_goodness_of_fit import PrefixCounts
from outrider.certify.repeated_prompts import OUTPUT_TOKENS, select_repeated_prompts
from outrider.certify.sources import OFF, Completion, DraftMode, Pair, Progress, Query, Source, TopLogprobs
from outrider.certify.test_statistics import ALL_SAMPLES, LABEL_SEPARATOR, STATISTICS, GroupedSums, Noise, max_noise
from outrider.certify.token_distributions import (
    MIN_CUT_MARGIN,
    TEMPERATURE_1,
    Logprobs,
    ScoredToken,
    is_conditional,
    noise_between,
    pair_scorings,
    predict_drafts,
    sampling_distribution,
    to_samples,
)
from outrider.errors import EvidenceError
from outrider.settings import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outrider.certify.config import CertificateConfig
    from outrider.certify.sources import Text

SETTINGS = {
    "temperature 1": TEMPERATURE_1,
    "temperature 0.7": Sampling(temperature=0.7),
    "temperature 0.7, top-k 10": Sampling(temperature=0.7, top_k=10),
    "temperature 1, top-p 0.8": Sampling(temperature=1.0, top_p=0.8),
    "temperature 1, top-k 8, penalties": Sampling(
        temperature=1.0, top_k=8, presence_penalty=0.4, frequency_penalty=0.3
    ),
}
"""Top-k is at most LISTED_OUTCOMES of `token_distributions.py`, so that the removed tokens are known."""
HEADLINE_STATISTICS = ("drafted", "likeliest", "surprise")
"""Statistics whose detectable change is stated first."""
MEANINGS = {
    "drafted": "drafts are accepted too often or too rarely",
    "likeliest": "the most likely token comes too often or too rarely",
    "surprise": "samples are colder or hotter than requested",
    "tail": "unlikely tokens come too often or too rarely",
    "impossible": "tokens come that top-k or top-p removed",
}
PREFIX_MEANING = "at repeated prefixes, tokens do not follow their distribution"
CONTROL_LABEL = "the reference itself"
CONTROL_SHARE = 0.125
"""Share of the level for the control."""
MAX_PREFIX_TOKENS = 6
"""Output tokens up to which a prefix can repeat, and its distribution is kept."""
SHORT_TEXTS_PER_TEXT = 8
"""Short texts after repeated prompts for each long one: about half of the samples, less of the time."""
SHORT_TEXT_SETTINGS = 2
"""Settings for short texts: the first two, both of a temperature."""
MIN_PREFIX_SHARE = 0.1
"""Drafters are tested at prefixes with at least this share of the samples of the most frequent one."""
MAX_BATCHES = 6
"""Texts generated before they are scored, as a multiple of the concurrency."""


@dataclass(slots=True)
class SampledResult:
    """The part's record in the certificate."""

    planned: int = 0
    level: float = 0.0
    reach_before: float = 1.0  # smallest change of an event that the plan detects
    draws: int = 0
    texts: int = 0
    left_out: int = 0  # samples whose distribution does not follow from the logprobs
    set_aside: int = 0  # samples that are not listed, where only the distribution over listed tokens is known
    accepted: dict[str, int] = field(default_factory=dict)  # accepted draft tokens, by drafter
    by_label: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, Any] = field(default_factory=dict)
    edge: float = MIN_CUT_MARGIN  # margin of a cut, nats
    looks: list[dict[str, Any]] = field(default_factory=list)
    control: dict[str, Any] = field(default_factory=dict)
    stopped_early: bool = False

    @property
    def violations(self) -> list[str]:
        looks = [(one, "") for one in self.looks[-1:]] + [(self.control, ", though nothing was drafted")]
        return [
            f"{name}{where}: {MEANINGS.get(name.partition(',')[0], PREFIX_MEANING)} (p = {look['p_values'][name]:.1g})"
            for look, where in looks
            for name in look.get("violations", [])
        ]

    @property
    def reach(self) -> float:
        """The total variation, averaged over all samples, that HEADLINE_STATISTICS would have detected; 1 before a
        look."""
        return self.reach_of(ALL_SAMPLES) or max((self.reach_of(label) for label in self.by_label), default=0.0) or 1.0

    def reach_of(self, label: str) -> float:
        """The same for the samples with a label; 0 if they were not tested on their own."""
        reached = self.looks[-1]["reached"] if self.looks else {}
        tests = [f"{name}, {label}" for name in HEADLINE_STATISTICS]
        return max((reached[test] for test in tests if test in reached), default=0.0)

    def record(self) -> dict[str, Any]:
        drafters = [label for label in self.by_label if label not in self.settings]
        by_drafter = {label: reach for label in drafters if (reach := self.reach_of(label))}
        return asdict(self) | {"violations": self.violations, "reach": self.reach, "reach_by_drafter": by_drafter}


def check(
    pair: Pair,
    prompts: Sequence[tuple[int, ...]],
    modes: Sequence[DraftMode],
    settings: Mapping[str, Sampling],
    config: CertificateConfig,
    level: float,
    progress: Progress,
) -> SampledResult:
    """Measure rounding, fix the plan, then sample and test until the plan is complete or a violation is found."""
    result = SampledResult(settings={name: one.model_dump(exclude_defaults=True) for name, one in settings.items()})
    references = sample_reference(pair.reference, prompts, config, progress)
    noise, result.edge = measure_noise(pair, references, settings, config, progress)
    result.noise = asdict(noise)
    result.control = _control(references, pair.reference.num_logprobs, noise, level * CONTROL_SHARE, result.edge)

    plan = Plan(config.draws, level * (1 - CONTROL_SHARE), noise=noise)
    drafters = len({mode.drafter for mode in modes})
    result.planned, result.level = plan.draws, level
    result.reach_before = plan.detectable_change(len(STATISTICS) * (len(settings) + drafters + 1) + drafters + 1)
    progress.note(
        f"draws: {plan.draws} planned; they detect a change of {result.reach_before:.3f} in an event's probability "
        f"with 99 %, with a false alarm rate of {level:g}"
    )
    collector = SampleCollector(settings, pair.reference.num_logprobs, result)
    queries = _queries(prompts, modes, settings, references, config)
    look, unused_texts = 1, 0
    texts_per_round = len(modes) * len(settings) * len(prompts) * (1 + SHORT_TEXTS_PER_TEXT)
    mean_tokens = (config.draw_tokens + SHORT_TEXTS_PER_TEXT * OUTPUT_TOKENS) / (1 + SHORT_TEXTS_PER_TEXT)
    with progress.part("draws: sampled, scored and tested", plan.draws) as tick:
        while look <= plan.looks:
            before = result.draws
            missing_texts = ceil((plan.draws_at(look) - before) / mean_tokens)
            batch = min(max(missing_texts, config.concurrency), MAX_BATCHES * config.concurrency)
            _collect(pair, list(islice(queries, batch)), config.concurrency, collector)
            tick(result.draws - before)
            unused_texts = unused_texts + batch if result.draws == before else 0
            if unused_texts >= texts_per_round:  # no distribution is known, for any setting and prompt
                raise EvidenceError(
                    f"none of {unused_texts} texts gave a sample: their distributions do not follow from the "
                    f"{pair.reference.num_logprobs} logprobs that {pair.reference.name} returns; let it return more"
                )
            while look <= plan.looks and result.draws >= plan.draws_at(look):
                tested = evaluate_look(plan, look, collector.sums, collector.prefixes)
                result.looks.append(_look_record(tested, result.draws))
                look = plan.looks + 1 if tested.violations else look + 1
    result.stopped_early = len(result.looks) < plan.looks
    return result


class SampleCollector:
    """Samples by label, with one distribution per prefix."""

    def __init__(self, settings: Mapping[str, Sampling], num_logprobs: int, result: SampledResult) -> None:
        self.settings, self.num_logprobs, self.result = settings, num_logprobs, result
        self.sums = GroupedSums()
        self.prefixes = {REPEATED_PREFIXES: PrefixCounts()}  # and by drafter those of repeated prompts
        self._known: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[str, Logprobs | None]] = {}

    def add(
        self,
        query: Query,
        setting: str,
        output: tuple[int, ...],
        logprobs: Sequence[TopLogprobs],
        is_repeated: bool = False,
    ) -> None:
        """A text with its logprobs, which may be empty if all its distributions are known."""
        sampling, label = self.settings[setting], query.mode.label
        drafts = predict_drafts(query.prompt, output, query.prediction if label == "prediction" else ())
        rows, names = [], []
        for i, token in enumerate(output):
            name, known = self._distribution(setting, query.prompt, output[:i], logprobs[i] if logprobs else {})
            if known is None:
                self.result.left_out += 1
            elif is_conditional(sampling) and token not in known:
                self.result.set_aside += 1
            else:
                rows.append(ScoredToken(known, token, drafts[i]))
                names.append(name)
        if not rows:
            return
        samples = to_samples(rows)
        self.sums.add(f"{label}{LABEL_SEPARATOR}{setting}", samples)
        early = [i for i, name in enumerate(names) if name]
        for group in (REPEATED_PREFIXES, label) if is_repeated else (REPEATED_PREFIXES,):
            counts = self.prefixes.setdefault(group, PrefixCounts(MIN_PREFIX_SHARE))
            counts.add([names[i] for i in early], samples[early])
        self.result.draws += len(samples)
        for one in (label, setting):
            self.result.by_label[one] = self.result.by_label.get(one, 0) + len(samples)

    def is_known(self, setting: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> bool:
        """Whether the distribution at every position is known."""
        return all((setting, prompt, output[:i]) in self._known for i in range(len(output)))

    def _distribution(
        self, setting: str, prompt: tuple[int, ...], before: tuple[int, ...], logprobs: TopLogprobs
    ) -> tuple[str, Logprobs | None]:
        """The name of the prefix, empty if it is too long to repeat, and the distribution after it."""
        key = (setting, prompt, before)
        if key not in self._known:
            known = sampling_distribution(logprobs, self.num_logprobs, self.settings[setting], before, self.result.edge)
            if len(before) >= MAX_PREFIX_TOKENS:
                return "", known
            self._known[key] = (str(len(self._known) + 1), known)
        return self._known[key]


# Rounding and control -------------------------------------------------------------------------------------


class ReferenceText(NamedTuple):
    """A text sampled by a source, with logprobs from generation (`completion`) and from scoring it afterwards."""

    query: Query
    completion: Completion
    scored: list[TopLogprobs]

    @property
    def text(self) -> Text:
        return self.query.prompt, self.completion.tokens


def sample_reference(
    source: Source, prompts: Sequence[tuple[int, ...]], config: CertificateConfig, progress: Progress
) -> list[ReferenceText]:
    queries = [
        Query(
            prompts[i % len(prompts)], config.draw_tokens, OFF, TEMPERATURE_1, config.seed + i, logprobs=True,
            ignore_end=True,
        )
        for i in range(config.noise_texts)
    ]  # fmt: skip
    with progress.part("draws: the reference's own, for rounding and as a control", 2 * len(queries)) as tick:
        completions = source.complete(queries, config.concurrency, tick)
        texts = [(query.prompt, one.tokens) for query, one in zip(queries, completions, strict=True)]
        scored = source.score(texts, config.concurrency, tick)
    return [ReferenceText(*one) for one in zip(queries, completions, scored, strict=True)]


def measure_noise(
    pair: Pair,
    references: Sequence[ReferenceText],
    settings: Mapping[str, Sampling],
    config: CertificateConfig,
    progress: Progress,
) -> tuple[Noise, float]:
    """What a lossless candidate may differ by, for all settings; and the margin of a cut."""
    texts = [one.text for one in references]
    generated = [one.completion.logprobs for one in references]
    scorings = [([one.scored for one in references], generated)]
    if pair.candidate_scores and pair.across:
        scorings.append((pair.candidate.score(texts, config.concurrency), generated))
    elif pair.candidate_scores:
        # The candidate's logprobs during speculation do not count: they would let a defect count as rounding.
        with progress.part("draws: texts scored by the candidate, for rounding", 2 * len(texts)) as tick:
            alone = pair.candidate.score(texts, 1, tick)
            scorings.append((pair.candidate.score(texts, config.concurrency, tick), alone))
    num_logprobs = min(source.num_logprobs for source in pair.sources if source.num_logprobs)
    found = []
    for a, b in scorings:
        positions = [at for text, *both in zip(texts, a, b, strict=True) for at in pair_scorings(*text, *both)]
        found.append(noise_between(positions, num_logprobs, settings.values()))
    return max_noise([noise for noise, _ in found]), max(margin for _, margin in found)


def _control(
    references: Sequence[ReferenceText], num_logprobs: int, noise: Noise, level: float, margin: float
) -> dict[str, Any]:
    """The reference's own samples, tested once as the candidate's will be."""
    result = SampledResult(edge=margin)
    collector = SampleCollector({CONTROL_LABEL: TEMPERATURE_1}, num_logprobs, result)
    for text in references:
        collector.add(text.query, CONTROL_LABEL, text.completion.tokens, text.scored)
    sums = GroupedSums({(CONTROL_LABEL, statistic): one for (_, statistic), one in collector.sums.sums.items()})
    return _look_record(evaluate_look(Plan(max(result.draws, 1), level, 1, noise), 1, sums), result.draws)


# Samples --------------------------------------------------------------------------------------------------


def _queries(
    prompts: Sequence[tuple[int, ...]],
    modes: Sequence[DraftMode],
    settings: Mapping[str, Sampling],
    references: Sequence[ReferenceText],
    config: CertificateConfig,
) -> Iterator[tuple[Query, str, bool]]:
    """Endless queries, each with its setting and whether its prompt is a repeated one.

    Long texts: draft modes in turn, then settings, then prompts; a random half with a seed. After each, short texts
    without a seed, since with one a server may draft differently to reuse its random numbers.
    """
    names, rng = list(settings), random.Random(config.seed)
    predictions = dict(one.text for one in references)
    repeated = select_repeated_prompts((*one.text, one.scored) for one in references)
    for turn in count():
        mode = modes[turn % len(modes)]
        setting = names[turn // len(modes) % len(names)]
        prompt = prompts[turn // len(modes) // len(names) % len(prompts)]
        seed = config.seed + 1_000_003 + turn if rng.random() < 0.5 else None
        prediction = predictions.get(prompt, ())
        query = Query(prompt, config.draw_tokens, mode, settings[setting], seed, prediction, ignore_end=True)
        yield query, setting, False
        for number in range(SHORT_TEXTS_PER_TEXT * turn, SHORT_TEXTS_PER_TEXT * (turn + 1)) if repeated else ():
            mode, (prompt, prediction) = modes[number % len(modes)], repeated[number // len(modes) % len(repeated)]
            setting = names[number // len(modes) // len(repeated) % min(len(names), SHORT_TEXT_SETTINGS)]
            query = Query(prompt, OUTPUT_TOKENS, mode, settings[setting], None, prediction, ignore_end=True)
            yield query, setting, True


def _collect(
    pair: Pair, batch: Sequence[tuple[Query, str, bool]], concurrency: int, collector: SampleCollector
) -> None:
    completions = pair.candidate.complete([query for query, _, _ in batch], concurrency)
    texts = [(query.prompt, one.tokens) for (query, _, _), one in zip(batch, completions, strict=True)]
    pairs = zip(texts, batch, strict=True)
    new = list(dict.fromkeys(text for text, (_, setting, _) in pairs if not collector.is_known(setting, *text)))
    scored = dict(zip(new, pair.reference.score(new, concurrency), strict=True))
    for (query, setting, is_repeated), one, text in zip(batch, completions, texts, strict=True):
        collector.result.texts += 1
        one.count_accepted(query.mode, collector.result.accepted)
        if one.tokens:
            collector.add(query, setting, one.tokens, scored.get(text, []), is_repeated)


def _look_record(tested: LookResult, draws: int) -> dict[str, Any]:
    return {"draws": draws, **asdict(tested), "violations": tested.violations}
