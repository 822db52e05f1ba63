"""Rows of a data set: columns checked, prompts templated and tokenised, before any model is loaded.

A row that cannot be used is listed with file, place and reason; the first five are shown and the run does not start.
Prompts over the limit are filtered if data.filter_overlong_prompts is set, else treated by data.truncation (T4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from banyan.data import rows
from banyan.data.chat import Chat
from banyan.data.files import Row
from banyan.errors import UserError


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
    keep_messages: bool = False  # for a reward model with a template of its own


@dataclass(frozen=True)
class Prompt:
    """One usable row. `tokens` is what the rollout gets; the rest is handed to the scorer."""

    tokens: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    text: str  # last message, for reports
    messages: list[dict[str, Any]] | None = None  # None unless kept, or given as token ids


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
    for place, row in rows.first_rows(paths, options.max_samples):
        num_read += 1
        prompt = row if isinstance(row, str) else _read(row, chat, options)
        if isinstance(prompt, str):
            bad.append(f"{place}: {prompt}")
            continue
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
        raise UserError(rows.bad_rows(bad))
    if not prompts:
        what = f"{num_filtered} rows, all over data.max_prompt_length" if num_read else "none"
        raise UserError(f"{', '.join(paths)}: wanted at least one row, got {what}")
    return Dataset(prompts, num_filtered, num_truncated)


def _read(row: Row, chat: Chat, options: Options) -> Prompt | str:
    """One prompt, or why the row cannot be used."""
    reason = _reason(row, options)
    if reason:
        return reason
    # A prompt is a chat, or token ids in its column or in `input_ids`.
    name = "input_ids" if row.get(options.prompt_key) is None else options.prompt_key
    value = row[name]
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        try:
            tokens = rows.token_ids(value, name, chat.vocab_size)
        except ValueError as error:
            return str(error)
        return _prompt(row, tokens, chat.decode(tokens), options)
    reason = rows.messages_reason(value, name)
    if reason is None and not (value[-1].get("content") or "").strip():
        reason = f"column {name!r}: the prompt is empty"
    if reason:
        return reason
    tokens = chat.encode_chat(value, **options.template_kwargs)
    prompt = _prompt(row, tokens, value[-1]["content"], options)
    return replace(prompt, messages=value) if options.keep_messages else prompt


def _reason(row: Row, options: Options) -> str | None:
    """Why a row cannot be used, its prompt aside, or None."""
    prompt_key = "input_ids" if row.get("input_ids") is not None else options.prompt_key
    for column in (prompt_key, options.reward_fn_key, "reward_model"):
        if row.get(column) is None:
            return f"column {column!r}: wanted a value, got {'null' if column in row else 'no such column'}"
    if not isinstance(row[options.reward_fn_key], str):
        return f"column {options.reward_fn_key!r}: wanted text, got {type(row[options.reward_fn_key]).__name__}"
    reward = row["reward_model"]
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        return "column 'reward_model': wanted an object with ground_truth"
    if not isinstance(row.get("extra_info") or {}, dict):
        return f"column 'extra_info': wanted an object, got {type(row['extra_info']).__name__}"
    return rows.media_reason(row)


def _prompt(row: Row, tokens: list[int], text: str, options: Options) -> Prompt:
    return Prompt(
        tokens=tokens,
        data_source=row[options.reward_fn_key],
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=dict(row.get("extra_info") or {}),
        text=text,
    )


def _truncate(prompt: Prompt, options: Options) -> Prompt:
    parts = rows.kept_range(len(prompt.tokens), options.max_prompt_length, options.truncation)
    kept = [token for begin, end in parts for token in prompt.tokens[begin:end]]
    return replace(prompt, tokens=kept)
