"""Fixtures of the shell's tests: a model directory, a data file, the arguments of a small run."""

from __future__ import annotations

from pathlib import Path

import pytest
from shell_files import data_row, write_jsonl, write_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model_dir(tmp_path / "model")


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    return write_jsonl(
        tmp_path / "train.jsonl", [data_row(f"{i} + 3?", str(i + 3)) for i in range(8)]
    )


@pytest.fixture
def arguments(tmp_path: Path, model_dir: Path, train_file: Path) -> list[str]:
    """A complete configuration of a small run."""
    return [
        f"actor_rollout_ref.model.path={model_dir}",
        f"data.train_files={train_file}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.logger=[console]",
        "trainer.total_training_steps=3",
    ]
