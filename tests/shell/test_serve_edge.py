"""The pure functions at the edge of the server: strict JSON, heads of requests, fields in range."""

from __future__ import annotations

import contextlib
import json

import pytest
from banyan.serve.errors import ApiError
from banyan.serve.field_kinds import Shape
from banyan.serve.fields import tables
from banyan.serve.http_head import HeadError, check_head
from banyan.serve.limits import Limits
from banyan.serve.openapi import table_schema
from banyan.serve.schema import Field, Table, check
from banyan.serve.strict_json import JsonError, parse_object
from hypothesis import given, settings
from hypothesis import strategies as st

LIMITS = Limits()
SHAPE = Shape(LIMITS, vocab=1000, max_model_len=512)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"a": "\xff"}', "bad byte at byte 7"),
        (b'{"a": 1, "a": 2}', "wanted each key once, got 'a' again at line 1 column 10"),
        (b'{"a": {"b": 1, "\\u0062": 2}}', "got 'b' again at line 1 column 16"),
        (b'{"a": 1e400}', "a finite number at line 1 column 7 (character 6)"),
        (b'{"a": NaN}', "a finite number at line 1 column 7"),
        (b'{"a": [1, -Infinity]}', "a finite number at line 1 column 11"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair at line 1 column 8"),
        (b'{"a": "\\udc00\\ud800"}', "half of a surrogate pair at line 1 column 8"),
        (b'{"a": "\\ud83d\\\\ude00"}', "half of a surrogate pair"),
        (b'{"a": 1,\n "b" 2}', "Expecting ':' delimiter at line 2 column 6"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a finite number at line 1 column 7"),
        (b"[1]", "wanted a JSON object, got a list"),
        (b"", "Expecting value at line 1 column 1"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nesting <= 64 deep at line 1 column 70"),
        (b"[" * 10000, "nesting <= 64 deep at line 1 column 65"),
        (b"{" + b'"a":{' * 10000, "nesting <= 64 deep"),
        (b'{"\x01": 1}', "Invalid control character"),
    ],
)
def test_bad_json_is_refused_with_its_place(body, text):
    with pytest.raises(JsonError) as error:
        parse_object(body, LIMITS.json_depth)
    assert text in str(error.value)


def test_good_json_passes():
    body = '{"a": "\\ud83d\\ude00 \\\\ud800 ü", "b": [1, 2.5e3, true, null], "c": {"a": {}}}'
    assert parse_object(body.encode(), 64) == json.loads(body)
    deep = b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}"
    assert parse_object(deep, 64)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "ignore"))
)
def test_any_bytes_are_json_or_refused(body):
    with contextlib.suppress(JsonError):
        assert parse_object(body, 64) == json.loads(body)


def test_eight_megabytes_of_escapes_in_an_open_string_are_refused_quickly():
    body = b'{"a": "' + b'\\"' * (4 << 20)
    with pytest.raises(JsonError, match="Unterminated string"):
        parse_object(body, 64)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /" + b"a" * 9000, 414),
        (HEAD + b"A: " + b"b" * 9000 + b"\r\n\r\n", 431),
        (HEAD + b"A: b\r\n" * 101 + b"\r\n", 431),
        (HEAD + (b"A: " + b"b" * 1000 + b"\r\n") * 40, 431),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n", 400),
        (HEAD + b"Content-Length: +5\r\n\r\n", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 5, 5\r\n\r\n", 400),
        (HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
        (HEAD + b"Content-Length:\r\n\r\n", 400),
        (HEAD + b"Content-Length: 52428800\r\n\r\n", 413),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"A: b\0c\r\n\r\n", 400),
        (HEAD + b"A: b\r\n c\r\n\r\n", 400),
    ],
)
def test_bad_heads_are_refused(head, status):
    with pytest.raises(HeadError) as error:
        check_head(head, LIMITS)
    assert error.value.status == status


def test_good_heads_pass_and_open_ones_wait():
    assert check_head(HEAD + b"content-length: 5\r\n\r\nhello", LIMITS)
    assert check_head(HEAD + b"transfer-encoding: chunked\r\n\r\n", LIMITS)
    assert not check_head(HEAD, LIMITS)
    assert not check_head(b"", LIMITS)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_refused(data):
    with contextlib.suppress(HeadError):
        assert check_head(HEAD + data, LIMITS) in (True, False)


def _ranges(table: Table, path: str = "") -> list[tuple[str, Field]]:
    found = []
    for name, spec in table.items():
        found.append((f"{path}{name}", spec))
        if spec.fields:
            found += _ranges(spec.fields, f"{path}{name}.")
    return found


RANGED = [
    (name, path, spec)
    for name, table in tables(SHAPE).items()
    for path, spec in _ranges(table)
    if spec.kind in ("integer", "number") and not spec.refused
]


@pytest.mark.parametrize(("name", "path", "spec"), RANGED, ids=[f"{n}-{p}" for n, p, _ in RANGED])
def test_every_number_is_refused_outside_its_range(name, path, spec):
    unknown: list[str] = []
    for end, step in ((spec.low, -1), (spec.high, 1)):
        if end is None:
            continue
        assert spec.check(end, path, unknown) == end
        with pytest.raises(ApiError) as error:
            spec.check(end + step if abs(end) < 1 << 62 else end * 2, path, unknown)
        assert error.value.status == 400
        assert f"{path}: wanted" in error.value.message
    if spec.above is not None:
        with pytest.raises(ApiError, match="wanted"):
            spec.check(spec.above, path, unknown)
    for wrong in ("1", True, [], {}, float("nan")):
        with pytest.raises(ApiError, match="wanted"):
            spec.check(wrong, path, unknown)


@pytest.mark.parametrize("name", sorted(tables(SHAPE)))
def test_what_the_schema_shows_is_what_is_checked(name):
    table = tables(SHAPE)[name]
    schema = table_schema(table)
    known = {field for field, spec in table.items() if not spec.refused}
    assert set(schema["properties"]) == known
    required = {field for field, spec in table.items() if spec.required}
    assert set(schema.get("required", [])) == required
    for field, spec in table.items():
        if spec.default is not None and not spec.refused:
            assert spec.check(spec.default, field, []) == spec.default


def test_messages_name_field_range_and_value():
    table = tables(SHAPE)["completion"]
    with pytest.raises(ApiError, match=r"^n: wanted a whole number >= 1 and <= 128, got 100000$"):
        check(table, {"prompt": "a", "n": 100000})
    with pytest.raises(ApiError, match=r"^top_p: wanted a finite number > 0 and <= 1, got 0$"):
        check(table, {"prompt": "a", "top_p": 0})
    with pytest.raises(ApiError, match=r"^prompt: wanted token ids in \[0, 999\], got 1000$"):
        check(table, {"prompt": [1, 1000]})
    with pytest.raises(ApiError, match=r"^guided_whitespace_pattern: not built: white space"):
        check(table, {"prompt": "a", "guided_whitespace_pattern": " "})
    unknown: list[str] = []
    found = check(table, {"prompt": "a", "stop": None, "n": 2.0, "xyz": 1}, unknown=unknown)
    assert (found["n"], found["stop"], unknown) == (2, None, ["xyz"])
