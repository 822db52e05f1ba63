"""`banyan dpo`: training on pairs of a chosen and a rejected answer; preference.objective chooses the loss."""

from __future__ import annotations

import argparse

from banyan.trainer import finetune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    finetune.add_arguments(parser, "dpo_trainer")


def run(args: argparse.Namespace) -> int:
    return finetune.run(args, "dpo")
