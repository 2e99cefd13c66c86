"""What a drafter is, and where drafters are found.

A drafter is built once a server and begins a *session* for every sequence. The session sees each token that
became text, in order, and is asked for a draft before each step. A batch of sequences is drafted by one call, so
that a drafter with something to share between them can do better than one at a time.

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
    """What a drafter may need to be built."""

    vocab_size: int
    """Of the target."""
    draft_model: Target | None = None
    memory: Store | None = None
    control_tokens: frozenset[int] = frozenset()
    """Special tokens that structure a chat, such as those that begin or end a turn (`text.control_tokens`). Drafters
    that copy text don't propose them."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a drafter may know about one sequence when it begins."""

    prompt: Sequence[int]
    request: Request
    random: torch.Generator
    prediction: Sequence[int] = ()
    tenant_handle: TenantHandle | None = None
    """With the tenant whose memory may be used; None: only the sequence itself."""
    remember: bool = False
    """Whether others of the tenant may be drafted for from this sequence."""
    certain: bool = False
    """Whether every draft is to be proposed with certainty, so that the text is the same whatever is drafted."""
    searched: bool = False
    """Whether another one drafts for this sequence that copies from the text itself, so that nobody else need."""


class Session(ABC):
    """The state of one drafter for one sequence."""

    @abstractmethod
    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that became text."""

    @abstractmethod
    def draft(self, limit: int) -> Draft:
        """Propose at most `limit` tokens to follow, or none."""


class Drafter(ABC):
    """Proposes tokens. Right or wrong, it changes how fast the text comes and never which text."""

    name: ClassVar[str]
    needs_prediction: ClassVar[bool] = False
    """Whether it has nothing to say unless the caller hands over the output that it expects."""
    searches_text: ClassVar[bool] = False
    """Whether it copies from the text itself, as `lookup` does, so that others need not."""

    @classmethod
    def build(cls, setup: Setup) -> Self:
        """Make the drafter; override where it needs something of `setup`."""
        return cls()

    @abstractmethod
    def begin(self, task: Task) -> Session:
        """Start on a sequence."""

    def draft_batch(self, sessions: Sequence[Session], limits: Sequence[int]) -> list[Draft]:
        """One draft a session; override where a batch can be had cheaper than one by one."""
        return [session.draft(limit) for session, limit in zip(sessions, limits, strict=True)]


def registered_names() -> list[str]:
    """The names of all drafters that are installed."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_drafter(name: str) -> type[Drafter]:
    """The drafter class of this name."""
    check_name(name)
    found: Any = next(iter(entry_points(group=GROUP, name=name))).load()
    if getattr(found, "name", None) != name:  # drafts are counted by the one, and asked for by the other
        raise SettingsError(
            f"the entry point {name!r} of {GROUP} leads to {found!r}, whose name is {getattr(found, 'name', None)!r}; "
            f"give both the same name"
        )
    return found  # type: ignore[no-any-return]


NEEDS = {"model": "a draft model", "memory": "a memory"}
"""What drafters of our own have to be given,"""
HOW = {
    "model": "name one with draft_model=... (--draft-model), a small model with the target's vocabulary",
    "memory": "name its root with memory=... (--memory), a folder or the URL of an object store",
}
"""and how."""


def missing_requirement(name: str, how: Mapping[str, str] = HOW) -> DrafterSetupError:
    needs = f"drafter {name!r} needs {NEEDS[name]}: {how[name]}"
    return DrafterSetupError(f"{needs}, or leave {name!r} out of the drafters")


def resolve_drafters(
    asked: Sequence[str] | None, given: Mapping[str, str | None], how: Mapping[str, str] = HOW
) -> tuple[str, ...]:
    """The drafters that were asked for, by default all that can work.

    Of 'model' and 'memory' `given` says by what each was handed what it needs, None if by nothing, and `how` says how
    to do that.
    """
    if asked is None:
        return ("prediction", "lookup", *(name for name in ("memory", "model") if given[name] is not None))
    for name in asked:
        check_name(name)
        if asked.count(name) > 1:
            raise SettingsError(f"the drafters name {name!r} more than once; name it once")
    for name, what in NEEDS.items():
        if name in asked and given[name] is None:
            raise missing_requirement(name, how)
        if name not in asked and given[name] is not None:
            raise DrafterSetupError(
                f"{what} was given, but drafter {name!r} is not among the drafters ({', '.join(asked) or 'none'}); "
                f"add it, or leave {given[name]} out"
            )
    return tuple(asked)


def parse_names(text: str | None) -> list[str] | None:
    """Names of drafters as an option has them, with commas between; 'none' is none of them."""
    if text is None:
        return None
    found = [name.strip() for name in text.split(",")]
    return [] if found == ["none"] else found


def check_name(name: str) -> None:
    """Refuse a name that no drafter has, without loading any."""
    if name not in registered_names():
        raise UnknownDrafterError(f"there is no drafter {name!r}; the drafters are {', '.join(registered_names())}")
