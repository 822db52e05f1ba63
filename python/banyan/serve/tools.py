"""Tool calls in the text that a model writes, as it comes. The text is data: nothing is called here.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>             Hermes, Qwen2.5, Qwen3
qwen     <tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>      Qwen3-Coder
llama    [<|python_tag|>] {"name": ..., "parameters": {...}} [; {...}]  or  [name(key=value), ...]     Llama 3, 4

A parser is pushed text and gives pieces of a delta: {"content": text} or {"tool_calls": [one call, complete]}. What
turns out to be no call is given as content.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable
from typing import Any

from banyan.errors import UserError
from banyan.serve.errors import bad

Fields = dict[str, Any]
Call = tuple[str, Any]  # name, arguments
# Names that vLLM and SGLang give to parsers -> the format that they read.
FORMATS = {
    "auto": "auto",
    "none": "none",
    **dict.fromkeys(("hermes", "qwen25", "qwen2_5", "qwen3"), "hermes"),
    **dict.fromkeys(("qwen", "qwen3_coder", "qwen3_xml"), "qwen"),
    **dict.fromkeys(("llama", "llama3", "llama3_json", "llama4_json"), "llama"),
    **dict.fromkeys(("llama4_pythonic", "pythonic"), "llama"),
}
_MAX_LITERAL = 16384
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def detect(template: str) -> str:
    """The format that a chat template teaches its model; `none` if it shows none."""
    if "<function=" in template:
        return "qwen"
    if "<tool_call>" in template:
        return "hermes"
    if "python_tag" in template or ("tools" in template and '"parameters"' in template):
        return "llama"
    return "none"


def named(name: str) -> str:
    """The format behind the name of a parser. Raises UserError."""
    if name not in FORMATS:
        raise UserError(f"--tool-call-parser: wanted one of {', '.join(FORMATS)}, got {name}")
    return FORMATS[name]


def constrain(fields: Fields) -> None:
    """Turns a tool choice that forces a call into structured output. Raises ApiError."""
    choice, tools = fields["tool_choice"], fields["tools"] or []
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise bad("tool_choice: wanted tools beside it", "tool_choice")
    if fields["structured_outputs"] or (fields["response_format"] or {}).get("type") not in (
        None,
        "text",
    ):
        raise bad(
            "tool_choice: a forced call and structured output exclude each other", "tool_choice"
        )
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if choice == "required":
        calls = [_call_schema(function) for function in functions.values()]
        schema: Fields = {"type": "array", "minItems": 1, "maxItems": 8, "items": {"anyOf": calls}}
    else:
        name = choice["function"]["name"]
        if name not in functions:
            raise bad(
                f"tool_choice: wanted one of {', '.join(functions)}, got {name!r}", "tool_choice"
            )
        schema = functions[name]["parameters"] or {"type": "object"}
    fields["structured_outputs"] = {"json": schema}


def _call_schema(function: Fields) -> Fields:
    arguments = function["parameters"] or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def parser(form: str, fields: Fields) -> Parser:
    """The parser of one answer. Raises ApiError if tools are given and the model's format is unknown."""
    choice, tools = fields["tool_choice"], fields["tools"]
    if not tools or choice == "none":
        return Parser()
    once = not fields["parallel_tool_calls"]
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        return WholeParser(lambda text: [(name, json.loads(text))], "{", once)
    if choice == "required":
        return WholeParser(_json_calls, "[", once)
    if form == "none":
        raise bad(
            "tools: the model's chat template shows no tool format; start with --tool-call-parser",
            "tools",
        )
    if form == "llama":
        return WholeParser(_llama_calls, "{[", once)
    read = _hermes_call if form == "hermes" else lambda text: _qwen_call(text, tools)
    return BlockParser(read, "<tool_call>", "</tool_call>", once)


class Parser:
    """Without tools: text is content."""

    def __init__(self) -> None:
        self.called = 0

    def push(self, text: str, final: bool) -> list[Fields]:
        return [{"content": text}] if text else []

    def _call(self, call: Call) -> Fields:
        name, arguments = call
        written = {"name": name, "arguments": _written(arguments)}
        made = {
            "index": self.called,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": written,
        }
        self.called += 1
        return {"tool_calls": [made]}


