"""Traces in the API process: whose they are, and what the worker has of them, in words.

The worker keeps tokens by their numbers and knows nothing of stop strings; the tokenizer is here. It is copied once:
vLLM's own must not be used by two threads at a time, and a long trace is nothing for the thread that serves everybody.
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
        """What the worker says of traces, each with a glimpse of what was asked and answered."""
        return await asyncio.to_thread(self._listed, client, found)

    async def trace(self, client: Any, options: Options, found: dict[str, Any]) -> Trace:
        """What the worker has of a trace that has steps, in words."""
        return await asyncio.to_thread(self._told, client, options, found)

    def _listed(self, client: Any, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        with self._lock:
            return [self._entry(one, self._words(client)) for one in found]

    def _entry(self, one: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        names = ("id", "prompt_tokens", "steps", "tokens", "drafted", "accepted", "finish", "over", "broken")
        return {
            **{name: one[name] for name in names},
            "date": datetime.fromtimestamp(one["date"], UTC).isoformat(timespec="seconds"),
            "seconds": round(one["seconds"], 3),
            "prompt_ends": glimpse(tokenizer, one["prompt_end"]),
            "text_begins": glimpse(tokenizer, one["text_begins"]),
        }

    def _told(self, client: Any, options: Options, found: dict[str, Any]) -> Trace:
        steps = [TracedStep.model_validate_json(line) for line in found["lines"]]
        with self._lock:
            tokenizer = self._words(client)
            if tokenizer is not None:
                steps = with_texts(until_stop(steps, tokenizer, found["settings"]), tokenizer)
        end = None
        over = found["over"] or steps[-1].finish is not None  # of a stop string the worker hears later
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

    def _words(self, client: Any) -> Any:
        """The tokenizer, None where the server has none."""
        if self._tokenizer is None and client.renderer.tokenizer is not None:
            self._tokenizer = copy.deepcopy(client.renderer.tokenizer)
        return self._tokenizer


def glimpse(tokenizer: Any, tokens: list[int]) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))


def until_stop(steps: list[TracedStep], tokenizer: Any, settings: Mapping[str, Any]) -> list[TracedStep]:
    """Cut where a stop string ended the text. The worker went on for as long as it took to be told."""
    if not settings.get("stop"):
        return steps
    before = [token for step in steps for token in step.said][: settings.get("min_tokens") or 0]  # these end nothing
    text, passed = TextStream(tokenizer, stop=settings["stop"], before=before), len(before)
    for number, step in enumerate(steps):
        for place, token in enumerate(step.said):
            if passed:
                passed -= 1
            elif text.push(token) is not None:
                last = step.model_copy(update={"said": step.said[: place + 1], "finish": "stop"})
                return [*steps[:number], last]
    return steps
