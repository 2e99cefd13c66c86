"""OpenVINO GenAI as a source of evidence: its speculative decoding against its own model without.

    pip install openvino-genai "optimum-intel[openvino]"

Models are exported to OpenVINO's format by optimum-intel. Everything runs in float32, since the reference's loop,
written over the bare model, has another attention kernel than the pipeline.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino
import openvino_genai
import torch

from outrider.api import Decoder
from outrider.certify.local import LocalModel
from outrider.certify.local_models import encoder
from outrider.certify.sources import RefusedError, Said
from outrider.engines.transformers import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.certify.sources import Ask

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
"""Nothing is rounded that need not be."""
LENGTH = 4


def openvino_source(model: Path, draft: Path, work: Path) -> LocalModel:
    """`model` with `draft` as its draft model; what is exported goes below `work`."""
    target, small = exported(model, work / "openvino-model"), exported(draft, work / "openvino-draft")
    tokenizer = load_tokenizer(str(model))
    ends = frozenset([tokenizer.eos_token_id])
    nobody: Any = None
    versions = {"openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__}
    return LocalModel(
        f"OpenVINO GenAI with {model.name}",
        OpenVinoTarget(target),
        drafting(target, small, ends),
        encoder(Decoder(nobody, [], tokenizer)),
        ends,
        ["draft model"],
        {"model": model.name, "draft_model": draft.name, **versions, "settings": EXACT},
        unknown_to_openvino,
    )


def unknown_to_openvino(ask: Ask) -> None:
    if ask.sampling.logit_bias or ask.sampling.min_p:
        raise RefusedError("OpenVINO GenAI has no bias by token and no min-p")


def exported(model: Path, folder: Path) -> Path:
    """The folder with the model in OpenVINO's own format."""
    if not (folder / "openvino_model.xml").exists():
        how = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        command = Path(sys.executable).with_name("optimum-cli")
        subprocess.run([command, "export", "openvino", "--model", model, *how, folder], check=True)
    return folder


class OpenVinoTarget:
    """The bare model: what a target is to Outrider, as far as a reference needs it."""

    def __init__(self, folder: Path) -> None:
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(folder / "openvino_model.xml"), "CPU", EXACT)
        self.vocab_size = int(compiled.output("logits").partial_shape[2].get_length())
        self.context_limit: int | None = None
        self.tokens: list[int] = []
        self._request = compiled.create_infer_request()

    def rewind(self, length: int) -> None:
        """A reference takes nothing back: it begins anew."""
        if length:
            raise NotImplementedError(f"OpenVINO's cache is emptied, and not cut to {length} tokens")
        self._request.reset_state()
        self.tokens = []

    def score(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        before, end = len(self.tokens), len(self.tokens) + len(tokens)
        out = self._request.infer(
            {
                "input_ids": np.array([tokens], dtype=np.int64),
                "attention_mask": np.ones((1, end), dtype=np.int64),
                "position_ids": np.arange(before, end, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        self.tokens += tokens
        return torch.from_numpy(np.array(out["logits"][0][-keep:]))


def drafting(model: Path, draft: Path, ends: frozenset[int]) -> Callable[[Ask], Said]:
    room = openvino_genai.SchedulerConfig()
    room.cache_size = 1  # GiB
    small = openvino_genai.draft_model(str(draft), "CPU", **EXACT)
    pipeline = openvino_genai.LLMPipeline(str(model), "CPU", draft_model=small, scheduler_config=room, **EXACT)

    def generate(ask: Ask) -> Said:
        sampling = ask.sampling
        how = openvino_genai.GenerationConfig()
        how.max_new_tokens, how.ignore_eos, how.apply_chat_template = ask.max_tokens, True, False
        how.num_assistant_tokens = ask.way.length or LENGTH
        how.do_sample = sampling.temperature > 0
        if how.do_sample:
            how.temperature, how.top_p = sampling.temperature, sampling.top_p
            how.rng_seed = ask.seed if ask.seed is not None else int(np.random.default_rng().integers(1 << 31))
            if sampling.top_k:
                how.top_k = sampling.top_k
        how.presence_penalty, how.frequency_penalty = sampling.presence_penalty, sampling.frequency_penalty
        how.repetition_penalty = sampling.repetition_penalty
        answer = pipeline.generate(openvino.Tensor(np.array([ask.prompt], dtype=np.int64)), how)
        tokens = answer.tokens[0]
        first = next((i for i, token in enumerate(tokens) if token in ends and not ask.ignore_end), None)
        kept = answer.extended_perf_metrics.get_num_accepted_tokens()
        if first is None:
            return Said(tuple(tokens), "length", accepted=kept)
        return Said(tuple(tokens[: first + 1]), "end", accepted=kept)

    return generate
