"""The small language in which ppo_trainer.yaml states the type and range of each key.

    spec  := type ["|null"] [range] | "one of" name {"," name} ["|null"] ["or FILE.py:FUNCTION"]
    type  := bool | int | float | str | file | dir | files | strs | ints | floats ["of" count] | map
    range := (">=" | ">" | "<=" | "<") number | "in" ("["|"(") number "," number ("]"|")") ["not" number]

`check` returns the value in its Python type (an int given for a float becomes one, a path gets its "~" expanded)
or raises ValueError with what was wanted. Whether files exist is checked later, by trainer/inputs.py.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any

_SPEC = re.compile(
    r"^(?P<type>bool|ints|int|floats|float|strs|str|files|file|dir|map)(?: of (?P<count>\d+))?"
    r"(?P<null>\|null)?(?: (?P<op>>=|>|<=|<) (?P<bound>\S+))?"
    r"(?: in (?P<open>[\[(])(?P<low>[^,]+), (?P<high>[^\])]+)(?P<close>[\])]))?(?: not (?P<excluded>\S+))?$"
)
_OR_FUNCTION = " or FILE.py:FUNCTION"
_FUNCTION = re.compile(r"^.+\.py:[A-Za-z_]\w*$")
_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "file": "a file",
    "dir": "a directory",
    "files": "a file or a list of files",
    "strs": "a name or a list of names",
    "ints": "a list of whole numbers",
    "floats": "a list of numbers",
    "map": "a mapping",
}


@dataclass(frozen=True)
class Spec:
    """One parsed type; `text` is what the YAML says."""

    text: str
    type: str
    nullable: bool = False
    choices: tuple[str, ...] = ()
    or_function: bool = False  # a choice, or a function in a file of the user
    count: int | None = None
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    excluded: float | None = None

    def wanted(self) -> str:
        """What a value must be, in words for an error message."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
            text += " or FILE.py:FUNCTION" if self.or_function else ""
        else:
            text = _WORDS[self.type]
            if self.count is not None:
                text = text.replace("a list of", f"a list of {self.count}")
            text += self._range_words()
        return text + (" or null" if self.nullable else "")

    def _range_words(self) -> str:
        if self.low > -math.inf and self.high < math.inf:
            text = f" in {'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"
        elif self.low > -math.inf:
            text = f" {'>' if self.low_open else '>='} {self.low:g}"
        elif self.high < math.inf:
            text = f" {'<' if self.high_open else '<='} {self.high:g}"
        else:
            text = ""
        return text + (f" other than {self.excluded:g}" if self.excluded is not None else "")

    def in_range(self, number: float) -> bool:
        if not math.isfinite(number) or number == self.excluded:
            return False
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        return above and below


def parse(text: str) -> Spec:
    """Parses a type; raises ValueError for one that the grammar does not know."""
    if text.startswith("one of "):
        body = text[len("one of ") :].removesuffix(_OR_FUNCTION)
        names = tuple(name.strip() for name in body.removesuffix("|null").split(","))
        return Spec(
            text, "str", body.endswith("|null"), names, or_function=text.endswith(_OR_FUNCTION)
        )
    match = _SPEC.match(text)
    if not match:
        raise ValueError(f"unknown type {text!r}")
    part = match.groupdict()
    low, high, low_open, high_open = -math.inf, math.inf, False, False
    if part["op"] in (">", ">="):
        low, low_open = float(part["bound"]), part["op"] == ">"
    elif part["op"]:
        high, high_open = float(part["bound"]), part["op"] == "<"
    if part["open"]:
        low, high = float(part["low"]), float(part["high"])
        low_open, high_open = part["open"] == "(", part["close"] == ")"
    return Spec(
        text=text,
        type=part["type"],
        nullable=part["null"] is not None,
        count=int(part["count"]) if part["count"] else None,
        low=low,
        high=high,
        low_open=low_open,
        high_open=high_open,
        excluded=float(part["excluded"]) if part["excluded"] else None,
    )


def check(spec: Spec, value: Any) -> Any:
    """Returns `value` as `spec` wants it. Raises ValueError(what was wanted)."""
    if value is None and spec.nullable:
        return None
    result = _convert(spec, value)
    if result is None:
        raise ValueError(spec.wanted())
    return result


def _convert(spec: Spec, value: Any) -> Any:
    """The converted value, or None where it does not fit."""
    if spec.choices:
        known = isinstance(value, str) and (
            value in spec.choices or (spec.or_function and _FUNCTION.match(value) is not None)
        )
        return value if known else None
    if spec.type == "bool":
        return value if isinstance(value, bool) else None
    if spec.type in ("int", "float"):
        return _number(spec, value)
    if spec.type in ("str", "file", "dir"):
        return _text(spec.type, value)
    if spec.type == "map":
        return value if isinstance(value, dict) else None
    items = value if isinstance(value, list) else [value]
    if spec.type in ("ints", "floats") and not isinstance(value, list):
        return None
    result: list[Any]
    if spec.type in ("ints", "floats"):
        result = [_number(spec, item) for item in items]
        fits = spec.count is None or len(items) == spec.count
    else:
        result = [_text("file" if spec.type == "files" else "str", item) for item in items]
        fits = spec.type != "files" or len(items) > 0
    return result if fits and None not in result else None


def _number(spec: Spec, value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    whole = spec.type in ("int", "ints")
    if whole and not isinstance(value, int):
        return None
    if not spec.in_range(value):
        return None
    return value if whole else float(value)


def _text(kind: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    text = str(value)
    if kind == "str":
        return text
    return os.path.expanduser(text) if text else None
