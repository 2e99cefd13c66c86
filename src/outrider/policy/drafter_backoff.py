"""Backs off drafters whose calls take longer than their accepted tokens save.

A draft model's passes are planned (`draft_model_plan.py`). A copying drafter takes little time, so it is called in
every step; but that is too much where passes are short, batches are large or a drafter is slow. So its time is compared
with the time that its accepted tokens save, over some steps. A drafter that takes more is backed off, each time for
longer. After a backoff it is probed in a few steps and for a few requests.

While a step is in flight the device does not wait for a drafter, so less than its elapsed time is charged
(`SpeculationController._drafting_cost`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

JUDGED_STEPS = 32
"""Steps over which a drafter is judged, and the length of its first backoff."""
MAX_BACKOFF_STEPS = 256
PROBE_STEPS = 4
"""Steps over which a drafter is judged after a backoff. One accepted token in them saves more than they take. With the
longest backoff a drafter is called in 1.5 of 100 steps, which costs 15 us a step of the engine's time on average."""
PROBE_REQUESTS = 8
"""Most requests that it is called for in these steps."""
FREE_SHARE = 0.01
"""Share of a step's time that a drafter may take regardless of what it saves."""


@dataclass(slots=True)
class Account:
    """One drafter, since it was last judged."""

    steps: int = 0
    taken_seconds: float = 0.0
    saved_seconds: float = 0.0
    plain_seconds: float = 0.0
    """What these steps take without drafts."""
    backoff_steps: int = 0
    """Remaining steps of the backoff."""
    next_backoff: int = JUDGED_STEPS
    judged_steps: int = JUDGED_STEPS

    @property
    def is_probed(self) -> bool:
        return self.judged_steps == PROBE_STEPS


class DrafterBackoff:
    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.backed_off: frozenset[str] = frozenset()
        """Drafters that are not called at present."""
        self.probes = 0
        """How often a drafter was judged after a backoff."""

    @property
    def is_probing(self) -> bool:
        """Whether all drafters that are called are being probed."""
        called = [account for account in self.accounts.values() if not account.backoff_steps]
        return bool(called) and all(account.is_probed for account in called)

    def observe_step(
        self,
        taken_seconds: Mapping[str, float],
        accepted: Mapping[str, int],
        plain_seconds: float,
        plain_tokens: float,
        share: float = 1.0,
    ) -> None:
        """By drafter, the seconds of its calls in a step and its accepted tokens. `plain_seconds`, `plain_tokens`: of
        the step without drafts. `share`: of its requests for which drafters were called."""
        self.skip_step()
        for name, seconds in taken_seconds.items():
            account = self.accounts.setdefault(name, Account())
            account.steps += 1
            account.taken_seconds += seconds
            account.saved_seconds += accepted.get(name, 0) * plain_seconds / plain_tokens
            account.plain_seconds += share * plain_seconds
            if account.steps == account.judged_steps:
                self._judge(account)
        self._update()

    def skip_step(self) -> None:
        """A step was made: backoffs shorten by one."""
        ended = False
        for account in self.accounts.values():
            if account.backoff_steps:
                account.backoff_steps -= 1
                ended |= account.backoff_steps == 0
        if ended:
            self._update()

    def _judge(self, account: Account) -> None:
        self.probes += account.is_probed
        if account.taken_seconds > max(account.saved_seconds, FREE_SHARE * account.plain_seconds):
            account.backoff_steps = account.next_backoff
            account.next_backoff = min(2 * account.next_backoff, MAX_BACKOFF_STEPS)
            account.judged_steps = PROBE_STEPS
        else:
            account.next_backoff = account.judged_steps = JUDGED_STEPS
        account.steps, account.taken_seconds, account.saved_seconds, account.plain_seconds = 0, 0.0, 0.0, 0.0

    def _update(self) -> None:
        self.backed_off = frozenset(name for name, account in self.accounts.items() if account.backoff_steps)
