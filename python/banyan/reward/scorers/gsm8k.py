"""GSM8K: the number after `####` in the response against the number of the data set.

Both rules look at the last 300 characters. `strict` (the default, equal to verl's to the last bit,
published scores depend on it) takes the last `#### number`, drops `,` and `$`, and compares text:
`42.` and `42.0` differ from `42`. `flexible` takes the last number anywhere, drops `,`, `$` and a
trailing `.`, and compares values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from banyan.reward.registry import scorer

_WINDOW_CHARS = 300
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_NUMBER = re.compile(r"(\-?[0-9\.\,]+)")


def extract(solution_str: str, method: str = "strict") -> str | None:
    """The answer in the response as text, or None. Raises ValueError for another method."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"[reward] method: wanted strict or flexible, got {method!r}")
    tail = solution_str[-_WINDOW_CHARS:]
    if method == "strict":
        found = _STRICT.findall(tail)
        return found[-1].replace(",", "").replace("$", "") if found else None
    found = _NUMBER.findall(tail)
    if not found:
        return None
    answer = next((text for text in reversed(found) if text not in ("", ".")), found[0])
    return _plain(answer)


def _plain(text: str) -> str:
    return text.replace(",", "").replace("$", "").removesuffix(".")


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for another one, 0 for none."""
    answer = extract(solution_str, method)
    if answer is None:
        return 0.0
    right = (
        answer == ground_truth
        if method == "strict"
        else _equal_numbers(answer, _plain(ground_truth))
    )
    return score if right else format_score


def _equal_numbers(left: str, right: str) -> bool:
    try:
        return Decimal(left) == Decimal(right)
    except InvalidOperation:
        return False


@scorer("openai/gsm8k")
def score_row(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    return compute_score(solution_str, ground_truth)
