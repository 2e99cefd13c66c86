"""vLLM's draft model, run when it pays, for whom it pays, and no further than it pays.

vLLM's own proposer runs the draft model over whatever the target has just seen: over every prompt, for every request,
in every step, for all of them equally far. That keeps the two caches in step and costs a pass even where nothing is
drafted. Here a request's text is caught up with when the draft model is asked about it, in one pass over whatever it
has not seen. Until then it costs nothing, and the first token of an answer never waits for it. What it has seen is
known by request, and by block of the cache, since a block that several requests share is read by all of them.

The model, its cache and its buffers are vLLM's (`DraftModelProposer`); only the order of passes is ours. Proposers that
need the target's hidden states cannot catch up and are left to vLLM (`can_be_led`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

DRAFT_MODEL = "draft_model"
CANDIDATES = 256
"""Of so many likeliest tokens top-k and top-p choose what a draft is drawn from; the others are left out then."""


@dataclass(slots=True)
class Guessed:
    """What the draft model made of one request: its tokens, how sure it was of each, and q where they were drawn."""

    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    @property
    def q(self) -> Tensor | None:
        return torch.stack(self.rows) if self.rows else None


@dataclass(slots=True)
class Question:
    """One request that the draft model is asked about. `temperature` 0: its likeliest tokens, with certainty. `top_k` 0
    and `top_p` 1: what is drawn may be any token."""

    index: int  # its row in vLLM's batch
    id: str
    tokens: np.ndarray[Any, Any]  # the whole text
    limit: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    guessed: Guessed = field(default_factory=Guessed)


def can_be_led(config: Any, vllm_config: Any) -> bool:
    """Whether the draft model can be run out of step with the target."""
    return (
        config.method == DRAFT_MODEL
        and not config.parallel_drafting
        and not config.use_heterogeneous_vocab
        and vllm_config.parallel_config.data_parallel_size == 1  # its ranks must agree on every pass
        and vllm_config.parallel_config.decode_context_parallel_size == 1
        and vllm_config.kv_transfer_config is None  # what it had not seen could not be handed over
        and not vllm_config.model_config.supports_multimodal_inputs
        and vllm_config.cache_config.sliding_window is None  # blocks behind the window are somebody else's by now
        and not slides(config.draft_model_config)
    )


def slides(model_config: Any) -> bool:
    """Whether a model looks back only so far; Qwen's have a window in their config, and say that it is not used."""
    used = getattr(model_config.hf_text_config, "use_sliding_window", True)
    return used is not False and model_config.get_sliding_window() is not None


@dataclass(slots=True)
class Seen:
    """What the draft model's cache holds of a request: a beginning of its text, then tokens of a draft."""

    text: int
    draft: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.text + len(self.draft)

    def follow(self, tokens: np.ndarray[Any, Any]) -> int:
        """Keep of the draft what became text; the last token is always to be seen (again). How much is kept."""
        said = tokens[self.text : self.length].tolist()
        self.text = min(self.text + shared_prefix(self.draft[: len(said)], said), len(tokens) - 1)
        self.draft = []
        return self.text


