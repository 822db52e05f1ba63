"""/v1/completions and /v1/chat/completions: shapes, streams, log-probabilities, stops, errors."""

from __future__ import annotations

import math
import time
from typing import ClassVar

import pytest
from serve_running import ANSWER, VOCAB, chunks, flat, ok, refused, running

pytest_plugins = ["serve_plugin"]

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_completion(server):
    body = ok(server.post("/v1/completions", prompt="hi", max_tokens=100))
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert abs(body["created"] - time.time()) < 60
    assert body["model"] == "tiny"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": ANSWER,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    count = len(ANSWER.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": count,
        "total_tokens": count + 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_prompts_times_n_are_in_order(server):
    body = ok(server.post("/v1/completions", prompt=["ab", "c"], n=3, max_tokens=2, echo=True))
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == ["abHe"] * 3 + ["cHe"] * 3
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 12


def test_ids_never_retokenised(server):
    """Ids in, ids out: even those that no text would give (sgl-project/sglang#26555)."""
    ids = server.chat.encode("he") + server.chat.encode("ü")[:1] + [0, 257]
    body = ok(server.post("/v1/completions", prompt=ids, max_tokens=3, return_token_ids=True))
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == server.chat.encode(ANSWER)[:3]
    assert server.engine.requests[-1]["prompt"] == ids
    many = ok(
        server.post("/v1/completions", prompt=[ids, [5]], max_tokens=1, return_token_ids=True)
    )
    assert [choice["prompt_token_ids"] for choice in many["choices"]] == [ids, [5]]


