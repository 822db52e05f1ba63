"""The ASGI application of one socket: request ids, keys, checks, routing, errors.

The public socket and the control socket are two of these with different routes and keys.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router

from banyan.serve import openapi
from banyan.serve.body import ClientGoneError, read_object
from banyan.serve.context import Context
from banyan.serve.errors import ApiError, from_exception, unauthorized
from banyan.serve.generation import JsonReply
from banyan.serve.route import Route, query_fields

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class App:
    """Answers HTTP requests of one socket."""

    def __init__(
        self,
        context: Context,
        routes: Iterable[Route],
        keys: Iterable[str] = (),
        check_host: bool = True,
        control: Iterable[Route] = (),
    ) -> None:
        """`keys`: one of them is wanted as a bearer token; none: everybody may call. `check_host`: without keys, only
        requests that name this machine are taken, so that no web page can reach the server by a name of its own.
        `control`: routes of the other socket, for who looks for them here."""
        self._context = context
        self._keys = [_digest(key.encode()) for key in keys]
        self._check_host = check_host and not self._keys
        self._routes = (
            *routes,
            Route("GET", "/openapi.json", "This document", self._document, public=True),
        )
        self._control = {route.path for route in control}
        self._known: Any = None
        entries = [
            StarletteRoute(route.path, self._endpoint(route), methods=[route.method])
            for route in self._routes
        ]
        self._router = Router(entries, redirect_slashes=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"[serve] scope: wanted http, got {scope['type']}")
        request = Request(scope)
        asked = request.headers.get("x-request-id", "")
        request_id = asked if _ID.fullmatch(asked) else f"req-{secrets.token_hex(12)}"
        scope["state"] = {"request_id": request_id, "dialect": "openai"}
        scope["app"] = self  # so that the router raises for an unknown path or method
        started = False

        async def send_with_id(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            self._check_origin(request)
            await self._router(scope, receive, send_with_id)
        except ClientGoneError:
            return
        except Exception as error:
            if started:
                raise
            response = self._error(error, scope)
            if response is not None:
                await response(scope, receive, send_with_id)

    def _endpoint(self, route: Route) -> Any:
        async def endpoint(request: Request) -> Response:
            request.scope["state"]["dialect"] = route.dialect
            if self._keys and not route.public:
                self._check_key(request)
            fields = query_fields(route, request)
            table = route.table(self._context)
            if table is not None:
                body = await read_object(self._context, request, route.body_optional)
                fields |= self._context.check(table, body)
            return await route.call(self._context, request, fields)

        return endpoint

    async def _document(self, context: Context, request: Request, fields: Any) -> Response:
        if self._known is None:
            self._known = openapi.document(context, self._routes, bool(self._keys))
        return JsonReply(self._known)

    def _check_key(self, request: Request) -> None:
        """Raises 401 unless the bearer token is one of the keys; takes the same time for every wrong one."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = _digest(token.strip().encode("latin-1"))  # the bytes that came
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(given, key)
        if not found or scheme.lower() != "bearer":
            raise unauthorized()

    def _check_origin(self, request: Request) -> None:
        """Raises 403 for requests that a foreign web page makes through a visitor's browser."""
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise ApiError(403, "requests of other web pages are refused")
        if self._check_host and _host_name(host) not in _LOOPBACK:
            raise ApiError(403, "Host: wanted localhost, for a server without keys")

    def _error(self, error: Exception, scope: Any) -> Response | None:
        allowed: dict[str, str] = {}
        if isinstance(error, HTTPException):
            allowed = dict(error.headers or {})  # the methods of a path
            error = ApiError(error.status_code, self._advice(error, scope))
        known = from_exception(error, self._context.model_directory)
        if known is None:
            self._context.log_fault(error, scope)
            known = ApiError(500, "internal error")
        if known.status == 499:
            return None
        state = scope["state"]
        headers = known.headers() | allowed
        if known.status == 413:
            headers["connection"] = "close"
        return JsonReply(known.body(state["request_id"], state["dialect"]), known.status, headers)

    def _advice(self, error: HTTPException, scope: Any) -> str:
        """What to do about a path or a method that is not there."""
        path = scope["path"][:128]
        if path in self._control:
            return f"{path}: a control route, on a socket of its own: start with --enable-admin --admin-token-file FILE"
        if error.status_code == 404:
            return f"{path}: no route; /openapi.json lists them"
        methods = (error.headers or {}).get("Allow", "another method")
        return f"{path}: wanted {methods}, got {scope['method'][:16]}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
