"""Kinds of fields that several tables use, and what their ranges depend on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from banyan.serve.limits import Limits
from banyan.serve.schema import Field

INT64 = (1 << 63) - 1
INT32 = (1 << 31) - 1
GUIDED = ("json", "regex", "choice", "grammar")  # guided_...: older names of structured_outputs
NO_TAGS = "structural tags are not built; use tools, or json, regex, choice or grammar for the whole answer"


class Shape(NamedTuple):
    """What the ranges depend on."""

    limits: Limits
    vocab: int  # ids of the model
    max_model_len: int  # prompt and response
    max_logprobs: int = 20  # -1: the vocabulary
    defaults: Mapping[str, float] = MappingProxyType(
        {}
    )  # sampling parameters of the model's generation_config.json
    trust_chat_template: bool = False
    return_sampling_mask: bool = False  # the default of the field


def integer(
    low: int, high: int, default: Any = None, required: bool = False, note: str = ""
) -> Field:
    return Field("integer", low=low, high=high, default=default, required=required, note=note)


def flag(default: bool) -> Field:
    return Field("boolean", default=default)


def ids(shape: Shape, most: int, min_items: int = 0, required: bool = False) -> Field:
    """Token ids of the model."""
    return Field(
        "tokens", high=shape.vocab - 1, max_items=most, min_items=min_items, required=required
    )


def label(shape: Shape) -> Field:
    """A name that answers and logs may carry: one line."""
    return Field("string", min_bytes=1, max_bytes=shape.limits.label_bytes, printable=True)


def logprobs(shape: Shape) -> Field:
    """So many likeliest tokens; -1 for the vocabulary where the server allows it."""
    everything = shape.max_logprobs < 0
    return integer(-1 if everything else 0, shape.vocab if everything else shape.max_logprobs)


def stop(limits: Limits, most: int) -> Field:
    text = Field("string", min_bytes=1, max_bytes=limits.stop_bytes)
    return Field("one_of", one_of=(text, Field("array", items=text, max_items=most)))


def resume(shape: Shape) -> Field:
    length = {"prompt_len": integer(1, shape.max_model_len, required=True)}
    note = "a continuation: length of the prompt that it began with, which keys its noise"
    return Field("object", fields=length, note=note)


def logit_bias(limits: Limits) -> Field:
    return Field("map", items=Field("number"), max_items=limits.logit_bias)


def one_or_many(shape: Shape, one: tuple[Field, ...], required: bool = False) -> Field:
    """A prompt, or a list of prompts."""
    many = tuple(
        Field("array", items=kind, min_items=1, max_items=shape.limits.prompts) for kind in one
    )
    return Field("one_of", one_of=(*one, *many), required=required)
