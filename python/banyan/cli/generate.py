"""`banyan generate`: responses to one prompt, or to the rows of a data file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from banyan.cli import model_arguments
from banyan.data.chat import Chat
from banyan.data.files import read_rows, write_rows
from banyan.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments.add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text of one user message")
    source.add_argument(
        "--in",
        dest="source",
        type=Path,
        help="data file; its column `prompt` holds messages or text",
    )
    parser.add_argument("--prompt-key", default="prompt", help="that column (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write rows here instead of printing")
    parser.add_argument(
        "--raw", action="store_true", help="no chat template: the prompt is text to go on with"
    )
    model_arguments.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    chat = model_arguments.check(args)
    rows = _rows(args, chat)
    core, model = model_arguments.load_model(args)
    tokens = [row_tokens for _, row_tokens in rows]
    found, stats = model_arguments.generate(core, model, chat, tokens, args)
    records = [
        {
            "prompt": prompt,
            "responses": [chat.decode(item["response"]) for item in items],
            "finish": [item["finish"] for item in items],
        }
        for (prompt, _), items in zip(rows, found, strict=True)
    ]
    if args.out:
        write_rows(args.out, records)
        print(
            f"{len(records)} prompts, {stats['response_tokens']} tokens in {stats['seconds']:.1f} s: {args.out}"
        )
    else:
        for record in records:
            print("\n---\n".join(record["responses"]))
    return 0


def _rows(args: argparse.Namespace, chat: Chat) -> list[tuple[Any, list[int]]]:
    """(prompt as given, tokens) of every row. Raises UserError for a row that cannot be used."""
    if args.prompt is not None:
        return [(args.prompt, _tokens(args.prompt, args, chat, "--prompt"))]
    rows = []
    for place, row in read_rows(args.source):
        if isinstance(row, str):
            raise UserError(f"{place}: {row}")
        prompt = row.get(args.prompt_key)
        rows.append((prompt, _tokens(prompt, args, chat, place)))
    if not rows:
        raise UserError(f"{args.source}: wanted at least one row, got none")
    return rows


def _tokens(prompt: Any, args: argparse.Namespace, chat: Chat, place: str) -> list[int]:
    if isinstance(prompt, str) and args.raw:
        tokens = chat.encode(prompt)
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        fits = isinstance(messages, list) and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in messages
        )
        if not fits or not messages:
            raise UserError(
                f"{place}: column {args.prompt_key!r}: wanted text or a list of {{role, content}}"
            )
        tokens = chat.encode_chat(messages)
    if not tokens:
        raise UserError(f"{place}: the prompt is empty")
    return tokens
