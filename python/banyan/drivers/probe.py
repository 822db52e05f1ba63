"""Does a server run the trainer's weights? It generates a short response, whose tokens the trainer scores.

Two engines never agree to the last bit, so the mean gap of the log-probabilities is compared with a tolerance; it tells
wrong weights, garbage after a sleep, and a server whose log-probabilities are those of another law. A small update
moves them by less than that: it is told from the last probe, whose numbers a server that missed the update repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from banyan.drivers.http import ServerError
from banyan.drivers.server import Ask, Server

_PROMPT_TOKENS = 256
_RESPONSE_TOKENS = 16
Score = Callable[[list[int], float], list[float]]  # (tokens, temperature) -> of tokens 1..


@dataclass(frozen=True)
class _Seen:
    tokens: list[int]
    theirs: list[float]
    ours: list[float]


class Probe:
    """Compares; remembers the last numbers of each server."""

    def __init__(self, tolerance: float | None, say: Callable[[str], None]) -> None:
        self._tolerance = tolerance
        self._say = say
        self._prompt: list[int] | None = None  # the same for the whole run
        self._temperature = 1.0
        self._last: dict[str, _Seen] = {}

    async def check(
        self, server: Server, score: Score, prompt: list[int], params: dict[str, Any], version: int
    ) -> None:
        """Raises ServerError if the server's weights are not those that `score` runs on."""
        if self._tolerance is None:
            return
        if self._prompt is None:
            self._prompt = prompt[:_PROMPT_TOKENS]
            self._temperature = params["temperature"] if params["temperature"] > 0.0 else 1.0
        ask = Ask(
            id=f"banyan-probe-{version}",
            tokens=self._prompt,
            max_tokens=_RESPONSE_TOKENS,
            seed=version + 1,
            params=_plain(self._temperature),
            prompt_tokens=len(self._prompt),
        )
        answer = await server.generate(ask)
        if not answer.tokens:
            raise ServerError(
                f"rollout server {server.url}: probe: wanted tokens, got none ({answer.finish})"
            )
        tokens = [*self._prompt, *answer.tokens]
        ours = score(tokens, self._temperature)[-len(answer.tokens) :]
        gaps = [abs(a - b) for a, b in zip(ours, answer.logprobs, strict=True)]
        seen = _Seen(tokens, list(answer.logprobs), ours)
        last = self._last.get(server.url)
        self._last[server.url] = seen
        what = f"rollout server {server.url}: probe of weights {version}"
        if last and (last.tokens, last.theirs) == (tokens, seen.theirs) and last.ours != ours:
            raise ServerError(
                f"{what}: wanted log-probabilities of the new weights, got exactly those from before the update"
            )
        mean = sum(gaps) / len(gaps)
        if mean > self._tolerance:
            raise ServerError(
                f"{what}: wanted log-probabilities within {self._tolerance:g} of the trainer's on average "
                f"(banyan.rollout.probe_tolerance), got {mean:.3f} (largest {max(gaps):.3f}): other weights, or "
                "another law (vLLM: --logprobs-mode processed_logprobs)"
            )
        if last is None:
            self._say(
                f"{what}: log-probabilities differ from the trainer's by {mean:.4f} on average"
            )


def _plain(temperature: float) -> dict[str, Any]:
    """The whole softmax at a temperature."""
    return {
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "ignore_eos": True,
        "eos_ids": [],
        "seed": 0,
        "step": 0,
    }
