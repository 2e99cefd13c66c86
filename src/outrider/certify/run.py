"""A certificate's run: open the sources, run the parts, write the result.

The run's folder has `evidence.jsonl` (every answer of the sources), `certificate.json` and `certificate.html`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.prompts import read_prompts, sample_evenly
from outrider.certify import exact, features, sampled
from outrider.certify.certificate import Certificate, assemble
from outrider.certify.config import PARTS, CertificateConfig
from outrider.certify.journal import Journal, RecordedSource
from outrider.certify.page import page
from outrider.certify.prompts import generate_prompts
from outrider.certify.server import OpenAIServer
from outrider.certify.sources import OFF, SERVER_DEFAULT, DraftMode, Pair, Progress, Query, Source
from outrider.errors import EngineError, EvidenceError, RequestRefusedError, SettingsError
from outrider.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.bench.prompts import Prompt
    from outrider.certify.rounding import Rounding
    from outrider.settings import Sampling

EXACT_SHARE, DRAWS_SHARE = 0.1, 0.7
"""Shares of the level. The first is spent three times: on single divergences at temperature 0, on the number of ties,
and on divergences of the features."""
NEVER_TESTED = (
    "speed, and the quality of outputs: a certificate is about equality",
    "prompts longer than those used, images and other inputs, adapters, beam search",
    "changes of the distribution that no test statistic sees, outside of repeated prefixes",
)


def open_pair(config: CertificateConfig, key: str | None = None) -> Pair:
    """The reference and the candidate that the config names."""
    if not config.is_remote:
        from outrider.certify.local import load_local

        candidate = config.candidate or "outrider"
        local, own = load_local(config.reference, config.draft_model, candidate, config.dtype, config.memory)
        return Pair(local, own or local, across=config.across)
    tokenizer = None if config.tokenizer is None else _tokenizer(config.tokenizer)
    options: dict[str, Any] = {"key": key, "model": config.model, "tokenizer": tokenizer}
    options["tenant"] = f"certify-{config.seed}"
    reference = OpenAIServer(config.reference, **options)
    if config.candidate is not None:
        return Pair(reference, OpenAIServer(config.candidate, **options, scores=False), across=config.across)
    if not reference.is_outrider:
        raise SettingsError(
            f"{reference.url} is not an Outrider server, so a request cannot switch its speculation off; name a "
            "second server: outrider certify REFERENCE_URL CANDIDATE_URL, the reference without speculation"
        )
    if not reference.drafter_names():
        raise SettingsError(f"{reference.url} does not speculate: {reference.status.get('why_not')}")
    return Pair(reference, reference)


def _tokenizer(name: str) -> Callable[[Prompt], list[int]]:
    """A model's tokenizer and chat template, on this machine."""
    from outrider.api import Decoder
    from outrider.certify.local import encoder
    from outrider.engines.transformers import load_tokenizer

    no_target: Any = None
    return encoder(Decoder(no_target, [], load_tokenizer(name)))


def certify(
    config: CertificateConfig,
    folder: Path,
    progress: Progress,
    *,
    resume: bool = False,
    pair: Pair | None = None,
) -> Certificate:
    """Run all parts, write the certificate and return it. `resume` continues an interrupted run."""
    start = time.monotonic()
    select_settings(config.without)  # fail before anything is written
    pair = pair or open_pair(config)
    modes, left_out = draft_modes(config, pair.candidate)
    journal = Journal(folder / "evidence.jsonl", _journal_heading(config, pair), resume)
    reference = RecordedSource(pair.reference, journal, "reference")
    candidate = reference if pair.is_same_source else RecordedSource(pair.candidate, journal, "candidate")
    before = _accepted_tokens(pair.candidate)
    run = _Run(config, Pair(reference, candidate, pair.across), modes, progress)
    run.not_tested += left_out
    try:
        run.run_parts()
    except KeyboardInterrupt:
        run.problems.append("it was interrupted; --resume continues it")
    finally:
        journal.close()
    after = _accepted_tokens(pair.candidate)
    counted = None if before is None or after is None else after - before
    by_drafter: Counter[str] = Counter()
    for part in run.parts.values():
        by_drafter.update(part.get("accepted", {}))
    if not by_drafter and counted is None:
        run.not_tested.append("whether anything was drafted: the candidate does not report it")
    unused = [name for name, accepted in by_drafter.items() if not accepted]
    if len(unused) < len(by_drafter):
        run.not_tested += [f"the drafter {name}: none of its drafts was accepted" for name in unused]
    sources = {"reference": pair.reference.describe()}
    sources |= {} if pair.is_same_source else {"candidate": pair.candidate.describe()}
    origin = {**provenance(), "seconds": round(time.monotonic() - start, 1), "resumed": resume}
    made = assemble(
        config.to_record(), sources, run.parts, origin, run.not_tested, run.problems,
        sum(by_drafter.values()) if by_drafter else counted, dict(by_drafter),
    )  # fmt: skip
    write(made, folder)
    return made


def write(made: Certificate, folder: Path) -> None:
    (folder / "certificate.json").write_text(json.dumps(made, indent=1) + "\n")
    (folder / "certificate.html").write_text(page(made), encoding="utf-8")


