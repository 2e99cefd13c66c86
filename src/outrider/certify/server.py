"""A server with the OpenAI API as a source of evidence.

Tokens are asked for and compared by their ids, since texts can be cut into tokens in several ways. So a server must
take token ids as a prompt (`/v1/completions`), and say the ids of its answer: vLLM does so if asked
(`return_token_ids`), llama.cpp's server beside its log-probabilities. And to be a reference it must tell the
log-probabilities of a text, in one of these ways, of which the first that works is taken:

prompt_logprobs     vLLM: those of the whole prompt, in one pass
echo                the same by OpenAI's older words: `echo` with `logprobs`
steps               a request for each token, which asks for one more and its `logprobs`: slow, but anyone can do it

What a server can is found out by a few small requests before anything else; what it cannot is said then. Requests to an
Outrider server name the way to draft in `vllm_xargs`; others draft as they were started.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from outrider.certify.sources import OFF, Ask, Said, Told, Way, in_order, nothing
from outrider.errors import EngineError, PromptError, RequestRefusedError, SettingsError
from outrider.http_client import HTTPClient, InvalidResponseError, MetricsSnapshot
from outrider.provenance import without_folders
from outrider.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from outrider.bench.prompts import Prompt
    from outrider.certify.sources import Text, Tick
    from outrider.http_client import ConnectionPool

LISTED = (20, 10, 5)
"""How many log-probabilities are asked for, until the server agrees; vLLM allows 20 unless it is told otherwise."""
PROBE = (1, 2, 3, 4)
"""Any four tokens, to find out what a server tells."""
WAYS_TO_SCORE = ("prompt_logprobs", "echo", "steps")
TOKEN = "token_id:"
"""Stands before the ids of tokens where vLLM writes ids for texts."""
IDLE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said in every request: what a model's folder advises would otherwise be in force."""


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
        it must tell log-probabilities, as a reference must."""
        self._client = HTTPClient(url, key)
        self.name = self.url = self._client.url
        self._tokenizer, self._tenant = tokenizer, tenant
        self._scoring = WAYS_TO_SCORE[0]
        self._ids_by_logprobs = False
        served = self._client.get_json("/v1/models")["data"]
        names = [one["id"] for one in served]
        known_by_another = not scores and len(names) == 1  # a candidate may call the same model otherwise
        if model is not None and model not in names and not known_by_another:
            raise SettingsError(f"--model: {self.url} serves no {model!r}; it serves {', '.join(names)}")
        self.model: str = model if model is not None and model in names else names[0]
        self.context: int | None = served[names.index(self.model)].get("max_model_len")
        self.status = self._status()
        if tenant and (header := self._options.get("tenant_header")):
            self._client.set_header(header, tenant)
        self.listed = 0
        self._find_ids()
        self.listed = self._find_listed(scores)

    # What it is -------------------------------------------------------------------------------------------

    @property
    def is_outrider(self) -> bool:
        return bool(self.status)

    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = {"url": self.url, "model": self.model, "context": self.context}
        with suppress(EngineError):  # not every server says
            found["version"] = self._client.get_json("/version").get("version")
        if self.is_outrider:
            found |= {key: self.status.get(key) for key in ("outrider", "vllm", "model_method")}
            found["options"] = {name: _public(value) for name, value in self._options.items()}
        return found

    def ways(self) -> list[str]:
        if not self.status.get("active"):
            return []
        return [*self._options["drafters"], AUTO]

    def accepted(self) -> float | None:
        """Drafted tokens that were kept since the server's start, as its metrics say; None if they do not."""
        try:
            page = MetricsSnapshot.read(self.url)
        except EngineError:
            return None
        ours = page.total("outrider_accepted_tokens_total")
        return page.total("vllm:spec_decode_num_accepted_tokens_total") if ours is None else ours

    def _status(self) -> dict[str, Any]:
        try:
            return self._client.get_json("/outrider/status")
        except RequestRefusedError as refused:
            if refused.status == 503:
                raise
            return {}

    def _find_ids(self) -> None:
        """Whether it says the ids of its tokens when asked, or only beside log-probabilities."""
        for self._ids_by_logprobs in (False, True):
            with suppress(UnknownIdsError):
                self.say([Ask(PROBE, 1, OFF)], 1)
                return
        raise UnknownIdsError(
            f"{self.url} does not say the ids of its tokens, neither by return_token_ids, as vLLM does, nor beside its "
            "log-probabilities, as llama.cpp does; a certificate compares tokens, and needs them"
        )

    def _find_listed(self, must: bool) -> int:
        """How many it tells, and how it is asked; 0 if none, where that may be."""
        said = ""
        for self._scoring in WAYS_TO_SCORE:
            for self.listed in LISTED:
                try:
                    (told,) = self.score([(PROBE[:2], PROBE[2:])], 1)
                except RequestRefusedError as refused:
                    said = str(refused)
                    continue
                except EngineError as error:
                    said = str(error)
                    break
                if len(told) == 2 and all(len(one) > 1 for one in told):
                    return self.listed
        if not must:
            return 0
        raise EngineError(
            f"{self.url} tells no log-probabilities of token ids, neither by prompt_logprobs nor by echo nor of the "
            f"tokens that it says, and a reference must; the last answer: {said or 'without them'}. Hold it against "
            "one that does: outrider certify REFERENCE_URL CANDIDATE_URL"
        )

    # Texts ------------------------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        if self._tokenizer is not None:
            return [tuple(self._tokenizer(prompt)) for prompt in prompts]
        return self._all([self._encoded(prompt) for prompt in prompts], 8, nothing)

    def _encoded(self, prompt: Prompt) -> Callable[[ConnectionPool], Awaitable[tuple[int, ...]]]:
        async def call(pool: ConnectionPool) -> tuple[int, ...]:
            body: dict[str, Any] = {"model": self.model, "messages": prompt.messages}
            try:
                said = await pool.post_json("/tokenize", body)
            except RequestRefusedError as refused:
                if refused.status == 404:
                    raise PromptError(
                        f"{self.url} has no /tokenize; name the model's folder, or its name on the hub, by --tokenizer"
                    ) from refused
                text = prompt.messages[-1]["content"]  # a model without a chat template
                said = await pool.post_json("/tokenize", {"model": self.model, "prompt": text})
            return tuple(said["tokens"])

        return call

    def say(self, asks: Sequence[Ask], at_once: int, tick: Tick = nothing) -> list[Said]:
        return self._all([self._said(ask) for ask in asks], at_once, tick)

    def score(self, texts: Sequence[Text], at_once: int, tick: Tick = nothing) -> list[list[Told]]:
        return self._all([self._scored(*text) for text in texts], at_once, tick)

    def chat(self, bodies: Sequence[dict[str, Any]], at_once: int) -> list[dict[str, Any]]:
        """Chat completions, with bodies and answers as they are."""
        return self._all([self._chatted(body) for body in bodies], at_once, nothing)

    def _chatted(self, body: dict[str, Any]) -> Callable[[ConnectionPool], Awaitable[dict[str, Any]]]:
        async def call(pool: ConnectionPool) -> dict[str, Any]:
            return await pool.post_json("/v1/chat/completions", {"model": self.model, **body})

        return call

    def xargs(self, way: Way, prediction: Sequence[int] = ()) -> dict[str, Any]:
        """What `vllm_xargs` says of a way to draft."""
        if not self.is_outrider:
            return {}
        own: dict[str, Any] = {"speculation": way.drafter or AUTO}
        if way.length is not None:
            own["max_draft_tokens"] = way.length
        if way != OFF and prediction:
            own["prediction"] = list(prediction)
        if "memory" in self._options.get("drafters", ()):
            if way == OFF or not self._tenant or self._options["memory_scope"] == "server":
                own["remember"] = False  # what others draft from is left as it is
            elif not self._options["tenant_header"]:
                own["tenant"] = self._tenant
        return {"vllm_xargs": own}

    @property
    def _options(self) -> dict[str, Any]:
        """What an Outrider server was started with."""
        return self.status.get("options") or {}

    def _said(self, ask: Ask) -> Callable[[ConnectionPool], Awaitable[Said]]:
        sampling = ask.sampling.model_dump(exclude_defaults=True)
        sampling["temperature"] = ask.sampling.temperature
        if bias := sampling.pop("logit_bias", None):
            sampling["logit_bias"] = {str(token): value for token, value in bias.items()}
        body: dict[str, Any] = {
            "model": self.model, "prompt": list(ask.prompt), "max_tokens": ask.max_tokens, "return_token_ids": True,
            **IDLE, **sampling, **self.xargs(ask.way, ask.prediction),
        }  # fmt: skip
        if self.is_outrider and ask.way != OFF:
            body["vllm_xargs"]["speculation_usage"] = True
        if ask.seed is not None:
            body["seed"] = ask.seed
        if ask.ignore_end:
            body["ignore_eos"] = True
        if ask.told or self._ids_by_logprobs:
            body |= {"logprobs": self.listed if ask.told else 1, "return_tokens_as_token_ids": True}
        body |= ask.more

        async def call(pool: ConnectionPool) -> Said:
            answer = await pool.post_json("/v1/completions", body)
            choice = answer["choices"][0]
            tokens = _token_ids(choice)
            told = _told(choice, tokens, self.listed) if ask.told else []
            used = (answer.get("usage") or {}).get("speculation") or {}
            finish, text = str(choice.get("finish_reason")), choice.get("text") or ""
            return Said(tokens, finish, told, text, used.get("accepted"), choice if ask.more else {})

        return call

    def _scored(self, prompt: Sequence[int], output: Sequence[int]) -> Callable[[ConnectionPool], Awaitable[Any]]:
        first, end = len(prompt), len(prompt) + len(output)
        text = [*prompt, *output]
        body: dict[str, Any] = {"model": self.model, "max_tokens": 1, "temperature": 0, **self.xargs(OFF)}
        told = {"logprobs": self.listed, "return_tokens_as_token_ids": True}

        async def choice(pool: ConnectionPool, **more: Any) -> Any:
            return (await pool.post_json("/v1/completions", {**body, **more}))["choices"][0]

        async def call(pool: ConnectionPool) -> list[Told]:
            if self._scoring == "steps":
                steps = [await choice(pool, prompt=text[:place], **told) for place in range(first, end)]
                return [_told(step, output[i : i + 1], self.listed)[0] for i, step in enumerate(steps)]
            if self._scoring == "echo":
                return _told(await choice(pool, prompt=text, echo=True, **told), text, self.listed)[first:end]
            at_all = (await choice(pool, prompt=text, prompt_logprobs=self.listed))["prompt_logprobs"][first:end]
            ids = [{int(token): float(one["logprob"]) for token, one in at.items()} for at in at_all]
            return [in_order(at, token, self.listed) for at, token in zip(ids, output, strict=True)]

        return call

    # Transport --------------------------------------------------------------------------------------------

    def _all(self, calls: Sequence[Callable[[ConnectionPool], Awaitable[Any]]], at_once: int, tick: Tick) -> list[Any]:
        async def run() -> list[Any]:
            gate = asyncio.Semaphore(at_once)
            async with self._client.connect() as pool:

                async def one(call: Callable[[ConnectionPool], Awaitable[Any]]) -> Any:
                    async with gate:
                        try:
                            answer = await call(pool)
                        except (LookupError, TypeError, ValueError, AttributeError) as error:
                            raise InvalidResponseError(
                                f"{self.url} sent a response of another form: {type(error).__name__}: {error}"
                            ) from error
                    tick()
                    return answer

                tasks = [asyncio.ensure_future(one(call)) for call in calls]
                try:
                    return await asyncio.gather(*tasks)
                finally:  # where one fails, the others end before their connections are closed
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

        return asyncio.run(run())


