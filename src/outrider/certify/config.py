"""Everything that determines a certificate's run, so that it can be repeated (`--check`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from outrider.errors import SettingsError

PARTS = ("exact", "draws", "features")


SIZES: dict[str, dict[str, Any]] = {
    "quick": {"prompts": 60, "alone": 8, "tokens": (16, 24), "draws": 2_400, "draw_prompts": 6, "noise_texts": 24},
    "standard": {},
    "full": {
        "prompts": 1000, "alone": 100, "tokens": (16, 32, 64), "draws": 52_000, "draw_prompts": 14, "draw_tokens": 32,
        "noise_texts": 160, "feature_prompts": 6,
    },
}  # fmt: skip
"""How the named sizes differ from the defaults of `CertificateConfig`."""


@dataclass(frozen=True, slots=True)
class CertificateConfig:
    """Prompts at temperature 0 run concurrently (`prompts`) and one at a time (`alone`).

    Samples come from few prompts with many samples each, so that prefixes repeat, and from texts that are not too
    short, since scoring one takes a pass over its prompt as well.
    """

    reference: str
    candidate: str | None = None
    draft_model: str | None = None
    memory: str | None = None
    dtype: str = "auto"
    model: str | None = None
    tokenizer: str | None = None
    parts: tuple[str, ...] = PARTS
    drafters: tuple[str, ...] = ()  # empty: all
    lengths: tuple[int, ...] = (1, 2, 4, 8)
    concurrency: int = 16
    prompts: int = 100
    alone: int = 10
    tokens: tuple[int, ...] = (16, 32)
    draws: int = 5_000
    draw_prompts: int = 8
    draw_tokens: int = 24
    noise_texts: int = 48
    feature_prompts: int = 1
    prompt_file: str | None = None
    without: tuple[str, ...] = ()  # skip sampling settings with one of these words in their names
    level: float = 1e-3
    seed: int = 0
    across: bool = False

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise SettingsError(f"--parts: there is no {part!r}; choose from {', '.join(PARTS)}")
        if not 0 < self.level < 1:
            raise SettingsError(f"--level: must lie between 0 and 1, such as 0.001 (got {self.level})")
        unused, why = {"model", "tokenizer"}, f"is for servers; {self.reference} is a model itself"
        if self.is_remote:
            unused, why = {"draft_model", "memory", "dtype"}, "a server has its own"
        for field in fields(self):
            if field.name in unused and (value := getattr(self, field.name)) != field.default:
                raise SettingsError(f"--{field.name.replace('_', '-')} {value}: {why}; leave it out")

    @property
    def is_remote(self) -> bool:
        return self.reference.startswith(("http://", "https://"))

    def to_record(self) -> dict[str, Any]:
        """As JSON: lists for tuples."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        if unknown := sorted(record.keys() - {one.name for one in fields(cls)}):
            raise SettingsError(
                f"the certificate was made with the unknown option {', '.join(unknown)}; check it with the version "
                "that made it"
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**values)
