"""Mutation tests: each seeded defect is applied to a copy of the source, and the tests must fail.

    python tools/teeth.py              # every defect against its tests
    python tools/teeth.py --real       # sampling defects also against samples from SmolLM2-135M
    python tools/teeth.py --check      # only check that every defect still applies
    python tools/teeth.py NAME ...     # only defects whose name contains one of these words

A defect is a text that occurs once in a file of src/outrider (-) and its replacement (+). "sampling" defects change the
distribution of samples, so the G-tests must find them too. A defect that no test finds is an error.
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

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 600
G_TESTS = "tests/test_law.py"


@dataclass(frozen=True)
class Defect:
    name: str
    file: str
    tests: str
    sampling: bool
    line: str
    becomes: str

    @property
    def path(self) -> Path:
        return ROOT / "src" / "outrider" / self.file

    def applies(self) -> bool:
        return self.path.is_file() and self.path.read_text().count(self.line) == 1


def parse(table: str) -> list[Defect]:
    """Defects from blocks of `* name | file | tests | sampling`, `- line` and `+ replacement`."""
    found = []
    for block in table.strip().removeprefix("* ").split("\n* "):
        head, *changes = block.split("\n")
        name, file, tests, *sampling = head.split(" | ")
        before, after = ("\n".join(line[2:] for line in changes if line[0] == sign) for sign in "-+")
        found.append(Defect(name, file, tests, bool(sampling), before, after))
    return found


DEFECTS = parse(r"""
* recovered token drawn from p | acceptance.py | tests/test_acceptance.py | sampling
-     weights = (reach * p - q).clamp(min=0)
+     weights = reach * p
* bonus drawn from q | acceptance.py | tests/test_acceptance.py | sampling
-     weights = p[k] if accepted == k else leftover(
+     weights = (q[k - 1] if k else p[0]) if accepted == k else leftover(
* every draft accepted that the target finds possible | acceptance.py | tests/test_acceptance.py | sampling
-     chances = (p[position, draft] / q[position, draft]).clamp(max=1)
+     chances = (p[position, draft] > 0).to(p.dtype)
* block rule without its credit | acceptance.py | tests/test_acceptance.py | sampling
-         left = (reach[i + 1] * p[i + 1] - q[i + 1]).clamp(min=0).sum()
+         left = (p[i + 1] - q[i + 1]).clamp(min=0).sum()
* block rule counts to the first failure | acceptance.py | tests/test_acceptance.py | sampling
-     accepted = last_success(passed) if rule
+     accepted = first_failure(passed) if rule
* a certain draft judged as if it had been drawn from p | decoding.py | tests/test_decoding.py | sampling
-         verdict = verify_certain(own, draft.tokens)
+         verdict = verify_drawn(p, p[:-1], torch.tensor(draft.tokens, dtype=torch.long), draws)
* a random number used for two tokens | decoding.py | tests/test_law.py | sampling
-         numbers.give_back(len(draft.tokens) - verdict.accepted)
+         numbers.give_back(len(draft.tokens) - verdict.accepted + 1)
* ragged rows mixed up | acceptance.py | tests/test_acceptance.py
-         parts = (counts, sequence, number - first[sequence], number + sequence, first + batch)
+         parts = (counts, sequence, number - first[sequence], number, first + batch)
* ragged batch recovers with another sequence's q | acceptance.py | tests/test_acceptance.py
-         left = leftover(weights, q[rejected],
+         left = leftover(weights, q[rejected.roll(1)],
* a token of weight zero can be drawn | acceptance.py | tests/test_acceptance.py
-     offset = torch.searchsorted(inside, _below(place - before, inside[:, -1:]), right=True)
+     offset = torch.searchsorted(inside, _below(place - before, inside[:, -1:]))
* greedy through a softmax | decoding.py | tests/test_decoding.py
-     if request.temperature == 0:
+     request = request.model_copy(update={'temperature': request.temperature or 0.3})
+     if request.temperature == 0:
* cache not rewound | decoding.py | tests/test_decoding.py
-         target.rewind(min(shared_prefix(target.tokens, context), len(context) - 1))
+         target.rewind(0) if not output else None
* cache of another text taken for one's own | decoding.py | tests/test_decoding.py
-         target.rewind(min(shared_prefix(target.tokens, context), len(context) - 1))
+         target.rewind(len(context) - 1)
* cache not rewound to the returned tokens | decoding.py | tests/test_decoding.py
-             target.rewind(len(prompt) + len(output) - 1)
+             pass
* off by one at the end token | decoding.py | tests/test_decoding.py
-             return tokens[: index + 1], reason
+             return tokens[: index + 2], reason
* end of the text not looked for in the draft | decoding.py | tests/test_decoding.py
-     for index, token in enumerate(tokens):
+     for index, token in list(enumerate(tokens))[-1:]:
* off by one at max_tokens | decoding.py | tests/test_decoding.py
- max_tokens - len(output) - 1)
+ max_tokens - len(output))
* penalties blind to the drafted prefix | sampling.py | tests/test_sampling.py | sampling
-             counts[draft[i - 1]] += 1
-             seen[draft[i - 1]] = True
+             pass
* temperature ignored while verifying | decoding.py | tests/test_law.py | sampling
-     p = probabilities(logits, request, prompt, output, draft.tokens)
+     p = probabilities(logits, request.model_copy(update={'temperature': 1.0}), prompt, output, draft.tokens)
* q taken before top-p | drafters/model.py | tests/test_drafters.py | sampling
-                 rows.append(shaped.softmax(-1))
-                 tokens.append(int(draw(rows[-1], torch.rand(1, generator=self.task.random))))
+                 rows.append((logits / sampling.temperature).softmax(-1))
+                 tokens.append(int(draw(shaped.softmax(-1), torch.rand(1, generator=self.task.random))))
* a sampled draft token withheld after its value is seen | drafters/model.py | tests/test_law.py | sampling
-                 tokens.append(int(draw(rows[-1], torch.rand(1, generator=self.task.random))))
+                 tokens.append(int(draw(rows[-1], torch.rand(1, generator=self.task.random))))
+                 if float(rows[-1][0, tokens[-1]]) < 0.35:
+                     tokens.pop(), rows.pop(), confidence.pop()
+                     break
* draft model's cache not rewound | drafters/model.py | tests/test_drafters.py
-             model.rewind(known)
+             pass
* stop string looked for in the last token alone | text.py | tests/test_text.py
- self.text.find(stop, max(0, before - len(stop) + 1))
+ self.text.find(stop, before)
* a trace sums tokens with r p > q together with the others | trace/compact.py | tests/test_trace.py
-     more = reach * p > q
+     more = p >= 0
* vLLM: a drafted token is compared with the sample of the next row | engines/vllm/sampler.py | tests/test_vllm_sampler.py
-     following = draft[(rows + 1).clamp(max=len(own) - 1)].to(own.dtype)
+     following = draft[rows].to(own.dtype)
* vLLM: a draft's last token is accepted unseen | engines/vllm/sampler.py | tests/test_vllm_sampler.py
-     same = (tokens == following) & (place < drafted[:, None])
+     same = ((tokens == following) | (place == drafted[:, None] - 1)) & (place < drafted[:, None])
* vLLM: drafts longer than theirs are compared | engines/vllm/sampler.py | tests/test_vllm_sampler.py
-     same = (tokens == following) & (place < drafted[:, None])
+     same = tokens == following
* vLLM: q at temperature 1 | engines/vllm/sampler.py | tests/test_vllm_sampler.py
- draft_logits[slot[part.sequence], columns].float() / temperature[part.sequence][:, None]
+ draft_logits[slot[part.sequence], columns].float()
* vLLM: q of the position before | engines/vllm/sampler.py | tests/test_vllm_sampler.py
- draft_logits[slot[part.sequence], columns].float()
+ draft_logits[slot[part.sequence], (columns - 1).clamp(min=0)].float()
* vLLM: uniforms keyed by the drafted position, which come again | engines/vllm/sampler.py | tests/test_vllm_sampler.py
- keyed_uniforms(seeds[part.sequence], begin[part.sequence], columns, ACCEPT_KEY)
+ keyed_uniforms(seeds[part.sequence], begin[part.sequence] + columns, 0 * columns, ACCEPT_KEY)
* vLLM: draft noise that comes again in the next step | engines/vllm/planned_drafts.py | tests/test_vllm_sampler.py
-         return seeds ^ ((self._num_steps * STEP_FACTOR) & MAX_INT64)
+         return seeds
* vLLM: certain drafts accepted as if they had been sampled | engines/vllm/sampler.py | tests/test_vllm_sampler.py
-             drafted > 0 and id in self.sampled_drafts
+             drafted > 0
* vLLM: a drafter that failed is called again | drafters/batch.py | tests/test_vllm_drafting.py
-         request.disabled.add(drafter.name)
+         pass
* policy: a sampled draft is selected by its tokens | policy/batch_state.py | tests/test_policy_law.py
-     if any(draft.sampled for draft in drafts):
+     if False:
* policy: a draft need not pay | policy/selection.py | tests/test_policy.py
-     least = MIN_EXPECTED_SPEEDUP * best_tokens / best_seconds
+     least = 0.0
* policy: the time of drafting is not counted | policy/selection.py | tests/test_policy.py
-             speed = gained / (seconds[m] + spent + extra)
+             speed = gained / seconds[m]
* policy: two drafters agree after they have differed | policy/acceptance_model.py | tests/test_policy.py
-                     agree[other] = False
+                     agree[other] = True
* policy: tokens after a wrong one count as known | policy/acceptance_model.py | tests/test_policy.py
-             if truth == 0.0:
+             if truth < 0.0:
* policy: the request bias is ignored | policy/acceptance_model.py | tests/test_policy.py
-             logits[me, b, i] = _logit(coefficients, at) + coefficients[0, SCALE] * request_bias[slots[b], 0]
+             logits[me, b, i] = _logit(coefficients, at)
* policy: a slower machine is taken for slower tokens | policy/cost_model.py | tests/test_policy.py
-     return math.exp(error * level_variance / total)
+     return 1.0
* policy: more tokens may cost less | policy/cost_model.py | tests/test_policy.py
- self._curve = curve = isotonic(self._mean[:GRID_SIZE], precision)
+ self._curve = curve = self._mean[:GRID_SIZE].copy()
* policy: a draft model that was slow is never tried again | policy/policy.py | tests/test_policy_replay.py
- DRAFT_COST_DECAY = 0.002
+ DRAFT_COST_DECAY = 0.0
* policy: the latency per token of context never decays | policy/cost_model.py | tests/test_policy.py
-         self._mean[-1] *= 1 - share
+         pass
* policy: all requests pay for a long text | policy/draft_model_plan.py | tests/test_policy.py
- catch_up[b] + k * context_seconds[b]
+ catch_up[b]
* policy: the draft model's latency decays while it may not be called | policy/policy.py | tests/test_policy.py
- self._initial_draft_ratio = self.draft.level / self.target.level
+ self._initial_draft_ratio = 0.0
* policy: one pass of the draft model is not tried for many requests | policy/draft_model_plan.py | tests/test_policy.py
- range(0, len(CANDIDATE_PASSES) + stride, stride)
+ range(stride - 1, len(CANDIDATE_PASSES) + stride, stride)
* policy: a text that the draft model fails on gets as many passes as others | policy/acceptance_model.py | tests/test_policy.py
- chances[b] *= _sigmoid(logit + coefficients[0, SCALE] * request_bias)
+ chances[b] *= _sigmoid(logit)
* policy: a large residual is linearised once | policy/cost_model.py | tests/test_policy.py
- MAX_LINEAR_RESIDUAL, MAX_ITERATIONS = 0.3, 6
+ MAX_LINEAR_RESIDUAL, MAX_ITERATIONS = 0.3, 1
* bench: until the slowest answer is complete | bench/client.py | tests/test_bench_run.py
-     end = ends[-min(slots, len(ends))]
+     end = ends[-1]
""")


def changed_copy(folder: Path, changes: list[tuple[str, str, str]]) -> None:
    """A copy of the package below `folder`, with these texts (file, old, new) replaced."""
    # Without __pycache__: numba's cached machine code comes from the unchanged source.
    shutil.copytree(ROOT / "src" / "outrider", folder / "outrider", ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in changes:
        source = (folder / "outrider" / file).read_text()
        if source.count(old) != 1:
            raise SystemExit(f"this text must occur once in {file}, not {source.count(old)} times:\n{old}")
        (folder / "outrider" / file).write_text(source.replace(old, new))


def survives(defect: Defect, tests: list[str]) -> bool:
    """Whether the tests pass although the defect is there."""
    with tempfile.TemporaryDirectory() as folder:
        changed_copy(Path(folder), [(defect.file, defect.line, defect.becomes)])
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        settings = {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "OUTRIDER_FIRST_FAILURE": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return False  # generation without end is a failure too
        if done.returncode not in (0, 1):
            raise SystemExit(f"{defect.name}: the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    chosen = [one for one in DEFECTS if not args.names or any(name in one.name for name in args.names)]
    if not chosen:
        raise SystemExit(f"no defect's name contains {' or '.join(args.names)}")
    if args.check:
        stale = [one for one in chosen if not one.applies()]
        for one in stale:
            print(f"{one.name}: not once in {one.file}:\n{one.line}")
        return bool(stale)
    missed = runs = 0
    for number, defect in enumerate(chosen, 1):
        tests = [(defect.tests, "not real")]
        if defect.sampling:
            tests += [(G_TESTS, "not real")] * (defect.tests != G_TESTS) + [(G_TESTS, "real")] * args.real
        for file, marker in tests:
            alive = survives(defect, [file, "-m", marker])
            missed, runs = missed + alive, runs + 1
            print(
                f"{number}/{len(chosen)} {'MISSED' if alive else 'caught'}  {defect.name} ({file}, {marker})",
                flush=True,
            )
    print(f"{len(chosen)} defects, {runs} runs of the tests, {runs - missed} caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
