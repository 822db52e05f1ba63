"""HTTP/1.1 of uvicorn with what it leaves open: sizes of the head and the body, and a deadline for every wait.

    idle   no byte of a request has come          idle_seconds, then closed
    head   some bytes of a head have come         header_seconds, then 408
    body   the head is whole, the body is not     body_seconds, then 408
    busy   a request is being answered            the application's deadline

Beside these, a write that the client does not take within write_seconds drops the connection. The write buffer's limit
is zero, so that every byte that is not taken at once counts. After a refusal the rest of what the client sends is read
away for a moment: closing at once would lose the answer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from banyan.serve.errors import ApiError
from banyan.serve.http_head import HeadError, check_head
from banyan.serve.limits import Limits


class _Connection(h11.Connection):
    """h11 behind the checks of a head and the count of a body. `refused` keeps why next_event failed."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.head_bytes + 1)
        self.refused = ApiError(400, "the request is not HTTP/1.1")
        self._limits = limits
        self._body = 0

    def next_event(self) -> Any:
        try:
            if self.their_state is h11.IDLE:
                check_head(self.trailing_data[0], self._limits)
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._body = 0
            elif isinstance(event, h11.Data):
                self._body += len(event.data)
                if self._body > self._limits.body_bytes:
                    raise HeadError(413, f"body: wanted <= {self._limits.body_bytes} bytes")
        except HeadError as error:
            self.refused = ApiError(error.status, error.message)
            raise h11.RemoteProtocolError(error.message, error.status) from None
        return event


class BoundedProtocol(H11Protocol):
    """One connection. `limits` and `idle` are set by `protocol_class`."""

    limits: ClassVar[Limits]
    idle: ClassVar[dict[BoundedProtocol, None]]  # idle connections, the longest idle first

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: _Connection = _Connection(self.limits)
        self._phase = ""
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._discarded: int | None = None  # bytes read away after a refusal

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.limits.connections and not self._make_room():
            self._refuse(ApiError(503, "too many connections", retry_after=1))
            return
        self._enter("idle")

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter("")
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > self.limits.discard_bytes:
                self.transport.abort()
            return
        super().data_received(data)
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Called where the head or the framing is refused."""
        self._refuse(self.conn.refused)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(
                self.limits.write_seconds, self.transport.abort
            )

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def shutdown(self) -> None:
        if self._discarded is not None:
            self.transport.close()
        else:
            super().shutdown()

    def _update(self) -> None:
        """Enters the phase that the parser's state shows."""
        if self._discarded is not None or self.transport.is_closing():
            return
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            self._enter("head" if self.conn.trailing_data[0] else "idle")
        elif theirs is h11.SEND_BODY:
            self._enter("body")
        else:
            self._enter("busy")

    def _enter(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.idle.pop(self, None)
        if phase == "idle":
            self.idle[self] = None
            self._timer = self.loop.call_later(self.limits.idle_seconds, self.transport.close)
        elif phase == "head":
            self._timer = self.loop.call_later(self.limits.header_seconds, self._late, "head")
        elif phase == "body":
            self._timer = self.loop.call_later(self.limits.body_seconds, self._late, "body")

    def _late(self, what: str) -> None:
        seconds = self.limits.header_seconds if what == "head" else self.limits.body_seconds
        self._refuse(ApiError(408, f"the {what} of the request took longer than {seconds:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Answers unless an answer has begun, then reads away what still comes and closes."""
        self._enter("")
        self._unset_keepalive_if_required()
        answering = False
        if self.cycle is not None and not self.cycle.response_complete:
            answering = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if answering or self.transport.is_closing():
            self.transport.close()
            return
        self.transport.write(_response(error))
        self._discarded = 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(self.limits.linger_seconds, self.transport.close)

    def _make_room(self) -> bool:
        """Closes the connection that has been idle longest."""
        for other in self.idle:
            if other is not self:
                other.transport.abort()
                other._enter("")
                return True
        return False

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def protocol_class(limits: Limits) -> type[BoundedProtocol]:
    """The protocol of one socket under these limits."""
    return type("Protocol", (BoundedProtocol,), {"limits": limits, "idle": {}})


def _response(error: ApiError) -> bytes:
    request_id = f"req-{secrets.token_hex(12)}"
    body = json.dumps(error.body(request_id)).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": request_id,
        **error.headers(),
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
