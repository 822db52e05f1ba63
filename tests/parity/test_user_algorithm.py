"""A training step with the user's loss and advantage equals one with the built-in ones of the same formula."""

from __future__ import annotations

import pytest
from models import write_model
from test_step import run

from banyan import _C, algo_functions

MINE = """
import torch

def ppo(log_prob, old_log_prob, advantages, config):
    ratio = torch.exp(log_prob - old_log_prob)
    bounded = ratio.clamp(1 - config["clip_ratio_low"], 1 + config["clip_ratio_high"])
    loss = torch.maximum(-advantages * ratio, -advantages * bounded)
    return loss, {"tokens": float(len(loss))}

def grpo(token_level_rewards, index):
    rewards = torch.stack([row.sum() for row in token_level_rewards])
    groups = [torch.tensor([other == one for other in index]) for one in index]
    return [(r - rewards[g].mean()) / (rewards[g].std() + 1e-6) for r, g in zip(rewards, groups)]
"""
LOSS = algo_functions.LOSS_KEY
ADVANTAGE = algo_functions.ADVANTAGE_KEY


@pytest.mark.parametrize("micro_batch", [16, 3])
def test_a_step_with_python_functions(tmp_path, micro_batch):
    """Two mini-batches, so that ratios differ from 1; cut into blocks, so that the loss runs on a whole one."""
    _, model = write_model("llama", tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    names = {LOSS: f"{tmp_path}/mine.py:ppo", ADVANTAGE: f"{tmp_path}/mine.py:grpo"}
    algo_functions.register(_C, names, algo_functions.load(names))
    changes = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.clip_ratio_c": 1e9,  # no dual clip
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro_batch,
    }
    own = run(model, tmp_path / "own", dtype="float64", **changes, **names)[0].metrics[-1]
    built_in = run(model, tmp_path / "built_in", dtype="float64", **changes)[0].metrics[-1]
    for name in ("actor/loss", "actor/pg_loss", "actor/grad_norm", "critic/advantages/max"):
        assert own[name] == pytest.approx(built_in[name], rel=1e-9, abs=1e-12), name
    assert built_in["actor/grad_norm"] > 0
    assert own["actor/ppo_kl"] != 0
    assert own["actor/tokens"] > 0  # the loss's own metric
