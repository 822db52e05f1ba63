"""Scores of finished trajectories: built-in scorers, the user's own function, and the workers that run them.

This package is imported by the reward workers and must not import torch.
"""

from banyan.reward.registry import scorer

__all__ = ["scorer"]
