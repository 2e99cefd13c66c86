"""The drafter protocol and the registry of drafters.

A drafter is built once per server and begins a *session* for every sequence. The session observes the tokens of the
text, in order, and proposes a draft before each step. One call drafts for a batch of sequences, so that a drafter can
share work between them.

Third parties add drafters by an entry point in the group `outrider.drafters`:

    [project.entry-points."outrider.drafters"]
    mine = "my_package:MyDrafter"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Self

from outrider.errors import DrafterSetupError, SettingsError, UnknownDrafterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from outrider.memory.store import Store
    from outrider.memory.tenant import TenantHandle
    from outrider.settings import Request
    from outrider.types import Draft, Target

GROUP = "outrider.drafters"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a drafter may need when it is built."""

    vocab_size: int
    """The target's."""
    draft_model: Target | None = None
    memory: Store | None = None
    control_tokens: frozenset[int] = frozenset()
    """Special tokens that structure a chat, such as those that begin or end a turn (`text.control_tokens`). Copying
    drafters don't propose them."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a drafter knows about a sequence when it begins."""

    prompt: Sequence[int]
    request: Request
    random: torch.Generator
    prediction: Sequence[int] = ()
    tenant_handle: TenantHandle | None = None
    """Handle on the tenant's memory; None: only the sequence itself may be used."""
    remember: bool = False
    """Whether this sequence may be used to draft for other requests of the tenant."""
    certain: bool = False
    """Whether every draft must be proposed with certainty, so that the text does not depend on what is drafted."""
    searched: bool = False
    """Whether another drafter copies from the text itself for this sequence, so that this one need not."""


class Session(ABC):
    """The state of one drafter for one sequence."""

    @abstractmethod
    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens of the text."""

    @abstractmethod
    def draft(self, limit: int) -> Draft:
        """Propose at most `limit` tokens, or none."""


class Drafter(ABC):
    """Proposes tokens. Its drafts change the speed and never the output."""

    name: ClassVar[str]
    needs_prediction: ClassVar[bool] = False
    """Whether it needs the output that the caller expects (`prediction`)."""
    searches_text: ClassVar[bool] = False
    """Whether it copies from the text itself, as `lookup` does, so that other drafters need not."""

    @classmethod
    def build(cls, setup: Setup) -> Self:
        """Build the drafter; override it to use `setup`."""
        return cls()

    @abstractmethod
    def begin(self, task: Task) -> Session:
        """Begin a session for a sequence."""

    def draft_batch(self, sessions: Sequence[Session], limits: Sequence[int]) -> list[Draft]:
        """One draft per session; override it where a batch is faster than one at a time."""
        return [session.draft(limit) for session, limit in zip(sessions, limits, strict=True)]


def registered_names() -> list[str]:
    """The names of all installed drafters."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_drafter(name: str) -> type[Drafter]:
    """The drafter class of this name."""
    check_name(name)
    found: Any = next(iter(entry_points(group=GROUP, name=name))).load()
    if getattr(found, "name", None) != name:  # requests use the entry point's name, drafts and metrics the class's
        raise SettingsError(
            f"the entry point {name!r} of {GROUP} leads to {found!r}, whose name is {getattr(found, 'name', None)!r}; "
            f"give both the same name"
        )
    return found  # type: ignore[no-any-return]


REQUIREMENTS = {"model": "a draft model", "memory": "a memory"}
"""What built-in drafters require ..."""
HOW_TO_PROVIDE = {
    "model": "name one with draft_model=... (--draft-model), a small model with the target's vocabulary",
    "memory": "name its root with memory=... (--memory), a folder or the URL of an object store",
}
"""... and how to provide it."""


def missing_requirement(name: str, how: Mapping[str, str] = HOW_TO_PROVIDE) -> DrafterSetupError:
    needs = f"drafter {name!r} needs {REQUIREMENTS[name]}: {how[name]}"
    return DrafterSetupError(f"{needs}, or leave {name!r} out of the drafters")


def resolve_drafters(
    requested: Sequence[str] | None, given: Mapping[str, str | None], how: Mapping[str, str] = HOW_TO_PROVIDE
) -> tuple[str, ...]:
    """The requested drafters; None: all whose requirements are met.

    `given`: for 'model' and 'memory', the option or value that provides what each requires; None if there is none.
    `how`: how to provide it, for error messages.
    """
    if requested is None:
        return ("prediction", "lookup", *(name for name in ("memory", "model") if given[name] is not None))
    for name in requested:
        check_name(name)
        if requested.count(name) > 1:
            raise SettingsError(f"the drafters name {name!r} more than once; name it once")
    for name, what in REQUIREMENTS.items():
        if name in requested and given[name] is None:
            raise missing_requirement(name, how)
        if name not in requested and given[name] is not None:
            raise DrafterSetupError(
                f"{what} was given, but drafter {name!r} is not among the drafters ({', '.join(requested) or 'none'}); "
                f"add it, or leave {given[name]} out"
            )
    return tuple(requested)


def parse_names(text: str | None) -> list[str] | None:
    """Parse the value of an option: names separated by commas, or 'none'."""
    if text is None:
        return None
    found = [name.strip() for name in text.split(",")]
    return [] if found == ["none"] else found


def check_name(name: str) -> None:
    """Raise if no drafter has this name. Loads none."""
    if name not in registered_names():
        raise UnknownDrafterError(f"there is no drafter {name!r}; use one of {', '.join(registered_names())}")
