"""A server over the fake engine on real sockets, for the tests of the HTTP service."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from banyan.data.chat import Chat
from banyan.serve import load
from banyan.serve.context import Context
from banyan.serve.ids_only import IdsOnly
from banyan.serve.limits import Limits
from banyan.serve.server import Listen, bind, serve
from fake_engine import FakeEngine

VOCAB = 262
ANSWER = "Hello, wörld! 🌍 and so on"


class Running:
    """A server in a thread of its own."""

    def __init__(self, context: Context, listen: Listen) -> None:
        self.context, self.listen = context, listen
        self.chat, self.engine = context.chat, context.engine._engine
        self.sockets = bind(listen)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def port(self) -> int:
        return self.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        assert self.sockets[1] is not None
        return f"http://127.0.0.1:{self.sockets[1].getsockname()[1]}"

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(10)
        unix = self.listen.uds
        transport = httpx.HTTPTransport(uds=str(unix)) if unix else None
        url = "http://localhost" if unix else self.url
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False, transport=transport)
        for _ in range(100):
            try:
                self.http.get("/health")
                return self
            except httpx.TransportError:
                threading.Event().wait(0.05)
        raise RuntimeError("the server did not start")

    def __exit__(self, *error: Any) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await serve(self.context, self.listen, self.sockets, self._stop)


@contextmanager
def running(
    directory: Path,
    listen: Listen | None = None,
    limits: dict[str, Any] | None = None,
    served: load.Served | None = None,
    text: bool = True,
    grammars: Any = None,
    **engine: Any,
) -> Iterator[Running]:
    """A server over the fake engine, which says `server.answer`. `text`: false for ids only."""
    served = replace(served or load.Served(names=("tiny",)), limits=Limits(**(limits or {})))
    chat = Chat(directory)
    end = chat.encode("<|im_end|>")
    script = engine.pop("script", lambda request, index: [*chat.encode(server.answer), *end])
    tokens = load.TokenText(chat.tokenizer, VOCAB)
    fake = FakeEngine(script, tokens.for_stops(), VOCAB, **engine)
    shown = chat if text else IdsOnly(directory)
    context = load.context(fake, shown, VOCAB, 128, served, grammars)
    server = Running(context, listen or Listen(port=0))
    server.answer = ANSWER
    with server:
        yield server


def chunks(response: httpx.Response) -> list[Any]:
    """JSON of every server-sent event before [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def flat(lists):
    return [item for part in lists for item in part]


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()


def refused(response, status, text, param="*"):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert text in error["message"], error
    assert error["code"] == status
    assert error["request_id"] == response.headers["x-request-id"]
    if param != "*":
        assert error["param"] == param
    return error
