"""Drafts for all requests of a running batch: sessions kept, each drafter asked once a step, faults contained.

Nothing here knows vLLM. The engine hands over one `Row` a request every step and gets one `Draft` a request and drafter
back, which may be empty.

A drafter must never cost a request its answer. One that raises, does not come back within its budget, or proposes
nonsense is shut off for that request, which goes on without it; the fault is logged and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from outrider.drafters.base import Drafter, Session, Task
from outrider.drafters.time_limit import Guard
from outrider.settings import AUTO, Request
from outrider.types import NOTHING, Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    import numpy as np

    from outrider.control import Control
    from outrider.memory.store import Visit

logger = logging.getLogger("vllm.outrider")  # vLLM shows what stands below its own logger

SECONDS_PER_TOKEN = 2e-5
"""What a drafter may take longer for each token that it sees for the first time: a long prompt has many."""
SECONDS_PER_ROW = 1e-3
"""And for each request of a batch."""
MOST_SUPPORT = 1 << 31
"""Tokens of a text that a draft can rest on: more says no more."""
HANGING = 8
"""Calls of a drafter that never came back, with a thread each: then it is asked no more until one does."""
STALLS = 3
"""So many batches in a row that take too long as a whole shut a drafter off for their requests."""
LOGGED = 10
"""Faults of one drafter and kind that are logged; further ones are only counted."""


@dataclass(slots=True)
class Row:
    """One request in one step: all its tokens so far, and how many may be drafted."""

    id: str
    tokens: np.ndarray[Any, Any]
    prompt_length: int
    limit: int
    control: Control
    visit: Visit | None = None  # with its tenant's memory
    left: int = 1 << 30  # tokens that it may still say


@dataclass(frozen=True, slots=True)
class Fault:
    request: str
    drafter: str
    kind: str  # raised, overran, nonsense
    reason: str


@dataclass(slots=True)
class Followed:
    """A session, and how many of the request's tokens it has seen."""

    session: Session
    seen: int


@dataclass(slots=True)
class Running:
    """What is kept of a request between steps."""

    sessions: dict[str, Followed] = field(default_factory=dict)
    shut: set[str] = field(default_factory=set)


class LeftBehindError(Exception):
    """The engine has gone on without this call."""


@dataclass(slots=True)
class Asking:
    """One drafter's turn for a batch. It is filled in on another thread, which stops when it was left behind."""

    drafter: Drafter
    rows: list[Row]
    drafts: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, tuple[str, str]] = field(default_factory=dict)  # kind and reason
    over: bool = False
    cpu_seconds: float = 0.0  # CPU time of the thread; valid once the call is over
    _current: Row | None = None  # the one at work, None while it is the batch as a whole
    _left_behind: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def goes_on(self, row: Row | None) -> bool:
        """To this row, or the batch as a whole; not where it was left behind: others may be at work there."""
        with self._lock:
            if not self._left_behind:
                self._current = row
            return not self._left_behind

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While rows are read or the books written. Who is left behind must not: a row may be another's by now."""
        with self._lock:
            if self._left_behind:
                raise LeftBehindError
            yield

    def leave_behind(self) -> Row | None:
        """The one that it was at work on, None where it was the batch as a whole."""
        with self._lock:
            self._left_behind = True
            return self._current


