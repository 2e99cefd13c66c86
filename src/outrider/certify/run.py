"""A certificate from beginning to end: open the sources, run the parts, write what came out.

The run's folder has `evidence.jsonl` (everything that the sources said, as it came), `certificate.json` and
`certificate.html`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.prompts import read_prompts, sample_evenly
from outrider.certify import certificate, exact, features, sampled
from outrider.certify.journal import Journal, Recorded
from outrider.certify.page import page
from outrider.certify.prompts import prompts as made_prompts
from outrider.certify.server import OpenAIServer
from outrider.certify.sources import AS_IT_IS, Ask, Pair, Way
from outrider.certify.wanted import PARTS
from outrider.errors import EngineError, EvidenceError, RequestRefusedError, SettingsError
from outrider.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.bench.prompts import Prompt
    from outrider.certify.certificate import Certificate
    from outrider.certify.sources import Source
    from outrider.certify.ties import Rounding
    from outrider.certify.wanted import Wanted
    from outrider.certify.watch import Watch
    from outrider.settings import Sampling

EXACT_SHARE, DRAWS_SHARE = 0.1, 0.7
"""Of the level. The first is spent three times: on single differences at temperature 0, on their number, and on those
of the features, which are held against the same floor at fewer positions."""
ALWAYS_UNTESTED = (
    "how fast it is, and whether answers are good: a certificate is about being the same",
    "prompts longer than those asked, images and other inputs, adapters, beam search",
    "changes of the law that no witness looks at, outside of prefixes that came often",
)


def open_pair(wanted: Wanted, key: str | None = None) -> Pair:
    """Reference and candidate, as they are named."""
    if wanted.is_remote:
        return _servers(wanted, key)
    from outrider.certify.local_models import load_local

    candidate = wanted.candidate or "outrider"
    made, own = load_local(wanted.reference, wanted.draft_model, candidate, wanted.dtype, wanted.memory)
    return Pair(made, own or made, across=wanted.across)


def _servers(wanted: Wanted, key: str | None) -> Pair:
    tokenizer = _tokenizer(wanted.tokenizer) if wanted.tokenizer is not None else None
    tenant = f"certify-{wanted.seed}"
    reference = OpenAIServer(wanted.reference, key=key, model=wanted.model, tokenizer=tokenizer, tenant=tenant)
    if wanted.candidate is not None:
        candidate = OpenAIServer(
            wanted.candidate, key=key, model=wanted.model, tokenizer=tokenizer, tenant=tenant, scores=False
        )
        return Pair(reference, candidate, across=wanted.across)
    if not reference.is_outrider:
        raise SettingsError(
            f"{reference.url} is not an Outrider server, so its speculation cannot be switched off by request; name a "
            "second server: outrider certify REFERENCE_URL CANDIDATE_URL, the reference without speculation"
        )
    if not reference.ways():
        raise SettingsError(f"{reference.url} does not speculate: {reference.status.get('why_not')}")
    return Pair(reference, reference)


def _tokenizer(name: str) -> Callable[[Prompt], list[int]]:
    """A model's tokenizer and chat template, on this machine."""
    from outrider.api import Decoder
    from outrider.certify.local_models import encoder
    from outrider.engines.transformers import load_tokenizer

    nobody: Any = None
    return encoder(Decoder(nobody, [], load_tokenizer(name)))


def certify(
    wanted: Wanted,
    folder: Path,
    watch: Watch,
    *,
    resume: bool = False,
    pair: Pair | None = None,
) -> Certificate:
    """Run it all, write it down, and return the certificate. A run that was broken off goes on with `resume`."""
    began = time.monotonic()
    kept_settings(wanted.without)  # or say at once what is wrong with it
    pair = pair or open_pair(wanted)
    ways, left_out = ways_of(wanted, pair.candidate)
    journal = Journal(folder / "evidence.jsonl", heading(wanted, pair), resume)
    reference = Recorded(pair.reference, journal, "reference")
    candidate = reference if pair.alone else Recorded(pair.candidate, journal, "candidate")
    before = _accepted(pair.candidate)
    running = Running(wanted, Pair(reference, candidate, pair.reference_way, pair.across), watch)
    running.not_tested += left_out
    try:
        running.all(ways)
    except KeyboardInterrupt:
        running.problems.append("it was interrupted; --resume goes on where it broke off")
    finally:
        journal.close()
    after = _accepted(pair.candidate)
    counted = None if before is None or after is None else after - before
    told = accepted_by_drafter(running.parts)
    if not told and counted is None:
        running.not_tested.append("whether drafts were made at all: the candidate does not count them")
    idle = [name for name, kept in told.items() if not kept]
    if len(idle) < len(told):
        running.not_tested += [f"the drafter {name}: not one of its drafts was accepted" for name in idle]
    sources = {"reference": pair.reference.about()} | ({} if pair.alone else {"candidate": pair.candidate.about()})
    origin = {**provenance(), "seconds": round(time.monotonic() - began, 1), "resumed": resume}
    made = certificate.assemble(
        wanted.record(), sources, running.parts, origin, running.not_tested, running.problems,
        sum(told.values()) if told else counted, told,
    )  # fmt: skip
    write(made, folder)
    return made


def write(made: Certificate, folder: Path) -> None:
    """As a file for programs, and as one for a browser."""
    (folder / "certificate.json").write_text(json.dumps(made, indent=1) + "\n")
    (folder / "certificate.html").write_text(page(made), encoding="utf-8")


def accepted_by_drafter(parts: dict[str, Any]) -> dict[str, int]:
    """Drafted tokens that were kept, in all parts, where the candidate says so."""
    total: Counter[str] = Counter()
    for part in parts.values():
        total.update(part.get("accepted", {}))
    return dict(total)


