"""/openapi.json (OpenAPI 3.1), printed from the tables that check requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from banyan import version
from banyan.serve.context import Context
from banyan.serve.route import Route
from banyan.serve.schema import Field, Table

Schema = dict[str, Any]
_NAMES = {
    400: "wrong request",
    401: "wrong key",
    403: "foreign page",
    404: "no such model",
    408: "too slow",
}
_NAMES |= {409: "wrong state", 413: "body too large", 500: "a fault of the server", 503: "not now"}


def document(context: Context, routes: Iterable[Route], locked: bool) -> Schema:
    paths: dict[str, Schema] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(context, route, path, locked)
    error = {"$ref": "#/components/schemas/Error"}
    inner = {"message": {"type": "string"}, "request_id": {"type": "string"}}
    shape = {"type": "object", "properties": inner, "required": ["message"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "banyan", "version": version()},
        "paths": paths,
        "components": {
            "schemas": {
                "Error": {
                    "type": "object",
                    "properties": {"error": {"anyOf": [shape, {"type": "string"}]}},
                    "required": ["error"],
                }
            },
            "responses": {
                "Error": {
                    "description": "error",
                    "content": {"application/json": {"schema": error}},
                }
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(context: Context, route: Route, path: str, locked: bool) -> Schema:
    operation: Schema = {"summary": route.summary, "responses": _responses(route, locked)}
    parameters = [_parameter(name, spec) for name, spec in route.query.items()]
    for name in re.findall(r"\{(\w+)\}", path):
        where = {"name": name, "in": "path", "required": True}
        parameters.append({**where, "schema": {"type": "string", "minLength": 1}})
    if parameters:
        operation["parameters"] = parameters
    table = route.table(context)
    if table is not None:
        content = {"application/json": {"schema": table_schema(table)}}
        operation["requestBody"] = {"required": not route.body_optional, "content": content}
    if locked and not route.public:
        operation["security"] = [{"key": []}]
    return operation


def _responses(route: Route, locked: bool) -> Schema:
    content: Schema = {route.media_type: {}} if route.media_type else {}
    if route.path.endswith(("completions", "generate")):
        content["text/event-stream"] = {}
    found: Schema = {"200": {"description": "done", **({"content": content} if content else {})}}
    statuses = {400, 500, *route.statuses}
    if locked and not route.public:
        statuses.add(401)
    if route.body is not None:
        statuses |= {408, 413}
    for status in sorted(statuses):
        if status == 503 and not route.media_type:  # the health routes answer with a status alone
            found["503"] = {"description": _NAMES[503]}
            continue
        schema = {"$ref": "#/components/schemas/Error"}
        content = {"application/json": {"schema": schema}}
        found[str(status)] = {"description": _NAMES[status], "content": content}
    return found


def _parameter(name: str, spec: Field) -> Schema:
    return {
        "name": name,
        "in": "query",
        "required": spec.required,
        "schema": field_schema(spec),
    }


def table_schema(table: Table) -> Schema:
    """The object that a table checks. Refused fields are left out: there is nothing to send in them."""
    shown = {name: _nullable(spec) for name, spec in table.items() if not spec.refused}
    required = [name for name, spec in table.items() if spec.required]
    return {
        "type": "object",
        "properties": shown,
        **({"required": required} if required else {}),
    }


def _nullable(spec: Field) -> Schema:
    schema = field_schema(spec)
    if spec.required:
        return schema
    if "enum" in schema:
        return {**schema, "type": [schema["type"], "null"], "enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema


def field_schema(spec: Field) -> Schema:
    schema: Schema = _BUILDERS[spec.kind](spec)
    if spec.choices:
        schema["enum"] = list(spec.choices)
    if spec.default is not None:
        schema["default"] = spec.default
    if spec.note:
        schema["description"] = spec.note
    return schema


def _number(spec: Field) -> Schema:
    ends = {"minimum": spec.low, "maximum": spec.high, "exclusiveMinimum": spec.above}
    return {"type": spec.kind, **{key: end for key, end in ends.items() if end is not None}}


def _string(spec: Field) -> Schema:
    schema: Schema = {"type": "string"}
    if spec.min_bytes:
        schema["minLength"] = 1
    if spec.max_bytes is not None:  # bytes: a text of so many letters may still be too long
        schema["maxLength"] = spec.max_bytes
    if spec.printable:
        schema["pattern"] = r"^[^\x00-\x1f\x7f]*$"
    return schema


def _counted(spec: Field, least: str, most: str) -> Schema:
    schema: Schema = {least: spec.min_items} if spec.min_items else {}
    if spec.max_items is not None:
        schema[most] = spec.max_items
    return schema


def _array(spec: Field) -> Schema:
    items = field_schema(spec.items) if spec.items else {}
    return {"type": "array", "items": items, **_counted(spec, "minItems", "maxItems")}


def _tokens(spec: Field) -> Schema:
    items = {"type": "integer", "minimum": 0, "maximum": spec.high}
    return {"type": "array", "items": items, **_counted(spec, "minItems", "maxItems")}


def _map(spec: Field) -> Schema:
    values = field_schema(spec.items) if spec.items else {}
    counts = _counted(spec, "minProperties", "maxProperties")
    return {"type": "object", "additionalProperties": values, **counts}


def _object(spec: Field) -> Schema:
    return table_schema(spec.fields) if spec.fields is not None else {"type": "object"}


def _one_of(spec: Field) -> Schema:
    return {"anyOf": [field_schema(choice) for choice in spec.one_of]}


_BUILDERS = {
    "integer": _number,
    "number": _number,
    "boolean": lambda spec: {"type": "boolean"},
    "string": _string,
    "array": _array,
    "tokens": _tokens,
    "map": _map,
    "object": _object,
    "one_of": _one_of,
    "any": lambda spec: {},
}
