"""The programs in examples/ run as a reader would run them."""

from __future__ import annotations

import importlib
import math

import pytest
from conftest import ROOT, needs_smollm2


@pytest.fixture
def grpo(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("transformers_grpo")


def test_grpo_on_a_tiny_model_learns_its_reward(grpo, capsys):
    history = grpo.main(["--tiny", "--steps", "16"])
    assert history.reward[0] < 0.6
    assert min(history.reward[-3:]) > 0.9
    assert all(
        unique < logical / 2
        for unique, logical in zip(history.unique_tokens, history.logical_tokens, strict=True)
    )
    assert capsys.readouterr().out.startswith("step   1  reward 0.")


def test_grpo_with_several_updates_of_a_batch(grpo):
    """The second update is off-policy: clipping and a ratio other than 1."""
    history = grpo.main(["--tiny", "--steps", "8", "--updates", "2", "--lr", "5e-3"])
    assert history.reward[-1] > history.reward[0] + 0.15


@pytest.mark.slow
@needs_smollm2
def test_grpo_on_smollm2(grpo, smollm2):
    history = grpo.main(["--model", str(smollm2), "--steps", "2", "--prompts", "2"])
    assert all(math.isfinite(norm) for norm in history.grad_norm)
    assert history.unique_tokens[0] < history.logical_tokens[0] / 4
    assert all(0 <= reward <= 1 for reward in history.reward)
