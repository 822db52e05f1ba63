"""`banyan convert`: a GGUF file, or a package that carries one, becomes a model directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from banyan.convert.convert import DEFAULT_SOURCE, cache_dir, convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="source",
        default=DEFAULT_SOURCE,
        metavar="SRC",
        help="GGUF file, or an installed package that carries one (default: %(default)s)",
    )
    parser.add_argument(
        "--to",
        dest="target",
        type=Path,
        metavar="DIR",
        help=f"model directory to write (default: {cache_dir()}/models/<name>; $BANYAN_CACHE)",
    )
    parser.add_argument("--force", action="store_true", help="replace a model that is there")


def run(args: argparse.Namespace) -> int:
    """Converts and prints the directory. Raises UserError for a source that cannot be used."""
    print(convert(args.source, args.target, force=args.force))
    return 0
