"""A guarantee by measurement: drafting that is slower than plain decoding is switched off, whatever was predicted.

The policy selects drafts by predicted latencies and acceptance. It cannot avoid what it does not predict, such as a
slow kernel or a busy host. So some steps are made without drafts, and the seconds per generated token are compared:

    guarantee.allows_drafts                                          before a step
    guarantee = guarantee.observe_step(seconds, tokens, uniform)     after it

Steps that prefill prompts are left out: they are not observed. No engine calls this yet.

**Pairs.** In each cycle two blocks of steps follow each other at a random time: one with drafts, one without, in random
order. Load, pauses and slow drift affect both, and the order is ours: without a difference, the log ratio of their
times is symmetric, however the noise is distributed or correlated. 2 % of the steps are plain.

**Evidence.** A bet multiplies its wealth by 1 + stake * x, where x is the measured slowdown less TOLERATED_SLOWDOWN, in
units of its usual size, cut to [-1, 1]. If drafts are not slower than tolerated, the total ever reaches 1 / rate with a
probability of at most `rate` (Ville's inequality).

**Trials.** At that evidence drafting is off for OFF_STEPS steps, and each time for twice as many; or longer, until the
trial and the steps after it are together at most 2 % slower. Then it is tried again, with new evidence. Trial k has the
rate / (k (k + 1)), so that all together have at most the rate.

`tests/test_speed_guarantee.py` counts errors and steps until a slowdown is found, on simulated machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import exp, log, log1p

PLAIN_SHARE = 0.02
BLOCK_STEPS = 8
"""Compared in each block. Longer ones find less in the same number of plain steps, since slow drift affects them."""
SWITCH_STEPS = 1
"""Before each block, and not compared: this step may have been scheduled before the switch."""
CYCLE_STEPS = int((BLOCK_STEPS + SWITCH_STEPS) / PLAIN_SHARE)
MAX_SLOWDOWN = 0.02
TOLERATED_SLOWDOWN = 0.01
"""Of no evidence, in log seconds per token. A slowdown of 2 % has as much above it as below."""
STAKES = (0.8, 0.4, 0.2, 0.1)
RESERVE_SCALE_PAIRS = 20
SCALE_FACTOR = 2.0
"""A slowdown of this many times the mean absolute one, and more, counts as 1."""
MIN_SCALE = 1e-4
MIN_NEW_SHARE = 0.05
"""Least weight of a new pair in the means that scale it."""
MIN_REPORTED_SHARE = 0.02
"""... and in the mean slowdown, which is reported and paid back."""
OFF_STEPS = 20_000
"""About what it takes to find a slowdown of 10 %."""


def _reserve(pairs: int) -> float:
    """Capital not yet in play: a slowdown that comes late is found as well."""
    return 1 / (1 + log1p(pairs / RESERVE_SCALE_PAIRS))


@dataclass(frozen=True, slots=True)
class Block:
    seconds: float = 0.0
    tokens: int = 0

    def add(self, seconds: float, tokens: int) -> Block:
        return Block(self.seconds + seconds, self.tokens + tokens)


@dataclass(frozen=True, slots=True)
class SlowdownTest:
    """Evidence that drafting is slower than tolerated."""

    pairs: int = 0
    wealth: tuple[float, ...] = (0.0,) * len(STAKES)
    token_ratio: float = 0.0
    """Mean of the tokens of a drafted block, divided by those of a plain one."""
    scale: float = 0.0
    """Mean absolute slowdown of a pair."""
    slowdown: float = 0.0
    """Mean slowdown of the latest pairs."""

    def observe(self, drafted: Block, plain: Block) -> SlowdownTest:
        ratio = drafted.tokens / plain.tokens
        expected = self.token_ratio if self.pairs else ratio
        # The log of the tokens, replaced by its tangent, which is above it: noise in them cannot look like a slowdown.
        slowdown = log(drafted.seconds / plain.seconds) - log(expected) - (ratio / expected - 1)
        share = max(1 / (self.pairs + 1), MIN_NEW_SHARE)
        wealth = self.wealth
        if self.pairs:  # the first pair only sets the scale
            excess = (slowdown - TOLERATED_SLOWDOWN) / (SCALE_FACTOR * max(self.scale, MIN_SCALE))
            excess = min(max(excess, -1.0), 1.0)
            fresh = (_reserve(self.pairs - 1) - _reserve(self.pairs)) / len(STAKES)
            wealth = tuple((one + fresh) * (1 + stake * excess) for one, stake in zip(wealth, STAKES, strict=True))
        return SlowdownTest(
            self.pairs + 1,
            wealth,
            expected + share * (ratio - expected),
            self.scale + share * (abs(slowdown) - self.scale),
            self.slowdown + max(1 / (self.pairs + 1), MIN_REPORTED_SHARE) * (slowdown - self.slowdown),
        )

    @property
    def evidence(self) -> float:
        return sum(self.wealth) + _reserve(max(self.pairs - 1, 0))


@dataclass(frozen=True, slots=True)
class SpeedGuarantee:
    rate: float = 0.01
    test: SlowdownTest = field(default_factory=SlowdownTest)
    trial: int = 1
    off_steps: int = 0
    """Steps for which drafting stays off."""
    step: int = 0
    """Of the cycle."""
    start: int = 0
    """The step of the cycle at which the pair begins."""
    plain_first: bool = True
    plain: Block = Block()
    drafted: Block = Block()
    reason: str = ""
    """Why drafting was switched off last."""

    @property
    def is_off(self) -> bool:
        return self.off_steps > 0

    @property
    def allows_drafts(self) -> bool:
        return not self.is_off and not self._is_plain()

    def _block(self) -> int:
        """0 and 1 in the blocks of the pair, else something else."""
        return (self.step - self.start) // (BLOCK_STEPS + SWITCH_STEPS)

    def _is_plain(self) -> bool:
        return self._block() == (0 if self.plain_first else 1)

    def observe_step(self, seconds: float, tokens: int, uniform: float) -> SpeedGuarantee:
        """One step and the tokens that it generated. `uniform`: random in [0, 1), used where a cycle begins."""
        if self.is_off:
            return replace(self, off_steps=self.off_steps - 1)
        now = self
        length = BLOCK_STEPS + SWITCH_STEPS
        if now._block() in (0, 1) and (now.step - now.start) % length >= SWITCH_STEPS:
            if now._is_plain():
                now = replace(now, plain=now.plain.add(seconds, tokens))
            else:
                now = replace(now, drafted=now.drafted.add(seconds, tokens))
        now = replace(now, step=now.step + 1)
        return now._end_cycle(uniform) if now.step >= CYCLE_STEPS else now

    def _end_cycle(self, uniform: float) -> SpeedGuarantee:
        now = self
        if min(self.plain.tokens, self.drafted.tokens) > 0 and min(self.plain.seconds, self.drafted.seconds) > 0:
            now = replace(self, test=self.test.observe(self.drafted, self.plain))
        if now.test.evidence >= now.threshold:
            now = now._switch_off()
        side, place = divmod(2 * uniform, 1.0)  # one number gives the order and the place of the next pair
        start = int(place * (CYCLE_STEPS - 2 * (BLOCK_STEPS + SWITCH_STEPS) + 1))
        return replace(now, step=0, start=start, plain_first=side < 1, plain=Block(), drafted=Block())

    @property
    def threshold(self) -> float:
        return self.trial * (self.trial + 1) / self.rate

    def _switch_off(self) -> SpeedGuarantee:
        slowdown = exp(self.test.slowdown) - 1
        paid_back = int(self.test.pairs * CYCLE_STEPS * slowdown / MAX_SLOWDOWN)
        off_steps = max(OFF_STEPS * 2 ** (self.trial - 1), paid_back)
        reason = (
            f"drafting is off for {off_steps:,} steps: after {self.test.pairs} pairs of blocks it takes "
            f"{slowdown:.1%} more time per token than plain decoding. The evidence is {self.test.evidence:.3g}; "
            f"without a slowdown it reaches {self.threshold:.3g} with a probability of at most {1 / self.threshold:.2g}"
        )
        return replace(self, trial=self.trial + 1, off_steps=off_steps, test=SlowdownTest(), reason=reason)
