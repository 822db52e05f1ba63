"""Structured output: a schema, a regular expression, choices or a grammar becomes a token table of the core.

For schemas and expressions outlines_core (linear-time automata, no backtracking) does the work in a process of its own
(structured_worker.py), under limits of pattern length, time, memory and table size; grammars, and choices as such, are
the core's own (src/banyan/rollout/grammar), under limits of counts. A hostile pattern ends in a UserError and harms
nobody. Tables, and refusals that took work, are kept in a cache with a limit in bytes, least recently used out first.
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan import extension
from banyan.errors import RunError, UserError, core_text
from banyan.serve.structured_schema import prepare_schema

KINDS = ("json", "regex", "choice", "grammar", "json_object")
_HINT = "; wanted a regular expression of linear time: no look-around, no back-reference"


@dataclass(frozen=True)
class StructuredLimits:
    pattern_chars: int = 32768  # of a regex, and of the one that a schema becomes
    schema_bytes: int = 65536
    choices: int = 1024
    seconds: float = 10.0  # to compile
    worker_bytes: int = 3 << 30  # address space of the process that compiles
    table_bytes: int = 256 << 20  # of one table
    cache_bytes: int = 512 << 20  # of all of them


class Grammars:
    """Compiles for one tokenizer. Calls from several threads wait for each other."""

    def __init__(
        self, token_bytes: Sequence[bytes], limits: StructuredLimits | None = None
    ) -> None:
        """`token_bytes`: what each id writes; b"" for special tokens, which no pattern may produce."""
        self.limits = limits or StructuredLimits()
        self._tokens = list(token_bytes)
        self._vocabulary = b"".join(struct.pack("<H", len(text)) + text for text in token_bytes)
        self._end = len(token_bytes)  # the worker's id for the end of the text
        self._core = extension.load()
        self._worker: _Worker | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self.cached_bytes = 0

    def compile(self, kind: str, value: Any) -> Any:
        """A core.TokenTable. `value`: text of a schema, regex or grammar, a list of texts, or True for a JSON object.

        Raises UserError for what cannot be compiled, RunError if the process that compiles does not start.
        """
        job = _job(kind, value, self.limits)  # refuses what takes no work to see
        key = (kind, json.dumps(value, sort_keys=True))
        with self._lock:
            found = self._cache.get(key)
            if found is None:
                found = self._make(job)
                self._keep(key, found)
            else:
                self._cache.move_to_end(key)
        if isinstance(found, str):
            raise UserError(found)
        return found

    def close(self) -> None:
        with self._lock:
            self._end_worker()

    def _make(self, job: dict[str, Any]) -> Any:
        """A table, or the text of a refusal."""
        try:
            if "ebnf" in job:
                return self._core.TokenTable.from_ebnf(
                    job["ebnf"], self._tokens, self.limits.table_bytes
                )
            if "json_object" in job:
                return self._core.TokenTable.json_object(self._tokens, self.limits.table_bytes)
        except ValueError as error:
            return f"structured output: {core_text(error)}"
        if self._worker is None:
            self._worker = _Worker(self._vocabulary, self.limits)
        answer = self._worker.ask(job, self.limits.seconds)
        if isinstance(answer, str):
            self._end_worker()
            return f"structured output: the pattern {answer}; wanted a simpler one"
        if len(answer) > self.limits.table_bytes // 8:
            self._end_worker()  # what it has grown to is given back
        if answer[:1] == b"E":
            text = answer[1:].decode(errors="replace")
            return f"structured output: {text}{_HINT if 'build DFA' in text else ''}"
        try:
            return self._core.TokenTable.from_outlines(
                answer[1:], self._end, self.limits.table_bytes
            )
        except ValueError as error:
            return f"structured output: {core_text(error)}"

    def _keep(self, key: tuple[str, str], found: Any) -> None:
        self._cache[key] = found
        self.cached_bytes += _size(key, found)
        while self.cached_bytes > self.limits.cache_bytes:
            old_key, old = self._cache.popitem(last=False)
            self.cached_bytes -= _size(old_key, old)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


def _size(key: tuple[str, str], found: Any) -> int:
    return len(key[1]) + 256 + (len(found) if isinstance(found, str) else found.num_bytes)


def _job(kind: str, value: Any, limits: StructuredLimits) -> dict[str, Any]:
    if kind == "json":
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text.encode(errors="replace")) > limits.schema_bytes:
            raise UserError(
                f"structured output: wanted a JSON schema of at most {limits.schema_bytes} bytes"
            )
        schema, patterns = prepare_schema(text)
        return {"schema": schema, "patterns": patterns, "pattern_chars": limits.pattern_chars}
    if kind == "json_object":
        return {"json_object": True}
    if kind not in KINDS:
        raise UserError(
            f"structured output: {kind!r} is not built; wanted one of {', '.join(KINDS)}"
        )
    texts = _choices(value, limits) if kind == "choice" else [value]
    if kind == "regex" and isinstance(value, str):
        texts = [_without_anchors(value)]
    letters = sum(len(text) for text in texts if isinstance(text, str))
    if not 1 <= letters <= limits.pattern_chars:
        raise UserError(
            f"structured output: wanted a {kind} of 1 to {limits.pattern_chars} characters"
        )
    if kind == "choice":
        return {"ebnf": "root ::= " + " | ".join(map(_quoted, texts))}
    return {"regex" if kind == "regex" else "ebnf": texts[0]}


def _choices(value: Any, limits: StructuredLimits) -> list[str]:
    texts = value if isinstance(value, list) else []
    if not 1 <= len(texts) <= limits.choices or not all(
        isinstance(text, str) and text for text in texts
    ):
        raise UserError(
            f"structured output: wanted a choice of 1 to {limits.choices} non-empty texts"
        )
    return texts


def _quoted(text: str) -> str:
    """A text as a grammar spells it."""
    return '"' + "".join(c if c.isalnum() else f"\\U{ord(c):08X}" for c in text) + '"'


def _without_anchors(regex: str) -> str:
    """The whole text must match anyhow, so ^ in front and $ behind say nothing; the library has no anchors."""
    if regex.startswith("^"):
        regex = regex[1:]
    body = regex[:-1]
    if regex.endswith("$") and (len(body) - len(body.rstrip("\\"))) % 2 == 0:
        regex = body
    return regex


def _wait(fd: int, event: int, deadline: float) -> None:
    """Until the descriptor is ready; TimeoutError at the deadline."""
    poll = select.poll()  # select() ends at 1,024 descriptors, which connections may use up
    poll.register(fd, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError


class _Worker:
    """The process that compiles."""

    def __init__(self, vocabulary: bytes, limits: StructuredLimits) -> None:
        script = Path(__file__).with_name("structured_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(limits.worker_bytes), str(int(limits.seconds) + 5)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        os.set_blocking(self._process.stdin.fileno(), False)  # type: ignore[union-attr]
        self._limits = limits
        if isinstance(self._exchange(vocabulary, max(60.0, limits.seconds)), str):
            self.kill()
            raise RunError(
                "structured output: the process that compiles patterns did not start; wanted the package "
                f"outlines_core 0.2.14 and {limits.worker_bytes >> 20} MB of memory"
            )

    def ask(self, job: dict[str, Any], seconds: float) -> bytes | str:
        """The worker's answer, or what went wrong with it: it must be killed then."""
        return self._exchange(json.dumps(job).encode(), seconds)

    def _exchange(self, frame: bytes, seconds: float) -> bytes | str:
        deadline = time.monotonic() + seconds
        try:
            self._write(struct.pack("<I", len(frame)) + frame, deadline)
            (length,) = struct.unpack("<I", self._read(4, deadline))
            if length > 2 * self._limits.table_bytes:
                return f"makes a table of more than {self._limits.table_bytes >> 20} MB"
            return self._read(length, deadline)
        except TimeoutError:
            return f"takes longer than {seconds:g} s to compile"
        except (EOFError, BrokenPipeError):
            return f"needs more than {self._limits.worker_bytes >> 20} MB to compile"

    def _write(self, frame: bytes, deadline: float) -> None:
        fd = self._process.stdin.fileno()  # type: ignore[union-attr]
        view = memoryview(frame)
        while view:
            _wait(fd, select.POLLOUT, deadline)
            view = view[os.write(fd, view) :]

    def _read(self, count: int, deadline: float) -> bytes:
        fd = self._process.stdout.fileno()  # type: ignore[union-attr]
        parts: list[bytes] = []
        while count > 0:
            _wait(fd, select.POLLIN, deadline)
            part = os.read(fd, min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
