"""A started engine over a tiny random model, for tests that talk to it as the server does."""

from __future__ import annotations

import select
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

VOCAB = 300
EOS = 7
POSITIONS = 8192
# One byte per id, for stop strings: id 40 is "(", id 65 is "A"; ids above 255 have two letters.
TOKEN_BYTES = [bytes([i]) if i < 256 else f"<{i - 256}>".encode() for i in range(VOCAB)]


def write_model(directory: Path, seed: int = 0, **changes: int) -> Path:
    """A random Llama in bf16 with peaked enough logits to tell two seeds apart."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": POSITIONS,
            **changes,
        },
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def resident_bytes(field: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(field)


class Response:
    """What came out of one response so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.raw: list[float] = []
        self.processed: list[float] = []
        self.log_kept_mass: list[float] = []
        self.last: dict[str, Any] | None = None  # the event that finished it

    @property
    def finish(self) -> str | None:
        return None if self.last is None else self.last["finish"]


class Live:
    """Starts the engine; `with` stops it. Responses are kept by (request, index)."""

    def __init__(self, core: Any, model: Any, **options: Any) -> None:
        self.engine = core.Engine(model, {"kv_bytes": 4 << 20, **options}, TOKEN_BYTES)
        self.responses: dict[tuple[str, int], Response] = defaultdict(Response)
        self.wanted: dict[str, int] = {}

    def __enter__(self) -> Live:
        self.engine.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.stop(10.0)

    def submit(self, prompt: list[int], n: int = 1, **params: Any) -> str:
        request = {
            key: params.pop(key) for key in ("priority", "cache_salt", "id") if key in params
        }
        given = {"max_tokens": 8, "eos_ids": [EOS], "seed": 1, **params}
        name = self.engine.submit({"prompt": prompt, "n": n, "params": given, **request})
        self.wanted[name] = n
        return name

    def take(self) -> int:
        """Everything that has come out; the number of events."""
        events = self.engine.drain()
        for event in events:
            response = self.responses[event["request"], event["index"]]
            assert response.last is None, f"event after the end: {event}"
            response.tokens += event["tokens"]
            response.raw += event["raw"]
            response.processed += event["processed"]
            response.log_kept_mass += event["log_kept_mass"]
            if event["finished"]:
                response.last = event
        return len(events)

    def wait(self, *requests: str, seconds: float = 20.0) -> list[Response]:
        """The responses of the requests, all finished. Fails after `seconds`."""
        names = list(requests) or list(self.wanted)
        deadline = time.monotonic() + seconds
        while not all(self.done(name) for name in names):
            left = deadline - time.monotonic()
            assert left > 0, f"unfinished after {seconds} s: {self.engine.stats()}"
            select.select([self.engine.event_fd()], [], [], min(left, 0.5))
            self.take()
        return [self.responses[name, i] for name in names for i in range(self.wanted[name])]

    def wait_tokens(self, request: str, count: int, seconds: float = 20.0) -> None:
        """Until response 0 of the request has `count` tokens."""
        deadline = time.monotonic() + seconds
        while len(self.responses[request, 0].tokens) < count:
            assert time.monotonic() < deadline, f"no {count} tokens: {self.engine.stats()}"
            select.select([self.engine.event_fd()], [], [], 0.2)
            self.take()

    def done(self, name: str) -> bool:
        return all(self.responses[name, i].last is not None for i in range(self.wanted[name]))

    def ask(self, prompt: list[int], n: int = 1, **params: Any) -> list[Response]:
        return self.wait(self.submit(prompt, n, **params))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Ids without EOS, fixed by the seed."""
    return [10 + (seed * 7919 + i * 104729 + i * i * 31) % (VOCAB - 10) for i in range(length)]
