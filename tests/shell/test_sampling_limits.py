"""The ranges of the routes are those of the core's table of sampling parameters, dialect by dialect."""

from __future__ import annotations

import math

import pytest
from banyan.serve.field_kinds import Shape
from banyan.serve.fields import tables
from banyan.serve.limits import Limits
from banyan.serve.schema import Field

from banyan import extension

TABLES = tables(Shape(Limits(), vocab=1 << 31, max_model_len=1 << 30))
COMPLETION = TABLES["completion"]
SGLANG = TABLES["sglang"]["sampling_params"].fields
NAMES = {
    "top_logprobs": "logprobs",
    "repetition_detection.max_pattern": "repetition_detection.max_pattern_size",
    "repetition_detection.min_pattern": "repetition_detection.min_pattern_size",
}
SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
# `max_tokens` of the routes begins at 1 (0 with echo), log-probabilities at 0: absent is what the engine calls -1.
OWN_LOW = {"max_tokens", "top_logprobs", "prompt_logprobs"}
ROWS = extension.load().sampling_limits()


def field_of(table: dict[str, Field], name: str) -> Field | None:
    head, *rest = name.split(".")
    found = table.get(head)
    for part in rest:
        found = (found.fields or {}).get(part) if found is not None else None
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
@pytest.mark.parametrize("dialect", ["openai", "sglang"])
def test_ranges_agree(row, dialect):
    table, names = (COMPLETION, NAMES) if dialect == "openai" else (SGLANG, NAMES | SGLANG_NAMES)
    name, _, what = row["name"].partition(".")
    listed = what in ("count", "bytes")
    field = field_of(
        table, names.get(name, name) if listed else names.get(row["name"], row["name"])
    )
    if field is None:
        assert dialect == "sglang" or row["name"] == "seed", f"{row['name']} is not on the routes"
        return
    low, high = row[dialect]
    if listed:
        check_list(field, what, high)
        return
    if row["above_low"]:
        assert field.above == low
    elif row["name"] not in OWN_LOW:
        assert field.low == low
    if high < 2**31 - 1 or math.isinf(high):
        assert field.high == (None if math.isinf(high) else high)


def check_list(field: Field, what: str, high: float) -> None:
    arrays = [one for one in (field, *field.one_of) if one.kind in ("array", "map", "tokens")]
    if what == "bytes":
        texts = [*field.one_of, *(one.items for one in arrays if one.items)]
        assert {text.max_bytes for text in texts if text.kind == "string"} == {high}
    elif high < 2**31 - 1:
        assert [one.max_items for one in arrays] == [high]
