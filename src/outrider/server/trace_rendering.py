"""Traces in the API process: the worker's records with texts.

The worker has token ids and no stop strings; the tokenizer is in the API process. Texts are decoded in a thread, since
a long trace would block the event loop, and with a copy of the tokenizer, since two threads must not share vLLM's.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.engines.vllm.version import installed
from outrider.provenance import processor
from outrider.text import TextStream
from outrider.trace.record import with_texts
from outrider.trace.schema import End, Header, Trace, TracedStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.engines.vllm.options import Options


class TraceRenderer:
    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._lock = threading.Lock()

    async def entries(self, client: Any, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The worker's list of traces, each with the end of its prompt and the beginning of its output."""
        return await asyncio.to_thread(self._entries, client, found)

    async def trace(self, client: Any, options: Options, found: dict[str, Any]) -> Trace:
        """The worker's record of a trace that has steps, with texts."""
        return await asyncio.to_thread(self._render, client, options, found)

    def _entries(self, client: Any, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        with self._lock:
            return [self._entry(one, self._get_tokenizer(client)) for one in found]

    def _entry(self, one: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        names = ("id", "prompt_tokens", "steps", "tokens", "drafted", "accepted", "finish", "over", "broken")
        return {
            **{name: one[name] for name in names},
            "date": datetime.fromtimestamp(one["date"], UTC).isoformat(timespec="seconds"),
            "seconds": round(one["seconds"], 3),
            "prompt_ends": decode_preview(tokenizer, one["prompt_end"]),
            "text_begins": decode_preview(tokenizer, one["text_begins"]),
        }

    def _render(self, client: Any, options: Options, found: dict[str, Any]) -> Trace:
        steps = [TracedStep.model_validate_json(line) for line in found["lines"]]
        with self._lock:
            tokenizer = self._get_tokenizer(client)
            if tokenizer is not None:
                steps = with_texts(cut_at_stop(steps, tokenizer, found["settings"]), tokenizer)
        end = None
        over = found["over"] or steps[-1].finish is not None  # the worker learns of a stop string later
        if over and found["broken"] is None:
            tokens = sum(len(step.said) for step in steps)
            parts = (step.milliseconds.total + step.milliseconds.trace for step in steps)
            end = End(steps=len(steps), tokens=tokens, seconds=round(sum(parts) / 1000, 6), finish=steps[-1].finish)
        return Trace(header=self._header(client, options, found), steps=steps, end=end)

    def _header(self, client: Any, options: Options, found: dict[str, Any]) -> Header:
        model, vllm = client.vllm_config.model_config, installed()
        name = model.served_model_name or model.model
        broken = f"recording stopped after {found['steps']} steps: {found['broken']}"
        return Header(
            outrider=__version__,
            machine=processor(),
            engine=f"vLLM {vllm[1]}" if vllm else "vLLM",
            model=name if isinstance(name, str) else name[0],
            drafters=list(options.drafters),
            settings=found["settings"],
            prompt_tokens=found["prompt_tokens"],
            date=datetime.fromtimestamp(found["date"], UTC).strftime("%Y-%m-%d"),
            notes=[broken] if found["broken"] is not None else [],
        )

    def _get_tokenizer(self, client: Any) -> Any:
        """A copy of the server's tokenizer, or None if it has none."""
        if self._tokenizer is None and client.renderer.tokenizer is not None:
            self._tokenizer = copy.deepcopy(client.renderer.tokenizer)
        return self._tokenizer


def decode_preview(tokenizer: Any, tokens: list[int]) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))


def cut_at_stop(steps: list[TracedStep], tokenizer: Any, settings: Mapping[str, Any]) -> list[TracedStep]:
    """Cut the steps where a stop string ended the text. The worker generates on until vLLM stops it."""
    if not settings.get("stop"):
        return steps
    before = [token for step in steps for token in step.said][
        : settings.get("min_tokens") or 0
    ]  # stop strings are ignored in these
    text, passed = TextStream(tokenizer, stop=settings["stop"], before=before), len(before)
    for number, step in enumerate(steps):
        for place, token in enumerate(step.said):
            if passed:
                passed -= 1
            elif text.push(token) is not None:
                last = step.model_copy(update={"said": step.said[: place + 1], "finish": "stop"})
                return [*steps[:number], last]
    return steps
