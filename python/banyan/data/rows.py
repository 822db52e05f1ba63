"""What all kinds of data rows share: columns, messages, token ids, limits, and the list of rows that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from banyan.data.files import Row, read_rows

_SHOWN = 5
_MEDIA = ("images", "videos", "audios")


def first_rows(paths: list[str], limit: int) -> Iterator[tuple[str, Row | str]]:
    """(place, row or reason) of the first `limit` rows of all files; -1 takes all."""
    count = 0
    for path in paths:
        for item in read_rows(path):
            if 0 <= limit <= count:
                return
            count += 1
            yield item


def bad_rows(bad: list[str]) -> str:
    """The error text for rows that cannot be used; the first five are shown."""
    head = "one row cannot be used:" if len(bad) == 1 else f"{len(bad)} rows cannot be used"
    if len(bad) > 1:
        head += ":" if len(bad) <= _SHOWN else f"; the first {_SHOWN}:"
    return "\n  ".join([f"data: {head}", *bad[:_SHOWN]])


def column(row: Row, name: str) -> Any:
    """Value of a column, or None; `a.b` is entry b of the object in column a, unless a column has that name."""
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def media_reason(row: Row) -> str | None:
    """Why a row with pictures or sound cannot be used, or None."""
    found = next((name for name in _MEDIA if row.get(name)), None)
    return f"column {found!r}: banyan trains on text only" if found else None


def messages_reason(messages: Any, name: str) -> str | None:
    """Why a value is not a list of {role, content}, or None."""
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else type(messages).__name__
        return f"column {name!r}: wanted a list of {{role, content}}, got {got}"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"column {name!r}: message {index}: wanted role and content as text"
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""  # a turn that only calls functions
        if not isinstance(content, str):
            return f"column {name!r}: message {index}: wanted role and content as text"
        if any("\ud800" <= letter <= "\udfff" for letter in message["role"] + content):
            return (
                f"column {name!r}: message {index}: wanted Unicode text, got half a surrogate pair"
            )
    return None


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """A column of token ids. Raises ValueError(reason) for anything else."""
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"column {name!r}: wanted a list of token ids, got {got}")
    for index, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(
                f"column {name!r}: entry {index}: wanted a token id in [0, {vocab_size}), got {token!r}"
            )
    return value


def kept_range(length: int, limit: int, truncation: str) -> list[tuple[int, int]]:
    """Which parts of `length` tokens stay under `limit`: the end (left), the start (right), or both (middle)."""
    if length <= limit:
        return [(0, length)]
    if truncation == "left":
        return [(length - limit, length)]
    if truncation == "right":
        return [(0, limit)]
    head = limit // 2
    return [(0, head), (length - (limit - head), length)]
