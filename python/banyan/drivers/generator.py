"""Servers as the trainer's generator (src/banyan/rollout/generator.h, python/bindings/python_generator.h).

generate(prompts)        wakes the servers, probes them after a change of weights and has them answer (round.py)
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
from banyan.drivers.responses import Response, trajectory
from banyan.drivers.round import Round
from banyan.drivers.server import Server
from banyan.drivers.weights import Save, WeightFolders


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
        self._calls += 1
        await self._wake()
        await self._check(prompts[0]["tokens"], params)
        stats = {"logical_prompt_tokens": 0, "computed_prompt_tokens": 0, "response_tokens": 0}
        is_over = False

        def finished(prompt: dict[str, Any], response: Response) -> None:
            if is_over:  # a call that outlived a round that failed: the core has gone on
                return
            tokens, cut_law = prompt["tokens"], self._options.reports_cut_law
            stats["logical_prompt_tokens"] += len(tokens)
            stats["computed_prompt_tokens"] += len(tokens) - response.cached_tokens
            stats["response_tokens"] += len(response.tokens)
            on_finished(trajectory(tokens, params, response, cut_law, self._version or 0))

        most = self._options.max_num_seqs
        try:
            await Round(self._servers, most, params, self._calls, finished).run(
                prompts, should_stop
            )
        finally:
            is_over = True
        await self._sleep()
        return {**stats, "seconds": time.monotonic() - start}

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
