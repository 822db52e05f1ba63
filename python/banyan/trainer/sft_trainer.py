"""Supervised fine-tuning: `banyan sft` and, with the same arguments, `python3 -m banyan.trainer.sft_trainer`."""

from __future__ import annotations

import argparse
import sys

from banyan.trainer import finetune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    finetune.add_arguments(parser, "sft_trainer")


def run(args: argparse.Namespace) -> int:
    return finetune.run(args, "sft")


def main(argv: list[str] | None = None) -> int:
    from banyan.cli.main import main as cli

    return cli(["sft", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
