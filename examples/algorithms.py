"""A policy loss and an advantage estimator of one's own; docs/guides/your_own_algorithm.md explains them.

banyan train ... \
    algorithm.adv_estimator=examples/algorithms.py:median_baseline \
    actor_rollout_ref.actor.policy_loss.loss_mode=examples/algorithms.py:soft_clip
"""

from __future__ import annotations

import torch


def soft_clip(log_prob, old_log_prob, advantages, config):
    """PPO's ratio with a smooth bound: tanh instead of a clip, so that no token loses its gradient at once."""
    width = config["clip_ratio_high"]
    ratio = torch.exp(log_prob - old_log_prob)
    bounded = 1.0 + width * torch.tanh((ratio - 1.0) / width)
    metrics = {"ratio_max": ratio.max().item()}
    return -advantages * bounded, metrics


def median_baseline(token_level_rewards, index):
    """Reward minus the median of its group, the same on every token of a response."""
    rewards = torch.stack([row.sum() for row in token_level_rewards])
    groups = torch.tensor(index)
    baseline = torch.stack([rewards[groups == group].median() for group in index])
    return [float(value) for value in rewards - baseline]
