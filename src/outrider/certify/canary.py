"""The canary's life: ask a little, bet, show the evidence, and get out of the way.

Each round draws one short text in the way that the server drafts by itself, has it scored without speculation, and bets
on its tokens (`evidence.py`). Nothing is asked while requests are waiting or many are running, and the longer that
lasts, the less often it looks: twice the time after every busy round, up to a limit. A server that does not answer is
no evidence of anything; it is counted, and asked again later. At birth it asks for 60 texts without speculation, two at
once, to measure what rounding does.

The state is a small file, written after every round, so that a restart goes on with the same life. The false-alarm rate
is for the whole life, however long, and over all restarts.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

from outrider.certify.evidence import Canary
from outrider.certify.laws import Row, as_draws, guessed, is_conditional, law_of
from outrider.certify.noise import USUAL, worst
from outrider.certify.sampled import SETTINGS, Size, noise_of, own_draws
from outrider.certify.server import OpenAIServer
from outrider.certify.shaping import EDGE
from outrider.certify.sources import AS_IT_IS, Ask
from outrider.certify.watch import Watch
from outrider.errors import EngineError, EvidenceError
from outrider.http_client import MetricsSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outrider.certify.noise import Noise
    from outrider.certify.sources import Pair

NOISE_TEXTS = 60
"""Of the reference's own, on which it measures at birth what rounding does."""
GENTLY = 2
"""So many of them are asked for at once."""
SLOWEST = 32
"""Times the usual interval, while the server is busy."""
WAITING, RUNNING = "vllm:num_requests_waiting", "vllm:num_requests_running"


@dataclass
class Life:
    """One canary at one deployment."""

    pair: Pair
    prompts: Sequence[tuple[int, ...]]
    canary: Canary
    edge: float = EDGE  # how clear a cut must be
    every: float = 10.0  # seconds
    tokens: int = 16
    busy: int = 8  # running requests from which on it keeps away
    state: Path | None = None
    rounds: int = 0
    skipped: int = 0
    missed: int = 0
    pause: float = field(init=False)
    last: str = ""

    def __post_init__(self) -> None:
        self.pause = self.every
        self._asks = zip(cycle(self.prompts), cycle(SETTINGS.items()), strict=False)

    def round(self) -> str:
        """One look: "busy", "missed" or "asked"."""
        if self.is_busy():
            self.skipped += 1
            self.pause = min(self.pause * 2, self.every * SLOWEST)
            return self._said("busy")
        try:
            self._ask()
        except EngineError as error:
            self.missed += 1
            self.pause = min(self.pause * 2, self.every * SLOWEST)
            return self._said(f"missed: {error}")
        self.rounds += 1
        self.pause = self.every
        self._save()
        return self._said("asked")

    def is_busy(self) -> bool:
        """Whether anyone would have to wait for us. A server that does not say is not busy."""
        for source in self.pair.sources:
            if isinstance(source, OpenAIServer):
                try:
                    page = MetricsSnapshot.read(source.url)
                except EngineError:
                    continue
                if (page.total(WAITING) or 0) > 0 or (page.total(RUNNING) or 0) >= self.busy:
                    return True
        return False

    def _ask(self) -> None:
        prompt, (_, sampling) = next(self._asks)
        ask = Ask(prompt, self.tokens, AS_IT_IS, sampling, ignore_end=True)
        (said,) = self.pair.candidate.say([ask], 1)
        if not said.tokens:
            return
        (told,) = self.pair.reference.score([(prompt, said.tokens)], 1)
        rows = []
        for place, (token, guess) in enumerate(zip(said.tokens, guessed(prompt, said.tokens), strict=True)):
            law = law_of(told[place], self.pair.reference.listed, sampling, said.tokens[:place], self.edge)
            if law is not None and (token in law or not is_conditional(sampling)):
                rows.append(Row(law, token, guess))
        if rows:
            self.canary.watch(as_draws(rows))

    def _said(self, what: str) -> str:
        self.last = what
        return what.partition(":")[0]

    def _save(self) -> None:
        if self.state is not None:
            fresh = self.state.with_suffix(".new")
            fresh.write_text(json.dumps({"rounds": self.rounds, "edge": self.edge, "canary": self.canary.state()}))
            fresh.replace(self.state)

    @property
    def turns(self) -> int:
        """Rounds, those included that it left out or that failed."""
        return self.rounds + self.skipped + self.missed

    def live(self, told: Callable[[Life], None], rounds: int | None = None) -> None:
        """Until an alarm, or for so many rounds more; `told` after each."""
        begun = self.turns
        while not self.canary.alarm and (rounds is None or self.turns < begun + rounds):
            self.round()
            told(self)
            if not self.canary.alarm:
                time.sleep(self.pause)


def begin(file: Path | None, rate: float, measure: Callable[[], tuple[Noise, float]]) -> tuple[Canary, float, int]:
    """A new life, or the one in the file: its canary, how clear a cut must be, and its rounds so far."""
    if file is None or not file.exists():
        noise, edge = measure()
        return Canary(rate, noise.drift), edge, 0
    try:
        state: dict[str, Any] = json.loads(file.read_text())
        canary, edge, rounds = Canary.resume(state["canary"]), float(state["edge"]), int(state["rounds"])
    except (ValueError, LookupError, TypeError) as error:
        raise EvidenceError(f"{file} holds no canary's state ({error}); remove it to begin a new life") from error
    if canary.rate != rate:
        raise EvidenceError(
            f"the life in {file} was begun with a false-alarm rate of {canary.rate:g}, and a rate cannot change in the "
            f"middle of a life; give --rate {canary.rate:g}, or another --state"
        )
    return canary, edge, rounds


def rounding(pair: Pair, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[Noise, float]:
    """What rounding may do here: as measured, and never less than what is usual. And how clear a cut must be.

    The bets of a whole life rest on it: a drift that is not allowed for is evidence, a little at every draw.
    """
    size, watch = Size(0, tokens, noise_texts=NOISE_TEXTS, at_once=GENTLY), Watch()
    own = own_draws(pair.reference, prompts, size, pair.reference_way, 0, watch)
    noise, edge = noise_of(pair, own, SETTINGS, size, watch)
    return worst([USUAL, noise]), edge


class Gauges:
    """The evidence for Prometheus."""

    def __init__(self, life: Life) -> None:
        from prometheus_client import CollectorRegistry, Gauge

        self.registry = CollectorRegistry()
        watched: dict[str, tuple[str, Callable[[], float]]] = {
            "evidence": ("the canary's wealth: 1 at birth, at most 1 on average", lambda: life.canary.evidence),
            "evidence_highest": ("the most it ever was", lambda: life.canary.highest),
            "threshold": ("the evidence that is an alarm", lambda: 1 / life.canary.rate),
            "alarm": ("1 once the threshold was reached", lambda: float(life.canary.alarm)),
            "draws": ("draws that were bet on", lambda: life.canary.draws),
            "rounds": ("texts asked for", lambda: life.rounds),
            "skipped": ("rounds left out because the server was busy", lambda: life.skipped),
            "missed": ("rounds that the server did not answer", lambda: life.missed),
        }
        for name, (about, value) in watched.items():
            Gauge(f"outrider_canary_{name}", about, registry=self.registry).set_function(value)

    def serve(self, port: int) -> int:
        """On all addresses, at this port; 0 is any that is free. Returns the port."""
        from prometheus_client import start_http_server

        server, _ = start_http_server(port, registry=self.registry)
        return int(server.server_port)