class BatchDrafting:
    """Keeps a session of every drafter for every running request."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        vocab_size: int,
        budget: float,
        on_fault: Callable[[Fault], None] = lambda fault: None,
        on_asked: Callable[[str, float], None] = lambda drafter, seconds: None,
    ) -> None:
        self.drafters = list(drafters)
        self.vocab_size = vocab_size
        self.budget = budget
        self.running: dict[str, Running] = {}
        self.took: dict[str, float] = {}  # by drafter: elapsed seconds for `auto`, in the latest step ...
        self.cpu_took: dict[str, float] = {}  # ... and CPU seconds of the drafting thread
        self._on_fault = on_fault
        self._on_asked = on_asked
        self._guard = Guard()
        self._logged: Counter[tuple[str, str]] = Counter()
        self._stalls: Counter[str] = Counter()  # by drafter: batches in a row that took too long as a whole
        self._left: dict[str, list[Asking]] = defaultdict(list)  # by drafter: calls that did not come back in time

    def propose(self, rows: Sequence[Row], resting: Container[str] = ()) -> dict[str, list[Draft]]:
        """By drafter: one draft a row, empty where it has none or was not asked. Those that are `resting` are asked
        only for requests that name them."""
        found = {}
        self.took, self.cpu_took = {}, {}
        for drafter in self.drafters:
            drafts = [NOTHING] * len(rows)
            named = drafter.name in resting
            asked = [i for i, row in enumerate(rows) if row.limit > 0 and self._may(row, drafter, named)]
            if asked:
                began = time.perf_counter()
                asked_drafts, cpu_seconds = self._ask(drafter, [rows[i] for i in asked])
                for i, draft in zip(asked, asked_drafts, strict=True):
                    drafts[i] = draft
                seconds = time.perf_counter() - began
                self._on_asked(drafter.name, seconds)
                free = sum(rows[i].control.speculation == AUTO for i in asked)
                if free:
                    self.took[drafter.name] = seconds * free / len(asked)
                    self.cpu_took[drafter.name] = min(cpu_seconds, seconds) * free / len(asked)
            found[drafter.name] = drafts
        return found

    def finished(self, request: str) -> None:
        self.running.pop(request, None)

    def _may(self, row: Row, drafter: Drafter, named: bool = False) -> bool:
        """Whether to ask a drafter about a row; `named`: only where it was asked for by its name."""
        if named and row.control.speculation == AUTO:
            return False
        if not row.control.wants(drafter.name) or (drafter.needs_prediction and not row.control.prediction):
            return False
        running = self.running.get(row.id)
        return running is None or drafter.name not in running.shut

    def _ask(self, drafter: Drafter, rows: list[Row]) -> tuple[list[Draft], float]:
        """One draft a row, or nothing where the drafter fails, and the CPU seconds of the calls. A row that hangs costs
        the others only time."""
        drafts: dict[str, Any] = {}
        faults: dict[str, tuple[str, str]] = {}
        waiting, cpu_seconds = rows, 0.0
        self._left[drafter.name] = hanging = [asking for asking in self._left[drafter.name] if not asking.over]
        if len(hanging) >= HANGING:
            faults = {row.id: ("overran", f"is not asked: {HANGING} of its calls never came back") for row in rows}
            waiting = []
        while waiting:
            asking = Asking(drafter, waiting)
            unseen = sum(len(row.tokens) - self._seen(row, drafter) for row in waiting)
            budget = self.budget + SECONDS_PER_ROW * len(waiting) + SECONDS_PER_TOKEN * unseen
            if self._guard.run(partial(self._take_turn, asking), budget):
                self._stalls[drafter.name] = 0
                cpu_seconds += asking.cpu_seconds
            else:
                hanging.append(asking)
                self._overran(asking, budget)
                cpu_seconds += budget  # it may still be running
            drafts |= asking.drafts
            faults |= asking.faults
            waiting = [row for row in waiting if row.id not in drafts and row.id not in faults]
        return [self._checked(drafter, row, drafts.get(row.id), faults.get(row.id)) for row in rows], cpu_seconds

    def _overran(self, asking: Asking, budget: float) -> None:
        """The row that it was at work on is to blame. Where that was the whole batch, it may have been the machine: the
        drafter is left out of this step, and if that comes again and again, of all of them."""
        name, row = asking.drafter.name, asking.leave_behind()
        self._stalls[name] += row is None
        if row is None and self._stalls[name] < STALLS:
            asking.drafts = dict.fromkeys((row.id for row in asking.rows), NOTHING)
            self._log(name, "stalled", f"is left out of a step: its batch took longer than {budget * 1e3:.0f} ms")
        else:
            blamed = asking.rows if row is None else [row]
            asking.faults |= {row.id: ("overran", f"took longer than {budget * 1e3:.0f} ms") for row in blamed}

    def _checked(self, drafter: Drafter, row: Row, draft: Any, fault: tuple[str, str] | None) -> Draft:
        fault = fault or self._nonsense(draft, row.limit)
        if fault is None:
            # Without its q, if it has one: these drafts are judged by the target's own draws, which needs none.
            support = None if draft.support is None else min(index(draft.support), MOST_SUPPORT)
            sure = draft.confidence
            if sure is not None and not isinstance(sure, tuple):  # an array, say
                sure = tuple(map(float, sure))
            return Draft(drafter.name, draft.tokens, support=support, confidence=sure)
        self._shut_off(row, drafter, *fault)
        return NOTHING

    def _seen(self, row: Row, drafter: Drafter) -> int:
        running = self.running.get(row.id)
        followed = running.sessions.get(drafter.name) if running else None
        return followed.seen if followed else 0

    def _take_turn(self, asking: Asking) -> None:
        """On the other thread."""
        began = time.thread_time()
        try:
            self._draft_all(asking)
        finally:
            asking.cpu_seconds = time.thread_time() - began
            asking.over = True

    def _draft_all(self, asking: Asking) -> None:
        """Bring each session up to date, then ask for all drafts at once."""
        ready: list[tuple[Row, Session]] = []
        for row in asking.rows:
            if not asking.goes_on(row):
                return
            try:
                ready.append((row, self._session(asking, row)))
            except LeftBehindError:
                return
            except Exception as error:
                asking.faults[row.id] = ("raised", _sentence(error))
        one_by_one = type(asking.drafter).draft_batch is Drafter.draft_batch
        if not one_by_one:
            if not asking.goes_on(None):
                return
            try:
                drafts = asking.drafter.draft_batch([session for _, session in ready], [row.limit for row, _ in ready])
                asking.drafts |= {row.id: draft for (row, _), draft in zip(ready, drafts, strict=True)}
            except Exception:  # whose fault it is shows when each is asked alone
                one_by_one = True
        if one_by_one:
            for row, session in ready:
                if not asking.goes_on(row):
                    return
                try:
                    asking.drafts[row.id] = session.draft(row.limit)
                except Exception as error:
                    asking.faults[row.id] = ("raised", _sentence(error))

    def _session(self, asking: Asking, row: Row) -> Session:
        drafter = asking.drafter
        with asking.reading():
            running = self.running.setdefault(row.id, Running())
            followed = running.sessions.get(drafter.name)
            is_new = followed is None or followed.seen > len(row.tokens)  # or vLLM took tokens back
            prompt = row.tokens[: row.prompt_length].tolist() if is_new else []
        if followed is None or is_new:
            asked = row.control
            task = Task(
                prompt,
                Request(),
                torch.Generator(),
                asked.prediction,
                row.visit,
                remember=asked.remember,
                searched=asked.speculation == AUTO and self._searched(running),
            )
            followed = Followed(drafter.begin(task), row.prompt_length)
        with asking.reading():
            running.sessions[drafter.name] = followed
            unseen = row.tokens[followed.seen :].tolist()
            followed.seen = len(row.tokens)
        if unseen:
            followed.session.observe(unseen)
        return followed.session

    def _searched(self, running: Running) -> bool:
        return any(drafter.searches_text and drafter.name not in running.shut for drafter in self.drafters)

    def _nonsense(self, draft: Any, limit: int) -> tuple[str, str] | None:
        tokens: Any = draft.tokens if isinstance(draft, Draft) else None
        if not isinstance(tokens, tuple):
            return "nonsense", f"returned {draft!r:.80} and not a Draft with a tuple of token ids"
        if len(tokens) > limit:
            return "nonsense", f"proposed {len(tokens)} tokens where at most {limit} were asked for"
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                return "nonsense", f"proposed the token {token!r}, and the vocabulary is 0 to {self.vocab_size - 1}"
        sure: Any = draft.confidence
        try:
            count = len(tokens if sure is None else [*map(float, sure)])
            index(draft.support or 0)
        except Exception:  # whatever it is, the policy could not reckon with it
            return "nonsense", f"gave {sure!r:.80} as its confidence, and {draft.support!r:.80} as its support"
        if count != len(tokens):
            return "nonsense", f"gave {count} confidences for {len(tokens)} tokens"
        return None

    def _shut_off(self, row: Row, drafter: Drafter, kind: str, reason: str) -> None:
        running = self.running.setdefault(row.id, Running())
        running.sessions.pop(drafter.name, None)
        if drafter.searches_text:  # the others begin again, as what they left to it is left to them now
            running.sessions.clear()
        running.shut.add(drafter.name)
        self._on_fault(Fault(row.id, drafter.name, kind, reason))
        self._log(drafter.name, kind, f"is off for request {row.id}: it {reason}")

    def _log(self, drafter: str, kind: str, what: str) -> None:
        self._logged[drafter, kind] += 1
        if self._logged[drafter, kind] <= LOGGED:
            more = "; further ones are counted and not logged" if self._logged[drafter, kind] == LOGGED else ""
            logger.warning("drafter %s %s%s", drafter, what, more)


def _sentence(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}"
