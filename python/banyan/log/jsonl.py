"""A file of JSON objects, one per line, keyed by `step`, that survives a kill and a resume.

Every line is written and flushed whole. On resume from the checkpoint of step N a torn last line and all lines with a
later step are dropped, so that the file reads as if the run had never stopped.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends records to `path`; nothing is touched before `start`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: Any = None

    def start(self, step: int | None) -> None:
        """Opens the file: after the checkpoint of `step`, or anew (None; an older file is kept as *.previous)."""
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if step is None:
            if self.path.is_file() and self.path.stat().st_size > 0:
                self.path.replace(self.path.with_suffix(".previous" + self.path.suffix))
        elif self.path.is_file():
            self._keep_until(step)
        self._stream = self.path.open("a", encoding="utf-8")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Adds one line; a number that is not finite becomes null."""
        if self._stream is None:
            self.start(None)
        record = {"step": step, **{key: _finite(value) for key, value in values.items()}}
        self._stream.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _keep_until(self, step: int) -> None:
        kept = [record for record in read(self.path) if record["step"] <= step]
        draft = self.path.with_suffix(".tmp")
        with draft.open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self.path)


def read(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file, in order; a torn or foreign line is left out. An absent file has none."""
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def by_step(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Records of one step merged, later ones first in rank."""
    merged: dict[int, dict[str, Any]] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return merged


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
