"""Messages of a request -> token ids, through the model's template in the sandbox. Runs off the loop."""

from __future__ import annotations

import json
from typing import Any

from banyan.serve.context import Context
from banyan.serve.errors import bad

Fields = dict[str, Any]


def encode_messages(context: Context, fields: Fields) -> list[int]:
    """Token ids under the template. Special tokens spelled in messages or tools stay text. Raises ApiError."""
    messages = [_plain(message) for message in fields["messages"]]
    tools = fields["tools"] if fields.get("tool_choice") != "none" else None
    continues = fields["continue_final_message"]
    if continues and messages[-1]["role"] != "assistant":
        raise bad(
            "continue_final_message: wanted the last message to be the assistant's",
            "continue_final_message",
        )
    marked, spelled = context.chat.mark_special([{"messages": messages, "tools": tools or []}])
    messages, tools = marked[0]["messages"], marked[0]["tools"]
    arguments: Fields = {
        "add_generation_prompt": fields["add_generation_prompt"] and not continues,
        **{k: v for k, v in (fields["chat_template_kwargs"] or {}).items() if v is not None},
    }
    if fields.get("reasoning_effort"):
        arguments.setdefault("reasoning_effort", fields["reasoning_effort"])
    if tools:
        arguments["tools"] = tools
    text = _chat(context, fields).render(messages, arguments)
    if continues:
        text = _up_to(text, messages[-1]["content"] or "")
    context.check_length(text)
    ids = context.chat.encode_rendered(text, spelled)[0]
    if fields.get("add_special_tokens"):
        ids = context.chat.encode("", add_special_tokens=True)[:1] + ids
    return ids


def _chat(context: Context, fields: Fields) -> Any:
    template = fields.get("chat_template")
    return context.chat.with_template(template) if template else context.chat


def _plain(message: Fields) -> Fields:
    """A message as templates expect it: content is text, arguments of a call are an object, nothing is null."""
    found = {key: value for key, value in message.items() if value is not None}
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = "\n".join(part["text"] for part in content)
    elif content is None:
        found["content"] = ""
    if found.get("tool_calls"):
        found["tool_calls"] = [_plain_call(call) for call in found["tool_calls"]]
    return found


def _plain_call(call: Fields) -> Fields:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise bad("messages: tool_calls.function.arguments: wanted JSON", "messages") from None
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _up_to(text: str, content: str) -> str:
    """Rendered text cut right after the last message's content."""
    found = text.rfind(content.strip())
    if found < 0:
        raise bad("continue_final_message: the template changes the last message", "messages")
    return text[: found + len(content.strip())]
