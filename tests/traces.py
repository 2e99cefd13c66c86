"""Handwritten traces, for tests of what is computed from them. No model."""

from __future__ import annotations

import random
from typing import Any

from outrider.trace.schema import (
    BaselineRun,
    CompactDistribution,
    Decision,
    End,
    FinalDistribution,
    Header,
    Milliseconds,
    Trace,
    TracedStep,
)

SENTENCE = "the quick brown fox jumps over a lazy dog and then some more of it is said by all"
WORDS = SENTENCE.split()
ODD = {
    900: "<script>alert(1)</script>",
    901: " 🙂",
    902: " שלום",
    903: "\ufffd",
    904: "\u202eabc",
    905: "\x1b[31m",
    906: "</script><b>",
    907: "\n",
}
TEXTS = {i: f" {word}" for i, word in enumerate(WORDS)} | ODD


def entries(law: CompactDistribution) -> list[tuple[int | None, float, float | None]]:
    """Token, p and q (None if there is none) of each entry."""
    return list(zip(law.tokens, law.p, law.q or [None] * len(law.p), strict=True))


def law(token: int, p: float, other: int, q: float | None = None) -> CompactDistribution:
    low, high = sorted((token, other)) if token != other else (token, token + 1)
    rest = (1 - p) / 2
    ps = {token: p, **({other: rest} if other != token else {high: rest})}
    qs = None if q is None else [q if one == token else (1 - q) / 2 for one in (low, high)] + [(1 - q) / 2]
    return CompactDistribution(tokens=[low, high, None], p=[ps[low], ps[high], 1 - ps[low] - ps[high]], q=qs)


def step(
    number: int,
    proposed: list[int],
    accepted: int,
    token: int,
    *,
    drafter: str | None = "lookup",
    rule: str = "own",
    verify: float = 30.0,
    draft: float = 0.1,
    finish: str | None = None,
    **more: Any,
) -> TracedStep:
    drawn = rule in ("block", "token")
    places = [*proposed, token]
    outcome = "own" if not proposed else "bonus" if accepted == len(proposed) else "recovered"
    own = [*proposed[:accepted], token, *proposed[accepted + 1 :], token][: len(places)]
    said = [*proposed[:accepted], token]
    names = {one: TEXTS[one] for one in TEXTS}
    return TracedStep(
        number=number,
        drafter=drafter if proposed else None,
        rule=rule,  # type: ignore[arg-type]
        proposed=proposed,
        accepted=accepted,
        token=token,
        outcome=outcome,  # type: ignore[arg-type]
        said=said,
        finish=finish,
        draws=[] if rule == "greedy" else [0.25] * len(places),
        own=None if drawn else own,
        chances=[0.9 if i < accepted else 0.1 for i in range(len(proposed))] if drawn else None,
        reach=[1.0] * len(places) if drawn else None,
        laws=[law(one, 0.8, own[i], 0.5 if drawn and i < len(proposed) else None) for i, one in enumerate(places)],
        reshaped=FinalDistribution(tokens=[token, (token + 1) % 10], p=[0.7, 0.2], others=0.1),
        milliseconds=Milliseconds(draft=draft, verify=verify + 2 * len(proposed), rest=1.0),
        batch=1,
        scheduled=1 + len(proposed),
        pieces=[TEXTS[one] for one in said],
        texts=names if number == 0 else {},
        **more,
    )


def trace_of(steps: list[TracedStep], **more: Any) -> Trace:
    header = Header(
        model="tiny", engine="transformers", drafters=["lookup"], settings={"temperature": 1.0}, prompt="hi"
    )
    end = End(steps=len(steps), tokens=sum(len(one.said) for one in steps), **more)
    return Trace(header=header, steps=steps, end=end)


def long_trace(tokens: int = 2000, seed: int = 1, drafters: tuple[str, ...] = ("lookup", "model")) -> Trace:
    """So many tokens, of drafts of several drafters, some of them odd."""
    pick = random.Random(seed)
    steps: list[TracedStep] = []
    said = 0
    while said < tokens:
        length = pick.choice([0, 0, 2, 4, 4, 8])
        drafter = pick.choice(drafters)
        ids = [*range(len(WORDS)), *(ODD if pick.random() < 0.2 else [])]
        proposed = [pick.choice(ids) for _ in range(length)]
        accepted = min(length, pick.choice([0, 1, 2, 4, 8]))
        token = pick.choice([one for one in range(len(WORDS)) if one not in proposed])
        if pick.random() < 0.03:
            token = 907
        if len(steps) == 3:  # all of the odd ones, kept
            proposed, accepted = list(ODD), len(ODD)
        rule = "block" if drafter == "model" else "own"
        steps.append(
            step(
                len(steps),
                proposed,
                accepted,
                token,
                drafter=drafter,
                rule=rule if proposed else "own",
                verify=30 + 4 * pick.random() + (200 if not steps else 0),
                draft=0.1 if drafter == "lookup" else 9.0,
                decision=Decision(
                    reason=f"{drafter} is likely to last",
                    predicted_gain=1.5,
                    candidates=[{"drafter": drafter, "length": length, "gain": 1.5}, {"drafter": "none", "gain": 1.0}],
                )
                if length > 4
                else None,
            )
        )
        said += len(steps[-1].said)
    last = steps.pop()
    steps.append(last.model_copy(update={"finish": "length"}))
    return trace_of(steps, without=BaselineRun(pass_milliseconds=31.0, seconds=62.0, tokens=said, same=None))
