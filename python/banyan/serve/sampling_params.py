"""Checked request fields -> the engine's sampling parameters, in vLLM's and in SGLang's dialect.

vLLM    temperature < 1e-5 is greedy and resets top_p, top_k, min_p; below 0.01 it is 0.01; greedy with n > 1 is refused
SGLang  temperature < 1e-6 is greedy; no upper bound; top_k = 0 is refused; max_new_tokens = 0 scores the prompt
"""

from __future__ import annotations

import json
from typing import Any

from banyan.serve.context import Context
from banyan.serve.errors import bad
from banyan.serve.field_kinds import GUIDED, NO_TAGS

Fields = dict[str, Any]
_SEED_MASK = (1 << 64) - 1
_ALL_TOKENS = 1 << 30  # kAllTokens


def openai_params(context: Context, fields: Fields) -> Fields:
    """Parameters of the OpenAI and vLLM routes, without max_tokens and logprobs, which differ between them."""
    temperature = fields["temperature"]
    greedy = temperature < 1e-5
    if greedy and fields["n"] > 1:
        raise bad(f"n: wanted 1 with temperature 0, got {fields['n']}", "n")
    params = {
        **_common(context, fields),
        "temperature": 0.0 if greedy else max(temperature, 0.01),
        "top_p": 1.0 if greedy else fields["top_p"],
        "top_k": -1 if greedy or fields["top_k"] == 0 else fields["top_k"],
        "min_p": 0.0 if greedy else fields["min_p"],
        "min_tokens": fields["min_tokens"],
        "seed": _seed(context, fields["seed"]),
        "bad_words": _bad_words(context, fields["bad_words"] or []),
        "allowed_token_ids": sorted(set(fields["allowed_token_ids"] or [])),
        "logprob_token_ids": fields["logprob_token_ids"] or [],
        "prompt_logprobs": _count(fields["prompt_logprobs"]),
        "grammar": _grammar(fields),
    }
    repetition = fields["repetition_detection"]
    if repetition:
        params["repetition_detection"] = {
            "max_pattern": repetition["max_pattern_size"],
            "min_pattern": repetition["min_pattern_size"],
            "min_count": repetition["min_count"],
        }
    return params


def sglang_params(context: Context, fields: Fields) -> Fields:
    if fields["top_k"] == 0:
        raise bad("sampling_params.top_k: wanted -1 or >= 1, got 0", "top_k")
    kinds = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
    grammars = [(kind, fields[name]) for name, kind in kinds.items() if fields[name]]
    if len(grammars) > 1:
        raise bad(f"sampling_params: wanted one of {', '.join(kinds)}, got {len(grammars)}")
    return {
        **_common(context, fields),
        "temperature": 0.0 if fields["temperature"] < 1e-6 else fields["temperature"],
        "top_p": fields["top_p"],
        "top_k": fields["top_k"],
        "min_p": fields["min_p"],
        "max_tokens": fields["max_new_tokens"],
        "min_tokens": fields["min_new_tokens"],
        "seed": _seed(context, fields["sampling_seed"]),
        "grammar": grammars[0] if grammars else None,
    }


async def compile_grammars(context: Context, requests: list[Fields]) -> None:
    """Puts the token table in the place of the grammar that the requests of a call have in common."""
    grammar = requests[0]["params"]["grammar"]
    if grammar is None:
        return
    table = await context.compile(*grammar)
    for request in requests:
        request["params"]["grammar"] = table


def set_length(
    context: Context,
    params: Fields,
    prompt: list[int],
    wanted: int | None,
    name: str,
    default: int | None = None,
) -> None:
    """Sets max_tokens: what was asked for, or what the context leaves of the default. Raises 400 with the range."""
    room = context.shape.max_model_len - len(prompt)
    if not prompt:
        raise bad("prompt: wanted at least one token, got none", "prompt")
    if room < (0 if wanted == 0 else 1):
        raise bad(
            f"prompt: wanted fewer than {context.shape.max_model_len} tokens, the context, got {len(prompt)}",
            "prompt",
        )
    if wanted is not None and wanted > room:
        raise bad(
            f"{name}: wanted <= {room} (context {context.shape.max_model_len} - prompt {len(prompt)}), "
            f"got {wanted}",
            name,
        )
    params["max_tokens"] = min(room, default or room) if wanted is None else wanted
    if wanted != 0 and params["min_tokens"] > params["max_tokens"]:
        raise bad(
            f"min_tokens: wanted <= max_tokens ({params['max_tokens']}), got {params['min_tokens']}",
            "min_tokens",
        )


