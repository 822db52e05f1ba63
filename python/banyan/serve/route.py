"""One entry per route: what it takes, who may call it, who answers. The app, its checks and /openapi.json read this."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from banyan.serve.context import Context
from banyan.serve.schema import Field, Table, check

Fields = dict[str, Any]
Handler = Callable[[Context, Request, Fields], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """`body`: a table of the context, or a table; None: no body is read."""

    method: str
    path: str
    summary: str
    call: Handler
    body: str | Table | None = None
    body_optional: bool = False
    query: Table = field(default_factory=dict)
    public: bool = False  # no key needed
    dialect: str = "openai"  # of errors
    media_type: str = "application/json"
    statuses: tuple[int, ...] = ()  # that it answers with beside those that every route has

    def table(self, context: Context) -> Table | None:
        return context.tables[self.body] if isinstance(self.body, str) else self.body


def query_fields(route: Route, request: Request) -> Fields:
    """Checked query parameters; a repeated one of array kind is a list."""
    given: Fields = {}
    for name, spec in route.query.items():
        values = request.query_params.getlist(name)
        if values:
            given[name] = values if spec.kind == "array" else _typed(spec, values[-1])
    return check(route.query, given)


def _typed(spec: Field, text: str) -> Any:
    """Query strings have no types: numbers and booleans are read, the rest stays text for the check to refuse."""
    if spec.kind == "boolean" and text.lower() in ("true", "1", "false", "0"):
        return text.lower() in ("true", "1")
    if spec.kind in ("integer", "number"):
        try:
            return int(text) if spec.kind == "integer" else float(text)
        except ValueError:
            return text
    return text