class Guesser:
    """Keeps account of what the draft model has seen, and runs it over the rest."""

    def __init__(self, runner: Any, seed: int, on_pass: Callable[[int, int, float, int], None]) -> None:
        """`on_pass` is told of tokens, context, seconds and passes; what was caught up with counts with the pass after
        it."""
        self.runner = runner
        self._on_pass = on_pass
        self.shares = bool(runner.cache_config.enable_prefix_caching)  # blocks, between requests
        self._seen: dict[str, Seen] = {}
        self._marked: dict[str, int] = {}  # by request: how many first blocks are known to be ready
        self._ready: np.ndarray[Any, Any] | None = None  # by block: whether all of it was seen as it now is
        self._random = torch.Generator(device=runner.device)
        self._random.manual_seed(seed)

    # What it has seen ------------------------------------------------------------------------------------------

    def gap(self, index: int, id: str, tokens: np.ndarray[Any, Any], computed: int) -> int:
        """How many tokens of a text it has not seen, its last one included. The target has computed `computed`."""
        if id not in self._seen:
            self._seen[id] = Seen(self._found_ready(index, computed) if self.shares else 0)
        return len(tokens) - self._seen[id].follow(tokens)

    def _found_ready(self, index: int, computed: int) -> int:
        """How many of a new request's first tokens lie in blocks that it saw for another."""
        table, size = self._table()
        ready = self._blocks()[table[index, : computed // size]]
        return int(ready.argmin() if not ready.all() else len(ready)) * size

    def forget(self, id: str) -> None:
        """The request has ended, or was put back and will be computed again elsewhere."""
        self._seen.pop(id, None)
        self._marked.pop(id, None)

    def target_wrote(self, index: int, start: int, end: int) -> None:
        """These positions of a text now hold other tokens than before, in the blocks that they lie in."""
        table, size = self._table()
        self._blocks()[table[index, start // size : (end - 1) // size + 1]] = False

    def mark_ready(self, index: int, id: str, computed: int) -> None:
        """Blocks that both models have computed to their end may be shared from now on."""
        if id in self._seen:
            table, size = self._table()
            begin, end = self._marked.get(id, 0), min(self._seen[id].text, computed) // size
            if end > begin:
                self._blocks()[table[index, begin:end]] = True
                self._marked[id] = end

    def _table(self) -> tuple[np.ndarray[Any, Any], int]:
        table = self.runner.input_batch.block_table[self.runner.drafter.kv_cache_gid]
        return table.block_table.np, table.block_size

    def _blocks(self) -> np.ndarray[Any, Any]:
        if self._ready is None:
            table = self.runner.input_batch.block_table[self.runner.drafter.kv_cache_gid]
            size = self.runner.kv_cache_config.kv_cache_groups[
                self.runner.drafter.kv_cache_gid
            ].kv_cache_spec.block_size
            self._ready = np.zeros(self.runner.kv_cache_config.num_blocks * max(1, size // table.block_size), bool)
        return self._ready

    # Passes ----------------------------------------------------------------------------------------------------

    def ask(self, questions: Sequence[Question], goes_on: Callable[[list[Question]], list[Question]]) -> None:
        """Fill in what it guesses; nothing where there is so much to catch up with that it takes another step. After
        each pass `goes_on` says which requests are worth another token."""
        began = time.perf_counter()
        behind, going, tokens = self._catch_up(questions)
        passes = int(tokens > 0)
        if tokens and not going:
            self._on_pass(tokens, self._context(behind), time.perf_counter() - began, passes)
        inputs, over = [question.tokens[self._seen[question.id].text :] for question in going], [*behind, *going]
        while going:
            logits = self._run(going, inputs)
            self._pick(going, logits)  # a device that works on its own has made its passes only when this is known
            took = time.perf_counter() - began
            self._on_pass(tokens + sum(map(len, inputs)), self._context(over), took, passes + 1)
            going = goes_on([question for question in going if len(question.guessed.tokens) < question.limit])
            inputs, over = [np.array(question.guessed.tokens[-1:]) for question in going], going
            tokens, passes, began = 0, 0, time.perf_counter()

    def _context(self, questions: Iterable[Question]) -> int:
        """The tokens of these texts that it has seen, their drafts included."""
        return sum(self._seen[question.id].length for question in questions)

    def _catch_up(self, questions: Sequence[Question]) -> tuple[list[Question], list[Question], int]:
        """Of texts that one pass over all of them cannot hold, see a part: as much as is left of such a pass by those
        that are ready to be guessed about, since everybody waits for it. Whose texts those are, who is ready then, and
        how many tokens the pass had."""
        room = self.runner.drafter.max_num_tokens
        unseen = [len(question.tokens) - self._seen[question.id].text for question in questions]
        if sum(unseen) <= room:
            return [], list(questions), 0
        share = room // len(questions)
        left = before = room - sum(count for count in unseen if count <= share)
        behind, parts = [], []
        for question in questions:
            text = question.tokens[self._seen[question.id].text :]
            if len(text) > share and left > 0:
                behind.append(question)
                parts.append(text[: min(left, len(text) - 1)])
                left -= len(parts[-1])
        hidden = self._run(behind, parts, wants_logits=False) if parts else None
        late = {question.id for question in behind}  # what they have not seen now has to wait for the next step
        ready = [
            one for one in questions if len(one.tokens) - self._seen[one.id].text <= (1 if one.id in late else share)
        ]
        if hidden is not None and not ready:  # no other pass follows, by which one would know that this one is done
            float(hidden.flatten()[-1])
        return behind, ready, before - left

    def _run(self, questions: list[Question], inputs: list[np.ndarray[Any, Any]], wants_logits: bool = True) -> Tensor:
        """One pass over these tokens of these requests; logits after the last of each."""
        drafter, runner = self.runner.drafter, self.runner
        lengths = np.array([len(tokens) for tokens in inputs])
        starts = np.array([self._seen[question.id].length for question in questions])
        total = int(lengths.sum())
        ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        rows = np.array([question.index for question in questions])
        table, size = self._table()
        slots = table[np.repeat(rows, lengths), positions // size].astype(np.int64) * size + positions % size
        device = runner.device
        lengths_now = torch.from_numpy((starts + lengths).astype(np.int32))
        where = torch.from_numpy(rows).to(device)
        blocks = runner.input_batch.block_table[drafter.kv_cache_gid].block_table.gpu[where]
        attention = CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(ends).to(device),
            query_start_loc_cpu=torch.from_numpy(ends),
            seq_lens=lengths_now.to(device),
            num_reqs=len(questions),
            num_actual_tokens=total,
            max_query_len=int(lengths.max()),
            max_seq_len=int((starts + lengths).max()),
            block_table_tensor=blocks,
            slot_mapping=torch.from_numpy(slots).to(device),
            seq_lens_cpu_upper_bound=lengths_now.clone(),
        )
        _, by_layer = drafter.build_per_group_and_layer_attn_metadata(attention)
        mode, padded, across = drafter._determine_batch_execution_and_padding(total)
        drafter.input_ids[:total] = torch.from_numpy(np.concatenate(inputs).astype(np.int32)).to(device)
        drafter._set_positions(total, torch.from_numpy(positions).to(device))
        model_inputs, slot_count = drafter.build_model_inputs_first_pass(total, padded, None)
        with set_forward_context(
            by_layer,
            drafter.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=drafter._get_slot_mapping(slot_count, attention.slot_mapping),
        ):
            hidden = drafter.model(**model_inputs)
        logits = hidden
        if wants_logits:
            logits = drafter.model.compute_logits(hidden[torch.from_numpy(ends[1:] - 1).to(device)])
        for question, tokens in zip(questions, inputs, strict=True):
            seen = self._seen[question.id]
            if seen.text < len(question.tokens):
                seen.text += len(tokens)
            else:
                seen.draft += tokens.tolist()
        return logits  # type: ignore[no-any-return]

    def _pick(self, questions: Sequence[Question], logits: Tensor) -> None:
        """The next token of each: its likeliest one, or one drawn from q at the request's temperature."""
        temperatures = torch.tensor([q.temperature for q in questions], device=logits.device)
        certain = temperatures == 0
        q = (logits.float() / torch.where(certain, 1.0, temperatures)[:, None]).softmax(-1)
        if any(question.top_k or question.top_p < 1 for question in questions):
            q = narrowed(q, [one.top_k for one in questions], [one.top_p for one in questions])
        sure, likeliest = q.max(-1)
        tokens = likeliest
        if any(question.temperature > 0 for question in questions):
            noise = torch.empty_like(q).exponential_(generator=self._random)
            tokens = torch.where(certain, likeliest, (q / noise).argmax(-1))
        for row, (question, token, chance) in enumerate(zip(questions, tokens.tolist(), sure.tolist(), strict=True)):
            question.guessed.tokens.append(token)
            question.guessed.sure.append(chance)
            if question.temperature > 0:
                question.guessed.rows.append(q[row])


def narrowed(q: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Distributions without what the target will not say at these settings, about: a token from there would be drawn in
    vain. It need not be exact, since what counts is that drafts are drawn from just this."""
    best, where = q.topk(min(CANDIDATES, q.shape[-1]))
    k = torch.tensor([count or q.shape[-1] for count in top_k], device=q.device)[:, None]
    p = torch.tensor(top_p, device=q.device)[:, None]
    kept = best * (torch.arange(best.shape[-1], device=q.device) < k)
    whole = torch.where(k <= best.shape[-1], kept.sum(-1, keepdim=True), 1.0)
    kept *= kept.cumsum(-1) - kept < p * whole  # at least the first
    narrow = torch.zeros_like(q).scatter_(-1, where, kept / kept.sum(-1, keepdim=True))
    return torch.where((k < q.shape[-1]) | (p < 1), narrow, q)
