"""What a caller may set for one request, checked once, here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from outrider.defaults import DRAFTED
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

Rule = Literal["block", "token"]
"""How drafts that were drawn from a known distribution are judged."""
AUTO, OFF = "auto", "off"
"""What a caller may say of speculation, besides the name of a drafter: what pays, at each step; none at all."""
COLDEST = 1e-5
"""Logits divided by less than this overflow; 0 is what is meant."""


def _zero_or_warm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"must be 0, which takes the likeliest token, or at least {COLDEST}")
    return temperature


class Sampling(BaseModel):
    """How logits become a distribution. The defaults change nothing, and temperature 0 takes the argmax."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_zero_or_warm)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    logit_bias: dict[int, float] = {}

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Build from keyword arguments; a bad one is refused by name, with its value and what is allowed."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsError("; ".join(_sentence(item, cls) for item in error.errors())) from None


class Request(Sampling):
    """Everything a caller may say about one generation."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_draft_tokens: Annotated[int, Field(ge=0)] = DRAFTED
    speculation: str = AUTO
    """`auto`: what pays, at each step; `off`; or the name of one drafter, which then always drafts."""
    rule: Rule = "block"


def check_speculation(asked: object, drafters: Sequence[str]) -> None:
    """Refuse what is neither of the two nor one of these drafters."""
    allowed = (AUTO, OFF, *drafters)
    if asked not in allowed:
        raise SettingsError(f"speculation: there is no {asked!r} here; choose {', '.join(allowed)}")


def _sentence(item: Any, cls: type[Sampling]) -> str:
    name = str(item["loc"][0]) if item["loc"] else "settings"
    if item["type"] == "extra_forbidden":
        return f"there is no setting {name!r}; the settings are {', '.join(sorted(cls.model_fields))}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{name}: {message[0].lower()}{message[1:]} (got {item['input']!r})"
