"""A response on its way from a server, its seeds, and what the core gets of it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

from banyan.drivers.server import Answer, Span


@dataclass
class Response:
    """What has come of it, over all its requests."""

    row: int
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    log_kept_mass: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    cached_tokens: int = 0
    finish: str = "abort"

    def add(self, answer: Answer) -> None:
        if not self.tokens:
            self.cached_tokens = answer.cached_tokens
        self._add_spans(answer.spans)
        self.tokens += answer.tokens
        self.logprobs += answer.logprobs
        self.log_kept_mass += answer.log_kept_mass
        self.finish = answer.finish

    def _add_spans(self, more: list[Span]) -> None:
        done = len(self.tokens)
        for span in more:
            if self.spans and self.spans[-1].version == span.version:
                self.spans[-1] = self.spans[-1]._replace(end=span.end + done)
            else:
                self.spans.append(Span(span.version, span.start + done, span.end + done))


def trajectory(
    prompt: list[int],
    params: dict[str, Any],
    response: Response,
    reports_cut_law: bool,
    epoch: int = 0,
) -> dict[str, Any]:
    """A response in the fields of core/sample.h. `epoch`: how often the weights have changed."""
    cuts = params["top_p"] < 1.0 or params["top_k"] > 0 or params.get("min_p", 0.0) > 0.0
    drawn = whole = response.logprobs
    if response.log_kept_mass:
        whole = [a + b for a, b in zip(drawn, response.log_kept_mass, strict=True)]
    out = {
        "row": response.row,
        "index": response.index,
        "prompt": prompt,
        "response": response.tokens,
        "rollout_log_probs": whole,
        "finish": response.finish,
    }
    if cuts and (reports_cut_law or response.log_kept_mass):
        out["sampled_log_probs"] = drawn
    if response.spans:
        out["weight_spans"] = [{"epoch": epoch, **span._asdict()} for span in response.spans]
    return out


def seed_of(seed: int, step: int, row: int, index: int, done: int) -> int:
    """A seed of 63 bits; `done` tokens on, the rest of a response has noise of its own."""
    packed = struct.pack("<QQqqq", seed & (2**64 - 1), step & (2**64 - 1), row, index, done)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
