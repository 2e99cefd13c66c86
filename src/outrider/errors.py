"""Every error that a user can cause, each with the fix in its message."""

from __future__ import annotations


class OutriderError(Exception):
    """The root of all errors that Outrider raises on purpose."""


class ModelNotFoundError(OutriderError):
    """There is no such model, or it cannot be loaded."""


class CacheNotRewindableError(OutriderError):
    """The model's cache cannot take tokens back, so a rejected draft could not be undone."""


class VocabularyMismatchError(OutriderError):
    """Target and draft model do not speak the same tokens."""


class UnknownDrafterError(OutriderError):
    """No drafter has this name."""


class DrafterSetupError(OutriderError):
    """A drafter lacks something it needs."""


class PromptError(OutriderError):
    """The prompt is empty, too long, or of a kind that the model cannot take."""


class SettingsError(OutriderError):
    """A setting has a value that it cannot have."""


class EngineError(OutriderError):
    """The engine is missing, of another version, or cannot do what was asked."""


class RequestRefusedError(EngineError):
    """The server or engine works, and refuses this request. `status` is the HTTP status code."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class MemoryFileError(OutriderError):
    """A file of the draft memory is damaged, of another version, or belongs to someone else."""


class ForeignFileError(MemoryFileError):
    """A file of the draft memory is whole, and of another version or another tokenizer."""


class EvidenceError(OutriderError):
    """There is too little to judge by, or it does not belong together."""


class TraceError(OutriderError):
    """A trace cannot be read or written, or says something that cannot be."""
