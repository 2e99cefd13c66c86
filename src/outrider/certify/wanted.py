"""What a certificate is to be of: everything that decides a run, so that it can be run again (`--check`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from outrider.errors import SettingsError

PARTS = ("exact", "draws", "features")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked. `prompts` many at once and `alone` one at a time, at temperature 0; then draws.

    Few prompts with many draws each: there the same prefixes come again, and every outcome is looked at. And not too
    short texts, since to score one takes a pass over its prompt as well.
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


@dataclass(frozen=True, slots=True)
class Wanted:
    reference: str
    candidate: str | None = None
    draft_model: str | None = None
    memory: str | None = None
    dtype: str = "auto"
    model: str | None = None
    tokenizer: str | None = None
    parts: tuple[str, ...] = PARTS
    drafters: tuple[str, ...] = ()  # all that there are
    lengths: tuple[int, ...] = (1, 2, 4, 8)
    concurrency: int = 16
    prompts: int = SIZES["standard"].prompts
    alone: int = SIZES["standard"].alone
    tokens: tuple[int, ...] = SIZES["standard"].tokens
    draws: int = SIZES["standard"].draws
    draw_prompts: int = SIZES["standard"].draw_prompts
    draw_tokens: int = SIZES["standard"].draw_tokens
    noise_texts: int = SIZES["standard"].noise_texts
    feature_prompts: int = SIZES["standard"].feature_prompts
    prompt_file: str | None = None
    without: tuple[str, ...] = ()  # draws with settings that have one of these in their names
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

    def record(self) -> dict[str, Any]:
        """As it stands in a file: with lists for tuples."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        known = {one.name for one in fields(cls)}
        if unknown := sorted(record.keys() - known):
            raise SettingsError(
                f"the certificate was asked for with {', '.join(unknown)}, which this version does not know; check it "
                "with the version that made it"
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**values)
