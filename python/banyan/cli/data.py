"""`banyan data arithmetic|gsm8k`: files of rows in verl's columns."""

from __future__ import annotations

import argparse
from pathlib import Path

from banyan.data import arithmetic, gsm8k
from banyan.data.files import write_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True)
    made = kinds.add_parser("arithmetic", help="word problems with integer answers, generated")
    made.add_argument(
        "--out", type=Path, required=True, help="file ending in .jsonl, .json or .parquet"
    )
    made.add_argument(
        "--rows", type=int, default=1000, help="number of problems (default: %(default)s)"
    )
    made.add_argument(
        "--seed", type=int, default=0, help="same seed, same rows (default: %(default)s)"
    )
    made.add_argument(
        "--split", choices=("train", "test"), default="train", help="test: numbers never in train"
    )
    made.add_argument(
        "--levels",
        type=_levels,
        default=(1, 2),
        help="difficulty: 1 add and subtract, 2 multiply, 3 two steps (default: 1,2)",
    )
    read = kinds.add_parser("gsm8k", help="GSM8K from its authors' JSONL")
    read.add_argument(
        "--in", dest="source", type=Path, required=True, help="train.jsonl or test.jsonl"
    )
    read.add_argument(
        "--out", type=Path, required=True, help="file ending in .jsonl, .json or .parquet"
    )
    read.add_argument("--split", help="name kept in extra_info (default: the input file's name)")


def run(args: argparse.Namespace) -> int:
    if args.kind == "arithmetic":
        rows = arithmetic.generate(args.rows, args.seed, args.split, args.levels)
    else:
        rows = gsm8k.convert(args.source, args.split or args.source.stem)
    write_rows(args.out, rows)
    print(f"{len(rows)} rows in {args.out}")
    return 0


def _levels(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"wanted numbers such as 1,2, got {text!r}") from error
