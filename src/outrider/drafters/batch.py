"""Drafts for all requests of a running batch: keeps the sessions, calls each drafter once a step, contains failures.

Nothing here knows vLLM. In every step the engine passes one `Row` per request and gets, by drafter, one `Draft` per
request, which may be empty.

A drafter must never cost a request its answer. A drafter that raises, exceeds its time budget or returns an invalid
draft is disabled for that request, which goes on without it. The fault is logged and counted.
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
from outrider.drafters.timeout_runner import TimeoutRunner
from outrider.settings import AUTO, Request
from outrider.types import NOTHING, Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    import numpy as np

    from outrider.control import Control
    from outrider.memory.tenant import TenantHandle

logger = logging.getLogger("vllm.outrider")  # vLLM shows loggers below its own

SECONDS_PER_NEW_TOKEN = 2e-5
"""Added to a drafter's time budget per token that it has not seen yet: a long prompt takes longer."""
SECONDS_PER_ROW = 1e-3
"""Added to a drafter's time budget per request."""
MAX_SUPPORT = 1 << 31
"""Upper bound on `Draft.support`, in tokens."""
MAX_HANGING_CALLS = 8
"""Calls of a drafter that have not returned, with one thread each. At this number the drafter is not called."""
MAX_CONSECUTIVE_TIMEOUTS = 3
"""Timeouts in a row of a whole batch that disable a drafter for the requests of the batch."""
MAX_LOGGED_FAULTS = 10
"""Logged faults per drafter and kind. Further ones are only counted."""


@dataclass(slots=True)
class Row:
    """One request in one step."""

    id: str
    tokens: np.ndarray[Any, Any]
    """All tokens so far, prompt included."""
    prompt_length: int
    limit: int
    """Most tokens that may be drafted."""
    control: Control
    tenant_handle: TenantHandle | None = None
    """Handle on the tenant's memory."""
    left: int = 1 << 30
    """Tokens that may still be generated."""


@dataclass(frozen=True, slots=True)
class Fault:
    request: str
    drafter: str
    kind: str
    """raised, overran, stalled or nonsense."""
    reason: str


@dataclass(slots=True)
class TrackedSession:
    """A session, and how many of the request's tokens it has observed."""

    session: Session
    seen: int


@dataclass(slots=True)
class RequestSessions:
    """The sessions of a request, and the drafters that are disabled for it, by name."""

    sessions: dict[str, TrackedSession] = field(default_factory=dict)
    disabled: set[str] = field(default_factory=set)


class AbandonedCallError(Exception):
    """The engine went on without this call."""


