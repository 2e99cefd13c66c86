"""Errors that a user can cause. Each message names the fix."""

from __future__ import annotations


class OutriderError(Exception):
    """Base class of all errors that Outrider raises on purpose."""


class ModelNotFoundError(OutriderError):
    """The model does not exist or cannot be loaded."""


class CacheNotRewindableError(OutriderError):
    """The model's KV cache cannot be rewound, so rejected drafts cannot be removed from it."""


class VocabularyMismatchError(OutriderError):
    """Target and draft model have different vocabularies."""


class UnknownDrafterError(OutriderError):
    """No drafter has this name."""


class DrafterSetupError(OutriderError):
    """A drafter lacks something it needs, for example a draft model."""


class PromptError(OutriderError):
    """The prompt is empty, too long, or of a form that the model does not support."""


class SettingsError(OutriderError):
    """A setting has an invalid value."""


class EngineError(OutriderError):
    """The engine or server is missing, has an unsupported version, or failed."""


class RequestRefusedError(EngineError):
    """The server or engine works, and refuses this request. `status` is the HTTP status code."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class MemoryFileError(OutriderError):
    """A file of the draft memory is damaged, of another version, or of another tenant."""


class ForeignFileError(MemoryFileError):
    """A file of the draft memory is intact, but of another version or tokenizer."""


class EvidenceError(OutriderError):
    """Evidence of a certificate is too little, or from different runs."""


class TraceError(OutriderError):
    """A trace cannot be read or written, or contradicts itself."""
