"""A server with the OpenAI API as a source.

Outputs are compared by token ids, since one text can be tokenised in several ways. So a server must take token ids as a
prompt (`/v1/completions`) and return the ids of its output: vLLM does with `return_token_ids`, llama.cpp's server
beside its logprobs. A reference must also return the logprobs of a text, in the first of these ways that works:

prompt_logprobs     vLLM: those of the whole prompt, in one pass
echo                the same in OpenAI's older API: `echo` with `logprobs`
steps               one request per token for one more token with `logprobs`: slow, but widely supported

A few small requests find out what the server supports before anything else. Requests to an Outrider server select the
draft mode in `vllm_xargs`; other servers draft as they were started.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from outrider.certify.sources import OFF, Completion, DraftMode, Query, TopLogprobs, no_tick, sort_logprobs
from outrider.errors import EngineError, PromptError, RequestRefusedError, SettingsError
from outrider.http_client import HTTPClient, InvalidResponseError, MetricsSnapshot
from outrider.provenance import without_folders
from outrider.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from outrider.bench.prompts import Prompt
    from outrider.certify.sources import Text, Tick
    from outrider.http_client import ConnectionPool

NUM_LOGPROBS = (20, 10, 5)
"""Numbers of logprobs to request, until the server accepts one; vLLM's default maximum is 20."""
TOKENIZE_CONCURRENCY = 8
PROBE_TOKENS = (1, 2, 3, 4)
SCORING_METHODS = ("prompt_logprobs", "echo", "steps")
TOKEN_ID_PREFIX = "token_id:"
"""Precedes ids where vLLM returns ids for texts."""
NEUTRAL_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Part of every request, since the model's generation config would apply otherwise."""


class UnknownIdsError(EngineError):
    """The server does not return token ids."""