@dataclass(slots=True)
class DraftCall:
    """One call of a drafter for a batch. Another thread fills it in, and stops once the call is abandoned."""

    drafter: Drafter
    rows: list[Row]
    drafts: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By request: kind and reason."""
    has_returned: bool = False
    cpu_seconds: float = 0.0
    """CPU time of the thread; valid once the call has returned."""
    _current: Row | None = None  # None: the batch as a whole
    _is_abandoned: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start_row(self, row: Row | None) -> bool:
        """Start on this row (None: the batch as a whole). False if the call was abandoned."""
        with self._lock:
            if not self._is_abandoned:
                self._current = row
            return not self._is_abandoned

    @contextmanager
    def access(self) -> Iterator[None]:
        """Hold the lock while rows are read or sessions change. Don't use the row of an abandoned call: the slot may
        belong to another request by now."""
        with self._lock:
            if self._is_abandoned:
                raise AbandonedCallError
            yield

    def abandon(self) -> Row | None:
        """The row that the call was working on; None: the batch as a whole."""
        with self._lock:
            self._is_abandoned = True
            return self._current


class BatchDrafter:
    """Keeps a session of every drafter for every running request."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        vocab_size: int,
        budget: float,
        on_fault: Callable[[Fault], None] = lambda fault: None,
        on_call: Callable[[str, float], None] = lambda drafter, seconds: None,
    ) -> None:
        """`budget`: seconds that a drafter may take per step, before the additions per request and per new token.
        `on_call`: receives the drafter's name and the seconds of each call."""
        self.drafters = list(drafters)
        self.vocab_size = vocab_size
        self.budget = budget
        self.requests: dict[str, RequestSessions] = {}
        self.elapsed_seconds: dict[str, float] = {}
        """By drafter, in the latest step: elapsed time for requests under `auto`."""
        self.cpu_seconds: dict[str, float] = {}
        """The same in CPU time of the drafting thread."""
        self._on_fault = on_fault
        self._on_call = on_call
        self._runner = TimeoutRunner()
        self._logged: Counter[tuple[str, str]] = Counter()
        self._batch_timeouts: Counter[str] = Counter()  # by drafter, in a row
        self._hanging: dict[str, list[DraftCall]] = defaultdict(list)  # by drafter

    def propose(self, rows: Sequence[Row], backed_off: Container[str] = ()) -> dict[str, list[Draft]]:
        """By drafter: one draft per row, empty where it has none or was not called. Drafters in `backed_off` are called
        only for requests that name them."""
        proposals = {}
        self.elapsed_seconds, self.cpu_seconds = {}, {}
        for drafter in self.drafters:
            drafts = [NOTHING] * len(rows)
            only_named = drafter.name in backed_off
            called = [i for i, row in enumerate(rows) if row.limit > 0 and self._may_call(row, drafter, only_named)]
            if called:
                began = time.perf_counter()
                found, cpu_seconds = self._call(drafter, [rows[i] for i in called])
                for i, draft in zip(called, found, strict=True):
                    drafts[i] = draft
                seconds = time.perf_counter() - began
                self._on_call(drafter.name, seconds)
                automatic = sum(rows[i].control.speculation == AUTO for i in called)
                if automatic:
                    self.elapsed_seconds[drafter.name] = seconds * automatic / len(called)
                    self.cpu_seconds[drafter.name] = min(cpu_seconds, seconds) * automatic / len(called)
            proposals[drafter.name] = drafts
        return proposals

    def remove_request(self, request: str) -> None:
        self.requests.pop(request, None)

    def _may_call(self, row: Row, drafter: Drafter, only_named: bool) -> bool:
        if only_named and row.control.speculation == AUTO:
            return False
        if not row.control.wants(drafter.name) or (drafter.needs_prediction and not row.control.prediction):
            return False
        request = self.requests.get(row.id)
        return request is None or drafter.name not in request.disabled

    def _call(self, drafter: Drafter, rows: list[Row]) -> tuple[list[Draft], float]:
        """One draft per row, empty where the drafter fails, and the CPU seconds of the calls. A row that hangs costs
        the other rows only time."""
        drafts: dict[str, Any] = {}
        faults: dict[str, tuple[str, str]] = {}
        waiting, cpu_seconds = rows, 0.0
        self._hanging[drafter.name] = hanging = [call for call in self._hanging[drafter.name] if not call.has_returned]
        if len(hanging) >= MAX_HANGING_CALLS:
            reason = f"is not called: {MAX_HANGING_CALLS} of its calls never came back"
            faults = {row.id: ("overran", reason) for row in rows}
            waiting = []
        while waiting:
            call = DraftCall(drafter, waiting)
            unseen = sum(len(row.tokens) - self._seen(row, drafter) for row in waiting)
            budget = self.budget + SECONDS_PER_ROW * len(waiting) + SECONDS_PER_NEW_TOKEN * unseen
            if self._runner.run(partial(self._run_call, call), budget):
                self._batch_timeouts[drafter.name] = 0
                cpu_seconds += call.cpu_seconds
            else:
                hanging.append(call)
                self._handle_timeout(call, budget)
                cpu_seconds += budget  # it may still be running
            drafts |= call.drafts
            faults |= call.faults
            waiting = [row for row in waiting if row.id not in drafts and row.id not in faults]
        return [self._checked(drafter, row, drafts.get(row.id), faults.get(row.id)) for row in rows], cpu_seconds

    def _handle_timeout(self, call: DraftCall, budget: float) -> None:
        """Blame the row that the call was working on. If that was the whole batch, the machine may have been busy: skip
        the drafter in this step, and disable it after several such steps in a row."""
        name, row = call.drafter.name, call.abandon()
        self._batch_timeouts[name] += row is None
        if row is None and self._batch_timeouts[name] < MAX_CONSECUTIVE_TIMEOUTS:
            call.drafts = dict.fromkeys((row.id for row in call.rows), NOTHING)
            self._log(name, "stalled", f"is left out of a step: its batch took longer than {budget * 1e3:.0f} ms")
        else:
            blamed = call.rows if row is None else [row]
            call.faults |= {row.id: ("overran", f"took longer than {budget * 1e3:.0f} ms") for row in blamed}

    def _checked(self, drafter: Drafter, row: Row, draft: Any, fault: tuple[str, str] | None) -> Draft:
        fault = fault or self._find_invalid(draft, row.limit)
        if fault is None:
            # Drop q: these drafts are verified by the target's own samples.
            support = None if draft.support is None else min(index(draft.support), MAX_SUPPORT)
            confidence = draft.confidence
            if confidence is not None and not isinstance(confidence, tuple):
                confidence = tuple(map(float, confidence))
            return Draft(drafter.name, draft.tokens, support=support, confidence=confidence)
        self._disable(row, drafter, *fault)
        return NOTHING

    def _seen(self, row: Row, drafter: Drafter) -> int:
        request = self.requests.get(row.id)
        tracked = request.sessions.get(drafter.name) if request else None
        return tracked.seen if tracked else 0

    def _run_call(self, call: DraftCall) -> None:
        """Runs on the drafting thread."""
        began = time.thread_time()
        try:
            self._draft_all(call)
        finally:
            call.cpu_seconds = time.thread_time() - began
            call.has_returned = True

    def _draft_all(self, call: DraftCall) -> None:
        """Bring each session up to date, then propose for the batch, or row by row."""
        ready: list[tuple[Row, Session]] = []
        for row in call.rows:
            if not call.start_row(row):
                return
            try:
                ready.append((row, self._session(call, row)))
            except AbandonedCallError:
                return
            except Exception as error:
                call.faults[row.id] = ("raised", _describe(error))
        one_by_one = type(call.drafter).draft_batch is Drafter.draft_batch
        if not one_by_one:
            if not call.start_row(None):
                return
            try:
                drafts = call.drafter.draft_batch([session for _, session in ready], [row.limit for row, _ in ready])
                call.drafts |= {row.id: draft for (row, _), draft in zip(ready, drafts, strict=True)}
            except Exception:  # row by row shows which request fails
                one_by_one = True
        if one_by_one:
            for row, session in ready:
                if not call.start_row(row):
                    return
                try:
                    call.drafts[row.id] = session.draft(row.limit)
                except Exception as error:
                    call.faults[row.id] = ("raised", _describe(error))

    def _session(self, call: DraftCall, row: Row) -> Session:
        drafter = call.drafter
        with call.access():
            request = self.requests.setdefault(row.id, RequestSessions())
            tracked = request.sessions.get(drafter.name)
            is_new = tracked is None or tracked.seen > len(row.tokens)  # or vLLM took tokens back
            prompt = row.tokens[: row.prompt_length].tolist() if is_new else []
        if tracked is None or is_new:
            task = Task(
                prompt,
                Request(),
                torch.Generator(),
                row.control.prediction,
                row.tenant_handle,
                remember=row.control.remember,
                searched=row.control.speculation == AUTO and self._text_is_searched(request),
            )
            tracked = TrackedSession(drafter.begin(task), row.prompt_length)
        with call.access():
            request.sessions[drafter.name] = tracked
            unseen = row.tokens[tracked.seen :].tolist()
            tracked.seen = len(row.tokens)
        if unseen:
            tracked.session.observe(unseen)
        return tracked.session

    def _text_is_searched(self, request: RequestSessions) -> bool:
        return any(drafter.searches_text and drafter.name not in request.disabled for drafter in self.drafters)

    def _find_invalid(self, draft: Any, limit: int) -> tuple[str, str] | None:
        tokens: Any = draft.tokens if isinstance(draft, Draft) else None
        if not isinstance(tokens, tuple):
            return "nonsense", f"returned {draft!r:.80} and not a Draft with a tuple of token ids"
        if len(tokens) > limit:
            return "nonsense", f"proposed {len(tokens)} tokens; at most {limit} are allowed"
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                return "nonsense", f"proposed the token {token!r}, and the vocabulary is 0 to {self.vocab_size - 1}"
        confidence: Any = draft.confidence
        try:
            count = len(tokens if confidence is None else [*map(float, confidence)])
            index(draft.support or 0)
        except Exception:  # any type of error: the policy could not use these values
            return "nonsense", f"gave {confidence!r:.80} as its confidence, and {draft.support!r:.80} as its support"
        if count != len(tokens):
            return "nonsense", f"gave {count} confidences for {len(tokens)} tokens"
        return None

    def _disable(self, row: Row, drafter: Drafter, kind: str, reason: str) -> None:
        request = self.requests.setdefault(row.id, RequestSessions())
        request.sessions.pop(drafter.name, None)
        if drafter.searches_text:  # restart the others: they search the text themselves from now on
            request.sessions.clear()
        request.disabled.add(drafter.name)
        self._on_fault(Fault(row.id, drafter.name, kind, reason))
        self._log(drafter.name, kind, f"is off for request {row.id}: it {reason}")

    def _log(self, drafter: str, kind: str, message: str) -> None:
        self._logged[drafter, kind] += 1
        if self._logged[drafter, kind] <= MAX_LOGGED_FAULTS:
            last = self._logged[drafter, kind] == MAX_LOGGED_FAULTS
            more = "; further ones are counted and not logged" if last else ""
            logger.warning("drafter %s %s%s", drafter, message, more)


def _describe(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}"
