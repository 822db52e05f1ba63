"""Ctrl-C: the first asks the trainer to save and stop, the second stops at once. SIGTERM counts as a first one.

While C++ runs, Python's own signal handlers wait; the wake-up descriptor does not. A thread reads it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_EXIT_INTERRUPTED = 130


class Interrupt:
    """Watches SIGINT and SIGTERM while in use as a context manager, in the main thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._asked = threading.Event()
        self._old: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """True once the user asked to stop."""
        return self._asked.is_set()

    def __enter__(self) -> Interrupt:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, lambda *_: None)
        self._old_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self._write_end)
        self._thread.join()
        os.close(self._read_end)

    def _watch(self) -> None:
        while number := os.read(self._read_end, 1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            if self._asked.is_set():
                os._exit(_EXIT_INTERRUPTED)
            self._asked.set()
            self._say("stopping: the run saves its state first; press Ctrl-C again to stop at once")