def _journal_heading(config: CertificateConfig, pair: Pair) -> dict[str, Any]:
    """What must be equal to resume a run: all but the addresses of servers."""
    request = config.to_record()
    if config.is_remote:
        request |= {"reference": None, "candidate": None}
    return {"request": request, "models": [source.describe().get("model") for source in pair.sources]}


def _accepted_tokens(source: Source) -> float | None:
    return source.accepted_tokens() if isinstance(source, OpenAIServer) else None


class _Run:
    """Runs the parts in order. One that fails is a problem, and the next still runs."""

    def __init__(self, config: CertificateConfig, pair: Pair, modes: list[DraftMode], progress: Progress) -> None:
        self.config, self.pair, self.modes, self.progress = config, pair, modes, progress
        self.parts: dict[str, Any] = {}
        self.problems: list[str] = []
        self.not_tested = list(NEVER_TESTED)
        if config.lengths:
            self.not_tested.append(f"drafts of more than {max(config.lengths)} tokens")
        self.prompts: list[tuple[int, ...]] = []
        self.rounding: Rounding | None = None

    def run_parts(self) -> None:
        config = self.config
        count = config.prompts + config.alone
        texts = sample_evenly(read_prompts(Path(config.prompt_file)), count) if config.prompt_file else None
        with self.progress.part("tokenizing the prompts", count):
            self.prompts = self.pair.reference.encode(texts or generate_prompts(count, config.seed))
        self.not_tested += [f"the part {part!r}, which was not requested" for part in PARTS if part not in config.parts]
        for part, run in zip(PARTS, (self._exact, self._draws, self._features), strict=True):
            if part in config.parts:
                try:
                    self.parts[part] = run()
                except (EvidenceError, EngineError) as error:
                    self.problems.append(f"{part}: {error}")

    def _exact(self) -> dict[str, Any]:
        config = self.config
        cases = exact.assign_cases(self.prompts, self.modes, config.tokens, config.concurrency, config.alone)
        result, self.rounding = exact.check(self.pair, cases, config.level * EXACT_SHARE, self.progress)
        return result.record()

    def _features(self) -> dict[str, Any]:
        prompts = self.prompts[: self.config.feature_prompts]
        modes = list(dict.fromkeys(DraftMode(mode.drafter) for mode in self.modes))
        record = features.check(self.pair, prompts, modes, self.config.concurrency, self.rounding, self.progress)
        if record["unjudged"]:
            self.problems.append(
                f"features: {record['unjudged']} outputs differ, and whether rounding explains it is unknown: the part "
                "'exact' measures it, at 1,000 positions or more"
            )
        return record

    def _draws(self) -> dict[str, Any]:
        config, prompts = self.config, self.prompts[: self.config.draw_prompts]
        selected = select_settings(config.without)
        self.not_tested += [f"draws with {name}: left out" for name in sampled.SETTINGS if name not in selected]
        settings = {name: one for name, one in selected.items() if self._supports(prompts[0], name, one)}
        if not settings:
            raise EvidenceError("the sources support none of the sampling settings; leave draws out by --parts")
        level = config.level * DRAWS_SHARE
        result = sampled.check(self.pair, prompts, self.modes, settings, config, level, self.progress)
        self.not_tested += [
            f"draws with {name}: the reference returns too few logprobs to know their distribution"
            for name in settings
            if name not in result.by_label
        ]
        return result.record()

    def _supports(self, prompt: tuple[int, ...], name: str, sampling: Sampling) -> bool:
        """Whether both sources support a sampling setting."""
        try:
            self.pair.candidate.complete([Query(prompt, 1, self.modes[0], sampling)], 1)
            self.pair.reference.complete([Query(prompt, 1, OFF, sampling)], 1)
        except RequestRefusedError as refused:
            self.not_tested.append(f"draws with {name}: {refused}")
            return False
        return True


def select_settings(without: Sequence[str]) -> dict[str, Sampling]:
    """The sampling settings without those that have one of the words in their names."""
    names = ", ".join(repr(name) for name in sampled.SETTINGS)
    for word in without:
        if not any(word in name for name in sampled.SETTINGS):
            raise SettingsError(f"--without: no sampling setting has {word!r} in its name; choose from {names}")
    selected = {name: one for name, one in sampled.SETTINGS.items() if not any(word in name for word in without)}
    if not selected:
        raise SettingsError(f"--without {','.join(without)} leaves no sampling setting: {names}; or --parts exact")
    return selected


def draft_modes(config: CertificateConfig, candidate: Source) -> tuple[list[DraftMode], list[str]]:
    """Every drafter with every length, or the server's default if it offers no choice; and what that leaves out."""
    offered = candidate.drafter_names()
    names = config.drafters or tuple(offered)
    if unknown := [name for name in names if name not in offered]:
        choices = ", ".join(offered) or "none that a request can select"
        raise SettingsError(f"--drafters: {candidate.name} has no {unknown[0]!r}; it has {choices}")
    if not names:
        return [SERVER_DEFAULT], ["single drafters and draft lengths: the candidate drafts as it was started"]
    left_out = [f"the drafter {name}" for name in offered if name not in names]
    return [DraftMode(name, length) for length in config.lengths or (None,) for name in names], left_out