class BlockParser(Parser):
    """Calls between two marks; other text is content."""

    def __init__(self, read: Callable[[str], Call], begin: str, end: str, once: bool) -> None:
        super().__init__()
        self._read, self._begin, self._end, self._once = read, begin, end, once
        self._held = ""
        self._after_call = False

    def push(self, text: str, final: bool) -> list[Fields]:
        self._held += text
        pieces: list[Fields] = []
        while self._held:
            start = self._held.find(self._begin)
            if start < 0:
                keep = 0 if final else _partial(self._held, self._begin)
                if final or not self._blank(len(self._held) - keep):
                    self._content(pieces, len(self._held) - keep)
                break
            self._content(pieces, start)
            end = self._held.find(self._end, len(self._begin))
            if end < 0 and not final:
                break
            stop = len(self._held) if end < 0 else end + len(self._end)
            inner = self._held[len(self._begin) : None if end < 0 else end]
            self._block(pieces, inner, stop)
        return pieces

    def _content(self, pieces: list[Fields], length: int) -> None:
        if length and not self._blank(length):
            self._after_call = False
            pieces.append({"content": self._held[:length]})
        self._held = self._held[length:]

    def _blank(self, length: int) -> bool:
        """Whether the next letters are the space between two calls, or behind the last."""
        return self._after_call and self._held[:length].isspace()

    def _block(self, pieces: list[Fields], inner: str, stop: int) -> None:
        try:
            call = self._read(inner)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._content(pieces, stop)
            return
        self._held = self._held[stop:]
        self._after_call = True
        if not (self._once and self.called):
            pieces.append(self._call(call))


class WholeParser(Parser):
    """The whole answer is calls if it begins like one; else it is content from its first letter."""

    def __init__(self, read: Callable[[str], list[Call]], begins: str, once: bool) -> None:
        super().__init__()
        self._read, self._begins, self._once = read, begins, once
        self._held = ""
        self._plain = False

    def push(self, text: str, final: bool) -> list[Fields]:
        if self._plain:
            return super().push(text, final)
        self._held += text
        bare = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        may_call = not bare or bare[0] in self._begins
        may_call = may_call or (not final and "<|python_tag|>".startswith(bare))
        if may_call and not final:
            return []
        held, self._held = self._held, ""
        self._plain = True
        calls = self._calls(bare) if may_call and bare else []
        if calls:
            return [self._call(call) for call in (calls[:1] if self._once else calls)]
        return super().push(held, final)

    def _calls(self, text: str) -> list[Call]:
        try:
            return self._read(text)
        except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError):
            return []


def _written(arguments: Any) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair stays an escape
        text = json.dumps(arguments)
    return text


def _partial(text: str, mark: str) -> int:
    """Length of the longest tail of `text` that begins `mark`."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


def _named(value: Any) -> Call:
    arguments = value["arguments"] if "arguments" in value else value.get("parameters", {})
    if not isinstance(value["name"], str):
        raise ValueError("name")
    value["name"].encode()  # half a surrogate pair: no name
    return value["name"], arguments


def _hermes_call(text: str) -> Call:
    return _named(json.loads(text))


def _json_calls(text: str) -> list[Call]:
    return [_named(value) for value in json.loads(text)]


def _llama_calls(text: str) -> list[Call]:
    if text[0] == "[":
        return _python_calls(text)
    calls, decoder, place = [], json.JSONDecoder(), 0
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        calls.append(_named(value))
        while place < len(text) and text[place] in "; \n\t\r":
            place += 1
    return calls


def _python_calls(text: str) -> list[Call]:
    """`[name(key=literal, ...), ...]`, read as a syntax tree of literals: nothing is evaluated."""
    if len(text) > _MAX_LITERAL:
        raise ValueError("too long")
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("no list")
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError("no call")
        arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        calls.append((node.func.id, arguments))
    return calls


def _qwen_call(text: str, tools: list[Fields]) -> Call:
    found = _FUNCTION.fullmatch(text)
    if not found:
        raise ValueError("no function")
    name = found[1].strip()
    types = _types(name, tools)
    arguments = {
        key.strip(): _typed(value, types.get(key.strip()))
        for key, value in _PARAMETER.findall(found[2])
    }
    return name, arguments


def _types(name: str, tools: list[Fields]) -> Fields:
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"]["parameters"] or {}).get("properties") or {}
            return {
                key: value.get("type")
                for key, value in properties.items()
                if isinstance(value, dict)
            }
    return {}


def _typed(text: str, kind: Any) -> Any:
    """A parameter is text; where the schema says otherwise, it is JSON."""
    if kind in (None, "string"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
