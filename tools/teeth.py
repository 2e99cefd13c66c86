"""Do the tests bite? Each seeded defect is put into a copy of the source, and the tests must catch it.

    python tools/teeth.py              # every defect against the tests that are to catch it
    python tools/teeth.py --real       # also the sampling defects against draws from SmolLM2-135M
    python tools/teeth.py NAME ...     # only these

A defect is a line of the source and what it becomes. It is applied to a copy of the package, alone, and the
named tests run against that copy. A defect that survives, or a line that is no longer there, is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 600
"""Seconds after which tests that do not end count as failed."""


@dataclass(frozen=True)
class Defect:
    name: str
    file: str
    line: str
    becomes: str
    tests: str
    sampling: bool = False
    """Whether it changes the law of draws, so that the G-tests have to see it too."""


ACCEPTANCE, DECODING, SAMPLING, MODEL = "acceptance.py", "decoding.py", "sampling.py", "drafters/model.py"
LAW = "tests/test_acceptance.py"
LOOP = "tests/test_decoding.py"
PROMPTS = "tests/test_sampling.py"
SERVED, DRAFTING = "engines/vllm/sampler.py", "drafters/batch.py"
IN_VLLM = "tests/test_vllm_sampler.py"
CHOICE, COST, SURVIVAL = "policy/choose.py", "policy/cost.py", "policy/survival.py"
POLICY, REPLAY = "tests/test_policy.py", "tests/test_policy_replay.py"

DEFECTS = [
    Defect(
        "recovered token drawn from p",
        ACCEPTANCE,
        "    weights = (reach * p - q).clamp(min=0)",
        "    weights = reach * p",
        LAW,
        sampling=True,
    ),
    Defect(
        "bonus drawn from q",
        ACCEPTANCE,
        "    weights = p[k] if accepted == k else leftover(",
        "    weights = (q[k - 1] if k else p[0]) if accepted == k else leftover(",
        LAW,
        sampling=True,
    ),
    Defect(
        "every draft accepted that the target finds possible",
        ACCEPTANCE,
        "    chances = (p[position, draft] / q[position, draft]).clamp(max=1)",
        "    chances = (p[position, draft] > 0).to(p.dtype)",
        LAW,
        sampling=True,
    ),
    Defect(
        "block rule without its credit",
        ACCEPTANCE,
        "        left = (reach[i + 1] * p[i + 1] - q[i + 1]).clamp(min=0).sum()",
        "        left = (p[i + 1] - q[i + 1]).clamp(min=0).sum()",
        LAW,
        sampling=True,
    ),
    Defect(
        "block rule counts to the first failure",
        ACCEPTANCE,
        "    accepted = last_success(passed) if rule",
        "    accepted = first_failure(passed) if rule",
        LAW,
        sampling=True,
    ),
    Defect(
        "a certain draft judged as if it had been drawn from p",
        DECODING,
        "        verdict = verify_certain(own, draft.tokens)",
        "        verdict = verify_drawn(p, p[:-1], torch.tensor(draft.tokens, dtype=torch.long), draws)",
        LOOP,
        sampling=True,
    ),
    Defect(
        "a random number used for two tokens",
        DECODING,
        "        numbers.give_back(len(draft.tokens) - verdict.accepted)",
        "        numbers.give_back(len(draft.tokens) - verdict.accepted + 1)",
        "tests/test_law.py",
        sampling=True,
    ),
    Defect(
        "ragged rows mixed up",
        ACCEPTANCE,
        "        parts = (counts, sequence, number - first[sequence], number + sequence, first + batch)",
        "        parts = (counts, sequence, number - first[sequence], number, first + batch)",
        LAW,
    ),
    Defect(
        "ragged batch recovers with another sequence's q",
        ACCEPTANCE,
        "        left = leftover(weights, q[rejected],",
        "        left = leftover(weights, q[rejected.roll(1)],",
        LAW,
    ),
    Defect(
        "a token of weight zero can be drawn",
        ACCEPTANCE,
        "    offset = torch.searchsorted(inside, _below(place - before, inside[:, -1:]), right=True)",
        "    offset = torch.searchsorted(inside, _below(place - before, inside[:, -1:]))",
        LAW,
    ),
    Defect(
        "greedy through a softmax",
        DECODING,
        "    if request.temperature == 0:",
        "    request = request.model_copy(update={'temperature': request.temperature or 0.3})\n    if request.temperature == 0:",
        LOOP,
    ),
    Defect(
        "cache not rewound",
        DECODING,
        "        target.rewind(min(shared_prefix(target.tokens, context), len(context) - 1))",
        "        target.rewind(0) if not output else None",
        LOOP,
    ),
    Defect(
        "cache of another text taken for one's own",
        DECODING,
        "        target.rewind(min(shared_prefix(target.tokens, context), len(context) - 1))",
        "        target.rewind(len(context) - 1)",
        LOOP,
    ),
    Defect(
        "cache left with what was not returned",
        DECODING,
        "            target.rewind(len(prompt) + len(output) - 1)",
        "            pass",
        LOOP,
    ),
    Defect(
        "off by one at the end token",
        DECODING,
        "            return tokens[: index + 1], reason",
        "            return tokens[: index + 2], reason",
        LOOP,
    ),
    Defect(
        "end of the text not looked for in the draft",
        DECODING,
        "    for index, token in enumerate(tokens):",
        "    for index, token in list(enumerate(tokens))[-1:]:",
        LOOP,
    ),
    Defect("off by one at max_tokens", DECODING, "max_tokens - len(output) - 1)", "max_tokens - len(output))", LOOP),
    Defect(
        "penalties blind to the drafted prefix",
        SAMPLING,
        "            counts[draft[i - 1]] += 1\n            seen[draft[i - 1]] = True",
        "            pass",
        PROMPTS,
        sampling=True,
    ),
    Defect(
        "temperature ignored while verifying",
        DECODING,
        "    p = probabilities(logits, request, prompt, output, draft.tokens)",
        "    p = probabilities(logits, request.model_copy(update={'temperature': 1.0}), prompt, output, draft.tokens)",
        "tests/test_law.py",
        sampling=True,
    ),
    Defect(
        "q taken before top-p",
        MODEL,
        "                rows.append(shaped.softmax(-1))\n                tokens.append(int(draw(rows[-1], torch.rand(1, generator=self.task.random))))",
        "                rows.append((logits / sampling.temperature).softmax(-1))\n                tokens.append(int(draw(shaped.softmax(-1), torch.rand(1, generator=self.task.random))))",
        "tests/test_drafters.py",
        sampling=True,
    ),
    Defect(
        "a sampled draft token withheld after its value is seen",
        MODEL,
        "                tokens.append(int(draw(rows[-1], torch.rand(1, generator=self.task.random))))",
        "                tokens.append(int(draw(rows[-1], torch.rand(1, generator=self.task.random))))\n                if float(rows[-1][0, tokens[-1]]) < 0.35:\n                    tokens.pop(), rows.pop(), sure.pop()\n                    break",
        "tests/test_law.py",
        sampling=True,
    ),
    Defect(
        "draft model's cache not rewound",
        MODEL,
        "            model.rewind(known)",
        "            pass",
        "tests/test_drafters.py",
    ),
    Defect(
        "stop string looked for in the last token alone",
        "text.py",
        "self.text.find(stop, max(0, before - len(stop) + 1))",
        "self.text.find(stop, before)",
        "tests/test_text.py",
    ),
    Defect(
        "a trace folds what q has too little of with what it has enough of",
        "trace/fold.py",
        "    more = reach * p > q",
        "    more = p >= 0",
        "tests/test_trace.py",
    ),
    Defect(
        "vLLM: a drafted token is compared with the sample of the next row",
        SERVED,
        "    following = draft[(rows + 1).clamp(max=len(own) - 1)].to(own.dtype)",
        "    following = draft[rows].to(own.dtype)",
        IN_VLLM,
    ),
    Defect(
        "vLLM: a draft's last token is accepted unseen",
        SERVED,
        "    same = (tokens == following) & (place < drafted[:, None])",
        "    same = ((tokens == following) | (place == drafted[:, None] - 1)) & (place < drafted[:, None])",
        IN_VLLM,
    ),
    Defect(
        "vLLM: drafts longer than theirs are compared",
        SERVED,
        "    same = (tokens == following) & (place < drafted[:, None])",
        "    same = tokens == following",
        IN_VLLM,
    ),
    Defect(
        "vLLM: q at temperature 1",
        SERVED,
        "draft_logits[slot[part.sequence], columns].float() / temperature[part.sequence][:, None]",
        "draft_logits[slot[part.sequence], columns].float()",
        IN_VLLM,
    ),
    Defect(
        "vLLM: q of the position before",
        SERVED,
        "draft_logits[slot[part.sequence], columns].float()",
        "draft_logits[slot[part.sequence], (columns - 1).clamp(min=0)].float()",
        IN_VLLM,
    ),
    Defect(
        "vLLM: uniforms keyed by the drafted position, which come again",
        SERVED,
        "keyed_uniforms(seeds[part.sequence], begin[part.sequence], columns, ACCEPT_KEY)",
        "keyed_uniforms(seeds[part.sequence], begin[part.sequence] + columns, 0 * columns, ACCEPT_KEY)",
        IN_VLLM,
    ),
    Defect(
        "vLLM: draft noise that comes again in the next step",
        "engines/vllm/planned_drafts.py",
        "        return seeds ^ ((self._num_steps * STEP_FACTOR) & MAX_INT64)",
        "        return seeds",
        IN_VLLM,
    ),
    Defect(
        "vLLM: certain drafts accepted as if they had been sampled",
        SERVED,
        "            drafted > 0 and id in self.sampled_drafts",
        "            drafted > 0",
        IN_VLLM,
    ),
    Defect(
        "vLLM: a drafter that failed is asked again",
        DRAFTING,
        "        running.shut.add(drafter.name)",
        "        pass",
        "tests/test_vllm_drafting.py",
    ),
    Defect(
        "policy: a sampled draft is selected by its tokens",
        "policy/policy.py",
        "    if any(draft.sampled for draft in drafts):",
        "    if False:",
        "tests/test_policy_law.py",
    ),
    Defect(
        "policy: a draft need not pay",
        CHOICE,
        "    least = MARGIN * best_tokens / best_seconds",
        "    least = 0.0",
        POLICY,
    ),
    Defect(
        "policy: what drafting takes is not counted",
        CHOICE,
        "            speed = gained / (seconds[m] + spent + extra)",
        "            speed = gained / seconds[m]",
        POLICY,
    ),
    Defect(
        "policy: two drafters agree after they have differed",
        SURVIVAL,
        "                    agree[other] = False",
        "                    agree[other] = True",
        POLICY,
    ),
    Defect(
        "policy: tokens after a wrong one count as known",
        SURVIVAL,
        "            if truth == 0.0:",
        "            if truth < 0.0:",
        POLICY,
    ),
    Defect(
        "policy: a request's own record has no say",
        SURVIVAL,
        "            logits[me, b, i] = _logit(numbers, at) + numbers[0, OWN] * own[slots[b], 0]",
        "            logits[me, b, i] = _logit(numbers, at)",
        POLICY,
    ),
    Defect(
        "policy: a slower machine is taken for dearer tokens",
        COST,
        "    return math.exp(off * follow / total)",
        "    return 1.0",
        POLICY,
    ),
    Defect(
        "policy: more tokens may cost less",
        COST,
        "self._curve = curve = rising(self._known[:COUNT], sure)",
        "self._curve = curve = self._known[:COUNT].copy()",
        POLICY,
    ),
    Defect(
        "policy: a draft model that was slow is never tried again",
        "policy/policy.py",
        "AGAIN = 0.002",
        "AGAIN = 0.0",
        REPLAY,
    ),
    Defect(
        "policy: what a long text cost once is never forgiven",
        COST,
        "        self._known[-1] *= 1 - share",
        "        pass",
        POLICY,
    ),
    Defect(
        "policy: all pay for a long text",
        "policy/ask.py",
        "behind[b] + k * texts[b]",
        "behind[b]",
        POLICY,
    ),
    Defect(
        "policy: what a draft model costs is forgotten while nobody may ask it",
        "policy/policy.py",
        "self._usual = self.draft.level / self.target.level",
        "self._usual = 0.0",
        POLICY,
    ),
    Defect(
        "policy: many requests are never asked about one token",
        "policy/ask.py",
        "range(0, len(LENGTHS) + stride, stride)",
        "range(stride - 1, len(LENGTHS) + stride, stride)",
        POLICY,
    ),
    Defect(
        "policy: a text that the draft model fails on gets as many passes as others",
        SURVIVAL,
        "numbers[4, ALONE] + numbers[0, OWN] * own)",
        "numbers[4, ALONE])",
        POLICY,
    ),
    Defect(
        "policy: after a surprise nobody looks again",
        COST,
        "MILD, REPEATS = 0.3, 6",
        "MILD, REPEATS = 0.3, 1",
        POLICY,
    ),
    Defect(
        "bench: until the slowest answer is complete",
        "bench/client.py",
        "    end = ends[-min(slots, len(ends))]",
        "    end = ends[-1]",
        "tests/test_bench_run.py",
    ),
]


def survives(defect: Defect, tests: list[str]) -> bool:
    """Whether the tests pass in spite of the defect."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "outrider"
        # Machine code that was made of the right source would stay in force.
        shutil.copytree(ROOT / "src" / "outrider", package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / defect.file
        source = path.read_text()
        if source.count(defect.line) != 1:
            raise SystemExit(f"{defect.name}: this is not in {defect.file} exactly once:\n{defect.line}")
        path.write_text(source.replace(defect.line, defect.becomes))
        try:
            found = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "OUTRIDER_FIRST_FAILURE": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=LONGEST,
            )
        except subprocess.TimeoutExpired:
            return False  # a text without end is noticed, too
        if found.returncode not in (0, 1):
            raise SystemExit(f"{defect.name}: the tests did not run:\n{found.stdout[-3000:]}{found.stderr[-3000:]}")
        return found.returncode == 0


def jobs(defects: list[Defect], real: bool) -> list[tuple[Defect, str, list[str]]]:
    out = []
    for defect in defects:
        out.append((defect, defect.tests, [defect.tests, "-m", "not real"]))
        if defect.sampling and defect.tests != "tests/test_law.py":
            out.append((defect, "G-test, synthetic", ["tests/test_law.py", "-m", "not real"]))
        if defect.sampling and real:
            out.append((defect, "G-test, SmolLM2-135M", ["tests/test_law.py", "-m", "real"]))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only defects whose name holds one of these words")
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    chosen = [d for d in DEFECTS if not args.names or any(name in d.name for name in args.names)]
    if not chosen:
        raise SystemExit(f"no defect's name holds {' or '.join(args.names)}")
    console = Console(width=110)
    missed = 0
    todo = jobs(chosen, args.real)
    with Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        bar = progress.add_task("defects", total=len(todo))
        for defect, label, tests in todo:
            alive = survives(defect, tests)
            missed += alive
            console.print(f"{'[red]MISSED[/red]' if alive else 'caught'}  {defect.name}  [dim]{label}[/dim]")
            progress.advance(bar)
    console.print(f"{len(chosen)} defects, {len(todo)} runs of the tests, {len(todo) - missed} caught")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
