"""The embedded arithmetic problems: the integer after the last `####`, by GSM8K's strict rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan.reward.registry import scorer
from banyan.reward.scorers import gsm8k


@scorer("banyan/arithmetic")
def score_row(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    return gsm8k.compute_score(solution_str, str(ground_truth))
