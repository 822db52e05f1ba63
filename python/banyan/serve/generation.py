"""One generation request from submit to the last byte: the same path for every dialect, streamed or not.

A dialect gives a `Reply`: it is fed the engine's events and makes chunks and the final body from the same figures, so
a stream and a whole answer cannot differ. When the client goes, the deadline passes or writing fails, what has not
ended is aborted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from banyan.serve.context import Context
from banyan.serve.engine_client import Event, Subscription, masks
from banyan.serve.errors import ApiError, from_exception

Send = Callable[[Any], Awaitable[None]]


class Reply(Protocol):
    """What a dialect makes of events."""

    requests: list[dict[str, Any]]  # for the engine
    stream: bool
    public_id: str

    def feed(self, event: Event, number: int) -> list[dict[str, Any]]:
        """Takes an event of the request with this number; the chunks to send now, if streamed."""
        ...

    def last_chunks(self) -> list[dict[str, Any]]:
        """Chunks after the last event, such as usage."""
        ...

    def body(self) -> Any:
        """The whole answer."""
        ...


class JsonReply(JSONResponse):
    """JSON as it is sent everywhere: no NaN, letters as they are."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(content: Any) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8")


def sse(chunk: dict[str, Any]) -> bytes:
    return b"data: " + to_json(chunk) + b"\n\n"


DONE = b"data: [DONE]\n\n"
_BARRED = "sampling: "  # DrawStatus::kNothingLeft (sampling/token_drawer.h)


async def answer(context: Context, request: Request, reply: Reply) -> Response:
    """Submits, and answers whole or as a stream."""
    subscription = await context.engine.open(reply.requests, reply.public_id)
    numbers = {id: number for number, id in enumerate(subscription.ids)}
    if reply.stream:
        return _Stream(context, reply, subscription, numbers)
    async with _Guard(context, request.receive, subscription):
        while events := await subscription.next():
            for event in events:
                _check(context, event, request.scope)
                reply.feed(event, numbers[event["request"]])
    return JsonReply(reply.body())


def _check(context: Context, event: Event, scope: Any) -> None:
    """Raises for a response that failed: 400 where what was asked for bars every token, else a fault for the log."""
    error = event.get("error")
    if not error:
        return
    if error.startswith(_BARRED):
        raise ApiError(400, error)
    context.log_fault(RuntimeError(error), scope)
    raise ApiError(500, "the engine failed on this request")


class _Guard:
    """While in force: the client's leaving and the deadline stop the subscription; at the end it is closed."""

    def __init__(self, context: Context, receive: Any, subscription: Subscription) -> None:
        self._context = context
        self._receive = receive
        self._subscription = subscription

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        seconds = self._context.limits.request_seconds
        late = ApiError(408, f"the request took longer than {seconds:g} s")
        self._timer = loop.call_later(seconds, self._subscription.stop, late)
        self._watch = loop.create_task(self._watch_client())

    async def __aexit__(self, *error: Any) -> None:
        self._timer.cancel()
        self._watch.cancel()
        self._subscription.close()

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._subscription.stop(ApiError(499, "the client has gone"))


class Merger:
    """Joins events of a response until they have `interval` tokens; the first token and the last never wait."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[tuple[str, int], Event] = {}
        self._begun: set[tuple[str, int]] = set()

    def take(self, events: list[Event]) -> list[Event]:
        if self._interval <= 1:
            return events
        ready = []
        for event in events:
            key = (event["request"], event["index"])
            held = self._held.pop(key, None)
            whole = event if held is None else _joined(held, event)
            full = key not in self._begun or len(whole["tokens"]) >= self._interval
            if full or whole["finished"]:
                self._begun.add(key)
                ready.append(whole)
            else:
                self._held[key] = whole
        return ready


def _joined(first: Event, second: Event) -> Event:
    columns = ("tokens", "raw", "processed", "log_kept_mass", "top")
    joined = {key: (first[key] or []) + (second[key] or []) for key in columns}
    return {**second, **joined, "sampling_mask": masks(first) + masks(second)}


class _Stream(Response):
    """Server-sent events of a reply."""

    def __init__(
        self,
        context: Context,
        reply: Reply,
        subscription: Subscription,
        numbers: dict[str, int],
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._context = context
        self._reply = reply
        self._subscription = subscription
        self._numbers = numbers

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with _Guard(self._context, receive, self._subscription):
            await send(head)
            try:
                await self._send_events(send, scope)
            except ApiError as error:
                if error.status == 499:
                    return
                await self._send_error(send, error, scope)
            except Exception as error:  # the status is out already: say it in the stream
                known = from_exception(error, self._context.model_directory)
                await self._send_error(send, known or ApiError(500, "internal error"), scope)
                if known is None:
                    self._context.log_fault(error, scope)
            await send({"type": "http.response.body", "body": DONE})

    async def _send_events(self, send: Send, scope: Any) -> None:
        merger = Merger(self._context.stream_interval)
        while events := await self._subscription.next():
            chunks = b""
            for event in merger.take(events):
                _check(self._context, event, scope)
                made = self._reply.feed(event, self._numbers[event["request"]])
                chunks += b"".join(sse(chunk) for chunk in made)
            if chunks:
                await send({"type": "http.response.body", "body": chunks, "more_body": True})
        last = b"".join(sse(chunk) for chunk in self._reply.last_chunks())
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})

    async def _send_error(self, send: Send, error: ApiError, scope: Any) -> None:
        text = sse(error.body(scope["state"]["request_id"]))
        await send({"type": "http.response.body", "body": text, "more_body": True})
