"""`banyan reward-model`: a Bradley-Terry reward model from the pairs that `banyan dpo` takes."""

from __future__ import annotations

import argparse

from banyan.trainer import finetune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    finetune.add_arguments(parser, "dpo_trainer")


def run(args: argparse.Namespace) -> int:
    fixed = ("preference.objective=reward_model", "trainer.experiment_name=reward_model")
    return finetune.run(args, "dpo", fixed)
