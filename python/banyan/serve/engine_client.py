"""The engine as an event loop sees it: submit, await events, abort, and control calls one at a time.

The engine's threads write one byte-count to a file descriptor per pass; the loop then drains everything at once and
hands each event to the subscription of its request. No callback runs per token.

    subscription = client.open([request, ...])   # dicts of the binding: prompt, n, params, ...
    while (events := await subscription.next()): ...
    subscription.close()                         # aborts what has not ended
"""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from banyan.errors import UserError, core_text
from banyan.serve.errors import ApiError, with_options
from banyan.serve.metrics import Metrics

Event = dict[str, Any]


def masks(event: Event) -> list[list[int]]:
    """The sampling mask of each token; an empty one where all ids survived."""
    return event["sampling_mask"] or [[] for _ in event["tokens"]]


class Subscription:
    """Events of the engine requests behind one HTTP request."""

    def __init__(self, client: EngineClient, ids: list[str], sequences: int) -> None:
        self.ids = ids
        self.left = sequences  # responses that have not ended
        self.stopped: ApiError | None = None
        self._client = client
        self._events: list[Event] = []
        self._ready = asyncio.Event()

    async def next(self) -> list[Event]:
        """Events since the last call, at least one; none after the last. Raises the ApiError given to `stop`."""
        while not self._events and self.left > 0 and self.stopped is None:
            self._ready.clear()
            await self._ready.wait()
        if self.stopped is not None:
            raise self.stopped
        found, self._events = self._events, []
        return found

    def feed(self, event: Event) -> None:
        self._events.append(event)
        if event["finished"]:
            self.left -= 1
        self._ready.set()

    def stop(self, reason: ApiError) -> None:
        """Ends `next` with an error: the client has gone, or the time is up."""
        self.stopped = reason
        self._ready.set()

    def close(self) -> None:
        """Aborts what has not ended; later events are dropped."""
        self._client.forget(self)


class EngineClient:
    """The only place of the server that talks to the engine."""

    def __init__(self, engine: Any, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._subscriptions: dict[str, Subscription] = {}
        self._public: dict[str, list[str]] = {}  # id that a client knows -> ids of the engine
        self._control = ThreadPoolExecutor(1, thread_name_prefix="banyan-control")
        self._submit = ThreadPoolExecutor(1, thread_name_prefix="banyan-submit")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="banyan-stats")
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the engine and listens to it; called on the loop. Raises UserError where the pool has no room."""
        self._loop = asyncio.get_running_loop()
        try:
            self._engine.start()
        except (ValueError, RuntimeError) as error:
            raise UserError(with_options(core_text(error))) from error
        self._loop.add_reader(self._engine.event_fd(), self._drain)

    async def stop(self, timeout: float) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._engine.event_fd())
        for subscription in list(self._subscriptions.values()):
            subscription.stop(ApiError(503, "the server is stopping"))
        # Not behind the control calls: a pause that waits ends with the engine.
        await self._loop.run_in_executor(self._submit, self._engine.stop, timeout)

    async def open(self, requests: list[dict[str, Any]], public_id: str) -> Subscription:
        """Submits requests as one. Raises what the engine raises; nothing is left behind then."""
        assert self._loop is not None
        ids = [f"{public_id}-{index}-{secrets.token_hex(4)}" for index in range(len(requests))]
        subscription = Subscription(self, ids, sum(request["n"] for request in requests))
        for id, request in zip(ids, requests, strict=True):
            request["id"] = id
            self._subscriptions[id] = subscription
            self._metrics.on_submit(request)
        self._public.setdefault(public_id, []).extend(ids)
        try:
            await self._loop.run_in_executor(self._submit, self._submit_all, requests)
        except BaseException:
            self.forget(subscription)
            raise
        return subscription

    def forget(self, subscription: Subscription) -> None:
        live = [id for id in subscription.ids if self._subscriptions.pop(id, None)]
        for id in live:
            public = id.rsplit("-", 2)[0]
            known = self._public.get(public, [])
            if id in known:
                known.remove(id)
            if not known:
                self._public.pop(public, None)
            if subscription.left > 0:
                self._metrics.forget(id)
        if live and subscription.left > 0:
            self._submit.submit(self._engine.abort, live)

    async def abort(self, public_ids: list[str]) -> int:
        """Ends requests by the ids that clients know; all if the list is empty. Their partials are returned."""
        ids = [id for public in public_ids for id in self._public.get(public, [])]
        if public_ids and not ids:
            return 0
        assert self._loop is not None
        # Not behind the control calls: a pause that waits for these requests would wait for them in vain.
        return await self._loop.run_in_executor(self._submit, self._engine.abort, ids)

    async def resume(self) -> None:
        """Ends a pause, one that still waits too: not behind the control calls (that pause then answers 409)."""
        assert self._loop is not None
        await self._loop.run_in_executor(self._submit, self._engine.resume)

    async def control(self, name: str, *arguments: Any) -> Any:
        """Calls a control function of the engine on a thread of its own; one at a time."""
        assert self._loop is not None
        async with self._lock:
            call = getattr(self._engine, name)
            return await self._loop.run_in_executor(self._control, lambda: call(*arguments))

    async def stats(self) -> dict[str, Any]:
        """EngineStats. Asked on a thread of its own, so that it answers while a control call waits."""
        assert self._loop is not None
        return await self._loop.run_in_executor(self._asking, self._engine.stats)

    def _submit_all(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self._engine.submit(request)

    def _drain(self) -> None:
        events = self._engine.drain()
        self._metrics.on_events(events, time.monotonic())
        for event in events:
            subscription = self._subscriptions.get(event["request"])
            if subscription is not None:
                subscription.feed(event)
