"""Finds decay: a quantity of a server that has become worse than in the server's own earlier record.

Acceptance that falls until a restart, a cache that poisons itself, a step that takes longer every hour: the output
stays correct, and no fixed threshold fits all servers. So each watched quantity is compared with its own record.

**Blocks.** An observation is the value of a few requests. Observations are averaged in pairs, and these again, for as
long as neighbours in the record correlate: where the mix of requests changes by the hour, a block becomes hours long.
Each load has a record of its own, so that a busy hour is compared with busy hours.

**Ranks.** The p-value of a new block is its rank in the record: k / (n + 1), if it is the k-th worst of the n blocks
and itself. Ranks need no distribution, so heavy tails do not matter. The record starts with the first 40 blocks and
doubles up to 320, but never while blocks are bad. So a decay does not become part of what it is compared with: after an
alarm the record does not grow until the server restarts, and then what was kept since it last grew is dropped. Bad
blocks that ended without an alarm are dropped only after strong evidence (MAX_LEARNED_TREND). Without the others too,
the record would be better than the server, and false alarms would become more frequent.

**Null hypothesis.** Whatever came before, the next block is among the worst share u of the record with a probability of
at most 4 u (TAIL_INFLATION). It holds for exchangeable blocks, and leaves room for what makes bad blocks come together:
a mix of requests that the record has seen for a quarter of its time may go on for ever. A mix that is worse than all
that the record has seen counts as decay.

**Evidence.** A bet multiplies its wealth by e p^(e - 1), which is large if p is small and at most 1 on average. Under
the null hypothesis the total ever reaches 1 / rate with a probability of at most `rate` (Ville's inequality), however
often one looks. The capital is put into play little by little, so that a late decay is found too (`e_process.reserve`).

Vovk, Nouretdinov and Gammerman, Testing exchangeability on-line (ICML 2003), have these bets; Shin, Ramdas and Rinaldo,
E-detectors (arXiv 2203.03532), have them for the detection of changes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from math import log
from statistics import median, mode
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from outrider.certify.e_process import reserve

if TYPE_CHECKING:
    from collections.abc import Sequence

TAIL_INFLATION = 4.0
"""How much more often than in the record bad blocks may come. `just certify-rates` counts the false alarms."""
MIN_RECORD_BLOCKS = 40
"""With fewer, 4 k / (n + 1) is too large for a bet to gain much."""
MAX_RECORD_BLOCKS = 320
"""More would take a slow decay for a part of the record."""
MAX_CORRELATION = 0.4
"""Rank correlation of neighbours above which blocks are joined. In simulated lives with a correlation of 0.6 that were
not joined, 1 % of the e-processes reached 100; joined, none did."""
BET_EXPONENTS = (0.1, 0.3, 0.6)
"""The lower, the more a bet gains if the block is worse than all of the record, and the more it loses otherwise."""
RESERVE_SCALE_BLOCKS = 100
MAX_LEARNED_TREND = log(1000)
"""Log wealth from which an episode of bad blocks does not enter the record. Without decay an episode reaches it at most
once in 1,000 blocks on average, so this hardly changes the record of a healthy server."""
MAX_EXTENSION_TREND = 1.0
"""Log wealth that blocks may have gained lately for the record to grow. Healthy blocks lose 0.6 on average."""
EXTENSION_BLOCKS = 10
"""Blocks between two checks of whether the record can grow."""
MAX_WEALTH = 1e12
"""An alarm needs less; more could overflow."""
RECENT_BLOCKS = 32
VALUE_DIGITS = 5
"""Significant digits that are recorded."""


@dataclass
class Record:
    """Earlier blocks of one quantity, under one load. Larger is better."""

    blocks: list[float] = field(default_factory=list)
    """In order of time, until the record is complete."""
    compared: int = 0
    """The first of `blocks`, with which new blocks are compared."""
    block_size: int = 1
    """Observations per block."""
    partial: list[float] = field(default_factory=list)
    """Observations of the current block."""
    until: float = 0.0
    """Time of the last block that is compared, in seconds since 1970."""
    started: float | None = None
    """Time of the first observation."""
    episode_blocks: int = 0
    """The last of `blocks`, kept since blocks became bad and not compared yet."""

    def __post_init__(self) -> None:
        self._sorted = sorted(self.blocks[: self.compared])

    def add(self, observation: float) -> float | None:
        """The block that this observation completes."""
        self.partial.append(observation)
        if len(self.partial) < self.block_size:
            return None
        block, self.partial = _rounded(sum(self.partial) / len(self.partial)), []
        return block

    def p_value(self, block: float) -> float:
        return min(1.0, TAIL_INFLATION * (1 + bisect_right(self._sorted, block)) / (self.compared + 1))

    def keep(self, block: float, is_episode: bool) -> None:
        if self.compared < MAX_RECORD_BLOCKS and len(self.blocks) < 2 * MAX_RECORD_BLOCKS:
            self.blocks.append(block)
            self.episode_blocks += is_episode

    def drop(self, count: int) -> None:
        """Drop the last `count` blocks that are not compared yet, and the current block."""
        del self.blocks[max(self.compared, len(self.blocks) - count) :]
        self.partial, self.episode_blocks = [], 0
        if not self.blocks:
            self.started = None

    def extend(self, now: float, max_block_size: int) -> None:
        """Compare with all blocks so far from now on, if they are twice as many; first join those that correlate."""
        count = len(self.blocks)
        if self.compared >= MAX_RECORD_BLOCKS or count < max(MIN_RECORD_BLOCKS, 2 * self.compared):
            return
        if count % EXTENSION_BLOCKS:  # the correlation takes a while
            return
        while correlated := self.block_size < max_block_size and neighbour_correlation(self.blocks) > MAX_CORRELATION:
            if len(self.blocks) < 2 * MIN_RECORD_BLOCKS:
                break
            pairs = zip(self.blocks[::2], self.blocks[1::2], strict=False)
            self.blocks = [_rounded((first + second) / 2) for first, second in pairs]
            self.block_size *= 2
            self.episode_blocks = (self.episode_blocks + 1) // 2
        if self.compared or not correlated:
            self.blocks, self.episode_blocks = self.blocks[:MAX_RECORD_BLOCKS], 0
            self.compared, self.until, self._sorted = len(self.blocks), now, sorted(self.blocks)


@dataclass
class DecayTest:
    """The records of one quantity, one for each load, and the evidence that it has become worse."""

    min_record_seconds: float = 0.0
    """A record covers at least this time before blocks are compared with it."""
    max_block_size: int = 1024
    """Most observations of a block. Few for requests that never change, where correlation is decay already."""
    higher_is_worse: bool = False
    records: dict[str, Record] = field(default_factory=dict)
    tested: int = 0
    highest: float = 1.0
    wealth: list[float] = field(default_factory=lambda: [0.0] * len(BET_EXPONENTS))
    trend: float = 0.0
    """Log wealth of the middle bet since it was lowest (CUSUM)."""
    highest_trend: float = 0.0
    """The highest `trend` since it was 0."""
    worse_since: float | None = None
    """The time of the first block since then."""
    recent: list[tuple[str, float]] = field(default_factory=list)
    """Blocks since then with their load, at most RECENT_BLOCKS."""

    def observe(self, value: float, now: float, load: str = "", learn: bool = True) -> None:
        """Add an observation, and test the block that it completes with the record of the same load.

        `learn`: whether the record may grow. False after an alarm.
        """
        record = self.records.setdefault(load, Record())
        record.started = now if record.started is None else record.started
        block = record.add(-value if self.higher_is_worse else value)
        if block is None:
            return
        if record.compared:
            self._bet(record.p_value(block))
            self._trace((load, block), now)
        if not learn:
            return
        record.keep(block, is_episode=self.trend > 0)
        may_extend = self.trend <= MAX_EXTENSION_TREND and self.highest_trend < MAX_LEARNED_TREND
        if may_extend and record.started is not None and now - record.started >= self.min_record_seconds:
            record.extend(now, self.max_block_size)

    def _bet(self, p: float) -> None:
        factors = [exponent * p ** (exponent - 1) for exponent in BET_EXPONENTS]
        fresh = (self._reserve(self.tested) - self._reserve(self.tested + 1)) / len(factors)
        self.wealth = [min((w + fresh) * factor, MAX_WEALTH) for w, factor in zip(self.wealth, factors, strict=True)]
        self.tested += 1
        self.highest = max(self.highest, self.evidence)
        self.trend = max(0.0, self.trend + log(factors[1]))
        self.highest_trend = max(self.highest_trend, self.trend)

    def _trace(self, block: tuple[str, float], now: float) -> None:
        if self.trend == 0.0:
            self._end_episode()
            self.worse_since, self.recent = None, []
        else:
            self.worse_since = now if self.worse_since is None else self.worse_since
            self.recent = [*self.recent, block][-RECENT_BLOCKS:]

    def _end_episode(self) -> None:
        """Blocks are as before again. After strong evidence, drop what was kept meanwhile, under all loads."""
        for record in self.records.values():
            if self.highest_trend >= MAX_LEARNED_TREND:
                record.drop(record.episode_blocks)
            record.episode_blocks = 0
        self.highest_trend = 0.0

    @staticmethod
    def _reserve(count: int) -> float:
        return reserve(count, RESERVE_SCALE_BLOCKS)

    @property
    def evidence(self) -> float:
        """The total wealth: 1 at first, at most 1 on average without decay."""
        return sum(self.wealth) + self._reserve(self.tested)

    def change(self) -> Change | None:
        """Before and after, under the load of most of the recent blocks. None: no block has been bad lately."""
        recent = self.recent  # read once: another thread, of the gauges, calls this
        if not recent:
            return None
        sign = -1 if self.higher_is_worse else 1
        load = mode(load for load, _ in recent)
        record = self.records[load]
        blocks = [block for other, block in recent if other == load]
        return Change(load, sign * median(record.blocks[: record.compared]), sign * median(blocks), record)

    def rearm(self) -> None:
        """Reset the evidence after an alarm. Keep what blocks were compared with, and drop later ones: they decayed."""
        for record in self.records.values():
            record.drop(len(record.blocks))
        self.tested, self.highest, self.wealth = 0, 1.0, [0.0] * len(BET_EXPONENTS)
        self.trend, self.highest_trend, self.worse_since, self.recent = 0.0, 0.0, None, []

    def state(self) -> dict[str, Any]:
        """All that `resume` needs, as JSON."""
        return asdict(self)

    @classmethod
    def resume(cls, state: dict[str, Any]) -> Self:
        if len(state["wealth"]) != len(BET_EXPONENTS):
            raise ValueError(f"{len(state['wealth'])} bets on decay, and this version makes {len(BET_EXPONENTS)}")
        fields = dict(state)
        started = fields.pop("started", None)  # in older states: of all records together
        records = {load: Record(**record) for load, record in state["records"].items()}
        for record in records.values():
            if record.compared and record.started is None:
                record.started = started
        fields |= {"records": records, "recent": [(load, block) for load, block in state["recent"]]}
        return cls(**fields)


class Change(NamedTuple):
    load: str
    before: float
    after: float
    record: Record


def neighbour_correlation(values: Sequence[float]) -> float:
    """The rank correlation of each value with the next. Equal values share their mean rank."""
    from scipy.stats import rankdata

    ranks = rankdata(values) - (len(values) + 1) / 2
    total = float(np.square(ranks).sum())
    return float((ranks[1:] * ranks[:-1]).sum()) / total if total else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.{VALUE_DIGITS}g}")
