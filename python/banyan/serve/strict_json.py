"""Strict JSON: UTF-8, no lone surrogate, limited depth, no duplicate key, finite numbers; errors say where.

The fast path is the standard library's parser with hooks. The hooks do not know where they are, so a refused text is
walked once more, token by token, to find the place: the slow path runs for bad input only.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+', re.DOTALL)
_MAX_DIGITS = 4000


class JsonError(Exception):
    """Text that is refused, with its place."""


def parse_object(body: bytes, depth: int) -> dict[str, Any]:
    """The object that `body` is. Raises JsonError."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"body: wanted UTF-8, got a bad byte at byte {error.start}") from None
    value = _parse(text, depth)
    if not isinstance(value, dict):
        raise JsonError(f"body: wanted a JSON object, got {_kind(value)}")
    return value


class _RefusedError(ValueError):
    """Raised by a hook: the slow path knows why and where."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RefusedError
    return found


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _RefusedError
    return number


def _constant(name: str) -> Any:
    raise _RefusedError


def _parse(text: str, depth: int) -> Any:
    try:
        value = json.loads(
            text, object_pairs_hook=_pairs, parse_float=_float, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        _explain(text, depth, upto=error.pos)
        raise JsonError(f"body: {error.msg} at {_place(text, error.pos)}") from None
    except (ValueError, RecursionError):
        _explain(text, depth)
        raise JsonError("body: wanted JSON") from None
    if _depth(value) > depth or _lone_surrogate(text) is not None:
        _explain(text, depth)
    return value


def _depth(value: Any) -> int:
    """Deepest nesting of containers."""
    deepest, level = 0, [value]
    while level := [item for item in level if type(item) in (list, dict)]:
        deepest += 1
        level = [
            inner
            for item in level
            for inner in (item.values() if type(item) is dict else item)
            if type(inner) in (list, dict)
        ]
    return deepest


def _lone_surrogate(text: str) -> int | None:
    """Where an escape stands for half a pair. Backslashes occur inside strings only."""
    if "\\ud" not in text and "\\uD" not in text:
        return None
    high = None
    for found in _ESCAPE.finditer(text):
        code = int(found[1], 16) if found[1] else 0
        if high is not None:
            if 0xDC00 <= code < 0xE000 and found.start() == high + 6:
                high = None
                continue
            return high
        if 0xDC00 <= code < 0xE000:
            return found.start()
        if 0xD800 <= code < 0xDC00:
            high = found.start()
    return high


def _explain(text: str, depth: int, upto: int | None = None) -> None:
    """Raises JsonError for the first fault that the hooks or the checks found."""
    place = _lone_surrogate(text)
    if place is not None and (upto is None or place < upto):
        raise JsonError(f"body: wanted no half of a surrogate pair at {_place(text, place)}")
    keys: list[set[str] | None] = []
    before = ""
    for found in _TOKEN.finditer(text, 0, len(text) if upto is None else upto):
        token = found[0]
        if token in "[{":
            keys.append(set() if token == "{" else None)
            if len(keys) > depth:
                raise JsonError(
                    f"body: wanted nesting <= {depth} deep at {_place(text, found.start())}"
                )
        elif token in "]}":
            keys and keys.pop()
        elif token[0] == '"' and keys and keys[-1] is not None and before in "{,":
            _check_key(token, keys[-1], text, found.start())
        elif token[0] not in '":,tfn':
            _check_number(token, text, found.start())
        before = token


def _check_key(token: str, known: set[str], text: str, start: int) -> None:
    key = json.loads(token, strict=False)
    if key in known:
        raise JsonError(
            f"body: wanted each key once, got {key[:64]!r} again at {_place(text, start)}"
        )
    known.add(key)


def _check_number(token: str, text: str, start: int) -> None:
    try:
        finite = len(token) <= _MAX_DIGITS and math.isfinite(float(token))
    except ValueError:
        return  # no number at all: the parser says so
    if not finite:
        raise JsonError(f"body: wanted a finite number at {_place(text, start)}")


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"line {line} column {column} (character {position})"


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
