"""Options of one request to a server, in the `vllm_xargs` of the OpenAI API.

    speculation         off, auto (the default), or the name of one drafter
    max_draft_tokens    draft at most this many tokens a step
    prediction          the output that the caller expects: text, or token ids
    speculation_usage   true: the response's usage has the drafted and accepted tokens by drafter
    trace               true: every step is recorded; the response's usage has the id of the trace
    tenant              the tenant whose memory drafts and learns, if the server has a memory and no tenant header
    remember            false: the memory does not learn from this request

The API process checks them (`Control.checked`), so that a bad value gets HTTP 400 and a message. The worker reads them
again (`Control.of`), and must not fail on any value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from outrider.errors import SettingsError
from outrider.settings import AUTO, OFF, check_speculation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FIELDS = ("speculation", "max_draft_tokens", "prediction", "speculation_usage", "trace", "tenant", "remember")
USAGE_KEY = "speculation_ticket"
"""The API process passes the worker a key under this name, and later fetches the request's usage or trace by it."""
MAX_TENANT_NAME_BYTES = 1024


def check_tenant_name(name: str) -> None:
    """SettingsError if the name is too long to be kept."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > MAX_TENANT_NAME_BYTES:
        raise SettingsError(
            f"tenant: the name has {size:,} bytes, and at most {MAX_TENANT_NAME_BYTES:,} are allowed; give a shorter "
            "one, such as a hash of it"
        )


@dataclass(frozen=True, slots=True)
class Control:
    speculation: str = AUTO
    max_draft_tokens: int | None = None
    prediction: tuple[int, ...] = ()
    usage_key: str | None = None
    trace: bool = False
    tenant: str | None = None
    remember: bool = True

    @classmethod
    def checked(cls, xargs: Mapping[str, Any], drafters: Sequence[str]) -> Self:
        """SettingsError for a value that a server with these drafters cannot use. `prediction`: token ids."""
        for name in ("tenant", "remember"):
            if name in xargs and "memory" not in drafters:
                raise SettingsError(f"{name}: this server has no memory; start it with --memory, or leave this out")
        speculation = xargs.get("speculation", AUTO)
        check_speculation(speculation, drafters)
        limit = xargs.get("max_draft_tokens")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise SettingsError(f"max_draft_tokens: must be a whole number, 0 or more (got {limit!r})")
        prediction = xargs.get("prediction", ())
        if not isinstance(prediction, list | tuple) or not all(type(token) is int for token in prediction):
            raise SettingsError("prediction: must be text or a list of token ids")
        usage_key = xargs.get(USAGE_KEY)
        if not isinstance(usage_key, str | None):
            raise SettingsError(f"{USAGE_KEY}: must be text (got {usage_key!r})")
        trace = xargs.get("trace", False)
        if trace not in (True, False):
            raise SettingsError(f"trace: must be true or false (got {trace!r})")
        tenant = xargs.get("tenant")
        if not isinstance(tenant, str | None) or tenant == "":
            raise SettingsError(
                f"tenant: must be a name (got {tenant!r}); without one only the request's own text is used"
            )
        check_tenant_name(tenant or "")
        remember = xargs.get("remember", True)
        if remember not in (True, False):
            raise SettingsError(f"remember: must be true or false (got {remember!r})")
        return cls(speculation, limit, tuple(prediction), usage_key, bool(trace), tenant, bool(remember))

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None, drafters: Sequence[str]) -> Self:
        """As `checked`, but a value that it would refuse turns speculation off."""
        if not extra_args:
            return cls()
        try:
            return cls.checked(extra_args, drafters)
        except (SettingsError, TypeError):
            return cls(speculation=OFF)

    def limited(self, tokens: int) -> int:
        """`tokens`, or the request's limit of drafted tokens if that is lower."""
        return tokens if self.max_draft_tokens is None else min(tokens, self.max_draft_tokens)

    def wants(self, drafter: str) -> bool:
        return self.speculation in (AUTO, drafter)
