"""Validation metrics: closed forms against every possible draw."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from banyan.trainer.metrics import best_of, majority_of, prompt_metrics, validation_metrics


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_best_of_n_equals_the_mean_over_all_draws_without_replacement(n):
    values = [0.0, 1.0, 0.25, 1.0, 0.5]
    draws = [max(draw) for draw in itertools.combinations(values, n)]
    mean, spread = best_of(values, n)
    assert mean == pytest.approx(statistics.fmean(draws), abs=1e-12)
    assert spread == pytest.approx(statistics.pstdev(draws), abs=1e-12)


def test_metrics_of_one_prompt():
    samples = [{"acc": 1.0}, {"acc": 0.0}, {"acc": 1.0}, {"acc": 0.0}]
    metrics = prompt_metrics(samples, "acc")
    assert metrics["mean@4"] == 0.5
    assert metrics["std@4"] == 0.5
    assert metrics["best@2/mean"] == pytest.approx(5 / 6)
    assert metrics["worst@2/mean"] == pytest.approx(1 / 6)
    assert metrics["best@4/mean"] == 1.0
    assert metrics["worst@4/std"] == 0.0
    assert prompt_metrics(samples[:1], "acc") == {"mean@1": 1.0}


def test_majority_takes_the_first_sample_of_the_most_frequent_prediction():
    pairs = [("a", 0.0), ("b", 1.0), ("b", 1.0), ("a", 0.0)]
    assert majority_of(pairs, 4, "seed") == (0.0, 0.0)  # a tie: the first one seen
    mean, _ = majority_of([("a", 0.0), ("b", 1.0), ("b", 1.0), ("b", 1.0)], 3, "seed")
    assert mean == 1.0
    assert majority_of(pairs, 2, "seed") == majority_of(pairs, 2, "seed")


def test_sections_sources_and_skipped_samples():
    groups = [
        ("gsm", [{"acc": 1.0, "reward": 1.0}, {"acc": 0.0, "reward": 0.0}]),
        ("gsm", [{"acc": 1.0, "reward": 1.0}, {"reward": 0.0}]),
        ("own", [{"reward": 2.0}]),
    ]
    metrics = validation_metrics(groups)
    assert metrics["val-core/gsm/acc/mean@2"] == 0.5
    assert metrics["val-aux/gsm/acc/skipped"] == 1.0
    assert metrics["val-aux/gsm/reward/mean@2"] == 0.5
    assert metrics["val-core/own/reward/mean@1"] == 2.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_no_samples_give_no_metrics():
    assert validation_metrics([]) == {}
    assert validation_metrics([("gsm", [])]) == {}
