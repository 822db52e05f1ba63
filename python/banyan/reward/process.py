"""One reward worker seen from the trainer: start it, feed it, hear it, end it.

The pipes do not block. The worker leads a session and process group of its own, so that ending the
group ends what the user's code has started too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from banyan.reward import wire

_EXIT_GRACE_S = 0.1
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class WorkerProcess:
    """A running worker. Its owner calls from one thread."""

    def __init__(self, settings: dict[str, Any], log: IO[bytes] | int) -> None:
        path = os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        # One thread each: many small workers share the cores with the trainer. Unbuffered: what was
        # printed before a kill is what explains it.
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "banyan.reward.worker", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.jobs_fd = self._process.stdin.fileno()
        self.answers_fd = self._process.stdout.fileno()
        os.set_blocking(self.jobs_fd, False)
        os.set_blocking(self.answers_fd, False)
        self._reader = wire.Reader(wire.MAX_RESULT_BYTES)
        self._outbox = bytearray()
        self.closed = False  # the worker closed its end: it is gone, or as good as gone

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    def send(self, frame: bytes) -> None:
        self._outbox += frame
        self.flush()

    def flush(self) -> None:
        """Writes what the pipe takes; the rest waits for it to be writable."""
        try:
            while self._outbox:
                del self._outbox[: os.write(self.jobs_fd, self._outbox[: 1 << 16])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outbox.clear()

    def receive(self) -> list[Any]:
        """Messages that have arrived. Raises ValueError for a malformed one."""
        messages = []
        try:
            while True:
                data = os.read(self.answers_fd, 1 << 16)
                if not data:
                    self.closed = True
                    break
                self._reader.feed(data)
                while (message := self._reader.next()) is not None:
                    messages.append(message)
        except BlockingIOError:
            pass
        return messages

    def is_dead(self) -> bool:
        """Whether the process has ended, without reaping it: its group id stays ours."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def _is_ending(self) -> bool:
        """A process that exits closes its pipes a moment before it counts as dead: wait for that."""
        deadline = time.monotonic() + _EXIT_GRACE_S
        while not self.is_dead():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def kill(self) -> str:
        """SIGKILLs the whole group and reaps the worker; returns how it ended."""
        ended_itself = self._is_ending() if self.closed else self.is_dead()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        if not ended_itself:
            return "ended by the trainer"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
