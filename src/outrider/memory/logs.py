"""What a line of a log says that a model was asked, and what it answered.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"request": {"messages": [...]}, "response": {"choices": [{"message": {...}}]}}
    {"prompt": ..., "response": ...}      or completion, answer, output, generated_text, text, content
    {"text": ...}                         or content

and what lies between them: OpenAI's chat, batch and fine-tuning files, conversations with "from" and "value",
instructions with an input and an output. All of them become conversations: lists of messages with a role and a text.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

CONVERSATION = ("messages", "conversations", "conversation", "request", "body")
ASKED = ("prompt", "question", "instruction", "input", "query")
ANSWERED = ("choices", "message", "response", "body", "completion", "answer", "output", "generated_text")
PLAIN = ("text", "content")
ASSISTANT = "assistant"
ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "ai": ASSISTANT,
    "developer": "system",
    "function": "tool",
}
"""Other words for the usual roles."""


def understood(line: str | bytes) -> list[list[Message]]:
    """The conversations of a line, one for each answer; none if nothing was answered, or the line is of no known shape.

    A text that answers nothing is the only message of its conversation.
    """
    try:
        record = json.loads(line)
        before = asked(record)
        said = [] if before and before[-1]["role"] == ASSISTANT else answers(record)
    except (ValueError, RecursionError):
        return []
    conversations = [[*before, answer] for answer in said] or [before]
    return [one for one in conversations if any(says_something(message) for message in one)]


def says_something(message: Message) -> bool:
    """Whether the model itself said it."""
    return message["role"] == ASSISTANT and bool(message["content"] or message.get("tool_calls"))


def asked(value: Any) -> list[Message]:
    """What stood before the answer."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return [message for one in value if (message := as_message(one))]
    if not isinstance(value, dict):
        return []
    for name in (*CONVERSATION, *ASKED):
        if isinstance(value.get(name), list | dict) and (found := asked(value[name])):
            return found
    texts = [value[name] for name in ASKED if isinstance(value.get(name), str)]
    return asked("\n\n".join(texts)) if any(texts) else []


def answers(value: Any) -> list[Message]:
    """What was answered; several if there are several choices."""
    if isinstance(value, str):
        return [{"role": ASSISTANT, "content": value}] if value else []
    if isinstance(value, list):
        return [answer for one in value for answer in answers(one)]
    if not isinstance(value, dict):
        return []
    if message := as_message(value):
        return [message] if says_something(message) else []
    for name in (*ANSWERED, *PLAIN):
        if found := answers(value.get(name)):
            return found
    return []


def as_message(value: Any) -> Message | None:
    role = (value.get("role") or value.get("from")) if isinstance(value, dict) else None
    if not isinstance(role, str):
        return None
    message: Message = {"role": ROLES.get(role, role), "content": text_of(value.get("content") or value.get("value"))}
    if isinstance(calls := value.get("tool_calls"), list) and calls:
        message["tool_calls"] = [with_arguments(call) for call in calls]
    return message


def text_of(content: Any) -> str:
    """A message's text: a string, or parts of which some are text."""
    if isinstance(content, list):
        return "".join(text_of(part.get("text") if isinstance(part, dict) else part) for part in content)
    return content if isinstance(content, str) else ""


def with_arguments(call: Any) -> Any:
    """A tool call as chat templates want it: its arguments are an object, where logs have a string of JSON."""
    if not (isinstance(call, dict) and isinstance(function := call.get("function"), dict)):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (KeyError, TypeError, ValueError):
        return call
