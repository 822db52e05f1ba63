"""One server address: calls with a deadline, and what is done about an answer that is none.

| answer | what happens |
|---|---|
| 503 | asked again after 1 s, doubling, with jitter (or Retry-After), until the deadline |
| connection cut or refused, 5xx | asked again, `max_attempts` times in all |
| 4xx | never asked again: an error with the server's own words |
| nothing until the deadline | an error that says for how long was waited |
| no JSON, or other JSON than wanted | an error that shows it |

Every error is one line: what was called, what was wanted, what came.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx

from banyan.errors import RunError

_SHOWN = 300  # characters of an answer in an error
_LONGEST_WAIT = 30.0  # seconds between two tries
# What a status usually means here.
_HINTS = {
    401: "banyan.rollout.api_key_file",
    403: "vLLM needs --enable-scale-out for this route",
    404: "vLLM needs VLLM_SERVER_DEV_MODE=1, banyan serve --enable-admin, for control routes",
}


class ServerError(RunError):
    """A server that did not do what was asked. `status` is that of its answer, 0 without one."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """actor_rollout_ref.rollout.server.* and banyan.rollout.request_timeout; seconds."""

    timeout: float = 60.0
    request_timeout: float = 1800.0
    max_attempts: int = 3
    retry_delay: float = 1.0
    max_connections: int = 1000
    max_start_wait_time: float = 300.0


class Address:
    """Calls to one address, over a pool of connections."""

    def __init__(self, url: str, limits: Limits, key: str | None = None) -> None:
        self.url = url
        self.limits = limits
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=None,  # each call has a deadline of its own
            limits=httpx.Limits(max_connections=limits.max_connections + 8),
            verify=url.startswith("https"),  # else the certificates would be read for nothing
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str, **options: Any) -> Any:
        return await self.call("GET", path, None, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        return await self.call("POST", path, body, **options)

    async def call(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        deadline: float | None = None,
        again: bool = True,
        as_text: bool = False,
    ) -> Any:
        """The answer's JSON, None where it is empty.

        Args:
            deadline: seconds for all tries together; `timeout` if None.
            again: whether a call that was cut off may be repeated.
            as_text: the answer is no JSON.

        Raises:
            ServerError: see the table above.
        """
        what = f"{method} {self.url}{path}"
        seconds = self.limits.timeout if deadline is None else deadline
        came = ["nothing"]
        try:
            text = await asyncio.wait_for(
                self._persist(what, method, path, body, again, came), seconds
            )
        except TimeoutError as error:
            raise ServerError(
                f"{what}: wanted an answer within {seconds:g} s, got {came[-1]}"
            ) from error
        return text if as_text else _parse(what, text)

    async def is_up(self, path: str) -> bool:
        """True if GET `path` is answered with 200, False if with another status; one try.

        Raises:
            ServerError: nobody answers, or the key is wrong (401).
        """
        what = f"GET {self.url}{path}"
        try:
            status, text, _ = await asyncio.wait_for(
                self._try("GET", path, None), self.limits.timeout
            )
        except TimeoutError as error:
            raise ServerError(
                f"{what}: wanted an answer within {self.limits.timeout:g} s"
            ) from error
        if status in (0, 401):
            hint = f" ({_HINTS[status]})" if status in _HINTS else ""
            raise ServerError(
                f"{what}: wanted 200, got {status or 'no answer'}: {_short(text)}{hint}", status
            )
        return status == 200

    async def _persist(
        self, what: str, method: str, path: str, body: Any, again: bool, came: list[str]
    ) -> str:
        """The text of the first good answer; `came` gets what came before it."""
        attempt = 0
        while True:
            attempt += 1
            status, text, wait = await self._try(method, path, body)
            if 200 <= status < 300:
                return text
            came.append(f"{status or 'no answer'}: {_short(text)}")
            if status != 503 and not _may_repeat(status, attempt, again, self.limits):
                hint = f" ({_HINTS[status]})" if status in _HINTS else ""
                tries = f" after {attempt} tries" if attempt > 1 else ""
                raise ServerError(f"{what}: wanted 200, got {came[-1]}{tries}{hint}", status)
            await asyncio.sleep(self._backoff(attempt) if wait is None else wait)

    async def _try(self, method: str, path: str, body: Any) -> tuple[int, str, float | None]:
        """(status, text, seconds that the server asks to wait); status 0: no whole answer."""
        try:
            reply = await self._client.request(
                method, path, json=body if method == "POST" and body is not None else None
            )
        except httpx.TransportError as error:
            return 0, f"{type(error).__name__} {error}".strip(), None
        return reply.status_code, reply.text, _retry_after(reply.headers.get("retry-after"))

    def _backoff(self, attempt: int) -> float:
        wait = min(self.limits.retry_delay * 2.0 ** (attempt - 1), _LONGEST_WAIT)
        return wait * random.uniform(0.75, 1.25)


def _may_repeat(status: int, attempt: int, again: bool, limits: Limits) -> bool:
    broken = status == 0 or status >= 500
    return broken and again and attempt < limits.max_attempts


def _retry_after(text: str | None) -> float | None:
    try:
        return min(max(float(text), 0.0), _LONGEST_WAIT) if text else None
    except ValueError:
        return None


def _parse(what: str, text: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerError(f"{what}: wanted JSON, got {_short(text)!r}") from error


def _short(text: str) -> str:
    """The server's own words: the message of an error object, else the text's beginning."""
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        message = error.get("message", error) if isinstance(error, dict) else error
        text = message if isinstance(message, str) else json.dumps(message)
    except ValueError:
        pass
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def wanted(what: str, value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    """`value` if it is of `kind`. Raises ServerError naming the field."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise ServerError(f"{what}: {name}: wanted {names}, got {_short(repr(value))}")
    return value
