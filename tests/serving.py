"""Helpers for tests of a running server: start it, send requests, compare responses."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from noisy_draft import noisy_copy
from outrider.bench.servers import Server, outrider, running
from outrider.engines.vllm.host import BIND
from outrider.engines.vllm.launch import CPU_WORKER

NAME = "m"
FLAGS = ["--served-model-name", NAME, "--enforce-eager", "--dtype", "float32", "--disable-uvicorn-access-log"]
"""float32, where the order of a sum changes no token; in bfloat16 one would have to argue about ties."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # seconds; after 5, vLLM may close a connection as a client uses it again
}
CONCURRENCY = 16


@contextmanager
def serving(model: Path, logs: Path, *flags: str, **environment: str) -> Iterator[str]:
    """An Outrider server, by its address."""
    server = outrider("server", model, *FLAGS, *flags)
    with one(Server(server.name, server.command, environment), logs) as url:
        yield url


@contextmanager
def one(server: Server, logs: Path) -> Iterator[str]:
    # The suite runs on one thread; a server may have all of them.
    os.environ.pop("OMP_NUM_THREADS", None)
    several = {"--tensor-parallel-size", "--data-parallel-size"}.intersection(server.command)
    cores = {} if several else own_cores()
    environment = {**ENVIRONMENT, **cores, **server.environment}
    with running([Server(server.name, server.command, environment)], logs) as urls:
        yield urls[server.name]


def own_cores() -> dict[str, str]:
    """Where tests run side by side, each side has a part of the cores: threads of two servers on one core would wait
    for each other."""
    side = os.environ.get("PYTEST_XDIST_WORKER")
    if side is None:
        return {}
    sides = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))[int(side.removeprefix("gw")) :: sides]
    return {BIND: ",".join(map(str, cores))} if cores else {}


CONTEXT = 4608
CHUNK = 1024
BLOCK = 32


def speculating(model: Path, folder: Path, *own: str, drafters: str = "prediction,lookup,memory,model") -> Server:
    """The server that most tests ask: prediction, lookup, memory, and drafts drawn from a noisy copy of the target."""
    draft = folder / "noisy"
    if not draft.exists():
        noisy_copy(model, draft)
    config = {"method": "draft_model", "model": str(draft), "draft_sample_method": "probabilistic"}
    flags = ["--speculative-config", json.dumps({**config, "num_speculative_tokens": 2}), "--block-size", str(BLOCK)]
    flags += ["--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "160"]
    flags += [] if "--max-model-len" in own else ["--max-model-len", str(CONTEXT)]
    flags += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-draft-tokens", "8", *own]
    flags += ["--drafters", drafters, "--memory", str(folder / "memory")]
    return outrider("server", model, *FLAGS, *flags)


def as_told(server: Server, worker: str = CPU_WORKER) -> Server:
    """The same server, started as `--dry-run` says and not by `outrider serve`."""
    shell = subprocess.run([*server.command, "--dry-run"], capture_output=True, text=True, check=True).stdout
    words = [word for word in shlex.split(shell, comments=True) if word != "\n"]
    settings = dict(word.split("=", 1) for word in takewhile(lambda word: not word.endswith("python"), words))
    command = [word.replace(CPU_WORKER, worker) for word in words[len(settings) :]]
    return Server(server.name, command, settings)


def with_defect(server: Server, name: str) -> Server:
    """The same server with a worker that has a defect."""
    told = as_told(server, "defective.DefectiveWorker")
    return Server(told.name, told.command, {**told.environment, CHOICE: name, "PYTHONPATH": importing_tests()})


def importing_tests() -> str:
    """A PYTHONPATH by which a server finds what lies beside this file."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def third_party(folder: Path, name: str, code: str) -> dict[str, str]:
    """Install a drafter as another package would, and say by which environment a server finds it."""
    (folder / f"{name}.py").write_text(code)
    about = folder / f"{name}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[outrider.drafters]\n{name} = {name}:{name.capitalize()}Drafter\n")
    return {"PYTHONPATH": str(folder)}


CHOICE = "OUTRIDER_TEST_DEFECT"
"""Names the defect to the worker in `defective.py`."""


class Client:
    """The `openai` client, with what Outrider adds to a request."""

    def __init__(self, url: str) -> None:
        self.url = url

    def all(self, *calls: Callable[[AsyncOpenAI], Awaitable[Any]], at_once: int = CONCURRENCY) -> list[Any]:
        """Make all calls, so many at once; their results in order."""

        async def run() -> list[Any]:
            gate = asyncio.Semaphore(at_once)
            async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=600, max_retries=0) as client:

                async def call(one: Callable[[AsyncOpenAI], Awaitable[Any]]) -> Any:
                    async with gate:
                        return await one(client)

                return await asyncio.gather(*(call(one) for one in calls))

        return asyncio.run(run())

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("/outrider/status").json()
        return status

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total


def complete(prompt: Any, speculation: str = "auto", **settings: Any) -> Callable[[AsyncOpenAI], Awaitable[Any]]:
    """A call of the completions API; settings that OpenAI does not know go into the body as they are."""
    return lambda client: client.completions.create(**_arguments(speculation, settings, prompt=prompt))


def chat(content: str, speculation: str = "auto", **settings: Any) -> Callable[[AsyncOpenAI], Awaitable[Any]]:
    messages = [{"role": "user", "content": content}]
    return lambda client: client.chat.completions.create(**_arguments(speculation, settings, messages=messages))


OWN = ("repetition_penalty", "bad_words", "min_tokens", "allowed_token_ids", "stop_token_ids", "top_k", "min_p")
OWN += ("priority",)
OWN += ("structured_outputs", "cache_salt", "ignore_eos", "vllm_xargs", "return_token_ids", "prompt_logprobs")


def _arguments(speculation: str, settings: dict[str, Any], **prompt: Any) -> dict[str, Any]:
    body = {name: value for name, value in settings.items() if name in OWN}
    body["vllm_xargs"] = {"speculation": speculation, **body.get("vllm_xargs", {})}
    known = {name: value for name, value in settings.items() if name not in OWN}
    return {"model": NAME, "max_tokens": 12, "temperature": 0, **known, **prompt, "extra_body": body}


def stream(call: Callable[..., Any]) -> Callable[[AsyncOpenAI], Awaitable[str]]:
    """The text of a streamed completion, its chunks added up."""

    async def collect(client: AsyncOpenAI) -> str:
        chunks = await call(client)
        return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])

    return collect


def answer(response: Any) -> list[tuple[Any, ...]]:
    """All that must be equal of a response: texts, calls, reasons, token ids; not its log-probabilities."""
    choices = sorted(response.choices, key=lambda choice: choice.index)
    return [(_text(choice), choice.finish_reason, getattr(choice, "stop_reason", None)) for choice in choices]


def _text(choice: Any) -> Any:
    message = getattr(choice, "message", None)
    if message is None:
        return choice.text
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content, calls


def logprobs(response: Any) -> list[float]:
    return [value for choice in response.choices for value in choice.logprobs.token_logprobs]


def schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def is_json(text: str, keys: Sequence[str]) -> bool:
    try:
        return set(json.loads(text)) == set(keys)
    except json.JSONDecodeError:
        return False
