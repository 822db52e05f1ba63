"""Tool calls in what a model writes: Hermes, Qwen and Llama formats, whole and letter by letter."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from banyan.serve import tools
from banyan.serve.load import Served
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_running import chunks, ok, refused, running

pytest_plugins = ["serve_plugin"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>"
)
LLAMA = '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}'
PYTHONIC = '[weather(city="Köln", days=2)]'
ARGUMENTS = {"city": "Köln", "days": 2}


def fields(**changes):
    return {"tools": [WEATHER], "tool_choice": None, "parallel_tool_calls": True, **changes}


def read(form, parts, **changes):
    """(content, calls) of text pushed in parts."""
    parser = tools.parser(form, fields(**changes))
    content, calls = "", []
    for place, part in enumerate(parts):
        for piece in parser.push(part, place == len(parts) - 1):
            content += piece.get("content", "")
            calls += piece.get("tool_calls", [])
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return content, [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "count"),
    [
        ("hermes", HERMES, "", 1),
        ("hermes", f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.\n", 2),
        ("hermes", HERMES.removesuffix("</tool_call>"), "", 1),
        ("qwen", QWEN, "", 1),
        ("qwen", f"First:\n{QWEN}", "First:\n", 1),
        ("llama", LLAMA, "", 1),
        ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
        ("llama", PYTHONIC, "", 1),
    ],
)
def test_calls_are_found(form, text, content, count):
    wanted = (content, [("weather", ARGUMENTS)] * count)
    assert read(form, [text]) == wanted
    assert read(form, list(text)) == wanted
    assert len(read(form, [text], parallel_tool_calls=False)[1]) == 1


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "no call < tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call> after'),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 5000),
        ("hermes", "a < b <tool_"),
        ("qwen", "<tool_call>nothing</tool_call>"),
        ("llama", "The answer is {4}."),
        ("llama", '{"answer": 4}'),
        ("llama", "[1, 2, 3]"),
        ("llama", "[__import__('os').system('true')]"),
        ("llama", "[f(x=open('a'))]"),
        ("llama", "[" * 20000),
        ("llama", "<|python"),
    ],
)
def test_what_is_no_call_stays_content(form, text):
    assert read(form, [text]) == (text, [])
    assert read(form, list(text) if len(text) < 100 else [text[:9], text[9:]]) == (text, [])


@settings(max_examples=300, deadline=None)
@given(
    form=st.sampled_from(["hermes", "qwen", "llama"]),
    text=st.lists(
        st.sampled_from(
            [HERMES, QWEN, LLAMA, PYTHONIC, "<tool_call>", "</tool_call>", "{", "[", "a ", "<"]
        ),
        max_size=4,
    ).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_cuts_change_nothing(form, text, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[begin:end] for begin, end in pairwise(places)]
    assert read(form, parts) == read(form, [text])


def test_formats_are_detected():
    assert tools.detect("{{ '<tool_call>' }}") == "hermes"
    assert tools.detect("<tool_call><function=...") == "qwen"
    assert tools.detect('{% if tools %}"parameters": {% endif %}') == "llama"
    assert tools.detect("{{ message.content }}") == "none"


def test_half_a_surrogate_pair_in_arguments_stays_an_escape():
    _, calls = read(
        "hermes", ['<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>']
    )
    assert calls == [("f", {"a": "\ud800"})]


@pytest.fixture(scope="module")
def tool_server(served_model):
    with running(served_model, served=Served(names=("tiny",), tool_format="hermes")) as found:
        yield found


MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_chat_with_tools(tool_server):
    tool_server.answer = f"I ask.\n{HERMES}"
    asked = {"messages": MESSAGES, "tools": [WEATHER]}
    (choice,) = ok(tool_server.post("/v1/chat/completions", **asked, max_tokens=100))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I ask.\n"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    parts = chunks(tool_server.post("/v1/chat/completions", **asked, max_tokens=100, stream=True))
    deltas = [part["choices"][0] for part in parts]
    assert "".join(d["delta"].get("content", "") for d in deltas) == "I ask.\n"
    calls = [call for d in deltas for call in d["delta"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == [
        call["function"] for call in choice["message"]["tool_calls"]
    ]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": call["id"]},
    ]
    ok(tool_server.post("/v1/chat/completions", messages=history, tools=[WEATHER], max_tokens=5))
    call["function"]["arguments"] = "{"
    history[1]["tool_calls"] = [call]
    refused(
        tool_server.post("/v1/chat/completions", messages=history), 400, "arguments: wanted JSON"
    )


def test_tool_choice(tool_server):
    asked = {"messages": MESSAGES, "tools": [WEATHER], "max_tokens": 90}

    class Grammars:
        def compile(self, kind, value):
            self.schema = json.loads(value)
            return "a table"

    grammars = Grammars()
    tool_server.context.grammars = grammars
    tool_server.answer = json.dumps(ARGUMENTS)
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = ok(tool_server.post("/v1/chat/completions", **asked, tool_choice=named))["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert grammars.schema == WEATHER["function"]["parameters"]
    tool_server.answer = json.dumps([{"name": "weather", "parameters": ARGUMENTS}])
    (choice,) = ok(tool_server.post("/v1/chat/completions", **asked, tool_choice="required"))[
        "choices"
    ]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert grammars.schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "weather"}
    tool_server.answer = HERMES
    (choice,) = ok(tool_server.post("/v1/chat/completions", **asked, tool_choice="none"))["choices"]
    assert choice["message"] == {"role": "assistant", "content": HERMES}
    other = {"type": "function", "function": {"name": "time"}}
    refused(
        tool_server.post("/v1/chat/completions", **asked, tool_choice=other),
        400,
        "wanted one of weather",
    )
