"""What `banyan bench step --peers` is held to: each figure beside its bar.

A bar is on a ratio of two measurements of one run, so it can be checked on any machine.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    key: str
    sign: str  # ">=" or "<="
    value: float
    meaning: str


BARS = (
    Bar("update_ratio_transformers", ">=", 6.0, "transformers' padded update / banyan's"),
    Bar("mfu", ">=", 0.5, "model FLOPs of unique tokens / the matrix rate"),
    Bar("step_ratio_trl", ">=", 10.0, "TRL's whole step / banyan's"),
    Bar("activation_peak_ratio_transformers", "<=", 0.5, "banyan's / transformers'"),
    Bar("sharing_efficiency_P4kR256n16", ">=", 0.95, "gain of sharing / gain in FLOPs"),
    Bar(
        "sharing_off_ratio_transformers_P4kR256n16",
        ">=",
        3.0,
        "one sequence at a time / sharing off",
    ),
    Bar("cost_of_twice_the_tokens", "<=", 2.1, "at the same length of paths"),
    Bar("planner_share_1M_tokens", "<=", 0.01, "trie and plan / update, a million logical tokens"),
)
_SIGNS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


def held(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The bars whose figure was measured: {key: {value, bar, holds}}."""
    return {
        bar.key: {
            "value": result[bar.key],
            "bar": f"{bar.sign} {bar.value:g}",
            "holds": _SIGNS[bar.sign](result[bar.key], bar.value),
        }
        for bar in BARS
        if bar.key in result
    }


def print_bars(found: dict[str, dict[str, Any]]) -> None:
    if not found:
        return
    print("\n  figure                                        value     bar")
    for bar in BARS:
        if bar.key in found:
            entry = found[bar.key]
            verdict = "holds" if entry["holds"] else "MISSED"
            print(
                f"  {bar.key:<44}{entry['value']:8.4g}   {entry['bar']:<8} {verdict:<7} {bar.meaning}"
            )
