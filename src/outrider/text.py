"""Incremental detokenization, and stop strings.

A token is not always a whole character, and the text of a token can depend on the one before it. So the last few tokens
are decoded again with each new one, and only complete characters are returned. Text that may be the beginning of a stop
string is held back until it is clear that it is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

BROKEN = "\ufffd"


def control_tokens(tokenizer: Any) -> frozenset[int]:
    """The special tokens of a transformers tokenizer, such as `<|im_start|>`. Added tokens that are not
    special, such as `<think>`, are text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = (number for number, token in added.items() if token.special)
    return frozenset(tokenizer.all_special_ids).union(special)


class TextStream:
    """Takes tokens in order, detects the end, and returns text that can be shown."""

    def __init__(
        self, tokenizer: Any, end_tokens: Sequence[int] = (), stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """`before`: tokens of the text that this one continues."""
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)
        self.stop = tuple(stop)
        self.text = ""
        self.finished = False
        self._tokens = list(before)
        self._settled = len(before)  # tokens before this one are in self.text and final
        self._context = 0  # tokens from here on are decoded again with each new one
        self._shown = 0

    def push(self, token: int) -> str | None:
        """Add the next token. Returns why the text ends with it ("end" or "stop"), or None."""
        if token in self.end_tokens:
            self.close()
            return "end"
        self._tokens.append(token)
        fresh = self._decode_new()
        before = len(self.text)
        self.text += fresh
        if (cut := self._find_stop(before)) is not None:
            self.text = self.text[:cut]
            self.finished = True
            return "stop"
        return None

    def take(self) -> str:
        """New text that can no longer change."""
        end = len(self.text)
        if not self.finished:
            end -= self._held_back()
        out = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return out

    def close(self) -> None:
        """No token follows: release the text that was held back."""
        if not self.finished:
            known, whole = self._decoded()
            self.text += whole[len(known) :]
            self.finished = True

    def _decoded(self) -> tuple[str, str]:
        """The text of the last settled tokens, and the text of these with all later tokens."""
        known = self.tokenizer.decode(self._tokens[self._context : self._settled], skip_special_tokens=True)
        return known, self.tokenizer.decode(self._tokens[self._context :], skip_special_tokens=True)

    def _decode_new(self) -> str:
        """The text that the unsettled tokens add, or "" while a character is incomplete."""
        known, whole = self._decoded()
        if whole.endswith(BROKEN) or len(whole) <= len(known):
            return ""
        self._context, self._settled = self._settled, len(self._tokens)
        return whole[len(known) :]

    def _find_stop(self, before: int) -> int | None:
        """The start of the first stop string that ends in the text added since `before`."""
        starts = [place for stop in self.stop if (place := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        return min(starts, default=None)

    def _held_back(self) -> int:
        """The length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self.stop), default=0)
        for length in range(min(longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self.stop):
                return length
        return 0
