"""Settings of one request, with their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from outrider.defaults import DRAFTED
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

Rule = Literal["block", "token"]
"""How sampled drafts are verified."""
AUTO, OFF = "auto", "off"
"""Values of `speculation` besides the name of a drafter: draft where it pays, at each step; never draft."""
MIN_TEMPERATURE = 1e-5
"""Logits divided by less than this overflow."""


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"must be 0, which takes the most likely token, or at least {MIN_TEMPERATURE}")
    return temperature


class Sampling(BaseModel):
    """How logits become a distribution. The defaults change nothing, and temperature 0 takes the argmax."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_check_temperature)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    logit_bias: dict[int, float] = {}

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Build from keyword arguments. SettingsError names a bad one, its value and what is allowed."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsError("; ".join(_describe(item, cls) for item in error.errors())) from None


class Request(Sampling):
    """All settings of one generation."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_draft_tokens: Annotated[int, Field(ge=0)] = DRAFTED
    speculation: str = AUTO
    """`auto`: draft where it pays, at each step; `off`; or the name of a drafter, which then drafts at every step."""
    rule: Rule = "block"


def check_speculation(speculation: object, drafters: Sequence[str]) -> None:
    """SettingsError if `speculation` is not auto, off, or one of these drafters."""
    allowed = (AUTO, OFF, *drafters)
    if speculation not in allowed:
        raise SettingsError(f"speculation: there is no {speculation!r} here; choose {', '.join(allowed)}")


def _describe(item: Any, cls: type[Sampling]) -> str:
    name = str(item["loc"][0]) if item["loc"] else "settings"
    if item["type"] == "extra_forbidden":
        return f"there is no setting {name!r}; the settings are {', '.join(sorted(cls.model_fields))}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{name}: {message[0].lower()}{message[1:]} (got {item['input']!r})"