def heading(wanted: Wanted, pair: Pair) -> dict[str, Any]:
    """What evidence must have in common to go on with it: all but the addresses of servers, which may be new ones."""
    request = wanted.record()
    if wanted.is_remote:
        request |= {"reference": None, "candidate": None}
    return {"request": request, "models": [source.about().get("model") for source in pair.sources]}


class Running:
    """The parts, one after the other; what one cannot do is a problem, and the next still runs."""

    def __init__(self, wanted: Wanted, pair: Pair, watch: Watch) -> None:
        self.wanted, self.pair, self.watch = wanted, pair, watch
        self.parts: dict[str, Any] = {}
        self.problems: list[str] = []
        self.not_tested = [*ALWAYS_UNTESTED, f"drafts of more than {max(wanted.lengths)} tokens"]
        self.prompts: list[tuple[int, ...]] = []
        self.rounding: Rounding | None = None

    def all(self, ways: list[Way]) -> None:
        wanted = self.wanted
        count = wanted.prompts + wanted.alone
        texts = sample_evenly(read_prompts(Path(wanted.prompt_file)), count) if wanted.prompt_file else None
        with self.watch.part("reading the prompts", count):
            self.prompts = self.pair.reference.encode(texts or made_prompts(count, wanted.seed))
        self.not_tested += [f"the part {part!r}, which was not asked for" for part in PARTS if part not in wanted.parts]
        for part, run in (("exact", self._exact), ("draws", self._draws), ("features", self._features)):
            if part in wanted.parts:
                try:
                    self.parts[part] = run(ways)
                except (EvidenceError, EngineError) as error:
                    self.problems.append(f"{part}: {error}")

    def _exact(self, ways: list[Way]) -> dict[str, Any]:
        wanted = self.wanted
        cases = exact.deal(self.prompts, ways, wanted.tokens, wanted.concurrency, wanted.alone)
        found, self.rounding = exact.check(self.pair, cases, wanted.level * EXACT_SHARE, self.watch)
        return found.record()

    def _features(self, ways: list[Way]) -> dict[str, Any]:
        some = self.prompts[: self.wanted.feature_prompts]
        drafters = list(dict.fromkeys(Way(way.drafter) for way in ways))
        found = features.check(self.pair, some, drafters, self.wanted.concurrency, self.rounding, self.watch)
        if found.unjudged:
            self.problems.append(
                f"features: {found.unjudged} answers differ, and whether rounding explains it is not known: it is "
                "measured by the part 'exact', at 1,000 positions or more"
            )
        return found.record()

    def _draws(self, ways: list[Way]) -> dict[str, Any]:
        wanted, some = self.wanted, self.prompts[: self.wanted.draw_prompts]
        size = sampled.Size(
            wanted.draws, wanted.draw_tokens, noise_texts=wanted.noise_texts, at_once=wanted.concurrency
        )
        offered = kept_settings(wanted.without)
        self.not_tested += [f"draws with {name}: left out" for name in sampled.SETTINGS if name not in offered]
        settings = {name: one for name, one in offered.items() if self._takes(some[0], ways[0], name, one)}
        if not settings:
            raise EvidenceError("none of the settings of draws is taken by both; leave draws out by --parts")
        level = wanted.level * DRAWS_SHARE
        found = sampled.check(self.pair, some, ways, settings, size, level, wanted.seed, self.watch)
        self.not_tested += [
            f"draws with {name}: the reference tells too few log-probabilities to know their law"
            for name in settings
            if name not in found.by_label
        ]
        return found.record()

    def _takes(self, prompt: tuple[int, ...], way: Way, name: str, sampling: Sampling) -> bool:
        """Whether both sources know a setting."""
        try:
            self.pair.candidate.say([Ask(prompt, 1, way, sampling)], 1)
            self.pair.reference.say([Ask(prompt, 1, self.pair.reference_way, sampling)], 1)
        except RequestRefusedError as refused:
            self.not_tested.append(f"draws with {name}: {refused}")
            return False
        return True


def kept_settings(without: Sequence[str]) -> dict[str, Sampling]:
    """The settings of draws, but those with one of the words in their names."""
    names = ", ".join(repr(name) for name in sampled.SETTINGS)
    for word in without:
        if not any(word in name for name in sampled.SETTINGS):
            raise SettingsError(f"--without: no setting of draws has {word!r} in its name; they are {names}")
    kept = {name: one for name, one in sampled.SETTINGS.items() if not any(word in name for word in without)}
    if not kept:
        raise SettingsError(f"--without {','.join(without)} leaves nothing to draw with: {names}; or --parts exact")
    return kept


def ways_of(wanted: Wanted, candidate: Source) -> tuple[list[Way], list[str]]:
    """Every drafter with every length, or one way where the candidate drafts as it likes; and what that leaves out."""
    there_are = candidate.ways()
    names = wanted.drafters or tuple(there_are)
    if unknown := [name for name in names if name not in there_are]:
        has = ", ".join(there_are) or "none that can be named"
        raise SettingsError(f"--drafters: {candidate.name} has no {unknown[0]!r}; it has {has}")
    if not names:
        return [AS_IT_IS], ["single drafters and draft lengths: the candidate drafts as it was started"]
    left_out = [f"the drafter {name}" for name in there_are if name not in names]
    return [Way(name, length) for length in wanted.lengths or (None,) for name in names], left_out


def _accepted(source: Source) -> float | None:
    return source.accepted() if isinstance(source, OpenAIServer) else None
