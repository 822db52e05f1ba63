"""Rows of a data set: columns checked, prompts templated and tokenised, before any model is loaded.

A row that cannot be used is listed with file, place and reason; the first five are shown and the run does not start.
Prompts over the limit are filtered if data.filter_overlong_prompts is set, else treated by data.truncation (T4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from banyan.data.chat import Chat
from banyan.data.files import Row, read_rows
from banyan.errors import UserError

_SHOWN = 5


@dataclass(frozen=True)
class Options:
    """The data.* keys that concern one set of files."""

    prompt_key: str
    reward_fn_key: str
    max_prompt_length: int
    truncation: str  # error | left | right | middle
    filter_overlong_prompts: bool
    max_samples: int  # -1: all
    template_kwargs: dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One usable row. `tokens` is what the rollout gets; the rest is handed to the scorer."""

    tokens: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    text: str  # last message, for reports


@dataclass(frozen=True)
class Dataset:
    """Usable rows, in the order of the files."""

    prompts: list[Prompt]
    num_filtered: int
    num_truncated: int

    def __len__(self) -> int:
        return len(self.prompts)


def load(paths: list[str], chat: Chat, options: Options) -> Dataset:
    """Reads, checks and tokenises the rows of all files. Raises UserError with the first five bad rows."""
    prompts: list[Prompt] = []
    bad: list[str] = []
    num_filtered = num_truncated = num_read = 0
    for place, row in _first(paths, options.max_samples):
        num_read += 1
        reason = row if isinstance(row, str) else _reason(row, options)
        if reason:
            bad.append(f"{place}: {reason}")
            continue
        prompt = _prompt(row, chat, options)
        excess = len(prompt.tokens) - options.max_prompt_length
        if excess > 0 and options.filter_overlong_prompts:
            num_filtered += 1
        elif excess > 0 and options.truncation == "error":
            bad.append(
                f"{place}: wanted at most {options.max_prompt_length} prompt tokens (data.max_prompt_length), got "
                f"{len(prompt.tokens)}; set data.filter_overlong_prompts=true or data.truncation"
            )
        else:
            num_truncated += excess > 0
            prompts.append(_truncate(prompt, options))
    if bad:
        raise UserError(_bad_rows(bad))
    if not prompts:
        what = f"{num_filtered} rows, all over data.max_prompt_length" if num_read else "none"
        raise UserError(f"{', '.join(paths)}: wanted at least one row, got {what}")
    return Dataset(prompts, num_filtered, num_truncated)


def _first(paths: list[str], limit: int):
    count = 0
    for path in paths:
        for item in read_rows(path):
            if 0 <= limit <= count:
                return
            count += 1
            yield item


def _reason(row: Row, options: Options) -> str | None:
    """Why a row cannot be used, or None."""
    for column in (options.prompt_key, options.reward_fn_key, "reward_model"):
        if row.get(column) is None:
            return f"column {column!r}: wanted a value, got {'null' if column in row else 'no such column'}"
    if not isinstance(row[options.reward_fn_key], str):
        return f"column {options.reward_fn_key!r}: wanted text, got {type(row[options.reward_fn_key]).__name__}"
    reward = row["reward_model"]
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        return "column 'reward_model': wanted an object with ground_truth"
    if not isinstance(row.get("extra_info") or {}, dict):
        return f"column 'extra_info': wanted an object, got {type(row['extra_info']).__name__}"
    for column in ("images", "videos", "audios"):
        if row.get(column):
            return f"column {column!r}: banyan trains on text only"
    return _message_reason(row[options.prompt_key], options.prompt_key)


def _message_reason(messages: Any, column: str) -> str | None:
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else type(messages).__name__
        return f"column {column!r}: wanted a list of {{role, content}}, got {got}"
    for index, message in enumerate(messages):
        fits = isinstance(message, dict) and all(
            isinstance(message.get(k), str) for k in ("role", "content")
        )
        if not fits:
            return f"column {column!r}: message {index}: wanted role and content as text"
        if any("\ud800" <= letter <= "\udfff" for letter in message["role"] + message["content"]):
            return f"column {column!r}: message {index}: wanted Unicode text, got half a surrogate pair"
    if not messages[-1]["content"].strip():
        return f"column {column!r}: the prompt is empty"
    return None


def _prompt(row: Row, chat: Chat, options: Options) -> Prompt:
    messages = row[options.prompt_key]
    return Prompt(
        tokens=chat.encode_chat(messages, **options.template_kwargs),
        data_source=row[options.reward_fn_key],
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=dict(row.get("extra_info") or {}),
        text=messages[-1]["content"],
    )


def _truncate(prompt: Prompt, options: Options) -> Prompt:
    limit, tokens = options.max_prompt_length, prompt.tokens
    if len(tokens) <= limit:
        return prompt
    if options.truncation == "left":
        kept = tokens[-limit:]
    elif options.truncation == "right":
        kept = tokens[:limit]
    else:
        head = limit // 2
        kept = tokens[:head] + tokens[len(tokens) - (limit - head) :]
    return Prompt(kept, prompt.data_source, prompt.ground_truth, prompt.extra_info, prompt.text)


def _bad_rows(bad: list[str]) -> str:
    head = "one row cannot be used:" if len(bad) == 1 else f"{len(bad)} rows cannot be used"
    if len(bad) > 1:
        head += ":" if len(bad) <= _SHOWN else f"; the first {_SHOWN}:"
    return "\n  ".join([f"data: {head}", *bad[:_SHOWN]])
