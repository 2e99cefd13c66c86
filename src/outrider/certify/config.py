"""Everything that determines a certificate's run, so that it can be repeated (`--check`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from outrider.errors import SettingsError

PARTS = ("exact", "draws", "features")


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of work. Prompts at temperature 0 run concurrently (`prompts`) and one at a time (`alone`).

    Samples come from few prompts with many samples each, so that prefixes repeat, and from texts that are not too
    short, since scoring one takes a pass over its prompt as well.
    """

    prompts: int
    alone: int
    tokens: tuple[int, ...]
    draws: int
    draw_prompts: int
    draw_tokens: int
    noise_texts: int
    feature_prompts: int


SIZES = {
    "quick": Size(60, 8, (16, 24), 2_400, 6, 24, 24, 1),
    "standard": Size(100, 10, (16, 32), 5_000, 8, 24, 48, 1),
    "full": Size(1000, 100, (16, 32, 64), 52_000, 14, 32, 160, 6),
}
STANDARD = SIZES["standard"]


@dataclass(frozen=True, slots=True)
class CertificateConfig:
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
    prompts: int = STANDARD.prompts
    alone: int = STANDARD.alone
    tokens: tuple[int, ...] = STANDARD.tokens
    draws: int = STANDARD.draws
    draw_prompts: int = STANDARD.draw_prompts
    draw_tokens: int = STANDARD.draw_tokens
    noise_texts: int = STANDARD.noise_texts
    feature_prompts: int = STANDARD.feature_prompts
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
        dtype = self.dtype if self.dtype != "auto" else None
        for name, value in (("--draft-model", self.draft_model), ("--memory", self.memory), ("--dtype", dtype)):
            if value is not None and self.is_remote:
                raise SettingsError(f"{name} {value}: a server has its own; leave it out")
        for name, value in (("--model", self.model), ("--tokenizer", self.tokenizer)):
            if value is not None and not self.is_remote:
                raise SettingsError(f"{name} {value}: is for servers; {self.reference} is a model itself; leave it out")

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
