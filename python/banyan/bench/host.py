"""The outside world of a measured run: fixed prompts, synthetic rewards, numbers kept.

It ends the run by an exception when the steps are done, since a benchmark wants no checkpoint.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any


class FinishedError(Exception):
    """Every step that was asked for is done."""


def status_bytes(name: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS, VmHWM."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"[bench] /proc/self/status: wanted a line {name}, which is missing")


def reward_of(tokens: list[int]) -> float:
    """Cheap, deterministic, different within a group."""
    return sum(tokens) % 97 / 97


class BenchHost:
    """Implements core/host.h for `num_steps` steps over the same prompts.

    Args:
        on_step: Called after each step with the number of steps done.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        num_steps: int,
        on_step: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._on_step = on_step
        self._prompts = prompts
        self._num_steps = num_steps
        self._scores: list[dict[str, Any]] = []
        self._libc = ctypes.CDLL(None)
        self.metrics: list[dict[str, float]] = []  # of each step
        self.trajectories: list[dict[str, Any]] = []  # of the last step
        self.peak_bytes = 0  # of the whole process: the core resets the kernel's mark

    def next_prompts(self, num_rows: int) -> list[dict[str, Any]]:
        if len(self.metrics) == self._num_steps:
            raise FinishedError
        self._look_at_memory()
        return [{"row": i, "tokens": self._prompts[i]} for i in range(num_rows)]

    def validation_prompts(self) -> list[dict[str, Any]]:
        return []

    def submit(self, trajectory: dict[str, Any], validation: bool) -> None:
        value = reward_of(trajectory["response"])
        key = {"row": trajectory["row"], "index": trajectory["index"]}
        self._scores.append({**key, "failed": False, "reason": "", "value": value, "extra": {}})

    def poll(self) -> list[dict[str, Any]]:
        self._look_at_memory()
        # What sampling freed goes back, so that the update's peak counts from a level floor.
        self._libc.malloc_trim(0)
        scores, self._scores = self._scores, []
        return scores

    def on_samples(
        self,
        step: int,
        validation: bool,
        trajectories: list[dict[str, Any]],
        scores: list[dict[str, Any]],
    ) -> None:
        self.trajectories = sorted(trajectories, key=lambda t: (t["row"], t["index"]))

    def validation_metrics(self, trajectories: list[Any], scores: list[Any]) -> dict[str, float]:
        return {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._look_at_memory()
        self.metrics.append(dict(metrics))
        self._on_step(len(self.metrics))

    def say(self, line: str) -> None:
        print(line, flush=True)

    def should_stop(self) -> bool:
        return False

    def save_state(self) -> str:
        return "{}"

    def load_state(self, state: str) -> None:
        raise ValueError(f"[bench] a measured run does not resume, got {state}")

    def _look_at_memory(self) -> None:
        self.peak_bytes = max(self.peak_bytes, status_bytes("VmHWM"))
