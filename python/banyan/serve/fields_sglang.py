"""Fields of SGLang's /generate: its spellings, ranges and defaults."""

from __future__ import annotations

from banyan.serve.field_kinds import (
    INT32,
    INT64,
    NO_TAGS,
    Shape,
    flag,
    ids,
    integer,
    label,
    logit_bias,
    one_or_many,
    resume,
    stop,
)
from banyan.serve.schema import Field, Table


def params(shape: Shape) -> Table:
    limits = shape.limits
    return {
        "max_new_tokens": integer(
            0, shape.max_model_len, note="default: 128, or what the context leaves"
        ),
        "min_new_tokens": integer(0, shape.max_model_len, default=0),
        "temperature": Field("number", low=0, default=1.0),
        "top_p": Field("number", above=0, high=1, default=1.0),
        "top_k": integer(-1, INT32, default=-1, note="-1: all; 0 is refused"),
        "min_p": Field("number", low=0, high=1, default=0.0),
        "repetition_penalty": Field("number", above=0, high=2, default=1.0),
        "presence_penalty": Field("number", low=-2, high=2, default=0.0),
        "frequency_penalty": Field("number", low=-2, high=2, default=0.0),
        "stop": stop(limits, most=32),
        "stop_token_ids": ids(shape, limits.listed_token_ids),
        "stop_regex": Field("any", refused="not built; use stop"),
        "no_stop_trim": flag(False),
        "ignore_eos": flag(False),
        "skip_special_tokens": flag(True),
        "spaces_between_special_tokens": flag(True),
        "n": integer(1, limits.n, default=1),
        "sampling_seed": integer(-INT64 - 1, INT64),
        "logit_bias": logit_bias(limits),
        "json_schema": Field("string", max_bytes=limits.schema_bytes),
        "regex": Field("string", max_bytes=limits.schema_bytes),
        "ebnf": Field("string", max_bytes=limits.schema_bytes, note="with a rule root"),
        "structural_tag": Field("any", refused=NO_TAGS),
        "custom_params": Field("any", refused="not built"),
    }


def generate(shape: Shape) -> Table:
    limits = shape.limits
    tokens = ids(shape, shape.max_model_len, min_items=1)
    rid = label(shape)
    return {
        "text": one_or_many(shape, (Field("string", min_bytes=1),)),
        "input_ids": one_or_many(shape, (tokens,)),
        "input_embeds": Field("any", refused="refused: token ids or text only"),
        "image_data": Field("any", refused="not built: text only"),
        "audio_data": Field("any", refused="not built: text only"),
        "lora_path": Field("any", refused="not built"),
        "sampling_params": Field("object", fields=params(shape)),
        "rid": one_or_many(shape, (rid,)),
        "return_logprob": flag(False),
        "logprob_start_len": integer(-1, shape.max_model_len, default=-1),
        "top_logprobs_num": integer(0, limits.logprobs, default=0),
        "token_ids_logprob": ids(shape, limits.listed_token_ids),
        "return_text_in_logprobs": flag(False),
        "return_sampling_mask": flag(shape.return_sampling_mask),
        "stream": flag(False),
        "priority": integer(-INT32, INT32, default=0),
        "extra_key": label(shape),
        "cache_salt": label(shape),
        "resume": resume(shape),
    }
