"""Structured output: what is compiled allows what it should and nothing else, and a hostile pattern harms nobody."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from banyan.errors import UserError
from banyan.serve.structured import Grammars, StructuredLimits
from banyan.serve.structured_ranges import integer_pattern
from banyan.serve.structured_schema import prepare_schema
from shell_files import TEST_DATA

from banyan import extension

core = extension.load()
QWEN = TEST_DATA / "tokenizers" / "qwen2.5" / "tokenizer.json"
# Every byte, some longer tokens (one twice), and one that is no text.
WORDS = [b"ab", b"true", b"alse", b'{"', b'":', b"12", b"yes", b"yes", b"\xc3\xa9", b""]
TOKENS = [bytes([byte]) for byte in range(256)] + WORDS


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(TOKENS)
    yield made
    made.close()


def texts(table: Any, count: int, tokens: list[bytes] = TOKENS, longest: int = 200) -> list[bytes]:
    """Random walks from the start to a final state."""
    draw = random.Random(3)
    found = []
    while len(found) < count:
        state, text = 0, b""
        for _ in range(longest):
            allowed = table.allowed(state)
            if table.is_final(state) and (not allowed or draw.random() < 0.5):
                found.append(text)
                break
            token = draw.choice(allowed)
            assert tokens[token]
            text += tokens[token]
            state = table.next(state, token)
    return found


def accepts(table: Any, text: bytes) -> bool:
    """By single bytes, which all stand in the vocabulary."""
    state = 0
    for byte in text:
        state = table.next(state, byte) if state >= 0 else -1
    return state >= 0 and table.is_final(state)


@pytest.mark.parametrize(
    ("regex", "python"),
    [
        (r"(ab)+c?", None),
        (r"^[a-f]{2,4}$", r"[a-f]{2,4}"),
        (r"a\$", None),
        (r"true|false", None),
        (r"[0-9]{2}:é*", None),
    ],
)
def test_a_regex_is_matched_whole(grammars, regex, python):
    table = grammars.compile("regex", regex)
    for text in texts(table, 40):
        assert re.fullmatch(python or regex, text.decode())
    assert not accepts(table, b"~")
    assert not accepts(table, b"")


def test_choices_are_taken_literally(grammars):
    choices = ["yes", "a.b", "(x|y)*", "no & yes", "é", "$5 [now]"]
    table = grammars.compile("choice", choices)
    assert {text.decode() for text in texts(table, 200)} == set(choices)
    assert not accepts(table, b"aXb")
    # Both ids of one text may stand for it.
    assert {256 + 6, 256 + 7} <= set(table.allowed(0))


SCHEMA = {
    "title": "Answer",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "description": "in years"},
        "kind": {"enum": ["a", 1, None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "more": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
    "$defs": {
        "leaf": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    },
}


def test_a_schema_gives_json_that_obeys_it(grammars):
    table = grammars.compile("json", json.dumps(SCHEMA))
    seen_more = 0
    for text in texts(table, 60):
        value = json.loads(text.decode("utf-8"))
        assert set(value) - {"more"} == {"name", "age", "kind", "tags"}
        assert 1 <= len(value["name"]) <= 6
        assert isinstance(value["age"], int)
        assert value["kind"] in ("a", 1, None)
        assert len(value["tags"]) <= 2
        assert all(isinstance(tag, bool) for tag in value["tags"])
        if value.get("more") is not None:
            seen_more += 1
            assert isinstance(value["more"]["x"], int | float)
    assert seen_more
    assert grammars.compile("json", SCHEMA).num_states == table.num_states


def depth_of(value):
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def test_a_json_object_is_any(grammars):
    table = grammars.compile("json_object", True)
    values = [json.loads(text.decode()) for text in texts(table, 60)]
    assert {type(value) for value in values} == {dict}
    assert max(map(depth_of, values)) > 1
    assert accepts(table, json.dumps({"é": [1, {"a": [-2.5e9, None]}]}, indent=2).encode())
    assert accepts(table, json.dumps({"a": [[[[]]]]}).encode())
    assert not accepts(table, json.dumps({"a": [[[[[]]]]]}).encode())  # the sixth container
    assert not accepts(table, b"[1]")


def test_a_grammar_is_obeyed(grammars):
    table = grammars.compile(
        "grammar",
        """
        root ::= name "=" sum   # a comment
        name ::= [a-z_]+
        sum  ::= term ([+*] term)*
        term ::= [0-9]+ | "(" sum ")"
        """,
    )
    for text in texts(table, 40):
        name, sum_ = text.decode().split("=")
        assert re.fullmatch("[a-z_]+", name)
        assert compile(re.sub(r"\b0+(?=\d)", "", sum_), "a sum", "eval")
    assert accepts(table, b"a_b=(1+2)*((3))")
    assert not accepts(table, b"a=(1+2")
    assert grammars.compile("grammar", 'root ::= "yes" | "no"').num_states == 5


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("grammar", "start: 'a'", "line 1: wanted a rule (name ::= ...), got 'start: 'a''"),
        ("grammar", "root ::= 'a'{9999}", "wanted a count of at most 4096"),
        ("grammar", "root ::= ('a'{4096}){4096}", "wanted a smaller grammar"),
        ("grammar", 7, "wanted a grammar of 1 to 32768 characters"),
        ("structural_tag", {}, "'structural_tag' is not built"),
        ("regex", "", "wanted a regex of 1 to"),
        ("regex", 7, "wanted a regex of 1 to"),
        ("regex", "a(?=b)", "no look-around, no back-reference"),
        ("regex", r"(a)\1", "no look-around, no back-reference"),
        ("regex", "(a", "wanted a regular expression"),
        ("regex", "a" * 40000, "wanted a regex of 1 to 32768 characters"),
        ("choice", [], "wanted a choice of 1 to 1024"),
        ("choice", ["a", ""], "wanted a choice of 1 to 1024"),
        ("choice", ["a"] * 1025, "wanted a choice of 1 to 1024"),
        ("json", "{", "the JSON schema cannot be read"),
        ("json", "[" * 30000, "the JSON schema cannot be read"),
        ("json", json.dumps({"enum": ["x" * 70000]}), "at most 65536 bytes"),
        ("json", json.dumps({"enum": [f"{i:08}" for i in range(5000)]}), "wanted at most 32768"),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammars, kind, value, text):
    with pytest.raises(UserError, match="structured output") as caught:
        grammars.compile(kind, value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (True, "at $: wanted an object"),
        ({"type": "number", "minimum": 3}, "at $: keyword 'minimum'"),
        (
            {"type": ["integer", "null"], "minimum": 3},
            "minimum is built for the type integer alone",
        ),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "between 3 and 2"),
        ({"type": "integer", "maximum": "a"}, "maximum: wanted a number"),
        ({"type": "array", "items": {"type": "null", "not": {}}}, "at $.items: keyword 'not'"),
        ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems'"),
        ({"properties": {"a": {"multipleOf": 2}}}, "at $.a: keyword 'multipleOf'"),
        ({"properties": {}, "required": ["b"]}, "required: 'b' is not among the properties"),
        ({"type": "object", "required": ["b"]}, "keyword 'required'"),
        ({"properties": {}, "anyOf": [{}]}, "properties and anyOf together"),
        ({"properties": {}, "minProperties": 1}, "keyword 'minProperties'"),
        ({"allOf": [{"type": "null"}, {"type": "null"}]}, "allOf of several"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "pattern and minLength together"),
        ({"type": "string", "pattern": 'a"'}, "without quotation marks"),
        ({"type": "string", "maxLength": -1}, "maxLength: wanted a count"),
        ({"type": "integer", "enum": [1, "a"]}, 'enum: "a" is not of the type integer'),
        ({"type": "text"}, "type: wanted one of string, array"),
        ({"$ref": "http://x/y"}, "inside the schema"),
        ({"$ref": "#/$defs/x"}, "leads nowhere"),
    ],
)
def test_a_schema_is_obeyed_as_a_whole_or_refused(schema, text):
    with pytest.raises(UserError) as caught:
        prepare_schema(json.dumps(schema))
    assert text in str(caught.value)


BOUNDS = [None, -1234, -100, -99, -10, -1, 0, 1, 7, 10, 42, 99, 100, 305, 999, 1000, 1234]


def test_ranges_of_whole_numbers():
    numbers = [*range(-1300, 1300), -54321, 54321, 10**12, -(10**12)]
    for low in BOUNDS:
        for high in BOUNDS:
            if low is not None and high is not None and low > high:
                with pytest.raises(ValueError, match="no whole number"):
                    integer_pattern(low, high)
                continue
            pattern = re.compile(integer_pattern(low, high))
            for number in numbers:
                inside = (low is None or number >= low) and (high is None or number <= high)
                assert bool(pattern.fullmatch(str(number))) == inside, (low, high, number)
            for text in ("-0", "00", "007", "+1", "", "-", "1.0"):
                assert not pattern.fullmatch(text)


def test_bounds_of_a_schema_are_obeyed(grammars):
    schema = {
        "type": "object",
        "properties": {
            "age": {"$ref": "#/$defs/age"},
            "left": {"type": "integer", "exclusiveMinimum": -3, "maximum": 2.5},
            "range": {"const": "range0end"},
        },
        "required": ["age", "left", "range"],
        "$defs": {"age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 121}},
    }
    seen = set()
    for text in texts(grammars.compile("json", schema), 200):
        value = json.loads(text)
        assert 0 <= value["age"] <= 120
        assert -2 <= value["left"] <= 2
        assert value["range"] == "range0end"
        seen.add(value["left"])
    assert seen == {-2, -1, 0, 1, 2}


def test_a_schema_may_refer_to_itself_or_be_deep(grammars):
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert json.loads(texts(grammars.compile("json", tree), 1)[0]) is not None
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    with pytest.raises(UserError, match="nested deeper than 64"):
        grammars.compile("json", deep)


def test_a_hostile_pattern_is_ended_and_the_next_one_works():
    grammars = Grammars(TOKENS, StructuredLimits(seconds=1.0))
    try:
        for pattern in ("[ab]*a[ab]{24}", "a{1000}{1000}"):
            start = time.monotonic()
            for _ in range(2):  # the refusal is kept: the second one costs nothing
                with pytest.raises(UserError, match=r"takes longer than 1 s|needs more than"):
                    grammars.compile("regex", pattern)
            assert time.monotonic() - start < 15.0
        assert accepts(grammars.compile("regex", "a+"), b"aa")
    finally:
        grammars.close()


def test_a_process_that_does_not_read_costs_its_time_only():
    grammars = Grammars(TOKENS)
    grammars.compile("regex", "ab")
    worker = grammars._worker
    os.kill(worker._process.pid, signal.SIGSTOP)
    answer = worker.ask({"regex": "a" * (1 << 20)}, 0.2)  # more than the pipe holds
    assert answer == "takes longer than 0.2 s to compile"
    grammars.close()
    assert worker._process.returncode == -signal.SIGKILL


def test_a_pattern_that_needs_much_memory_is_ended():
    grammars = Grammars(TOKENS, StructuredLimits(seconds=30.0, worker_bytes=160 << 20))
    try:
        with pytest.raises(UserError, match="needs more than 160 MB"):
            grammars.compile("regex", "[ab]*a[ab]{24}")
        assert accepts(grammars.compile("regex", "a+"), b"aa")
    finally:
        grammars.close()


def test_a_table_has_a_limit():
    grammars = Grammars(TOKENS, StructuredLimits(table_bytes=1 << 20))
    try:
        with pytest.raises(UserError, match=r"a table of (at most|more than) 1 MB"):
            grammars.compile("regex", r"[^a]{1000}")
    finally:
        grammars.close()


def test_the_cache_has_a_limit_in_bytes():
    grammars = Grammars(TOKENS, StructuredLimits(cache_bytes=20000))
    try:
        kept = grammars.compile("regex", "a{2}")
        for count in range(3, 120):
            grammars.compile("regex", f"a{{{count}}}")
            assert grammars.cached_bytes <= 20000
            assert grammars.compile("regex", "a{2}") is kept  # in use: stays
        assert 1 < len(grammars._cache) < 100
        sizes = [len(key[1]) + 256 + table.num_bytes for key, table in grammars._cache.items()]
        assert grammars.cached_bytes == sum(sizes)
    finally:
        grammars.close()


def test_threads_wait_for_each_other(grammars):
    found: list[Any] = []

    def ask(number: int) -> None:
        found.append((number % 3, grammars.compile("regex", f"b{{{number % 3 + 1}}}")))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(table) for _, table in found}) == 3
    assert all(accepts(table, b"b" * (number + 1)) for number, table in found)


def test_the_sampler_walks_a_table(grammars):
    """Draws from random logits, one token after another, end in a text that the schema allows."""
    end = len(TOKENS) - 1
    params = {"grammar": grammars.compile("json", SCHEMA), "eos_ids": [end], "max_tokens": 10000}
    noise = np.random.default_rng(1)
    for _ in range(5):
        response: list[int] = []
        while not response or response[-1] != end:
            row = noise.normal(0.0, 2.0, (1, len(TOKENS))).astype(np.float32)
            row[0, ord('"')] += 3.0  # texts come to an end
            request = {
                "params": params,
                "prompt": [0],
                "response": response,
                "uniform": noise.random(),
            }
            (drawn,) = core.sample_rows(row, [request])
            assert drawn["drawn"]
            response.append(drawn["token"])
        assert json.loads(b"".join(TOKENS[token] for token in response[:-1]))["age"] is not None


@pytest.mark.skipif(
    not QWEN.is_file(), reason="the Qwen2.5 tokenizer is not at hand (../shared/data)"
)
def test_a_large_vocabulary():
    from banyan.data.token_bytes import special_ids, token_bytes
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(QWEN))
    special = special_ids(tokenizer)
    tokens = [b"" if id in special else text for id, text in enumerate(token_bytes(tokenizer))]
    grammars = Grammars(tokens)
    try:
        table = grammars.compile("json", SCHEMA)
        for text in texts(table, 10, tokens):
            assert json.loads(text.decode())["tags"] is not None
        ids = tokenizer.encode('{"name": "Bo", "age": 41, "kind": null, "tags": [true, false]}').ids
        state = 0
        for id in ids:
            state = table.next(state, id)
            assert state >= 0
        assert table.is_final(state)
    finally:
        grammars.close()