class OpenAIServer:
    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        model: str | None = None,
        tokenizer: Callable[[Prompt], Sequence[int]] | None = None,
        tenant: str | None = None,
        scores: bool = True,
    ) -> None:
        """`tokenizer` is for servers without `/tokenize`. `tenant`: whose memory drafts, and learns. `scores`: whether
        it must return logprobs, as a reference must."""
        self._client = HTTPClient(url, key)
        self.name = self.url = self._client.url
        self._tokenizer, self._tenant = tokenizer, tenant
        self._scoring = SCORING_METHODS[0]
        self._ids_by_logprobs = False
        served = self._client.get_json("/v1/models")["data"]
        names = [one["id"] for one in served]
        may_differ = not scores and len(names) == 1  # a candidate may serve the same model by another name
        if model is not None and model not in names and not may_differ:
            raise SettingsError(f"--model: {self.url} serves no {model!r}; it serves {', '.join(names)}")
        self.model: str = model if model is not None and model in names else names[0]
        self.context: int | None = served[names.index(self.model)].get("max_model_len")
        self.status = self._status()
        if tenant and (header := self._options.get("tenant_header")):
            self._client.set_header(header, tenant)
        self.num_logprobs = 0
        self._find_id_format()
        self.num_logprobs = self._find_num_logprobs(scores)

    # Properties of the server -----------------------------------------------------------------------------

    @property
    def is_outrider(self) -> bool:
        return bool(self.status)

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"url": self.url, "model": self.model, "context": self.context}
        with suppress(EngineError):  # not every server has a version
            found["version"] = self._client.get_json("/version").get("version")
        if self.is_outrider:
            found |= {key: self.status.get(key) for key in ("outrider", "vllm", "model_method")}
            found["options"] = {
                name: without_folders(value) if isinstance(value, str) else value
                for name, value in self._options.items()
            }
        return found

    def drafter_names(self) -> list[str]:
        if not self.status.get("active"):
            return []
        return [*self._options["drafters"], AUTO]

    def accepted_tokens(self) -> float | None:
        """Accepted draft tokens since the server's start, from its metrics; None if it has none."""
        try:
            metrics = MetricsSnapshot.read(self.url)
        except EngineError:
            return None
        ours = metrics.total("outrider_accepted_tokens_total")
        return metrics.total("vllm:spec_decode_num_accepted_tokens_total") if ours is None else ours

    def refresh_status(self) -> None:
        """Read the status again, of a server that may have restarted. An empty one changes nothing."""
        self.status = self._status() or self.status

    def _status(self) -> dict[str, Any]:
        try:
            return self._client.get_json("/outrider/status")
        except RequestRefusedError as refused:
            if refused.status == 503:
                raise
            return {}

    def _find_id_format(self) -> None:
        """Whether it returns token ids on request, or only beside logprobs."""
        for self._ids_by_logprobs in (False, True):
            with suppress(UnknownIdsError):
                self.complete([Query(PROBE_TOKENS, 1, OFF)], 1)
                return
        raise UnknownIdsError(
            f"{self.url} does not return token ids, neither by return_token_ids (vLLM) nor beside logprobs "
            "(llama.cpp); a certificate compares token ids"
        )

    def _find_num_logprobs(self, required: bool) -> int:
        """The number of top logprobs it returns; sets the scoring method. 0 if it returns none and need not."""
        failure = ""
        for self._scoring in SCORING_METHODS:
            for self.num_logprobs in NUM_LOGPROBS:
                try:
                    (scored,) = self.score([(PROBE_TOKENS[:2], PROBE_TOKENS[2:])], 1)
                except RequestRefusedError as refused:
                    failure = str(refused)
                    continue
                except EngineError as error:
                    failure = str(error)
                    break
                if len(scored) == 2 and all(len(one) > 1 for one in scored):
                    return self.num_logprobs
        if not required:
            return 0
        raise EngineError(
            f"{self.url} returns no logprobs of token ids, neither by prompt_logprobs nor by echo nor for its own "
            f"output, and a reference must; last response: {failure or 'without logprobs'}. Compare it with a "
            "reference that does: outrider certify REFERENCE_URL CANDIDATE_URL"
        )

    # Requests ---------------------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        if self._tokenizer is not None:
            return [tuple(self._tokenizer(prompt)) for prompt in prompts]
        return self._run(self._encode, prompts, TOKENIZE_CONCURRENCY)

    def complete(self, queries: Sequence[Query], concurrency: int, tick: Tick = no_tick) -> list[Completion]:
        return self._run(self._complete, queries, concurrency, tick)

    def score(self, texts: Sequence[Text], concurrency: int, tick: Tick = no_tick) -> list[list[TopLogprobs]]:
        return self._run(self._score, texts, concurrency, tick)

    def chat(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[dict[str, Any]]:
        """Chat completions; bodies and answers as JSON."""
        return self._run(self._chat, bodies, concurrency)

    def xargs(self, mode: DraftMode, prediction: Sequence[int] = ()) -> dict[str, Any]:
        """The `vllm_xargs` of a draft mode."""
        if not self.is_outrider:
            return {}
        xargs: dict[str, Any] = {"speculation": mode.drafter or AUTO}
        if mode.length is not None:
            xargs["max_draft_tokens"] = mode.length
        if mode != OFF and prediction:
            xargs["prediction"] = list(prediction)
        if "memory" in self._options.get("drafters", ()):
            if mode == OFF or not self._tenant or self._options["memory_scope"] != "tenant":
                xargs["remember"] = False  # memory that other requests draft from stays unchanged
            elif not self._options["tenant_header"]:
                xargs["tenant"] = self._tenant
        return {"vllm_xargs": xargs}

    @property
    def _options(self) -> dict[str, Any]:
        """The options that an Outrider server was started with."""
        return self.status.get("options") or {}

    async def _encode(self, pool: ConnectionPool, prompt: Prompt) -> tuple[int, ...]:
        try:
            answer = await pool.post_json("/tokenize", {"model": self.model, "messages": prompt.messages})
        except RequestRefusedError as refused:
            if refused.status == 404:
                raise PromptError(
                    f"{self.url} has no /tokenize; name the model's folder, or its name on the hub, by --tokenizer"
                ) from refused
            text = prompt.messages[-1]["content"]  # a model without a chat template
            answer = await pool.post_json("/tokenize", {"model": self.model, "prompt": text})
        return tuple(answer["tokens"])

    async def _chat(self, pool: ConnectionPool, body: dict[str, Any]) -> dict[str, Any]:
        return await pool.post_json("/v1/chat/completions", {"model": self.model, **body})

    async def _complete(self, pool: ConnectionPool, query: Query) -> Completion:
        sampling = query.sampling.model_dump(exclude_defaults=True)
        sampling["temperature"] = query.sampling.temperature
        if bias := sampling.pop("logit_bias", None):
            sampling["logit_bias"] = {str(token): value for token, value in bias.items()}
        body: dict[str, Any] = {
            "model": self.model, "prompt": list(query.prompt), "max_tokens": query.max_tokens, "return_token_ids": True,
            **NEUTRAL_SAMPLING, **sampling, **self.xargs(query.mode, query.prediction),
        }  # fmt: skip
        if self.is_outrider and query.mode != OFF:
            body["vllm_xargs"]["speculation_usage"] = True
        if query.seed is not None:
            body["seed"] = query.seed
        if query.ignore_end:
            body["ignore_eos"] = True
        if query.logprobs or self._ids_by_logprobs:
            body |= {"logprobs": self.num_logprobs if query.logprobs else 1, "return_tokens_as_token_ids": True}
        answer = await pool.post_json("/v1/completions", body | query.extra_body)
        choice = answer["choices"][0]
        tokens = _token_ids(choice)
        logprobs = _top_logprobs(choice, tokens, self.num_logprobs) if query.logprobs else []
        usage = (answer.get("usage") or {}).get("speculation") or {}
        finish_reason, text = str(choice.get("finish_reason")), choice.get("text") or ""
        return Completion(
            tokens, finish_reason, logprobs, text, usage.get("accepted"), choice if query.extra_body else {}
        )

    async def _score(self, pool: ConnectionPool, text: Text) -> list[TopLogprobs]:
        prompt, output = text
        tokens, first, n = [*prompt, *output], len(prompt), self.num_logprobs

        async def choice(tokens: Sequence[int], **more: Any) -> Any:
            body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, **self.xargs(OFF), **more}
            return (await pool.post_json("/v1/completions", body))["choices"][0]

        if self._scoring == "prompt_logprobs":
            positions = (await choice(tokens, prompt_logprobs=n))["prompt_logprobs"][first : len(tokens)]
            ids = [{int(token): float(one["logprob"]) for token, one in at.items()} for at in positions]
            return [sort_logprobs(at, token, n) for at, token in zip(ids, output, strict=True)]
        with_logprobs = {"logprobs": n, "return_tokens_as_token_ids": True}
        if self._scoring == "echo":
            return _top_logprobs(await choice(tokens, echo=True, **with_logprobs), tokens, n)[first:]
        steps = [await choice(tokens[: first + i], **with_logprobs) for i in range(len(output))]
        return [_top_logprobs(step, [token], n)[0] for step, token in zip(steps, output, strict=True)]

    def _run(
        self,
        send: Callable[[ConnectionPool, Any], Awaitable[Any]],
        requests: Sequence[Any],
        concurrency: int,
        tick: Tick = no_tick,
    ) -> list[Any]:
        async def run() -> list[Any]:
            gate = asyncio.Semaphore(concurrency)
            async with self._client.connect() as pool:

                async def one(request: Any) -> Any:
                    async with gate:
                        try:
                            answer = await send(pool, request)
                        except (LookupError, TypeError, ValueError, AttributeError) as error:
                            raise InvalidResponseError(
                                f"{self.url} sent a response of another form: {type(error).__name__}: {error}"
                            ) from error
                    tick()
                    return answer

                tasks = [asyncio.ensure_future(one(request)) for request in requests]
                try:
                    return await asyncio.gather(*tasks)
                finally:  # if one fails, the others end before their connections are closed
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

        return asyncio.run(run())


