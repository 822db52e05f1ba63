"""What a scorer's answer must look like, checked in the trainer: the worker is not trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScoreResult:
    """The score of one trajectory.

    `failed` samples have no value: they are left out of their group's statistics and counted.
    """

    value: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)  # further entries of the mapping
    failed: bool = False
    reason: str = ""  # "<status>: <what happened>", empty if not failed
    status: str = "ok"  # ok | timeout | error | killed | invalid
    text: dict[str, str] = field(default_factory=dict)  # entries that are text, such as `pred`


def failure(status: str, what: str) -> ScoreResult:
    return ScoreResult(failed=True, status=status, reason=f"{status}: {what}")


def from_answer(answer: Any) -> ScoreResult:
    """A number, or a mapping with `score`; a plain number is also the entry `acc`."""
    if isinstance(answer, dict):
        if "score" not in answer:
            return failure("invalid", "wanted a mapping with score, got one without")
        value, entries = answer["score"], answer
    else:
        value, entries = answer, {"acc": answer}
    if not _is_finite(value):
        what = "a text" if isinstance(value, str) else _short(value)
        return failure("invalid", f"wanted a finite number or a mapping with score, got {what}")
    extra = {k: float(v) for k, v in entries.items() if k != "score" and _is_finite(v)}
    text = {k: v for k, v in entries.items() if isinstance(v, str)}
    return ScoreResult(value=float(value), extra=extra, text=text)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(float(value))
    except OverflowError:  # an int beyond the range of float
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
