"""The fields of every request, with type, range and default: the table that checks them and prints /openapi.json.

Names and meanings are vLLM's and OpenAI's; SGLang's stand in fields_sglang.py. docs/guides/serving.md explains them.
"""

from __future__ import annotations

from dataclasses import replace

from banyan.serve import fields_chat, fields_sglang
from banyan.serve.field_kinds import (
    GUIDED,
    INT32,
    INT64,
    NO_TAGS,
    Shape,
    flag,
    ids,
    integer,
    label,
    logit_bias,
    logprobs,
    one_or_many,
    resume,
    stop,
)
from banyan.serve.limits import Limits
from banyan.serve.schema import Field, Table

_DEFAULT_LENGTH = "default: 16, or what the context leaves"
_REFUSED = {
    "suffix": "not built: the model continues text, it does not fill gaps",
    "guided_decoding_backend": "removed upstream; there is one compiler here",
    "guided_whitespace_pattern": "not built: white space between tokens of JSON is bounded",
    "use_beam_search": "not built",
    "logits_processors": "not built: no code of a request is run",
    "prompt_embeds": "refused: token ids or text only",
    "kv_transfer_params": "not built",
    "functions": "removed upstream; use tools",
    "function_call": "removed upstream; use tool_choice",
    "audio": "not built: text only",
}


def tables(shape: Shape) -> dict[str, Table]:
    """Every body that a route takes, by name."""
    return {
        "completion": completion(shape),
        "chat": chat(shape),
        "inference": inference(shape),
        "sampling_params": sampling_params(shape),
        "sglang": fields_sglang.generate(shape),
        "sglang_params": fields_sglang.params(shape),
        "tokenize": tokenize(shape),
        "detokenize": detokenize(shape),
    }


def completion(shape: Shape) -> Table:
    tokens = ids(shape, shape.max_model_len, min_items=1)
    return {
        "model": Field("string"),
        "prompt": one_or_many(shape, (Field("string", min_bytes=1), tokens), required=True),
        "max_tokens": integer(0, shape.max_model_len, note=_DEFAULT_LENGTH),
        "echo": flag(False),
        "logprobs": logprobs(shape),
        "best_of": Field("integer", default=1, refused="not built: ask for n instead"),
        **_sampling(shape),
        **_text(shape),
        **_output(shape),
        "add_special_tokens": flag(True),
        "truncate_prompt_tokens": integer(-1, INT32),
        **_refused(),
    }


def chat(shape: Shape) -> Table:
    limits = shape.limits
    untrusted = "refused: start the server with --trust-request-chat-template"
    template = "" if shape.trust_chat_template else untrusted
    return {
        "model": Field("string"),
        "messages": replace(fields_chat.messages(shape), required=True),
        "max_tokens": integer(1, shape.max_model_len, note="default: what the context leaves"),
        "max_completion_tokens": integer(1, shape.max_model_len),
        "logprobs": flag(False),
        "top_logprobs": logprobs(shape),
        **_sampling(shape),
        **_text(shape),
        **_output(shape),
        "chat_template": Field("string", max_bytes=limits.schema_bytes, refused=template),
        "chat_template_kwargs": fields_chat.template_kwargs(),
        "add_generation_prompt": flag(True),
        "continue_final_message": flag(False),
        "add_special_tokens": flag(False),
        "reasoning_effort": Field("string", max_bytes=64),
        "tools": fields_chat.tools(shape),
        "tool_choice": fields_chat.tool_choice(shape),
        "parallel_tool_calls": flag(True),
        **_refused(),
    }


def sampling_params(shape: Shape) -> Table:
    """Of /inference/v1/generate: defaults of a model's generation_config.json never apply."""
    return {
        "max_tokens": integer(1, shape.max_model_len, note=_DEFAULT_LENGTH),
        "logprobs": logprobs(shape),
        **_sampling(shape._replace(defaults={})),
        **_text(shape),
        "return_sampling_mask": flag(shape.return_sampling_mask),
        **_refused(),
    }


def inference(shape: Shape) -> Table:
    return {
        "model": Field("string"),
        "token_ids": ids(shape, shape.max_model_len, min_items=1, required=True),
        "sampling_params": Field("object", fields=sampling_params(shape)),
        "return_weight_versions": flag(True),
        "return_rl": flag(False),
        **_call(shape),
    }


def tokenize(shape: Shape) -> Table:
    special = "default: true for a prompt, false for messages"
    return {
        "model": Field("string"),
        "prompt": Field("string"),
        "messages": fields_chat.messages(shape),
        "add_special_tokens": Field("boolean", note=special),
        "add_generation_prompt": flag(True),
        "continue_final_message": flag(False),
        "return_token_strs": flag(False),
        "chat_template_kwargs": fields_chat.template_kwargs(),
        "tools": fields_chat.tools(shape),
    }


