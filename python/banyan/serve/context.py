"""What the routes share: the engine, the tokenizer, names, limits, the tables of fields, and a thread for text work."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from banyan.data.chat import Chat
from banyan.serve.engine_client import EngineClient
from banyan.serve.errors import ApiError, bad, unavailable
from banyan.serve.field_kinds import Shape
from banyan.serve.fields import tables
from banyan.serve.limits import Limits
from banyan.serve.metrics import Metrics
from banyan.serve.schema import Table, check
from banyan.serve.text_stream import TokenText

_log = logging.getLogger("banyan.serve")
_MAX_COMPILING = 64


@dataclass
class Context:
    """One served model."""

    engine: EngineClient
    chat: Chat
    tokens: TokenText
    names: list[str]  # the model's, the first is shown
    shape: Shape
    limits: Limits
    eos_ids: list[int]
    grammars: Any  # serve/structured.py
    tool_format: str  # tools.py
    metrics: Metrics
    logprobs_mode: str = "raw_logprobs"
    model_directory: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # effective ones, for /server_info
    seeds: random.Random = field(default_factory=random.SystemRandom)  # of requests without one
    stream_interval: int = 1  # tokens of a chunk
    release_level: int | None = 2  # sleep level of releasing weights; None: no sleeping
    log_stats: bool = False
    start_calls: list[tuple[Any, ...]] = field(default_factory=list)  # control calls at the start
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.tables: dict[str, Table] = tables(self.shape)
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="banyan-text")
        self._patterns = ThreadPoolExecutor(1, thread_name_prefix="banyan-grammar")
        self._compiling = 0
        self._waiting = 0
        self._told: set[str] = set()  # unknown fields that the log has named
        directory = self.model_directory
        self._paths = {directory, str(Path(directory).resolve())} if directory else set()
        self.bodies = 0  # bytes of request bodies held

    @property
    def name(self) -> str:
        return self.names[0]

    async def work(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Runs text work (templates, tokenizing, grammars) off the loop, one piece at a time: the tokenizer is one."""
        if self._waiting >= self.limits.waiting_requests:
            self.metrics.reject("queue_full")
            raise unavailable("too many requests are waiting")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._texts, partial(call, *arguments))
        finally:
            self._waiting -= 1

    async def compile(self, kind: str, value: Any) -> Any:
        """A token table, on a thread of its own: a hard pattern delays only other patterns. Raises UserError."""
        if self.grammars is None:
            raise bad("structured output: wanted a server with a tokenizer's grammar compiler")
        if self._compiling >= _MAX_COMPILING:
            raise unavailable("too many grammars are being compiled")
        self._compiling += 1
        try:
            loop = asyncio.get_running_loop()
            call = partial(self.grammars.compile, kind, value)
            return await loop.run_in_executor(self._patterns, call)
        finally:
            self._compiling -= 1

    def check(self, table: Table, body: dict[str, Any]) -> dict[str, Any]:
        """Checked fields; names that the table does not know are logged, each once."""
        unknown: list[str] = []
        fields = check(table, body, unknown=unknown)
        for name in {re.sub(r"\[\d+\]", "[]", name[:128]) for name in unknown}:
            if name not in self._told and len(self._told) < 256:
                self._told.add(name)
                _log.warning("request field %r is not known: ignored", name)
        return fields

    def check_length(self, text: str) -> None:
        """Refuses what the context cannot hold however it is cut: tokenizing it would keep the others waiting."""
        if not self.tokens.known:  # only ids are taken, and the tokenizer that is missing says so
            return
        most = self.shape.max_model_len * self.tokens.longest
        if self.chat.tokenizer.normalizer is not None:  # may write several letters as one
            most *= 4
        if len(text) > most:
            length = self.shape.max_model_len
            raise bad(
                f"prompt: wanted fewer than {length} tokens, the context, got {len(text)} letters",
                "prompt",
            )

    def check_model(self, name: str | None) -> str:
        """The name to answer with: a served one, or the directory. Raises 404 for a model that is not served."""
        if name is not None and name not in self.names and name not in self._paths:
            served = ", ".join(self.names)
            text = f"model: {name[:128]!r} is not served here, wanted {served}"
            raise ApiError(404, text, "model")
        return name or self.name

    def log_fault(self, error: BaseException, scope: Any) -> None:
        """A fault of ours: the log gets it whole, with the request's id."""
        _log.error("request %s failed", scope["state"].get("request_id"), exc_info=error)
