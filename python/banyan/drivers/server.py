"""What the generator asks of a server, whatever its dialect. vllm.py and sglang.py say how.

Ids go in, ids and log-probabilities come out; no text is ever compared. Siblings are requests of their own, each with
its own seed. A request names the whole budget; what a server returns after an abort is continued by the generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from banyan.drivers.http import Address, Limits, ServerError, wanted

LOAD_SECONDS = 5.0  # for a figure that only balances


@dataclass(frozen=True)
class Ask:
    """One response that is wanted, or the rest of one."""

    id: str
    tokens: list[int]  # the prompt, and what there is of the response
    max_tokens: int
    seed: int
    params: dict[str, Any]  # SamplingParams of the core
    prompt_tokens: int  # how many of `tokens` are the prompt


class Span(NamedTuple):
    """Tokens [start, end) of a response were drawn by the weights with this label."""

    version: str
    start: int
    end: int


@dataclass
class Answer:
    """What came of an Ask."""

    tokens: list[int]
    logprobs: list[float]
    finish: str  # stop | length | abort
    cached_tokens: int = 0
    spans: list[Span] = field(default_factory=list)  # where the server gives the weights' label
    log_kept_mass: list[float] = field(default_factory=list)  # of banyan's own servers


@dataclass(frozen=True)
class Facts:
    """What a server says of itself."""

    name: str  # "vLLM 0.33.0"
    model: str
    max_model_len: int | None = None


class Server(ABC):
    """One server, its dialect and its routes."""

    needs_warm_prompt = False  # one request must prefill a prompt before its siblings come

    def __init__(self, address: Address, control: Address, say: Callable[[str], None]) -> None:
        self.address = address
        self.control = control  # where pause, sleep and weights are; often the same address
        self.say = say
        self.routes: set[str] | None = None  # None: the server does not list them
        self.in_flight = 0
        self.elsewhere = 0  # running and waiting requests of others
        self.version: str | None = None  # label of the weights that it must have
        self.asleep = False

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def limits(self) -> Limits:
        return self.address.limits

    async def close(self) -> None:
        await self.address.close()
        if self.control is not self.address:
            await self.control.close()

    def lists(self, route: str) -> bool:
        """True if the server lists `route`, or lists none at all."""
        return self.routes is None or route in self.routes

    async def find_routes(self) -> None:
        """Reads /openapi.json of both addresses where they have one."""
        found: set[str] = set()
        for address in {self.address, self.control}:
            try:
                body = await address.get("/openapi.json")
            except ServerError as error:
                if error.status == 0:
                    raise
                return
            if isinstance(body, dict) and isinstance(body.get("paths"), dict):
                found |= set(body["paths"])
        self.routes = found or None

    @abstractmethod
    async def identify(self) -> Facts:
        """Who answers there. Raises ServerError if it is not a server of this dialect."""

    @abstractmethod
    async def is_ready(self) -> bool: ...

    @abstractmethod
    async def generate(self, ask: Ask) -> Answer: ...

    async def warm(self, ask: Ask) -> None:
        """Has the prompt prefilled; called where needs_warm_prompt."""
        raise ServerError(f"rollout server {self.url}: has no request without tokens")

    @abstractmethod
    async def abort(self, ids: list[str]) -> None:
        """Ends requests; what there is of them comes back through generate()."""

    async def load_weights(self, directory: str, version: str) -> None:
        """Has an HF directory loaded and everything of the old weights dropped. In bounded time.

        Awake: pause, load, drop the cache, resume (even if the load failed). Asleep: weights, load, KV pages, drop the
        cache; with the last memory back a server runs by itself.
        """
        if self.asleep:
            await self.wake("weights")
            await self.put_weights(directory, version)
            await self.wake("kv_cache")
            await self.drop_cache()
            self.asleep = False
        else:
            await self.pause()
            try:
                await self.put_weights(directory, version)
                await self.drop_cache()
            finally:
                await self.resume()
        self.version = version

    async def find_asleep(self) -> None:
        """Whether it sleeps already, as after a run that broke off."""
        if self.routes is not None and "/is_sleeping" in self.routes:
            body = await self.address.get("/is_sleeping")
            self.asleep = isinstance(body, dict) and body.get("is_sleeping") is True

    @abstractmethod
    async def pause(self) -> None: ...

    @abstractmethod
    async def resume(self) -> None:
        """Called once after a pause."""

    @abstractmethod
    async def put_weights(self, directory: str, version: str) -> None:
        """Loads an HF directory and checks the label where there is one."""

    @abstractmethod
    async def drop_cache(self) -> None:
        """Returns when nothing of the old weights is cached."""

    @abstractmethod
    async def sleep(self, with_weights: bool) -> None:
        """Gives the memory of the KV pages back, and that of the weights if they can be loaded again."""

    @abstractmethod
    async def wake(self, what: str) -> None:
        """`what`: weights or kv_cache."""

    async def wake_as_it_was(self) -> None:
        """After a sleep that kept the weights."""
        await self.wake("kv_cache")

    @abstractmethod
    async def load(self) -> int | None:
        """Running and waiting requests; None where the server does not say."""


def check_answer(what: str, ask: Ask, answer: Answer) -> Answer:
    """`answer` if it is one to `ask`. Raises ServerError."""
    if len(answer.tokens) != len(answer.logprobs):
        raise ServerError(
            f"{what}: wanted one log-probability per token ({len(answer.tokens)}), got {len(answer.logprobs)}"
        )
    if len(answer.tokens) > ask.max_tokens:
        raise ServerError(
            f"{what}: wanted at most {ask.max_tokens} tokens, got {len(answer.tokens)}"
        )
    if not answer.tokens and answer.finish != "abort":
        raise ServerError(f"{what}: wanted at least one token, got none ({answer.finish})")
    if answer.finish not in ("stop", "length", "abort"):
        raise ServerError(
            f"{what}: finish_reason: wanted stop, length or abort, got {answer.finish}"
        )
    return answer


def spans(what: str, value: Any, length: int) -> list[Span]:
    """[{version, start, end}] in the order of the tokens, or one label for all of them. Raises ServerError."""
    if value is None or length == 0:
        return []
    if not isinstance(value, list):
        return [Span(str(value), 0, length)]
    found = [
        Span(*(wanted(what, item, dict, "weight_versions[]").get(key) for key in Span._fields))
        for item in value
    ]
    ends = [0, *(span.end for span in found)]
    if found and ([span.start for span in found] != ends[:-1] or ends[-1] != length):
        raise ServerError(f"{what}: weight_versions: wanted spans from 0 to {length}, got {value}")
    return [span._replace(version=str(span.version)) for span in found]


def token_ids(what: str, value: Any, name: str) -> list[int]:
    """A list of ids. Raises ServerError."""
    for item in wanted(what, value, list, name):
        wanted(what, item, int, f"{name}[]")
    return value


def numbers(what: str, value: Any, name: str) -> list[float]:
    """A list of numbers. Raises ServerError."""
    return [
        float(wanted(what, item, (int, float), f"{name}[]"))
        for item in wanted(what, value, list, name)
    ]