def stop_strings(fields: Fields) -> list[str]:
    stop = fields.get("stop")
    return [stop] if isinstance(stop, str) else list(stop or [])


def _common(context: Context, fields: Fields) -> Fields:
    stops, stop_ids = [], list(fields["stop_token_ids"] or [])
    for text in stop_strings(fields):
        id = context.tokens.by_special_text.get(text)
        if id is None:
            stops.append(text.encode())
        else:  # a special token is no text: its id ends the response
            stop_ids.append(id)
    _check_known(context, stop_ids)
    return {
        "repetition_penalty": fields["repetition_penalty"],
        "presence_penalty": fields["presence_penalty"],
        "frequency_penalty": fields["frequency_penalty"],
        "logit_bias": _logit_bias(context, fields["logit_bias"] or {}),
        "eos_ids": context.eos_ids,
        "stop_token_ids": sorted(set(stop_ids)),
        "stop": stops,
        "ignore_eos": fields["ignore_eos"],
        "processed_logprobs": context.logprobs_mode == "processed_logprobs",
    }


def _check_known(context: Context, ids: list[int]) -> None:
    """A stop token that the server's tokenizer lacks would never be said (huggingface/trl#3425)."""
    for id in ids if context.tokens.known else ():
        if not context.tokens.of(id) and id not in context.tokens.special:
            raise bad(
                f"stop_token_ids: token id {id} is unknown to the tokenizer", "stop_token_ids"
            )


def _seed(context: Context, seed: int | None) -> int:
    return context.seeds.getrandbits(63) if seed is None or seed == -1 else seed & _SEED_MASK


def _logit_bias(context: Context, bias: dict[str, float]) -> dict[int, float]:
    found = {}
    for key, value in bias.items():
        id = int(key) if key.isdecimal() and len(key) < 12 else -1
        if not 0 <= id < context.shape.vocab:
            high = context.shape.vocab - 1
            raise bad(
                f"logit_bias: wanted token ids in [0, {high}], got {key[:32]!r}", "logit_bias"
            )
        found[id] = min(100.0, max(-100.0, value))
    return found


def _bad_words(context: Context, words: list[str]) -> list[list[int]]:
    """Each word with and without a space before it, as vLLM does; the last token of each is barred."""
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        for text in (bare, " " + bare):
            ids = context.chat.encode(text, as_text=True)
            if ids and ids not in found:
                found.append(ids)
    return found


def _count(logprobs: int | None) -> int:
    """-1 in the engine's words: none; a request's -1: the vocabulary."""
    return -1 if logprobs is None else _ALL_TOKENS if logprobs < 0 else logprobs


top_count = _count


def _grammar(fields: Fields) -> tuple[str, Any] | None:
    """Kind and text of structured_outputs or response_format; `compile_grammars` makes a table of it."""
    given = {kind: fields[f"guided_{kind}"] for kind in GUIDED}
    given |= {k: v for k, v in (fields["structured_outputs"] or {}).items() if v is not None}
    asked = {kind: value for kind, value in given.items() if value not in (None, False)}
    form = fields["response_format"] or {"type": "text"}
    if form["type"] == "json_schema":
        schema = (form["json_schema"] or {}).get("schema")
        if schema is None:
            raise bad(
                "response_format.json_schema.schema: wanted a schema, got nothing",
                "response_format",
            )
        asked.setdefault("json", schema)
    elif form["type"] == "json_object":
        asked.setdefault("json_object", True)
    elif form["type"] == "structural_tag":
        raise bad(f"response_format.type: {NO_TAGS}", "response_format")
    if len(asked) > 1:
        raise bad(f"structured_outputs: wanted one of {', '.join(asked)}, got {len(asked)}")
    if not asked:
        return None
    kind, value = next(iter(asked.items()))
    if kind == "json" and not isinstance(value, str):
        value = json.dumps(value)
    return kind, value
