"""One call of generate(): prompts go to servers as they have room, what comes back aborted is sent again.

A prompt goes to the server with the least running and waiting; its n copies are requests of their own with seeds of
(seed, step, row, index). A response that was aborted goes on with the tokens that are there and the budget that is
left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from banyan.drivers.http import ServerError
from banyan.drivers.responses import Response, seed_of
from banyan.drivers.server import Answer, Ask, Server

_WATCH_SECONDS = 0.2
_POLL_SECONDS = 2.0
Finished = Callable[[dict[str, Any], Response], None]  # (prompt, its response)


class Round:
    """Made inside the event loop."""

    def __init__(
        self,
        servers: Sequence[Server],
        max_num_seqs: int,
        params: dict[str, Any],
        number: int,
        finished: Finished,
    ) -> None:
        """`max_num_seqs`: in flight per server; `number`: of the call, for ids."""
        self._servers = servers
        self._limits = servers[0].limits
        self._most = max_num_seqs
        self._params = params
        self._number = number
        self._finished = finished
        self._is_stopping = False
        self._in_flight: dict[str, Server] = {}
        self._freed = asyncio.Event()
        self._gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connections = asyncio.Semaphore(self._limits.max_connections)
        for server in servers:
            server.in_flight = 0

    async def run(self, prompts: list[dict[str, Any]], should_stop: Callable[[], bool]) -> None:
        """Returns when every response has ended. Raises ServerError."""
        if len(self._servers) > 1:
            await self._read_loads()
        helpers = [
            asyncio.create_task(self._watch(should_stop)),
            asyncio.create_task(self._poll_loads()),
        ]
        for helper in helpers:
            helper.add_done_callback(lambda _: self._freed.set())  # it may have failed
        groups: set[asyncio.Task[None]] = set()
        try:
            for prompt in prompts:
                server = await self._room_for(prompt["n"], [*groups, *helpers])
                task = asyncio.create_task(self._group(server, prompt))
                task.add_done_callback(lambda _: self._freed.set())
                groups.add(task)
            while not all(task.done() for task in groups):
                await self._next_change([*groups, *helpers])
            _raise_first([*groups, *helpers])
        finally:
            for pending in [*groups, *helpers]:
                pending.cancel()
            await asyncio.gather(*groups, *helpers, return_exceptions=True)

    async def _room_for(self, n: int, tasks: list[asyncio.Task[None]]) -> Server:
        """The least loaded server that has room for `n` more; waits for one."""
        while True:
            free = [s for s in self._servers if s.in_flight == 0 or s.in_flight + n <= self._most]
            if free:
                server = min(free, key=lambda s: s.in_flight + s.elsewhere)
                server.in_flight += n
                return server
            await self._next_change(tasks)

    async def _next_change(self, tasks: list[asyncio.Task[None]]) -> None:
        """Returns when a response has ended; raises what a task failed with."""
        _raise_first(tasks)
        self._freed.clear()
        await self._freed.wait()
        _raise_first(tasks)

    async def _group(self, server: Server, prompt: dict[str, Any]) -> None:
        if server.needs_warm_prompt and prompt["n"] > 1 and not self._is_stopping:
            await server.warm(self._ask(prompt, Response(prompt["row"], -1), 0))

        async def one(index: int) -> None:
            response = Response(prompt["row"], index)
            try:
                await self._respond(server, prompt, response)
            finally:
                server.in_flight -= 1
                self._freed.set()
            self._finished(prompt, response)

        first = prompt.get("first_index", 0)
        await asyncio.gather(*(one(first + place) for place in range(prompt["n"])))

    async def _respond(self, server: Server, prompt: dict[str, Any], response: Response) -> None:
        """Fills `response`; after an abort it goes on with what is left of the budget."""
        until = time.monotonic() + self._limits.request_timeout
        wait = self._limits.retry_delay
        tries = 0
        while not self._is_stopping:
            tries += 1
            before = len(response.tokens)
            ask = self._ask(prompt, response, tries)
            answer = await self._call(server, ask)
            if answer is None:
                return
            _check_label(server, answer)
            response.add(answer)
            if response.finish != "abort":
                return
            if len(answer.tokens) == ask.max_tokens:
                response.finish = "length"
                return
            if time.monotonic() > until:
                raise ServerError(
                    f"rollout server {server.url}: response {response.index} of row {response.row}: wanted its end "
                    f"within {self._limits.request_timeout:g} s, got {tries} aborts"
                )
            if len(response.tokens) == before:  # a paused server aborts at once
                await asyncio.sleep(wait)
                wait = min(2.0 * wait, 30.0)

    async def _call(self, server: Server, ask: Ask) -> Answer | None:
        """The answer; None once the call was given up."""
        async with self._connections:
            self._in_flight[ask.id] = server
            call = asyncio.ensure_future(server.generate(ask))
            either: list[asyncio.Future[Any]] = [call, self._gave_up]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                return call.result() if call.done() else None
            finally:
                del self._in_flight[ask.id]
                call.cancel()

    def _ask(self, prompt: dict[str, Any], response: Response, tries: int) -> Ask:
        given, params = prompt["tokens"], self._params
        tokens = [*given, *response.tokens]
        length = prompt.get("original_prompt") or len(given)  # behind it, a response so far
        done = len(tokens) - length
        return Ask(
            id=f"banyan-{self._number}-{params['step']}-{response.row}-{response.index}-{tries}",
            tokens=tokens,
            max_tokens=params["max_tokens"] - done,
            seed=seed_of(params["seed"], params["step"], response.row, response.index, done),
            params=params,
            prompt_tokens=length,
        )

    async def _watch(self, should_stop: Callable[[], bool]) -> None:
        """Asks whether to stop; then aborts what runs and, after `timeout`, gives it up."""
        while not should_stop():
            await asyncio.sleep(_WATCH_SECONDS)
        self._is_stopping = True
        for server in self._servers:
            ids = [name for name, owner in self._in_flight.items() if owner is server]
            if ids:
                await server.abort(ids)
        await asyncio.sleep(self._limits.timeout)
        self._gave_up.set_result(None)

    async def _poll_loads(self) -> None:
        """Keeps the servers' loads fresh."""
        while len(self._servers) > 1:
            await asyncio.sleep(_POLL_SECONDS)
            await self._read_loads()

    async def _read_loads(self) -> None:
        await asyncio.gather(*(_read_load(server) for server in self._servers))


def _check_label(server: Server, answer: Answer) -> None:
    for span in answer.spans:
        if server.version is not None and span.version != server.version:
            raise ServerError(
                f"rollout server {server.url}: wanted tokens of weights {server.version}, got some of {span.version}"
            )


async def _read_load(server: Server) -> None:
    """How much of a server's work is not ours; one that does not say works for us alone."""
    ours = server.in_flight
    try:
        found = await server.load()
    except ServerError:
        found = None
    server.elsewhere = max(0, found - ours) if found is not None else 0


def _raise_first(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]
