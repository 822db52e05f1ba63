"""Servers as the trainer's generator (src/banyan/rollout/generator.h, python/bindings/python_generator.h).

generate(prompts)        a prompt goes to the server with the least running and waiting; its n copies are requests of
                         their own with seeds of (seed, step, row, index); what comes back aborted is sent again with
                         the tokens that are there and the budget that is left
weights_changed(v)       the actor is saved to a fresh folder, every server loads it and drops its cache
before the next prompt   a probe is generated on every server and scored by the trainer; a gap stops the run
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from banyan.drivers.http import ServerError
from banyan.drivers.probe import Probe, Score
from banyan.drivers.responses import Response, seed_of, trajectory
from banyan.drivers.server import Answer, Ask, Server
from banyan.drivers.weights import Save, WeightFolders

_WATCH_SECONDS = 0.2
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Options:
    """What the generator is told of the run."""

    reports_cut_law: bool  # log-probabilities are those after top-k and top-p
    starts_with_sync: bool = True  # load_format=dummy: the servers' own weights are never used
    colocated: bool = False  # servers sleep while the trainer works
    max_num_seqs: int = 256  # in flight per server
    total_tokens: int = 0  # of the longest prompt with its response


class ServerGenerator:
    """Generates on one or more servers. Calls come from the training thread, one at a time."""

    def __init__(
        self,
        servers: Sequence[Server],
        options: Options,
        folders: WeightFolders,
        probe: Probe,
        say: Callable[[str], None],
    ) -> None:
        self._servers = list(servers)
        self._options = options
        self._folders = folders
        self._probe = probe
        self._say = say
        self._limits = servers[0].limits
        self._runner = asyncio.Runner()
        self._save: Save = _unattached
        self._score: Score = _unattached
        self._version: int | None = None
        self._is_checked = False
        self._calls = 0  # of generate(), for ids
        self._new_call()

    # --- what the core calls -------------------------------------------------------------------------------------

    def attach(self, save: Save, score: Score) -> None:
        self._save, self._score = save, score

    def detach(self) -> None:
        self._save = self._score = _unattached

    def weights_changed(self, version: int) -> None:
        first, self._version = self._version is None, version
        self._is_checked = False
        if first and not self._options.starts_with_sync:
            return
        directory = self._folders.write(self._save, version)
        self._runner.run(self._each(lambda server: server.load_weights(directory, str(version))))
        self._folders.forget_all_but(directory)

    def generate(
        self,
        prompts: list[dict[str, Any]],
        params: dict[str, Any],
        on_finished: Callable[[dict[str, Any]], None],
        should_stop: Callable[[], bool],
    ) -> dict[str, Any]:
        if not prompts:
            return {
                "logical_prompt_tokens": 0,
                "computed_prompt_tokens": 0,
                "response_tokens": 0,
                "seconds": 0.0,
            }
        return self._runner.run(self._generate(prompts, params, on_finished, should_stop))

    # --- for the shell -------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Waits until every server answers and says who they are. Raises ServerError."""
        self._runner.run(self._each(self._meet))

    def close(self) -> None:
        """Leaves the servers awake, as far as they answer, and forgets the folders."""
        with suppress(ServerError, TimeoutError):
            self._runner.run(asyncio.wait_for(self._wake(), self._limits.timeout))
        self._runner.run(self._each(lambda server: server.close()))
        self._runner.close()
        self._folders.forget_all_but(None)

    # --- inside --------------------------------------------------------------------------------------------------

    def _new_call(self) -> None:
        self._calls += 1
        self._is_stopping = False
        self._in_flight: dict[str, Server] = {}
        for server in self._servers:
            server.in_flight = 0

    async def _each(self, call: Callable[[Server], Awaitable[None]]) -> None:
        await asyncio.gather(*(call(server) for server in self._servers))

    async def _meet(self, server: Server) -> None:
        until = time.monotonic() + self._limits.max_start_wait_time
        waits = False
        while True:
            try:
                if await server.is_ready():
                    break
                why = "it is not ready"
            except ServerError as error:
                if error.status == 401:
                    raise
                why = str(error)
            if time.monotonic() > until:
                raise ServerError(
                    f"rollout server {server.url}: wanted it ready within {self._limits.max_start_wait_time:g} s "
                    f"(rollout.server.max_start_wait_time), got {why}"
                )
            if not waits:
                waits = True
                self._say(f"rollout server {server.url}: waiting for it: {why}")
            await asyncio.sleep(self._limits.retry_delay)
        facts = await server.identify()
        length = facts.max_model_len
        if length is not None and length < self._options.total_tokens:
            raise ServerError(
                f"rollout server {server.url}: wanted room for prompt and response ({self._options.total_tokens} "
                f"tokens), got max_model_len {length}"
            )
        await server.find_asleep()
        self._say(f"rollout server {server.url}: {facts.name}, model {facts.model}")

    async def _generate(
        self,
        prompts: list[dict[str, Any]],
        params: dict[str, Any],
        on_finished: Callable[[dict[str, Any]], None],
        should_stop: Callable[[], bool],
    ) -> dict[str, Any]:
        start = time.monotonic()
        self._new_call()
        await self._wake()
        await self._check(prompts[0]["tokens"], params)
        if len(self._servers) > 1:
            await self._each(_read_load)
        self._freed = asyncio.Event()
        self._gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connections = asyncio.Semaphore(self._limits.max_connections)
        stats = {"logical_prompt_tokens": 0, "computed_prompt_tokens": 0, "response_tokens": 0}

        def finished(prompt: dict[str, Any], response: Response) -> None:
            stats["logical_prompt_tokens"] += len(prompt["tokens"])
            stats["computed_prompt_tokens"] += len(prompt["tokens"]) - response.cached_tokens
            stats["response_tokens"] += len(response.tokens)
            on_finished(
                trajectory(prompt["tokens"], params, response, self._options.reports_cut_law)
            )

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
                task = asyncio.create_task(self._group(server, prompt, params, finished))
                task.add_done_callback(lambda _: self._freed.set())
                groups.add(task)
            while not all(task.done() for task in groups):
                await self._next_change([*groups, *helpers])
            _raise_first([*groups, *helpers])
        finally:
            for pending in [*groups, *helpers]:
                pending.cancel()
            await asyncio.gather(*groups, *helpers, return_exceptions=True)
        await self._sleep()
        return {**stats, "seconds": time.monotonic() - start}

    async def _room_for(self, n: int, tasks: list[asyncio.Task[None]]) -> Server:
        """The least loaded server that has room for `n` more; waits for one."""
        most = self._options.max_num_seqs
        while True:
            free = [s for s in self._servers if s.in_flight == 0 or s.in_flight + n <= most]
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

    async def _group(
        self,
        server: Server,
        prompt: dict[str, Any],
        params: dict[str, Any],
        finished: Callable[[dict[str, Any], Response], None],
    ) -> None:
        if server.needs_warm_prompt and prompt["n"] > 1 and not self._is_stopping:
            await server.warm(self._ask(prompt, Response(prompt["row"], -1), params, 0))

        async def one(index: int) -> None:
            response = Response(prompt["row"], index)
            try:
                await self._respond(server, prompt, response, params)
            finally:
                server.in_flight -= 1
                self._freed.set()
            finished(prompt, response)

        first = prompt.get("first_index", 0)
        await asyncio.gather(*(one(first + place) for place in range(prompt["n"])))

    async def _respond(
        self, server: Server, prompt: dict[str, Any], response: Response, params: dict[str, Any]
    ) -> None:
        """Fills `response`; after an abort it goes on with what is left of the budget."""
        until = time.monotonic() + self._limits.request_timeout
        wait = self._limits.retry_delay
        tries = 0
        while not self._is_stopping:
            tries += 1
            before = len(response.tokens)
            ask = self._ask(prompt, response, params, tries)
            answer = await self._call(server, ask)
            if answer is None:
                return
            self._check_label(server, answer)
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

    def _ask(
        self, prompt: dict[str, Any], response: Response, params: dict[str, Any], tries: int
    ) -> Ask:
        given = prompt["tokens"]
        tokens = [*given, *response.tokens]
        length = prompt.get("original_prompt") or len(given)  # behind it, a response so far
        done = len(tokens) - length
        return Ask(
            id=f"banyan-{self._calls}-{params['step']}-{response.row}-{response.index}-{tries}",
            tokens=tokens,
            max_tokens=params["max_tokens"] - done,
            seed=seed_of(params["seed"], params["step"], response.row, response.index, done),
            params=params,
            prompt_tokens=length,
        )

    def _check_label(self, server: Server, answer: Answer) -> None:
        if answer.version is None or server.version is None or answer.version == server.version:
            return
        raise ServerError(
            f"rollout server {server.url}: wanted tokens of weights {server.version}, got some of {answer.version}"
        )

    async def _check(self, prompt: list[int], params: dict[str, Any]) -> None:
        """The probe, once after each hand-over."""
        if self._is_checked:
            return
        self._is_checked = True
        await self._each(
            lambda server: self._probe.check(
                server, self._score, prompt, params, self._version or 0
            )
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
            await self._each(_read_load)

    async def _sleep(self) -> None:
        if not self._options.colocated:
            return
        # Weights are dropped only where a folder can bring them back.
        with_weights = self._folders.newest is not None

        async def put_to_sleep(server: Server) -> None:
            await server.sleep(with_weights)
            server.asleep = True

        await self._each(put_to_sleep)

    async def _wake(self) -> None:
        """Wakes servers that sleep although the weights did not change since."""
        directory = self._folders.newest

        async def wake(server: Server) -> None:
            if server.asleep and directory is not None:
                await server.load_weights(directory, server.version or "0")
            elif server.asleep:
                await server.wake_as_it_was()
                server.asleep = False

        await self._each(wake)


def _unattached(*_: Any) -> Any:
    raise ServerError("the generator has no actor: it is not in a run")


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
