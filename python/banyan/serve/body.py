"""Reads a request's body within the limits, and parses it off the loop where it is large."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from banyan.serve.context import Context
from banyan.serve.errors import ApiError, bad, unavailable
from banyan.serve.strict_json import parse_object

_LARGE = 65536  # bytes


class ClientGoneError(Exception):
    """The client left before its request was whole."""


async def read_object(context: Context, request: Request, optional: bool) -> dict[str, Any]:
    """The JSON object that the body is. Raises ApiError 400, 413, 503, or ClientGoneError."""
    held = 0
    try:
        parts: list[bytes] = []
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            held += len(part)
            context.bodies += len(part)
            _check_sizes(context, held)
            parts.append(part)
            more = message.get("more_body", False)
        body = b"".join(parts)
        if not body and optional:
            return {}
        if not body:
            raise bad("body: wanted a JSON object, got nothing")
        depth = context.limits.json_depth
        if len(body) < _LARGE:
            return parse_object(body, depth)
        return await context.work(parse_object, body, depth)
    finally:
        context.bodies -= held


def _check_sizes(context: Context, held: int) -> None:
    limits = context.limits
    if held > limits.body_bytes:
        raise ApiError(413, f"body: wanted <= {limits.body_bytes} bytes")
    if context.bodies > limits.bodies_bytes:
        raise unavailable("too many request bodies are being read")
