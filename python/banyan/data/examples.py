"""Rows of given text to examples for `banyan sft` and `banyan dpo`: token ids with a mask of what is trained on.

    sft   messages | prompt, response | input_ids, loss_mask    -> one sample, or one per assistant turn
    dpo   prompt, chosen, rejected | chosen, rejected (whole chats) | prompt_, chosen_, rejected_input_ids
          -> two samples, the chosen one first

Text under `prompt`, `response`, `chosen` and `rejected` is one message; lists of {role, content} are taken as they are.
A row that cannot be used is listed with file, place and reason; the first five are shown and the run does not start.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from banyan.data import rows, turns
from banyan.data.chat import Chat
from banyan.data.files import Row
from banyan.errors import UserError


@dataclass(frozen=True)
class Options:
    """The data.* keys that concern one set of files."""

    keys: dict[str, str]  # messages, tools, enable_thinking, prompt, response, chosen, rejected
    enable_thinking: bool | None
    max_length: int
    truncation: str  # error | left | right | middle
    max_samples: int  # -1: all
    vocab_size: int
    turns: turns.Options


@dataclass(frozen=True)
class Sample:
    """Token ids, four bytes each, and the mask, one byte each."""

    tokens: array[int]
    scored: bytes


Example = list[Sample]
Reader = Callable[[Row, Chat, Options], list[turns.Turns]]


@dataclass(frozen=True)
class Examples:
    """The usable rows, in the order of the files."""

    examples: list[Example]
    num_truncated: int

    def __len__(self) -> int:
        return len(self.examples)


def load(paths: list[str], chat: Chat, options: Options, read: Reader) -> Examples:
    """Reads the rows of all files with `read`. Raises UserError with the first five bad rows."""
    examples: list[Example] = []
    bad: list[str] = []
    num_truncated = 0
    for place, row in rows.first_rows(paths, options.max_samples):
        if isinstance(row, str):
            bad.append(f"{place}: {row}")
            continue
        try:
            found = read(row, chat, options)
            num_truncated += any(len(sample.tokens) > options.max_length for sample in found)
            examples.append([_sample(sample, options) for sample in found])
        except (ValueError, UserError) as error:
            bad.append(f"{place}: {error}")
    if bad:
        raise UserError(rows.bad_rows(bad))
    if not examples:
        raise UserError(f"{', '.join(paths)}: wanted at least one row, got none")
    return Examples(examples, num_truncated)


def read_sft(row: Row, chat: Chat, options: Options) -> list[turns.Turns]:
    """Samples of a row of `banyan sft`. Raises ValueError(reason)."""
    keys = options.keys
    if row.get("input_ids") is not None:
        return [_given(row, options)]
    if row.get(keys["messages"]) is not None:
        messages = _messages(row[keys["messages"]], keys["messages"], "user")
        return _encode(row, chat, messages, 0, keys["messages"], options)
    prompt, response = (rows.column(row, keys[name]) for name in ("prompt", "response"))
    if prompt is None or response is None:
        raise ValueError(
            f"wanted column {keys['messages']!r}, or {keys['prompt']!r} and {keys['response']!r}, or 'input_ids'; "
            f"got {', '.join(row) or 'none'}"
        )
    before = _messages(prompt, keys["prompt"], "user")
    after = _messages(response, keys["response"], "assistant")
    return _encode(row, chat, before + after, len(before), keys["response"], options)


def read_pair(row: Row, chat: Chat, options: Options) -> list[turns.Turns]:
    """The chosen and the rejected sample of a row of `banyan dpo`. Raises ValueError(reason)."""
    keys = options.keys
    if row.get("chosen_input_ids") is not None:
        prompt = row.get("prompt_input_ids")
        before = rows.token_ids(prompt, "prompt_input_ids", options.vocab_size) if prompt else []
        names = ("chosen_input_ids", "rejected_input_ids")
        answers = [rows.token_ids(row.get(name), name, options.vocab_size) for name in names]
        return [turns.Turns(before + ids, [0] * len(before) + [1] * len(ids)) for ids in answers]
    chosen, rejected = (rows.column(row, keys[name]) for name in ("chosen", "rejected"))
    if chosen is None or rejected is None:
        raise ValueError(
            f"wanted columns {keys['chosen']!r} and {keys['rejected']!r}; got {', '.join(row) or 'none'}"
        )
    pair = [
        _messages(value, keys[name], "assistant")
        for name, value in (("chosen", chosen), ("rejected", rejected))
    ]
    prompt = rows.column(row, keys["prompt"])
    if prompt is not None:
        before = _messages(prompt, keys["prompt"], "user")
        pair = [before + answer for answer in pair]
        first = len(before)
    else:
        first = _common(*pair)
        if isinstance(chosen, str) or first == 0:
            raise ValueError(
                f"column {keys['prompt']!r}: wanted a prompt, or chosen and rejected as whole chats that begin alike"
            )
    names = (keys["chosen"], keys["rejected"])
    return [
        _encode(row, chat, messages, first, name, options)[0]
        for messages, name in zip(pair, names, strict=True)
    ]


def _given(row: Row, options: Options) -> turns.Turns:
    tokens = rows.token_ids(row["input_ids"], "input_ids", options.vocab_size)
    mask = row.get("loss_mask")
    if mask is None:
        return turns.Turns(tokens, [1] * len(tokens))
    fits = isinstance(mask, list) and all(
        isinstance(entry, int) and entry in (0, 1) for entry in mask
    )
    if not fits or len(mask) != len(tokens):
        raise ValueError(
            f"column 'loss_mask': wanted {len(tokens)} entries of 0 or 1, one per token of input_ids"
            + (f", got {len(mask)}" if isinstance(mask, list) else "")
        )
    return turns.Turns(tokens, [int(entry) for entry in mask])


def _messages(value: Any, name: str, role: str) -> list[dict[str, Any]]:
    """A list of messages; text is one message of `role`."""
    value = [{"role": role, "content": value}] if isinstance(value, str) else value
    reason = rows.messages_reason(value, name)
    if reason:
        raise ValueError(reason)
    return value


def _encode(
    row: Row,
    chat: Chat,
    messages: list[dict[str, Any]],
    first: int,
    name: str,
    options: Options,
) -> list[turns.Turns]:
    kwargs = dict(options.turns.template_kwargs)
    tools = row.get(options.keys["tools"])
    if tools:
        kwargs["tools"] = tools
    thinking = row.get(options.keys["enable_thinking"])
    thinking = options.enable_thinking if thinking is None else thinking
    if thinking is not None:
        kwargs["enable_thinking"] = bool(thinking)
    how = turns.Options(options.turns.each_turn, options.turns.ignore_mismatch, kwargs)
    try:
        return turns.encode_turns(chat, messages, first, how)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from error


def _sample(sample: turns.Turns, options: Options) -> Sample:
    """The sample under data.max_length, checked for something to train on."""
    length = len(sample.tokens)
    if length > options.max_length and options.truncation == "error":
        raise ValueError(
            f"wanted at most {options.max_length} tokens (data.max_length), got {length}; set data.truncation"
        )
    parts = rows.kept_range(length, options.max_length, options.truncation)
    tokens = [token for begin, end in parts for token in sample.tokens[begin:end]]
    scored = [entry for begin, end in parts for entry in sample.scored[begin:end]]
    if not any(scored[1:]):
        raise ValueError(
            "wanted a token to train on behind the first, got none"
            + (" within data.max_length" if length > options.max_length else "")
        )
    return Sample(array("i", tokens), bytes(scored))


def _common(left: list[Any], right: list[Any]) -> int:
    """Messages that both chats begin with."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
