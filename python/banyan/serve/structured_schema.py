"""Which JSON schemas can be compiled so that every text that they allow obeys them.

outlines_core passes over what it does not know (`uniqueItems`, `required` beside no `properties`, ...), and the text
would then break the schema without a word. Here such a schema is refused, with the place of the keyword. What only
allows more (`additionalProperties: true`) may be passed over: what is written still obeys. Bounds of whole numbers,
which it does not know either, become patterns of our own: a constant stands in their place until the schema is a
pattern.
"""

from __future__ import annotations

import json
import math
from typing import Any

from banyan.errors import UserError
from banyan.serve.structured_ranges import integer_pattern

_MAX_DEPTH = 64
_ANNOTATIONS = {
    *(
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
    ),
    *("deprecated", "readOnly", "writeOnly", "discriminator"),
}
# Keywords that say what a value is; at most one of them, and what may stand beside it.
_FORMS: dict[str, set[str]] = {
    "properties": {"type", "required", "additionalProperties"},
    "prefixItems": {"type", "items"},
    "enum": {"type"},
    "const": {"type"},
    "anyOf": set(),
    "oneOf": set(),
    "allOf": set(),
    "$ref": set(),
}
_BY_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"additionalProperties", "minProperties", "maxProperties"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def prepare_schema(text: str) -> tuple[str, dict[str, str]]:
    """The schema for outlines_core, and what to put into its pattern: {constant in quotes: pattern}.

    Raises UserError for a schema that cannot be obeyed as a whole.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"structured output: the JSON schema cannot be read: {error}") from None
    walk = _Walk(root, text)
    walk.node(root, "$", 0)
    return (json.dumps(root) if walk.patterns else text), walk.patterns


class _Walk:
    def __init__(self, root: Any, text: str) -> None:
        self._root = root
        self._seen: set[str] = set()  # references that were followed
        self._mark = "range"
        while self._mark in text:
            self._mark += "x"
        self.patterns: dict[str, str] = {}

    def node(self, node: Any, path: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            _refuse(path, f"nested deeper than {_MAX_DEPTH}")
        if not isinstance(node, dict):
            _refuse(path, f"wanted an object, got {json.dumps(node)[:40]}")
        forms = [name for name in _FORMS if name in node]
        if len(forms) > 1:
            _refuse(path, f"{forms[0]} and {forms[1]} together are not built")
        types = _types(node, path)
        known = _FORMS[forms[0]] if forms else {"type"}.union(*(_BY_TYPE[name] for name in types))
        for name in node:
            if name not in known and name not in _ANNOTATIONS and name not in forms:
                _refuse(path, f"keyword {name!r} is not built here")
        if forms:
            self._form(forms[0], node, types, path, depth)
        else:
            self._plain(node, path, depth)

    def _plain(self, node: dict[str, Any], path: str, depth: int) -> None:
        if "pattern" in node:
            for other in ("minLength", "maxLength", "format"):
                if other in node:
                    _refuse(path, f"pattern and {other} together are not built")
            if not isinstance(node["pattern"], str) or '"' in node["pattern"]:
                _refuse(path, "pattern: wanted text without quotation marks")
        for name in (
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
            "minProperties",
            "maxProperties",
        ):
            count = node.get(name, 0)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                _refuse(path, f"{name}: wanted a count, got {json.dumps(count)[:40]}")
        for name in ("items", "additionalProperties"):
            if isinstance(node.get(name), dict):
                self.node(node[name], f"{path}.{name}", depth + 1)
        if node.get("items") is False:
            _refuse(path, "items: false is not built")
        bounds = [name for name in node if name in _BY_TYPE["integer"]]
        if bounds:
            self._bound(node, bounds, path)

    def _bound(self, node: dict[str, Any], bounds: list[str], path: str) -> None:
        """Turns a whole number with bounds into a constant that stands for a pattern."""
        if node["type"] != "integer":
            _refuse(path, f"{bounds[0]} is built for the type integer alone")
        low: int | None = None
        high: int | None = None
        for name in bounds:
            value = node[name]
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not abs(value) < 1e18
            ):
                _refuse(path, f"{name}: wanted a number, got {json.dumps(value)[:40]}")
            if name.endswith("inimum"):
                least = math.floor(value) + 1 if name.startswith("ex") else math.ceil(value)
                low = least if low is None else max(low, least)
            else:
                most = math.ceil(value) - 1 if name.startswith("ex") else math.floor(value)
                high = most if high is None else min(high, most)
        if low is not None and high is not None and low > high:
            _refuse(path, f"no whole number is between {low} and {high}")
        constant = f"{self._mark}{len(self.patterns)}end"
        self.patterns[f'"{constant}"'] = integer_pattern(low, high)
        node.clear()
        node["const"] = constant

    def _form(
        self, form: str, node: dict[str, Any], types: list[str], path: str, depth: int
    ) -> None:
        value = node[form]
        if form == "properties":
            if not isinstance(value, dict) or types not in ([], ["object"]):
                _refuse(path, "properties: wanted an object of type object")
            missing = [name for name in node.get("required", []) if name not in value]
            if missing:
                _refuse(path, f"required: {missing[0]!r} is not among the properties")
            for name, child in value.items():
                self.node(child, f"{path}.{name}", depth + 1)
        elif form == "$ref":
            self._follow(value, path, depth)
        elif form in ("enum", "const"):
            for one in value if form == "enum" else [value]:
                fits = [kind for kind in types if isinstance(one, _PYTHON_TYPES[kind])]
                if types and (not fits or (isinstance(one, bool) and "boolean" not in types)):
                    _refuse(path, f"{form}: {json.dumps(one)[:40]} is not of the type {types[0]}")
        else:
            if not isinstance(value, list) or not value:
                _refuse(path, f"{form}: wanted a list of schemas")
            if form == "allOf" and len(value) > 1:
                _refuse(path, "allOf of several schemas is not built")
            for place, child in enumerate(value):
                self.node(child, f"{path}.{form}[{place}]", depth + 1)

    def _follow(self, reference: Any, path: str, depth: int) -> None:
        if not isinstance(reference, str) or not reference.startswith("#"):
            _refuse(path, "$ref: wanted a reference inside the schema (#/...)")
        if reference in self._seen:
            return
        self._seen.add(reference)
        target = self._root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or key not in target:
                _refuse(path, f"$ref: {reference[:80]!r} leads nowhere")
            target = target[key]
        self.node(target, path, depth + 1)


def _types(node: dict[str, Any], path: str) -> list[str]:
    types = node.get("type", [])
    types = types if isinstance(types, list) else [types]
    for name in types:
        if not isinstance(name, str) or name not in _BY_TYPE:
            _refuse(path, f"type: wanted one of {', '.join(_BY_TYPE)}, got {json.dumps(name)[:40]}")
    return types


def _refuse(path: str, text: str) -> None:
    raise UserError(f"structured output: JSON schema at {path[:200]}: {text}")
