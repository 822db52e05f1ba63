"""The parts of `banyan bench step --peers` beside the step: a long shared prompt, and growth.

`P4kR256n16` with sharing on and off, the same sequences by transformers one at a time, cost against
the number of tokens, and planning of a million logical tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PRESET = "P4kR256n16"
TOKENS = ("P100R128n8x8", "P100R128n8x16")  # the second is twice the first, paths as long
MILLION = "P100R128n8x550"  # 1,003,200 logical tokens
SAMPLES_PER_BLOCK = 8
MAX_TOKENS = 8192  # of a block of PRESET


def run_sharing(spec: dict[str, Any], core: Any) -> dict[str, Any]:
    """In a child: PRESET forward and backward; writes its sequences for the peer."""
    model = core.Model.load(spec["model"], kernels=spec["kernels"], with_backward=True)
    options = {
        "preset": spec["preset"],
        "repeats": spec["repeats"],
        "max_tokens_per_block": MAX_TOKENS,
    }
    sequences = core.bench_workload(model, spec["preset"])
    Path(spec["work_file"]).write_text(json.dumps({"sequences": sequences}), encoding="utf-8")
    return core.bench_trie(model, options)


def run_growth(spec: dict[str, Any], core: Any) -> dict[str, Any]:
    """In a child: passes over once and twice the tokens, and planning alone."""
    model = core.Model.load(spec["model"], kernels=spec["kernels"], with_backward=True)
    options = {"repeats": spec["repeats"], "max_samples_per_block": SAMPLES_PER_BLOCK}
    return {
        "passes": core.bench_scaling(model, {**options, "presets": spec["presets"]}),
        "planning": core.bench_planning(model, {**options, "presets": [spec["million"]]})[0],
    }


def figures(
    sharing: dict[str, Any],
    peer_seconds: float,
    growth: dict[str, Any],
    update_seconds_per_token: float,
) -> dict[str, float]:
    """What banyan.bench.bars asks for, out of the two children, the peer and the step.

    Args:
        update_seconds_per_token: Of an update, per unique token, in the same run: an update of a
            million tokens would take minutes, and cost_of_twice_the_tokens says that it scales.
    """
    once, twice = growth["passes"]
    planning = growth["planning"]
    update = planning["unique_tokens"] * update_seconds_per_token
    return {
        f"sharing_ratio_{PRESET}": sharing["ratio"],
        f"sharing_efficiency_{PRESET}": sharing["efficiency"],
        f"sharing_off_ratio_transformers_{PRESET}": peer_seconds / sharing["off"]["median"],
        "cost_of_twice_the_tokens": twice["median"] / once["median"],
        "planner_share_1M_tokens": planning["median"] / update,
    }
