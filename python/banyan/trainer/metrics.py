"""Validation metrics in verl's names, with closed forms where verl draws bootstrap samples (T40).

For a prompt with N samples and every numeric variable: mean@N, std@N, and for n in {2, 4, ... < N, N} the mean and
standard deviation of the best and worst of n drawn without replacement. With x sorted upwards,

    P(best of n = x_(j)) = C(j - 1, n - 1) / C(N, n),        j = 1 .. N,

and worst mirrored. A `pred` entry adds maj@n: the value of the first sample with the most frequent prediction, exact at
n = N, else over 1,000 seeded draws. Then the plain mean over the prompts of a data source. A sample without a value is
skipped and counted (T41).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

_DRAWS = 1000
Sample = dict[str, Any]  # variable -> number; "pred" -> anything hashable


def validation_metrics(groups: list[tuple[str, list[Sample]]]) -> dict[str, float]:
    """Metrics of (data source, samples of one prompt) pairs, named `<section>/<source>/<variable>/<metric>`."""
    out: dict[str, float] = {}
    for source in sorted({source for source, _ in groups}):
        prompts = [samples for name, samples in groups if name == source]
        variables = sorted(
            {key for samples in prompts for sample in samples for key in sample if key != "pred"}
        )
        core = "acc" if "acc" in variables else "reward"
        largest = max(len(samples) for samples in prompts)
        for variable in variables:
            table = [prompt_metrics(samples, variable, source) for samples in prompts]
            for metric in sorted({name for row in table for name in row}):
                values = [row[metric] for row in table if metric in row]
                section = _section(variable == core, metric, largest)
                out[f"{section}/{source}/{variable}/{metric}"] = math.fsum(values) / len(values)
            skipped = sum(variable not in sample for samples in prompts for sample in samples)
            if skipped:
                out[f"val-aux/{source}/{variable}/skipped"] = float(skipped)
    return out


def prompt_metrics(samples: list[Sample], variable: str, source: str = "") -> dict[str, float]:
    """Metrics of one variable over the samples of one prompt."""
    kept = [sample for sample in samples if variable in sample]
    values = [float(sample[variable]) for sample in kept]
    count = len(values)
    if not count:
        return {}
    mean = math.fsum(values) / count
    out = {f"mean@{count}": mean}
    if count == 1:
        return out
    out[f"std@{count}"] = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count)
    has_predictions = all("pred" in sample for sample in kept)
    for n in _sizes(count):
        out[f"best@{n}/mean"], out[f"best@{n}/std"] = best_of(values, n)
        worst, spread = best_of([-value for value in values], n)
        out[f"worst@{n}/mean"], out[f"worst@{n}/std"] = -worst, spread
        if has_predictions:
            pairs = [(sample["pred"], float(sample[variable])) for sample in kept]
            out[f"maj@{n}/mean"], out[f"maj@{n}/std"] = majority_of(
                pairs, n, f"{source} {variable} {n}"
            )
    return out


def best_of(values: list[float], n: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of n values drawn without replacement."""
    ordered = sorted(values)
    total = math.comb(len(ordered), n)
    weights = [math.comb(j, n - 1) / total for j in range(len(ordered))]
    mean = math.fsum(weight * value for weight, value in zip(weights, ordered, strict=True))
    square = math.fsum(w * (value - mean) ** 2 for w, value in zip(weights, ordered, strict=True))
    return mean, math.sqrt(max(square, 0.0))


def majority_of(pairs: list[tuple[Any, float]], n: int, seed: str) -> tuple[float, float]:
    """Mean and standard deviation of the value behind the most frequent prediction of n drawn pairs."""
    if n == len(pairs):
        return _majority(pairs), 0.0
    source = random.Random(seed)
    draws = [
        _majority([pairs[i] for i in sorted(source.sample(range(len(pairs)), n))])
        for _ in range(_DRAWS)
    ]
    mean = math.fsum(draws) / _DRAWS
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in draws) / _DRAWS)


def _majority(pairs: list[tuple[Any, float]]) -> float:
    (winner, _), *_ = Counter(prediction for prediction, _ in pairs).most_common(1)
    return next(value for prediction, value in pairs if prediction == winner)


def _sizes(count: int) -> list[int]:
    sizes = []
    n = 2
    while n < count:
        sizes.append(n)
        n *= 2
    return [*sizes, count]


def _section(is_core: bool, metric: str, largest: int) -> str:
    counted = metric.split("/")[0].endswith(f"@{largest}")
    return (
        "val-core"
        if is_core and counted and metric.startswith(("mean", "maj", "best"))
        else "val-aux"
    )