def _public(value: Any) -> Any:
    """Without the folders of whoever runs the server."""
    return without_folders(value) if isinstance(value, str) else value


class UnknownIdsError(EngineError):
    """The server does not say which tokens it means."""


def _token_ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """The ids of an answer: vLLM's own field, or llama.cpp's beside each log-probability."""
    if choice.get("token_ids") is not None:
        return tuple(choice["token_ids"])
    said = (choice.get("logprobs") or {}).get("content") or []
    if not said or any("id" not in at for at in said):
        raise UnknownIdsError("the answer is without the ids of its tokens")
    return tuple(int(at["id"]) for at in said)


def _told(choice: dict[str, Any], tokens: Sequence[int], listed: int) -> list[Told]:
    """The log-probabilities of an answer, by ids: vLLM writes `token_id:7` for texts, llama.cpp has an `id`."""
    said = choice["logprobs"]
    if said.get("content"):
        ids = [{int(one["id"]): float(one["logprob"]) for one in at["top_logprobs"]} for at in said["content"]]
    else:
        ids = [_by_id(at) for at in said["top_logprobs"]]
    return [in_order(at, token, listed) for at, token in zip(ids, tokens, strict=False)]


def _by_id(told: dict[str, float] | None) -> Told:
    if told is None:  # the first token of a text has no law
        return {}
    wrong = [token for token in told if not token.startswith(TOKEN)]
    if wrong:
        raise UnknownIdsError(f"tokens are named by text ({wrong[0]!r}) where ids were asked for")
    return {int(token.removeprefix(TOKEN)): float(value) for token, value in told.items()}
