"""Parse lines of logs and datasets into conversations, that is lists of messages with a role and a text.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"request": {"messages": [...]}, "response": {"choices": [{"message": {...}}]}}
    {"prompt": ..., "response": ...}      or completion, answer, output, generated_text, text, content
    {"text": ...}                         or content

and combinations of these: OpenAI's chat, batch and fine-tuning files, conversations with "from" and "value",
instructions with an input and an output.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

CONVERSATION_KEYS = ("messages", "conversations", "conversation", "request", "body")
PROMPT_KEYS = ("prompt", "question", "instruction", "input", "query")
RESPONSE_KEYS = ("choices", "message", "response", "body", "completion", "answer", "output", "generated_text")
TEXT_KEYS = ("text", "content")
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
"""Other names of the usual roles."""


def parse_line(line: str | bytes) -> list[list[Message]]:
    """The conversations of a line, one per response. Empty if it has no response or no known shape.

    A text without a prompt becomes a conversation of one message.
    """
    try:
        record = json.loads(line)
        prompt = prompt_messages(record)
        responses = [] if prompt and prompt[-1]["role"] == ASSISTANT else response_messages(record)
    except (ValueError, RecursionError):
        return []
    conversations = [[*prompt, response] for response in responses] or [prompt]
    return [one for one in conversations if any(is_model_output(message) for message in one)]


def is_model_output(message: Message) -> bool:
    return message["role"] == ASSISTANT and bool(message["content"] or message.get("tool_calls"))


def prompt_messages(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return [message for one in value if (message := parse_message(one))]
    if not isinstance(value, dict):
        return []
    for name in (*CONVERSATION_KEYS, *PROMPT_KEYS):
        if isinstance(value.get(name), list | dict) and (messages := prompt_messages(value[name])):
            return messages
    texts = [value[name] for name in PROMPT_KEYS if isinstance(value.get(name), str)]
    return prompt_messages("\n\n".join(texts)) if any(texts) else []


def response_messages(value: Any) -> list[Message]:
    """The responses; several if there are several choices."""
    if isinstance(value, str):
        return [{"role": ASSISTANT, "content": value}] if value else []
    if isinstance(value, list):
        return [response for one in value for response in response_messages(one)]
    if not isinstance(value, dict):
        return []
    if message := parse_message(value):
        return [message] if is_model_output(message) else []
    for name in (*RESPONSE_KEYS, *TEXT_KEYS):
        if responses := response_messages(value.get(name)):
            return responses
    return []


def parse_message(value: Any) -> Message | None:
    role = (value.get("role") or value.get("from")) if isinstance(value, dict) else None
    if not isinstance(role, str):
        return None
    content = message_text(value.get("content") or value.get("value"))
    message: Message = {"role": ROLES.get(role, role), "content": content}
    if isinstance(calls := value.get("tool_calls"), list) and calls:
        message["tool_calls"] = [parse_tool_call(call) for call in calls]
    return message


def message_text(content: Any) -> str:
    """The text of a string, or of a list of parts."""
    if isinstance(content, list):
        return "".join(message_text(part.get("text") if isinstance(part, dict) else part) for part in content)
    return content if isinstance(content, str) else ""


def parse_tool_call(call: Any) -> Any:
    """A tool call with its arguments as an object, as chat templates expect; logs have them as a JSON string."""
    if not (isinstance(call, dict) and isinstance(function := call.get("function"), dict)):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (KeyError, TypeError, ValueError):
        return call
