"""Parts of a chat request: messages, tools, arguments of the template."""

from __future__ import annotations

from banyan.serve.field_kinds import Shape
from banyan.serve.schema import Field, Table


def messages(shape: Shape) -> Field:
    message = Field("object", fields=_message(shape))
    return Field("array", items=message, min_items=1, max_items=shape.limits.messages)


def tools(shape: Shape) -> Field:
    function = {
        "name": Field("string", required=True, min_bytes=1, max_bytes=shape.limits.label_bytes),
        "description": Field("string"),
        "parameters": Field("object"),
        "strict": Field("boolean"),
    }
    tool = {
        "type": Field("string", choices=("function",), default="function"),
        "function": Field("object", required=True, fields=function),
    }
    return Field("array", items=Field("object", fields=tool), max_items=shape.limits.tools)


def tool_choice(shape: Shape) -> Field:
    name = Field("string", required=True, max_bytes=shape.limits.label_bytes)
    named = {
        "type": Field("string", choices=("function",), default="function"),
        "function": Field("object", required=True, fields={"name": name}),
    }
    words = Field("string", choices=("none", "auto", "required"))
    return Field("one_of", one_of=(words, Field("object", fields=named)))


def template_kwargs() -> Field:
    """The arguments of a chat template that a request may give, with their types. Others are ignored."""
    known = {
        "enable_thinking": Field("boolean"),
        "thinking": Field("boolean"),
        "reasoning_effort": Field("string", max_bytes=64),
        "date_string": Field("string", max_bytes=64),
        "tools_in_user_message": Field("boolean"),
        "documents": Field("array", items=Field("object"), max_items=1024),
    }
    return Field("object", fields=known)


def _message(shape: Shape) -> Table:
    part = {
        "type": Field("string", choices=("text",), default="text", note="text only"),
        "text": Field("string", required=True),
    }
    parts = Field("array", items=Field("object", fields=part), max_items=shape.limits.messages)
    calls = Field("object", fields=_call())
    return {
        "role": Field("string", required=True, min_bytes=1, max_bytes=64),
        "content": Field("one_of", one_of=(Field("string"), parts)),
        "name": Field("string", max_bytes=shape.limits.label_bytes),
        "tool_calls": Field("array", items=calls, max_items=shape.limits.tools),
        "tool_call_id": Field("string"),
        "reasoning_content": Field("string"),
    }


def _call() -> Table:
    arguments = Field("one_of", one_of=(Field("string"), Field("object")), default="{}")
    function = {"name": Field("string", required=True), "arguments": arguments}
    return {
        "id": Field("string"),
        "type": Field("string", choices=("function",), default="function"),
        "function": Field("object", required=True, fields=function),
    }
