r"""Competition mathematics: the last `\boxed{...}` of the response, compared by value.

math-verify parses both answers and compares them (`\frac12` equals `0.5`). Its own time limits are
off, since they need a signal in the main thread; the limit of the reward worker holds instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan.reward.registry import scorer

_BOX = r"\boxed"


def last_boxed(text: str) -> str | None:
    r"""The last `\boxed{...}` with its balanced braces, or None."""
    start = text.rfind(_BOX + "{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start : end + 1]
    return None


@scorer("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
def score_row(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    # Imported here: it loads sympy, a second that other data sets need not wait for.
    from math_verify import parse, verify

    boxed = last_boxed(solution_str)
    if boxed is None:
        return 0.0
    gold = parse(f"{_BOX}{{{ground_truth}}}", parsing_timeout=None)
    return float(verify(gold, parse(boxed, parsing_timeout=None), timeout_seconds=None))
