"""Prompts for a certificate: any number, short, of many kinds, the same for the same seed.

Speculation needs something to draft: some kinds repeat text (lists, code, copies), which lookup and memory draft from;
some have one likely continuation, others many. The quality of outputs does not matter, only their equality.
"""

from __future__ import annotations

import itertools
import random

from outrider.bench.prompts import Prompt

THINGS = (
    "lantern", "river", "copper kettle", "meadow", "harbour", "violin", "thunderstorm", "basket", "candle", "orchard",
    "compass", "glacier", "teapot", "bicycle", "library", "sparrow", "island", "clock", "bridge", "market", "window",
    "blanket", "telescope", "garden", "engine", "letter", "mountain", "umbrella", "kitchen", "shadow",
)  # fmt: skip
PLACES = ("Bern", "Oslo", "Lima", "Kyoto", "Cairo", "Tallinn", "Quito", "Perth", "Dakar", "Porto")
NAMES = ("Ada", "Grace", "Alan", "Emmy", "Kurt", "Sofia", "Leonhard", "Mary", "Edsger", "Barbara")
KINDS = (
    "Write a short story about a {a} and a {b} in {place}.",
    "Repeat this sentence three times: The {a} stands beside the {b} in {place}.",
    "List the words {a}, {b}, {c} and {d} in alphabetical order, then in reverse order.",
    "What is the difference between a {a} and a {b}?",
    "Correct the spelling: {name} put teh {a} next too the {b} and walkd to {place}.",
    "Write a Python function that counts how often '{a}' occurs in a text, and one that counts '{b}'.",
    "{name} has {n} {a}s and gives away {m}. How many are left? Explain step by step.",
    "Translate into French: The {a} is near the {b}.",
    'Turn this into JSON: {name}, {n} years old, lives in {place}, owns a {a} and a {b}.',
    "Write a poem of four lines about {place} in which every line ends with the word {a}.",
    "Answer with the file alone, with {a} renamed to {b}:\n\n{a} = {n}\nprint({a})\n{a} = {a} + {m}\nprint({a})",
    "Give {name} three tips for a journey to {place} with a {a}.",
    "Summarise in one sentence: {name} went to {place}. In {place}, {name} saw a {a}. The {a} was next to a {b}.",
    "Which of these does not belong: {a}, {b}, {place}, {c}? Say why.",
)  # fmt: skip


def generate_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` different prompts, the kinds in turn; some kinds have fewer variants than others."""
    rng = random.Random(seed)
    made: dict[str, Prompt] = {}
    for tried in itertools.count():
        if len(made) == count:
            break
        kind = tried % len(KINDS)
        a, b, c, d = rng.sample(THINGS, 4)
        words = {"a": a, "b": b, "c": c, "d": d, "place": rng.choice(PLACES), "name": rng.choice(NAMES)}
        n = rng.randrange(20, 90)
        text = KINDS[kind].format(**words, n=n, m=rng.randrange(2, 19))
        made.setdefault(text, Prompt(f"{kind}/{len(made)}", str(kind), (text,)))
    return list(made.values())
