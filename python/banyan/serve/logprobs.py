"""Log-probabilities in the shapes of the dialects. Minus infinity is -9999.0 on OpenAI's and vLLM's routes."""

from __future__ import annotations

from typing import Any

from banyan.serve.choice import Choice, Top
from banyan.serve.text_stream import TokenText

_LOWEST = -9999.0


def finite(logprob: float) -> float:
    """Never NaN or infinite: JSON has neither."""
    return logprob if logprob > _LOWEST else _LOWEST


def completion(
    tokens: TokenText,
    ids: list[int],
    shown: list[float],
    top: list[Top],
    offsets: list[int],
    as_ids: bool,
) -> dict[str, Any]:
    """`logprobs` of /v1/completions."""
    return {
        "text_offset": offsets,
        "token_logprobs": [finite(value) for value in shown],
        "tokens": [name(tokens, id, as_ids) for id in ids],
        "top_logprobs": [
            {name(tokens, id, as_ids): finite(value) for id, value, _ in entries} for entries in top
        ],
    }


def completion_delta(
    choice: Choice, begin: int, end: int, processed: bool, as_ids: bool
) -> dict[str, Any]:
    part = slice(begin, end)
    return completion(
        choice.tokens,
        choice.ids[part],
        choice.shown(processed)[part],
        choice.top[part],
        choice.offsets()[part],
        as_ids,
    )


def completion_prompt(
    tokens: TokenText, prompt: list[int], found: list[Top], offsets: list[int], as_ids: bool
) -> dict[str, Any]:
    """The same for an echoed prompt: the first token has no log-probability."""
    shown = completion(
        tokens,
        prompt,
        [entries[0][1] if entries else 0.0 for entries in found],
        found,
        offsets,
        as_ids,
    )
    shown["token_logprobs"][0] = None
    shown["top_logprobs"][0] = None
    return shown


def joined(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    return second if first is None else {key: first[key] + second[key] for key in second}


def chat(
    choice: Choice, begin: int, end: int, processed: bool, asked: int, as_ids: bool
) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions for tokens [begin, end)."""
    shown = choice.shown(processed)
    content = []
    for place in range(begin, end):
        entries = choice.top[place] if choice.top else []
        entry = _chat_token(choice.tokens, choice.ids[place], shown[place], as_ids)
        entry["top_logprobs"] = [
            _chat_token(choice.tokens, id, value, as_ids) for id, value in likeliest(entries, asked)
        ]
        content.append(entry)
    return {"content": content}


def likeliest(entries: Top, asked: int) -> list[tuple[int, float]]:
    """The `asked` likeliest of an entry list, best first; -1: all of it."""
    unique = {id: (rank, value) for id, value, rank in entries}
    order = sorted(unique.items(), key=lambda item: (item[1][0], item[0]))
    return [(id, value) for id, (rank, value) in order if asked < 0 or rank <= asked]


def prompt(tokens: TokenText, found: list[Top]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per token of the prompt an object by id, the first null."""
    return [
        {
            str(id): {"logprob": finite(value), "rank": rank, "decoded_token": tokens.name(id)}
            for id, value, rank in entries
        }
        or None
        for entries in found
    ]


def by_id(choice: Choice, begin: int, end: int, processed: bool) -> dict[str, Any]:
    """`logprobs` of /inference/v1/generate."""
    shown = choice.shown(processed)
    content = []
    for place in range(begin, end):
        entries = choice.top[place] if choice.top else []
        content.append(
            {
                "token_id": choice.ids[place],
                "logprob": finite(shown[place]),
                "rank": entries[0][2] if entries else None,
                "top_logprobs": [
                    {"token_id": id, "logprob": finite(value), "rank": rank}
                    for id, value, rank in entries
                ],
            }
        )
    return {"content": content}


def for_training(choice: Choice, begin: int, end: int, seed: int) -> dict[str, Any]:
    """`rl`: both laws of tokens [begin, end), what truncation kept, and what drew them."""
    part = slice(begin, end)
    return {
        "raw": [finite(value) for value in choice.raw[part]],
        "processed": [finite(value) for value in choice.processed[part]],
        "log_kept_mass": choice.kept[part],
        "seed": seed,
        "epochs": choice.epochs(),
    }


def name(tokens: TokenText, id: int, as_ids: bool) -> str:
    return f"token_id:{id}" if as_ids else tokens.name(id)


def _chat_token(tokens: TokenText, id: int, value: float, as_ids: bool) -> dict[str, Any]:
    text = tokens.of(id).decode("utf-8", "replace")  # `bytes` has what no letter shows
    return {
        "token": name(tokens, id, as_ids) if as_ids else text,
        "logprob": finite(value),
        "bytes": list(tokens.of(id)),
    }
