"""One table says what a request may hold: it checks requests, and /openapi.json is printed from it.

A table maps field names to `Field`s. `check` returns the fields with their defaults; a value out of range raises
ApiError 400 that names the field and the range. A field that is null counts as absent. Names of unknown fields are
collected, for one line in the log; a field that stands for something banyan does not do has `refused` set, so that it
is never dropped in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from banyan.serve.errors import bad

Table = Mapping[str, "Field"]


@dataclass(frozen=True)
class Field:
    """Type and range of one value.

    `kind` is integer, number, boolean, string, array, object, map (any keys, values like `items`), tokens (a list of
    token ids), any, or one_of.
    """

    kind: str
    low: float | None = None
    high: float | None = None
    above: float | None = None  # exclusive lower bound
    default: Any = None
    required: bool = False
    choices: tuple[Any, ...] = ()
    items: Field | None = None  # of an array; values of a map
    max_items: int | None = None
    min_items: int = 0
    max_bytes: int | None = None  # UTF-8 bytes of a string
    min_bytes: int = 0
    printable: bool = False  # no line breaks, no other control characters
    fields: Table | None = None  # of an object
    one_of: tuple[Field, ...] = ()
    refused: str = ""  # why a value other than the default is refused
    note: str = ""

    def check(self, value: Any, path: str, unknown: list[str]) -> Any:
        """The value, converted. Raises ApiError that names `path` and what was wanted; adds to `unknown`."""
        if self.kind == "one_of":
            return self._check_one_of(value, path, unknown)
        checked = _CHECKS[self.kind](self, value, path, unknown)
        if self.choices and checked not in self.choices:
            wanted = ", ".join(str(choice) for choice in self.choices)
            raise bad(f"{path}: wanted one of {wanted}, got {_short(value)}", path)
        return checked

    def _check_one_of(self, value: Any, path: str, unknown: list[str]) -> Any:
        fitting = [choice for choice in self.one_of if choice.takes(value)]
        if not fitting:
            raise bad(f"{path}: wanted {self.wanted()}, got {_short(value)}", path)
        return fitting[0].check(value, path, unknown)

    def takes(self, value: Any) -> bool:
        """Whether the value is of this type; its range is another question."""
        if self.kind == "tokens":
            return isinstance(value, list) and bool(value) and type(value[0]) in (int, float)
        if self.kind == "array" and isinstance(value, list):
            return not value or self.items is None or self.items.takes(value[0])
        return self.kind == "any" or (
            isinstance(value, _PYTHON_TYPES[self.kind])
            and not (isinstance(value, bool) and self.kind in ("integer", "number"))
        )

    def wanted(self) -> str:
        """Type and range in words."""
        if self.kind == "one_of":
            return " or ".join(dict.fromkeys(choice.wanted() for choice in self.one_of))
        low = f"> {_number(self.above)}" if self.above is not None else ""
        low = f">= {_number(self.low)}" if self.low is not None else low
        high = f"<= {_number(self.high)}" if self.high is not None else ""
        ends = " and ".join(end for end in (low, high) if end)
        names = {"integer": "a whole number", "number": "a finite number", "boolean": "a boolean"}
        names |= {"string": "a string", "array": "a list", "tokens": "a list of token ids"}
        name = names.get(self.kind, "an object")
        return f"{name} {ends}" if ends else name


def check(
    table: Table, body: dict[str, Any], path: str = "", unknown: list[str] | None = None
) -> dict[str, Any]:
    """Checked fields with defaults; the names that the table does not know are appended to `unknown`."""
    unknown = [] if unknown is None else unknown
    found: dict[str, Any] = {}
    for name, spec in table.items():
        value = body.get(name)
        where = f"{path}.{name}" if path else name
        if value is None:
            if spec.required:
                raise bad(f"{where}: wanted {spec.wanted()}, got nothing", where)
            found[name] = spec.default
        elif spec.refused:
            if value != spec.default:
                raise bad(f"{where}: {spec.refused}", where)
            found[name] = value
        else:
            found[name] = spec.check(value, where, unknown)
    unknown += [f"{path}.{name}" if path else name for name in body if name not in table]
    return found


def _integer(spec: Field, value: Any, path: str, unknown: list[str]) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad(f"{path}: wanted {spec.wanted()}, got {_short(value)}", path)
    return int(_ranged(spec, value, path))


def _number_value(spec: Field, value: Any, path: str, unknown: list[str]) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise bad(f"{path}: wanted {spec.wanted()}, got {_short(value)}", path)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise bad(f"{path}: wanted {spec.wanted()}, got {_short(value)}", path)
    _ranged(spec, value, path)
    return number


def _ranged(spec: Field, value: Any, path: str) -> Any:
    low = spec.low is not None and value < spec.low
    if (
        low
        or (spec.above is not None and value <= spec.above)
        or (spec.high is not None and value > spec.high)
    ):
        raise bad(f"{path}: wanted {spec.wanted()}, got {_short(value)}", path)
    return value


def _boolean(spec: Field, value: Any, path: str, unknown: list[str]) -> bool:
    if not isinstance(value, bool):
        raise bad(f"{path}: wanted a boolean, got {_short(value)}", path)
    return value


def _string(spec: Field, value: Any, path: str, unknown: list[str]) -> str:
    if not isinstance(value, str):
        raise bad(f"{path}: wanted a string, got {_short(value)}", path)
    size = len(value.encode())
    if size < spec.min_bytes or (spec.max_bytes is not None and size > spec.max_bytes):
        wanted = _between(spec.min_bytes, spec.max_bytes)
        raise bad(f"{path}: wanted a string of {wanted} bytes, got {size}", path)
    if spec.printable and not value.isprintable():
        raise bad(f"{path}: wanted a string without control characters, got {_short(value)}", path)
    return value


def _array(spec: Field, value: Any, path: str, unknown: list[str]) -> list[Any]:
    if not isinstance(value, list):
        raise bad(f"{path}: wanted a list, got {_short(value)}", path)
    _counted(spec, len(value), path)
    if spec.items is None:
        return value
    return [spec.items.check(item, f"{path}[{index}]", unknown) for index, item in enumerate(value)]


def _tokens(spec: Field, value: Any, path: str, unknown: list[str]) -> list[int]:
    if isinstance(value, list) and any(type(token) is float for token in value):
        value = [int(t) if type(t) is float and t.is_integer() else t for t in value]  # 1.0 is 1
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise bad(f"{path}: wanted a list of token ids", path)
    _counted(spec, len(value), path)
    high = int(spec.high or 0)
    if value and (min(value) < 0 or max(value) > high):
        wrong = next(token for token in value if not 0 <= token <= high)
        raise bad(f"{path}: wanted token ids in [0, {high}], got {_short(wrong)}", path)
    return value


def _object(spec: Field, value: Any, path: str, unknown: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(f"{path}: wanted an object, got {_short(value)}", path)
    return check(spec.fields, value, path, unknown) if spec.fields is not None else value


def _map(spec: Field, value: Any, path: str, unknown: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(f"{path}: wanted an object, got {_short(value)}", path)
    _counted(spec, len(value), path)
    items = spec.items or Field("any")
    return {key: items.check(item, f"{path}.{_short(key)}", unknown) for key, item in value.items()}


def _counted(spec: Field, count: int, path: str) -> None:
    if count < spec.min_items or (spec.max_items is not None and count > spec.max_items):
        wanted = _between(spec.min_items, spec.max_items)
        raise bad(f"{path}: wanted {wanted} entries, got {count}", path)


def _between(least: int, most: int | None) -> str:
    return f"at least {least}" if most is None else f"{least} to {most}"


def _any(spec: Field, value: Any, path: str, unknown: list[str]) -> Any:
    return value


_CHECKS = {
    "integer": _integer,
    "number": _number_value,
    "boolean": _boolean,
    "string": _string,
    "array": _array,
    "tokens": _tokens,
    "object": _object,
    "map": _map,
    "any": _any,
}
_PYTHON_TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "string": str,
    "array": list,
    "object": dict,
    "map": dict,
}


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _short(value: Any) -> str:
    """At most 64 letters of a value, for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = repr(value[:64]) if isinstance(value, str) else str(value)
    return text if len(text) <= 64 else text[:61] + "..."