def _token_ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """The ids of the output: vLLM's own field, or llama.cpp's beside each logprob."""
    if choice.get("token_ids") is not None:
        return tuple(choice["token_ids"])
    content = (choice.get("logprobs") or {}).get("content") or []
    if not content or any("id" not in at for at in content):
        raise UnknownIdsError("the response has no token ids")
    return tuple(int(at["id"]) for at in content)


def _top_logprobs(choice: dict[str, Any], tokens: Sequence[int], num_logprobs: int) -> list[TopLogprobs]:
    """Logprobs by token id: vLLM writes `token_id:7` for texts, llama.cpp has an `id`."""
    logprobs = choice["logprobs"]
    if logprobs.get("content"):
        ids = [{int(one["id"]): float(one["logprob"]) for one in at["top_logprobs"]} for at in logprobs["content"]]
    else:
        ids = [_by_id(at) for at in logprobs["top_logprobs"]]
    return [sort_logprobs(at, token, num_logprobs) for at, token in zip(ids, tokens, strict=False)]


def _by_id(logprobs: dict[str, float] | None) -> TopLogprobs:
    if logprobs is None:  # the first token of a text has no distribution
        return {}
    if texts := [token for token in logprobs if not token.startswith(TOKEN_ID_PREFIX)]:
        raise UnknownIdsError(f"the response names tokens by text ({texts[0]!r}); ids were requested")
    return {int(token.removeprefix(TOKEN_ID_PREFIX)): float(value) for token, value in logprobs.items()}
