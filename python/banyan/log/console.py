"""The run on screen: a progress bar on a terminal, one plain line per step elsewhere.

The bar shows reward, tokens per second, sharing (logical tokens per computed one) and the time left.
"""

from __future__ import annotations

import sys
import time
from typing import Any


class Console:
    """Shows steps and lines. `total_steps` None means unknown."""

    def __init__(self, total_steps: int | None, stream: Any = None, shown: bool = True) -> None:
        self._total = total_steps
        self._stream = stream or sys.stdout
        self._shown = shown
        self._began = time.monotonic()
        self._first_step: int | None = None
        self._progress: Any = None
        self._task: Any = None
        if shown and self._stream.isatty():
            self._start_bar()

    def say(self, line: str) -> None:
        """A line for the user; always shown."""
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a finished step, or of a validation pass."""
        if not self._shown:
            return
        validation = {
            name: value
            for name, value in metrics.items()
            if name.startswith("val-core/") or name in ("val/loss", "val/rewards/accuracies")
        }
        if validation:
            shown = "  ".join(
                f"{name.removeprefix('val-core/')} {value:.3f}"
                for name, value in validation.items()
            )
            self.say(f"validation after step {step}: {shown}")
        if "timing_s/step" not in metrics:
            return
        if self._first_step is None:
            self._first_step = step
            self._began = time.monotonic() - metrics["timing_s/step"]
        facts = describe(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, facts=facts)
        else:
            self.say(
                f"step {step}{f'/{self._total}' if self._total else ''}  {facts}{self._time_left(step)}"
            )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _time_left(self, step: int) -> str:
        if not self._total or self._first_step is None:
            return ""
        done = step - self._first_step + 1
        left = (time.monotonic() - self._began) / done * (self._total - step)
        return f"  {duration(left)} left"

    def _start_bar(self) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
        )
        self._task = self._progress.add_task("step", total=self._total, facts="")
        self._progress.start()


def describe(metrics: dict[str, float]) -> str:
    """The few numbers of a step that fit on a line, with units."""
    facts = []
    if "train/loss" in metrics:
        facts.append(f"loss {metrics['train/loss']:.4f}")
    if "rewards/accuracies" in metrics:
        facts.append(f"pairs in order {metrics['rewards/accuracies']:.2f}")
    if "critic/score/mean" in metrics:
        facts.append(f"reward {metrics['critic/score/mean']:.3f}")
    if "perf/throughput" in metrics:
        facts.append(f"{metrics['perf/throughput']:,.0f} tokens/s")
    if "trie/ratio" in metrics:
        facts.append(f"sharing {metrics['trie/ratio']:.2f}x")
    facts.append(f"{metrics['timing_s/step']:.1f} s")
    return "  ".join(facts)


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
