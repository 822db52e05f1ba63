"""What a run achieved, in a few lines: reward and accuracy before and after, tokens, times, where things are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from banyan.log.console import duration
from banyan.log.jsonl import by_step, read

Steps = dict[int, dict[str, Any]]
_WINDOW = 5  # steps averaged at both ends
_STAGES = (
    ("rollout", "timing_s/gen"),
    ("waiting for rewards", "timing_s/reward"),
    ("old log-probs", "timing_s/old_log_prob"),
    ("reference", "timing_s/ref"),
    ("update", "timing_s/update_actor"),
    ("update", "timing_s/update"),
    ("validation", "timing_s/testing"),
    ("checkpoints", "timing_s/save_checkpoint"),
)
_FINETUNE = (
    ("train/loss", "training loss"),
    ("val/loss", "validation loss"),
    ("val/rewards/accuracies", "validation pairs in order"),
)


def headline(steps: Steps) -> list[tuple[str, str]]:
    """(name, value) pairs for the top of the report and the summary."""
    rows: list[tuple[str, str]] = []
    rewards = _values(steps, "critic/score/mean")
    if rewards:
        n = min(_WINDOW, max(1, len(rewards) // 2))
        rows.append(
            (
                f"mean reward, first and last {n} steps",
                _change(_mean(rewards[:n]), _mean(rewards[-n:])),
            )
        )
    for name, label in _FINETUNE:
        values = _values(steps, name)
        if values:
            rows.append((f"{label}, first and last", _change(values[0], values[-1])))
    for name in sorted({key for values in steps.values() for key in values if _is_accuracy(key)}):
        values = _values(steps, name)
        rows.append(
            (
                f"validation {name.removeprefix('val-core/')}, first and last",
                _change(values[0], values[-1]),
            )
        )
    logical, unique = (
        math.fsum(_values(steps, f"trie/{kind}_tokens")) for kind in ("logical", "unique")
    )
    if logical:
        rows.append(
            ("tokens of the updates, unique of logical", f"{unique:,.0f} of {logical:,.0f}")
        )
    prompts, computed = (
        math.fsum(_values(steps, f"rollout/{kind}_prompt_tokens"))
        for kind in ("logical", "computed")
    )
    if prompts:
        rows.append(
            (
                "prompt tokens of the rollouts, computed of logical",
                f"{computed:,.0f} of {prompts:,.0f}",
            )
        )
    throughput = _values(steps, "perf/throughput")
    if throughput:
        rows.append(("logical tokens per second, mean", f"{_mean(throughput):,.0f}"))
    times = stage_times(steps)
    if times:
        rows.append(("time in all stages", duration(sum(seconds for _, seconds in times))))
    return rows


def stage_times(steps: Steps) -> list[tuple[str, float]]:
    """(stage, seconds) over the run, stages without time left out."""
    times = [(name, math.fsum(_values(steps, metric))) for name, metric in _STAGES]
    return [(name, seconds) for name, seconds in times if seconds > 0]


def summarise(directory: Path, outcome: dict[str, Any], report: Path | None) -> list[str]:
    """The last lines of a run; the very last says where the results are."""
    steps = by_step(read(directory / "metrics.jsonl"))
    lines = [f"{name}: {value}" for name, value in headline(steps)]
    times = stage_times(steps)
    if times:
        lines.append(
            "time per stage: " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in times)
        )
    if outcome.get("stopped_early"):
        lines.append(
            f"stopped after step {outcome['last_step']}; the same command goes on from there"
        )
    lines.append(f"checkpoint: {outcome.get('checkpoint') or 'none'}")
    lines.append(f"report: {report}" if report else f"results: {directory}")
    return lines


def _is_accuracy(name: str) -> bool:
    return name.startswith("val-core/") and name.rsplit("/", 1)[-1].startswith("mean@")


def _values(steps: Steps, name: str) -> list[float]:
    found = [values.get(name) for _, values in sorted(steps.items())]
    return [float(value) for value in found if isinstance(value, (int, float))]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _change(before: float, after: float) -> str:
    return f"{before:.3f} \u2192 {after:.3f}"