def test_a_stream_says_what_the_whole_answer_says(server):
    asked = {"prompt": "hi", "max_tokens": 100, "n": 2, "logprobs": 3, "seed": 5}
    extra = {"return_token_ids": True, "return_rl": True, "return_weight_versions": True}
    whole = ok(server.post("/v1/completions", **asked, **extra))
    options = {"include_usage": True}
    parts = chunks(
        server.post("/v1/completions", **asked, **extra, stream=True, stream_options=options)
    )
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        for key in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
            assert flat(c["logprobs"][key] for c in own) == choice["logprobs"][key]
        assert flat(c["token_ids"] for c in own) == choice["token_ids"]
        assert flat(c["rl"]["raw"] for c in own) == choice["rl"]["raw"]
        assert own[-1]["weight_versions"] == choice["weight_versions"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        assert all(c["finish_reason"] is None for c in own[:-1])
        assert "stop_reason" not in own[0]


def test_logprobs_of_a_completion(server):
    (choice,) = ok(server.post("/v1/completions", prompt="hi", max_tokens=12, logprobs=2))[
        "choices"
    ]
    shown = choice["logprobs"]
    assert shown["tokens"][:3] == ["H", "e", "l"]
    assert shown["tokens"][8] == "bytes:\\xc3"
    assert shown["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10]
    for name, value, top in zip(
        shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True
    ):
        assert top[name] == value  # one array: equal as floats
        assert len(top) >= 2
    (choice,) = ok(server.post("/v1/completions", prompt="hi", max_tokens=2, logprobs=0))["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1, 1]


def test_an_echo_with_logprobs(server):
    asked = {"prompt": "aü", "echo": True, "logprobs": 1}
    (choice,) = ok(server.post("/v1/completions", **asked, max_tokens=2))["choices"]
    shown = choice["logprobs"]
    assert choice["text"] == "aüHe"
    assert shown["text_offset"] == [0, 1, 1, 2, 3]
    assert shown["token_logprobs"][0] is None
    assert shown["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in shown["token_logprobs"][1:])
    (choice,) = ok(server.post("/v1/completions", **asked, max_tokens=0))["choices"]
    assert choice["text"] == "aü"
    assert choice["logprobs"]["token_logprobs"] == shown["token_logprobs"][:3]
    assert (
        ok(server.post("/v1/completions", prompt="ab", echo=True, max_tokens=0))["usage"][
            "completion_tokens"
        ]
        == 0
    )


def test_prompt_logprobs(server):
    (choice,) = ok(server.post("/v1/completions", prompt="abc", max_tokens=1, prompt_logprobs=1))[
        "choices"
    ]
    first, second, _ = choice["prompt_logprobs"]
    assert first is None
    token = server.chat.encode("b")[0]
    assert second[str(token)]["decoded_token"] == "b"


def test_fields_for_training(server):
    extra = {"return_rl": True, "return_weight_versions": True, "return_sampling_mask": True}
    (choice,) = ok(server.post("/v1/completions", prompt="a", max_tokens=3, seed=7, **extra))[
        "choices"
    ]
    assert choice["rl"]["seed"] == 7
    assert choice["rl"]["log_kept_mass"] == [-0.25] * 3
    assert choice["rl"]["processed"] == [value / 2 for value in choice["rl"]["raw"]]
    assert choice["weight_versions"] == [{"version": "v0", "start": 0, "end": 3}]
    assert choice["sampling_mask"] == [[id] for id in server.chat.encode(ANSWER)[:3]]
    drawn = ok(server.post("/v1/completions", prompt="a", max_tokens=1, return_rl=True))
    assert drawn["choices"][0]["rl"]["seed"] == server.engine.requests[-1]["params"]["seed"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        ("wör", False, "Hello, ", "wör"),
        ("wör", True, "Hello, wör", "wör"),
        (["xyz", "🌍"], False, "Hello, wörld! ", "🌍"),
        ("<|im_end|>", False, ANSWER, "<|im_end|>"),
    ],
)
def test_stop_string_mid_token(server, stream, stop, include, text, reason):
    """Stop strings end at token borders of nobody: text is cut exactly, ids end there (vllm-project/vllm#3672)."""
    asked = {"prompt": "a", "max_tokens": 60, "stop": stop, "include_stop_str_in_output": include}
    asked |= {"stream": stream, "return_token_ids": True, "ignore_eos": stop == "<|im_end|>"}
    response = server.post("/v1/completions", **asked)
    choices = (
        [part["choices"][0] for part in chunks(response)] if stream else ok(response)["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == reason
    ids = flat(choice["token_ids"] for choice in choices)
    said = server.chat.tokenizer.decode(ids, skip_special_tokens=False)
    assert said.endswith(reason)


def test_added_stop_token_known(server):
    """A stop token that the tokenizer lacks is refused with its id (huggingface/trl#3425)."""
    refused(
        server.post("/v1/completions", prompt="a", stop_token_ids=[VOCAB - 1]),
        400,
        f"token id {VOCAB - 1} is unknown to the tokenizer",
        "stop_token_ids",
    )
    token = server.chat.encode("o")[0]
    (choice,) = ok(server.post("/v1/completions", prompt="a", stop_token_ids=[token]))["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("Hell", token)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "prompt: wanted a string or a list"),
        ({"prompt": ""}, "prompt: wanted a string of at least 1 bytes"),
        ({"prompt": []}, "prompt: wanted 1 to 1024 entries, got 0"),
        ({"prompt": [[]]}, "wanted"),
        ({"prompt": [True]}, "prompt: wanted"),
        ({"prompt": ["a", 1]}, "prompt[1]: wanted a string"),
        ({"prompt": [VOCAB]}, "prompt: wanted token ids in [0, 261], got 262"),
        ({"prompt": "a", "n": 129}, "n: wanted a whole number >= 1 and <= 128, got 129"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n: wanted 1 with temperature 0"),
        ({"prompt": "a", "max_tokens": 10**9}, "max_tokens: wanted a whole number >= 0 and <= 128"),
        ({"prompt": "a", "max_tokens": 128}, "max_tokens: wanted <= 127 (context 128 - prompt 1)"),
        ({"prompt": "a" * 128}, "prompt: wanted fewer than 128 tokens"),
        (
            {"prompt": "a" * 9000},
            "prompt: wanted fewer than 128 tokens, the context, got 9000 letters",
        ),
        (
            {"prompt": "a" * 9000, "truncate_prompt_tokens": 4},
            "prompt: wanted fewer than 128 tokens, the context, got 9000 letters",
        ),
        (
            {"prompt": "a", "request_id": "one\nx-forged: two"},
            "request_id: wanted a string without control characters",
        ),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: wanted >= 1"),
        ({"prompt": "a", "min_tokens": 20}, "min_tokens: wanted <= max_tokens (16)"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop: wanted 0 to 16 entries, got 17"),
        ({"prompt": "a", "stop": "x" * 257}, "stop: wanted a string of 1 to 256 bytes"),
        ({"prompt": "a", "stop": ""}, "stop: wanted a string of 1"),
        (
            {"prompt": "a", "logit_bias": {str(i): 1 for i in range(301)}},
            "logit_bias: wanted 0 to 300",
        ),
        ({"prompt": "a", "logit_bias": {"262": 1}}, "logit_bias: wanted token ids in [0, 261]"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias: wanted token ids"),
        ({"prompt": "a", "logprobs": 21}, "logprobs: wanted a whole number >= 0 and <= 20"),
        ({"prompt": "a", "temperature": 2.1}, "temperature: wanted a finite number >= 0 and <= 2"),
        ({"prompt": "a", "suffix": "b"}, "suffix: not built"),
        ({"prompt": "a", "guided_decoding_backend": "b"}, "guided_decoding_backend: removed"),
        (
            {"prompt": "a", "guided_regex": "b", "structured_outputs": {"grammar": "x"}},
            "wanted one of regex, grammar, got 2",
        ),
        (
            {"prompt": "a", "structured_outputs": {"structural_tag": "{}"}},
            "structural tags are not built; use tools",
        ),
        (
            {"prompt": "a", "response_format": {"type": "structural_tag", "structures": []}},
            "structural tags are not built; use tools",
        ),
        (
            {"prompt": "a", "stream_options": {"include_usage": True}},
            "stream_options: wanted stream",
        ),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs: not with stream"),
        ({"prompt": "a", "stream": True, "echo": True, "logprobs": 1}, "an echo with logprobs"),
        ({"prompt": "a", "resume": {"prompt_len": 5}}, "resume.prompt_len: wanted <= 1, got 5"),
        ({"prompt": ["a"] * 1000, "n": 100}, "n: wanted prompts x n <= 8192, got 100000"),
    ],
)
def test_wrong_fields_are_refused_with_the_range(server, fields, text):
    refused(server.post("/v1/completions", **fields), 400, text)


def test_other_models_paths_and_methods(server):
    refused(
        server.post("/v1/completions", prompt="a", model="other"),
        404,
        "'other' is not served",
        "model",
    )
    refused(server.http.get("/nowhere"), 404, "/nowhere: no route; /openapi.json lists them")
    response = server.http.get("/v1/completions")
    refused(response, 405, "/v1/completions: wanted POST, got GET")
    assert response.headers["allow"] == "POST"
    refused(
        server.http.post("/v1/completions", content=b""), 400, "wanted a JSON object, got nothing"
    )
    refused(server.http.post("/v1/completions", content=b'{"a": 1, "a": 2}'), 400, "each key once")


def test_unknown_fields_are_told_once(server, caplog):
    for _ in range(3):
        ok(
            server.post(
                "/v1/completions",
                prompt="a",
                frobnicate=1,
                stop=None,
                resume={"prompt_len": 1, "x": 2},
            )
        )
    told = [record.getMessage() for record in caplog.records]
    assert told.count("request field 'frobnicate' is not known: ignored") == 1
    assert told.count("request field 'resume.x' is not known: ignored") == 1


def test_parameters_reach_the_engine(server):
    fields = {
        "temperature": 0.005,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"3": 200, "4": -5},
        "bad_words": [" ab"],
        "allowed_token_ids": [3, 1, 2, 1],
        "logprob_token_ids": [9],
        "logprobs": 1,
        "seed": -5,
        "ignore_eos": True,
        "priority": 3,
        "cache_salt": "s",
        "group_id": "g",
        "resume": {"prompt_len": 1},
        "truncate_prompt_tokens": 2,
        "repetition_detection": {"max_pattern_size": 4},
    }
    ok(server.post("/v1/completions", prompt="abcd", max_tokens=5, **fields))
    request = server.engine.requests[-1]
    params = request["params"]
    assert request["prompt"] == server.chat.encode("cd")
    shared = {
        key: request[key] for key in ("priority", "cache_salt", "group_id", "original_prompt")
    }
    assert shared == {"priority": 3, "cache_salt": "s", "group_id": "g", "original_prompt": 1}
    assert params["temperature"] == 0.01
    assert params["top_k"] == -1
    assert params["logit_bias"] == {3: 100.0, 4: -5.0}
    assert params["bad_words"] == [server.chat.encode("ab"), server.chat.encode(" ab")]
    assert params["allowed_token_ids"] == [1, 2, 3]
    assert params["seed"] == 2**64 - 5
    assert params["repetition_detection"] == {"max_pattern": 4, "min_pattern": 1, "min_count": 2}
    assert params["eos_ids"] == [257, 258]
    assert params["max_tokens"] == 5
    ok(server.post("/v1/completions", prompt="a", temperature=0, top_p=0.5, top_k=7))
    greedy = server.engine.requests[-1]["params"]
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0.0, 1.0, -1)


def test_a_chat(server):
    body = ok(server.post("/v1/chat/completions", messages=MESSAGES, return_token_ids=True))
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER}
    assert choice["finish_reason"] == "stop"
    assert body["prompt_token_ids"] == server.chat.encode_chat(MESSAGES)
    assert server.engine.requests[-1]["params"]["max_tokens"] == 128 - len(body["prompt_token_ids"])


def test_a_streamed_chat(server):
    asked = {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2, "seed": 1}
    whole = ok(server.post("/v1/chat/completions", **asked))
    parts = chunks(
        server.post(
            "/v1/chat/completions", **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1
    assert parts[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        content = flat(c["logprobs"]["content"] for c in own if c.get("logprobs"))
        assert content == choice["logprobs"]["content"]
        assert own[-1]["finish_reason"] == "stop"
    entry = whole["choices"][0]["logprobs"]["content"][8]
    assert entry["bytes"] == [0xC3]
    assert len(entry["top_logprobs"]) == 2


def test_messages_are_rendered_in_the_sandbox(server):
    spelled = [{"role": "user", "content": "<|im_end|> is text"}]
    ok(server.post("/v1/chat/completions", messages=spelled, max_tokens=1))
    assert server.engine.requests[-1]["prompt"] == server.chat.encode_chat(spelled)
    assert server.engine.requests[-1]["prompt"].count(257) == 1
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    ok(server.post("/v1/chat/completions", messages=parts, max_tokens=1))
    joined = [{"role": "user", "content": "a\nb"}]
    assert server.engine.requests[-1]["prompt"] == server.chat.encode_chat(joined)
    half = [*MESSAGES, {"role": "assistant", "content": "The answer"}]
    ok(
        server.post(
            "/v1/chat/completions", messages=half, continue_final_message=True, max_tokens=1
        )
    )
    rendered = server.chat.tokenizer.decode(
        server.engine.requests[-1]["prompt"], skip_special_tokens=False
    )
    assert rendered.endswith("<|im_start|>assistant\nThe answer")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": []}, "messages: wanted 1 to 4096 entries"),
        ({"messages": [{"content": "a"}]}, "messages[0].role: wanted a string"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content: wanted a string or a list",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs: wanted logprobs = true"),
        ({"messages": MESSAGES, "chat_template": "x"}, "--trust-request-chat-template"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": 3}},
            "wanted a boolean",
        ),
        ({"messages": MESSAGES, "functions": []}, "functions: removed upstream; use tools"),
        ({"messages": MESSAGES, "tools": [{"function": {"name": "f"}}]}, "shows no tool format"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice: wanted tools"),
        ({"messages": [{"role": "user", "content": "a" * 200}]}, "wanted fewer than 128 tokens"),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens: wanted"),
        ({"messages": MESSAGES, "continue_final_message": True}, "to be the assistant's"),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "wanted a schema"),
    ],
)
def test_wrong_chats_are_refused(server, fields, text):
    refused(server.post("/v1/chat/completions", **fields), 400, text)


def test_a_template_that_fails_is_a_wrong_request(served_model):
    template = "{{ raise_exception('no such role') }}{{ messages[0].content + 1 }}"
    with running(served_model) as server:
        server.context.chat._template_text = template
        error = refused(server.post("/v1/chat/completions", messages=MESSAGES), 400, "no such role")
        assert str(served_model) not in error["message"]
        server.context.chat._template = None
        server.context.chat._template_text = "{{ messages[0].content + 1 }}"
        refused(server.post("/v1/chat/completions", messages=MESSAGES), 400, "TypeError")


def test_nothing_infinite_reaches_a_client(served_model):
    from banyan.serve import logprobs

    assert logprobs.finite(-math.inf) == -9999.0
    assert logprobs.finite(math.nan) == -9999.0
    assert logprobs.finite(-3.5) == -3.5


def test_structured_output_becomes_a_table(served_model):
    class Grammars:
        asked: ClassVar[list] = []

        def compile(self, kind, value):
            self.asked.append((kind, value))
            return "a table"

    with running(served_model, grammars=Grammars()) as server:
        ok(server.post("/v1/completions", prompt="a", structured_outputs={"regex": "a+"}))
        assert server.engine.requests[-1]["params"]["grammar"] == "a table"
        ok(server.post("/v1/completions", prompt="a", structured_outputs={"choice": ["a", "b"]}))
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        ok(server.post("/v1/chat/completions", messages=MESSAGES, response_format=form))
        ok(server.post("/generate", text="a", sampling_params={"regex": "b"}))
        assert Grammars.asked == [
            ("regex", "a+"),
            ("choice", ["a", "b"]),
            ("json", '{"type": "object"}'),
            ("regex", "b"),
        ]
        refused(
            server.post(
                "/v1/completions", prompt="a", structured_outputs={"regex": "a", "choice": ["b"]}
            ),
            400,
            "wanted one of regex, choice",
        )
