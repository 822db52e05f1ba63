"""What the peer scripts share: the work to do, the clock, the memory meter, the result file.

The work file is JSON: {"prompts": [P lists of ids], "responses": [S lists of ids], "rewards": [S]},
S = P * n, the n responses of prompt p at [p*n, (p+1)*n). It is written by `banyan bench`, so every
side works on the same tokens. The work of `banyan bench rollout` has sizes only:
{"rollouts": {name: {"prompts", "group_size", "response_length"}}}. Nothing here imports banyan: the
scripts run in environments of their own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Work:
    prompts: list[list[int]]
    responses: list[list[int]]
    rewards: list[float]

    @property
    def group_size(self) -> int:
        return len(self.responses) // len(self.prompts)


@dataclass
class Rollout:
    prompts: list[list[int]]
    group_size: int  # responses of one prompt
    response_length: int  # tokens, exactly

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.group_size


def parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--work", required=True, type=Path, help="work file of `banyan bench`")
    parser.add_argument("--json", required=True, type=Path, help="result file to write")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs")
    return parser


def read_work(path: Path) -> Work:
    return Work(**json.loads(path.read_text(encoding="utf-8")))


def read_rollouts(path: Path) -> dict[str, Rollout]:
    rollouts = json.loads(path.read_text(encoding="utf-8"))["rollouts"]
    return {name: Rollout(**values) for name, values in rollouts.items()}


def time_rollout(rollout: Rollout, repeats: int, run: Callable[[], None]) -> dict[str, object]:
    """Seconds and tokens per second of `run`, the median of `repeats`. The caller has warmed up."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    tokens = rollout.num_sequences * rollout.response_length
    return {"seconds": median, "all_seconds": seconds, "tokens_per_s": tokens / median}


def write_result(path: Path, **values: object) -> None:
    path.write_text(json.dumps(values) + "\n", encoding="utf-8")


def status_bytes(name: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS, or VmHWM (the highest VmRSS so far)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"[bench] /proc/self/status: wanted a line {name}, which is missing")


class PeakMeter:
    """Peak of resident memory above its level at the start of a stretch of work.

    Freed memory that the allocator still holds is given back first; then the kernel's high-water
    mark is reset, so `above` counts what the stretch itself adds.
    """

    def __init__(self) -> None:
        self.process_peak = status_bytes("VmHWM")
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._start = status_bytes("VmRSS")

    def stop(self) -> tuple[int, int]:
        """(peak above the start, peak of the whole process), bytes."""
        peak = status_bytes("VmHWM")
        return peak - self._start, max(peak, self.process_peak)
