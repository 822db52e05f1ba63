"""`banyan trie explain FILE`: what sharing makes of a batch, in words and as a picture.

A row is a list of token ids, {"tokens": [...]}, {"input_ids": [...]}, or {"text": ...} with a tokenizer (--model).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from banyan import extension
from banyan.data.chat import Chat
from banyan.data.files import read_rows
from banyan.errors import UserError, core_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True)
    explain = verbs.add_parser(
        "explain", help="tree, groups, providers, kept lengths, tokens saved"
    )
    explain.add_argument("file", type=Path, metavar="FILE", help="rows: .jsonl, .json or .parquet")
    explain.add_argument("--svg", type=Path, help="also draw the tree into this file")
    explain.add_argument(
        "--model", type=Path, help="model or tokenizer directory: shows texts, reads rows with text"
    )
    explain.add_argument("--min-prefix-len", type=int, default=1, help="default: %(default)s")
    explain.add_argument("--min-group-size", type=int, default=2, help="default: %(default)s")
    explain.add_argument(
        "--detector",
        choices=("trie", "trie_online"),
        default="trie",
        help="rule of groups and rows; trie_online looks at the rows so far (default: %(default)s)",
    )
    explain.add_argument(
        "--max-lines", type=int, default=100, help="lines of a list; 0: all (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    chat = Chat(args.model) if args.model else None
    rows = [_tokens(place, row, chat) for place, row in read_rows(args.file, (dict, list))]
    if not rows:
        raise UserError(f"{args.file}: wanted at least one row, got none")
    texts = {} if chat is None else {t: chat.decode([t]) for t in {t for row in rows for t in row}}
    try:
        found = extension.load().explain_trie(
            rows,
            args.min_prefix_len,
            args.min_group_size,
            args.detector,
            max(0, args.max_lines),
            texts,
        )
    except (ValueError, TypeError) as error:
        raise UserError(core_text(error)) from error
    print(found["text"], end="")
    if args.svg:
        args.svg.write_text(found["svg"], encoding="utf-8")
        print(f"picture: {args.svg}")
    return 0


def _tokens(place: str, row: Any, chat: Chat | None) -> list[int]:
    """Token ids of a row. Raises UserError for one that has none."""
    if isinstance(row, str):
        raise UserError(f"{place}: {row}")
    tokens = row if isinstance(row, list) else row.get("tokens", row.get("input_ids"))
    if tokens is None and isinstance(row.get("text"), str):
        if chat is None:
            raise UserError(f"{place}: wanted --model to read rows with text")
        tokens = chat.encode(row["text"])
    if not isinstance(tokens, list) or not all(
        isinstance(t, int) and not isinstance(t, bool) and 0 <= t < 2**31 for t in tokens
    ):
        raise UserError(f"{place}: wanted a list of token ids, tokens, input_ids or text")
    if not tokens:
        raise UserError(f"{place}: wanted at least one token, got none")
    return tokens
