"""`banyan score`: log-probability and entropy of every token of given texts, shared trunks computed once.

Rows in: {"id", "input_ids"} or {"id", "text"} (taken as it is, without a chat template). Rows out: {"id", "logprobs",
"entropy"} with one entry per token; the first is null, since nothing predicts it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from banyan.cli import model_arguments
from banyan.data.chat import Chat
from banyan.data.files import read_rows, write_rows
from banyan.errors import UserError, core_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments.add_model_arguments(parser)
    parser.add_argument(
        "--in", dest="source", type=Path, required=True, help="JSONL with id and input_ids or text"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSONL to write")
    parser.add_argument(
        "--share", choices=("on", "off"), default="on", help="compute shared prefixes once"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="divides the logits (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens-per-block", type=int, default=0, help="token budget of a block; 0: none"
    )


def run(args: argparse.Namespace) -> int:
    if args.temperature <= 0:
        raise UserError(f"--temperature: wanted > 0, got {args.temperature}")
    chat = model_arguments.check(args)
    ids, samples = _rows(args.source, chat)
    core, model = model_arguments.load_model(args)
    _check_vocabulary(args.source, samples, model.shape["vocab"])
    try:
        scores = core.score(
            model, samples, args.share == "on", args.temperature, args.max_tokens_per_block
        )
    except ValueError as error:  # a negative budget, a text past the model's longest
        raise UserError(core_text(error)) from error
    rows = [
        {"id": row_id, "logprobs": [None, *_list(logprobs)], "entropy": [None, *_list(entropy)]}
        for row_id, logprobs, entropy in zip(
            ids, scores["logprobs"], scores["entropy"], strict=True
        )
    ]
    write_rows(args.out, rows)
    print(
        f"{len(rows)} rows, {scores['logical_tokens']} tokens, {scores['unique_tokens']} unique: {args.out}"
    )
    return 0


def _rows(path: Path, chat: Chat) -> tuple[list[Any], list[list[int]]]:
    """Ids and tokens of all rows. Raises UserError for the first that cannot be used."""
    ids: list[Any] = []
    samples: list[list[int]] = []
    for place, row in read_rows(path):
        if isinstance(row, str):
            raise UserError(f"{place}: {row}")
        if "id" not in row:
            raise UserError(f"{place}: column 'id': wanted a value, got no such column")
        tokens = row.get("input_ids")
        if tokens is None and isinstance(row.get("text"), str):
            tokens = chat.encode(row["text"])
        if not isinstance(tokens, list) or not all(
            isinstance(t, int) and not isinstance(t, bool) for t in tokens
        ):
            raise UserError(f"{place}: wanted input_ids (a list of token ids) or text")
        if not tokens:
            raise UserError(f"{place}: wanted at least one token, got none")
        ids.append(row["id"])
        samples.append(tokens)
    if not samples:
        raise UserError(f"{path}: wanted at least one row, got none")
    return ids, samples


def _check_vocabulary(path: Path, samples: list[list[int]], vocab: int) -> None:
    for number, tokens in enumerate(samples, start=1):
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise UserError(f"{path} row {number}: wanted token ids in [0, {vocab}), got {wrong}")


def _list(values: Any) -> list[float]:
    return values.tolist() if hasattr(values, "tolist") else list(values)