def detokenize(shape: Shape) -> Table:
    return {"model": Field("string"), "tokens": ids(shape, 1 << 20, required=True)}


def _sampling(shape: Shape) -> dict[str, Field]:
    limits, default = shape.limits, shape.defaults
    penalty = default.get("repetition_penalty", 1.0)
    return {
        "n": integer(1, limits.n, default=1),
        "temperature": Field("number", low=0, high=2, default=default.get("temperature", 1.0)),
        "top_p": Field("number", above=0, high=1, default=default.get("top_p", 1.0)),
        "top_k": integer(-1, INT32, default=int(default.get("top_k", -1)), note="-1, 0: all"),
        "min_p": Field("number", low=0, high=1, default=default.get("min_p", 0.0)),
        "repetition_penalty": Field("number", above=0, default=penalty),
        "presence_penalty": Field("number", low=-2, high=2, default=0.0),
        "frequency_penalty": Field("number", low=-2, high=2, default=0.0),
        "logit_bias": logit_bias(limits),
        "seed": integer(-INT64 - 1, INT64, note="-1: drawn by the server"),
        "min_tokens": integer(0, shape.max_model_len, default=0),
        "stop_token_ids": ids(shape, limits.listed_token_ids),
        "ignore_eos": flag(False),
        "allowed_token_ids": ids(shape, shape.vocab, min_items=1),
        "logprob_token_ids": ids(shape, limits.listed_token_ids),
        "prompt_logprobs": logprobs(shape),
        "repetition_detection": _repetition(),
        "structured_outputs": Field("object", fields=_structured(limits)),
        **{f"guided_{kind}": _structured(limits)[kind] for kind in GUIDED},
        "response_format": Field("object", fields=_response_format(limits)),
    }


def _text(shape: Shape) -> dict[str, Field]:
    """Fields that concern text: they need the tokenizer."""
    limits = shape.limits
    words = Field("string", min_bytes=1, max_bytes=limits.stop_bytes)
    return {
        "stop": stop(limits, limits.stop),
        "include_stop_str_in_output": flag(False),
        "bad_words": Field("array", items=words, max_items=limits.bad_words),
        "skip_special_tokens": flag(True),
        "spaces_between_special_tokens": flag(True),
        "detokenize": flag(True),
    }


def _call(shape: Shape) -> dict[str, Field]:
    stream = {"include_usage": flag(False), "continuous_usage_stats": flag(False)}
    return {
        "stream": flag(False),
        "stream_options": Field("object", fields=stream),
        "priority": integer(-INT32, INT32, default=0),
        "request_id": label(shape),
        "cache_salt": label(shape),
        "group_id": label(shape),
        "resume": resume(shape),
    }


def _output(shape: Shape) -> dict[str, Field]:
    return {
        **_call(shape),
        "user": Field("string", max_bytes=shape.limits.label_bytes),
        "return_token_ids": flag(False),
        "return_tokens_as_token_ids": flag(False),
        "return_weight_versions": flag(False),
        "return_sampling_mask": flag(shape.return_sampling_mask),
        "return_rl": flag(False),
    }


def _repetition() -> Field:
    known = {
        "max_pattern_size": integer(0, 256, default=0),
        "min_pattern_size": integer(1, 256, default=1),
        "min_count": integer(2, 256, default=2),
    }
    return Field("object", fields=known)


def _structured(limits: Limits) -> dict[str, Field]:
    text = Field("string", min_bytes=1, max_bytes=limits.schema_bytes)
    return {
        "json": Field("one_of", one_of=(Field("object"), text)),
        "regex": text,
        "choice": Field("array", items=text, min_items=1, max_items=1024),
        "grammar": replace(text, note="EBNF with a rule root, as llama.cpp and XGrammar read it"),
        "json_object": Field("boolean"),
        "structural_tag": Field("any", refused=NO_TAGS),
    }


def _response_format(limits: Limits) -> dict[str, Field]:
    schema = {
        "name": Field("string", max_bytes=limits.label_bytes),
        "description": Field("string"),
        "schema": Field("object"),
        "strict": Field("boolean"),
    }
    kinds = ("text", "json_schema", "json_object", "structural_tag")
    return {
        "type": Field("string", choices=kinds, default="text"),
        "json_schema": Field("object", fields=schema),
    }


def _refused() -> dict[str, Field]:
    return {name: Field("any", refused=reason) for name, reason in _REFUSED.items()}
