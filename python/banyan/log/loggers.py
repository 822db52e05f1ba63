"""All sinks of a run behind one object: console, metrics.jsonl, samples.jsonl, run.log, TensorBoard.

metrics.jsonl is the truth and always written; report.html is made from it. trainer.logger chooses the rest. A tracker
that banyan does not drive (wandb, mlflow, ...) is said once and left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from banyan.log.console import Console
from banyan.log.jsonl import JsonLines

_ALWAYS = ("console", "file")
_OPTIONAL = ("tensorboard",)


class RunLog:
    """The sinks of one run in `directory`."""

    def __init__(self, directory: Path, names: list[str], total_steps: int | None) -> None:
        self.directory = directory
        self.metrics = JsonLines(directory / "metrics.jsonl")
        self.samples = JsonLines(directory / "samples.jsonl")
        self.console = Console(total_steps, shown="console" in names)
        self._tensorboard: Any = None
        self._want_tensorboard = "tensorboard" in names
        self._started = False
        self._unsaid = [name for name in names if name not in _ALWAYS + _OPTIONAL]

    def start(self, step: int | None) -> None:
        """Opens the files: anew (None), or after the checkpoint of `step`."""
        self._started = True
        self.metrics.start(step)
        self.samples.start(step)
        if self._unsaid:
            names = ", ".join(self._unsaid)
            self.say(
                f"trainer.logger={names}: equivalent, numbers go to metrics.jsonl, report.html and TensorBoard"
            )
            self._unsaid = []
        if self._want_tensorboard and self._tensorboard is None:
            self._open_tensorboard(step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of one step or one validation pass."""
        self._start_once()
        self.metrics.write(step, metrics)
        self.console.step(step, metrics)
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def log_sample(self, step: int, record: dict[str, Any]) -> None:
        """One sample with its text, for the report."""
        self._start_once()
        self.samples.write(step, record)

    def say(self, line: str) -> None:
        """A line on screen and in run.log."""
        self.console.say(line)
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "run.log").open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def close(self) -> None:
        self.console.close()
        self.metrics.close()
        self.samples.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _start_once(self) -> None:
        if not self._started:
            self.start(None)

    def _open_tensorboard(self, step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.say(
                "trainer.logger=tensorboard: the package is not installed (pip install tensorboard); left out"
            )
            return
        purge = None if step is None else step + 1
        self._tensorboard = SummaryWriter(
            log_dir=str(self.directory / "tensorboard"), purge_step=purge
        )


class RankLog:
    """Stands in for RunLog in all processes of a run but the first: what is said goes to rank_N.log."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.console = self
        self._file = directory / f"rank_{rank}.log"

    def start(self, step: int | None) -> None:
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def log_sample(self, step: int, record: dict[str, Any]) -> None:
        pass

    def say(self, line: str) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def close(self) -> None:
        pass
