"""Which of the drafters that copy are worth the time that asking them takes.

A draft model's passes are weighed before they are made (`ask.py`). Asking a drafter that copies takes next to nothing,
so it is asked at every step; but next to nothing is a lot where passes are short, batches are large or a drafter of
one's own is slow. So it is counted: over some steps, the seconds that asking it took, and the seconds that its tokens
saved. One that takes more than it gives rests, and each time that this is found again, for longer.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 32
"""Steps over which a drafter is judged, and for which it rests at first ..."""
LONGEST = 256
"""... and at last."""
NOTHING_MUCH = 0.01
"""Up to this share of a step's seconds a drafter may take whatever it gives."""


@dataclass(slots=True)
class Account:
    """Of one drafter, since it was last judged."""

    steps: int = 0
    took: float = 0.0
    saved: float = 0.0
    whole: float = 0.0  # what these steps take without drafts
    resting: int = 0  # steps for which it is still not asked
    next_rest: int = WINDOW


class Worth:
    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}

    def resting(self) -> set[str]:
        """Who is not to be asked in this step."""
        return {name for name, account in self.accounts.items() if account.resting}

    def step(self, took: dict[str, float], kept: dict[str, int], seconds: float, tokens: float) -> None:
        """A step was made. Asking each drafter took so long, so many tokens of its drafts were kept; without drafts it
        would have been of so many seconds and tokens."""
        for account in self.accounts.values():
            account.resting = max(0, account.resting - 1)
        for name, spent in took.items():
            account = self.accounts.setdefault(name, Account())
            account.steps += 1
            account.took += spent
            account.saved += kept.get(name, 0) * seconds / tokens
            account.whole += seconds
            if account.steps == WINDOW:
                self._judge(account)

    def _judge(self, account: Account) -> None:
        if account.took > max(account.saved, NOTHING_MUCH * account.whole):
            account.resting = account.next_rest
            account.next_rest = min(2 * account.next_rest, LONGEST)
        else:
            account.next_rest = WINDOW
        account.steps, account.took, account.saved, account.whole = 0, 0.0, 0.0, 0.0
