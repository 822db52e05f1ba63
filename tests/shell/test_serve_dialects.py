"""vLLM's token route, SGLang's /generate, tokenizer routes, and the small ones."""

from __future__ import annotations

import pytest
from serve_running import ANSWER, chunks, flat, ok, refused

pytest_plugins = ["serve_plugin"]


def test_token_ids_in_and_out(server):
    params = {"max_tokens": 60, "logprobs": 1, "n": 2, "return_sampling_mask": True}
    asked = {"token_ids": [5, 0, 257], "sampling_params": params, "request_id": "mine"}
    body = ok(server.post("/inference/v1/generate", **asked))
    assert body["request_id"] == "mine"
    assert server.engine.requests[-1]["prompt"] == [5, 0, 257]
    first, second = body["choices"]
    ids = [*server.chat.encode(ANSWER), 257]
    assert first["token_ids"] == second["token_ids"] == ids
    entry = first["logprobs"]["content"][0]
    assert entry["token_id"] == ids[0]
    assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token_id", "logprob", "rank")}
    assert first["sampling_mask"][:1] == [ids[:1]]
    assert first["weight_versions"] == [{"version": "v0", "start": 0, "end": len(ids)}]
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", None)
    assert body["usage"]["completion_tokens"] == 2 * len(ids)
    parts = chunks(server.post("/inference/v1/generate", **asked, stream=True))
    own = [c for part in parts for c in part["choices"] if c["index"] == 1]
    assert flat(c["token_ids"] for c in own) == ids
    assert flat(c["logprobs"]["content"] for c in own) == second["logprobs"]["content"]


def test_prompts_are_scored(server):
    asked = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    body = ok(server.post("/inference/v1/generate", **asked))
    assert body["prompt_logprobs"][0] is None
    assert list(body["prompt_logprobs"][1]) == ["6"]
    refused(
        server.post("/inference/v1/generate", **asked, stream=True),
        400,
        "prompt_logprobs: not with stream",
    )
    refused(
        server.post("/inference/v1/generate", token_ids=[5], sampling_params={"max_tokens": 500}),
        400,
        "sampling_params.max_tokens: wanted a whole number >= 1 and <= 128",
    )
    assert (
        ok(server.post("/inference/v1/generate", token_ids=[5]))["usage"]["completion_tokens"] == 16
    )


def test_sglang_generates(server):
    params = {"max_new_tokens": 60, "temperature": 3.5, "stop": "world"}
    body = ok(
        server.post(
            "/generate",
            text="hi",
            sampling_params=params,
            rid="r1",
            return_logprob=True,
            top_logprobs_num=2,
            token_ids_logprob=[9],
            return_text_in_logprobs=True,
            logprob_start_len=0,
        )
    )
    meta = body["meta_info"]
    assert body["text"] == ANSWER
    assert body["output_ids"] == [*server.chat.encode(ANSWER), 257]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "stop", "matched": 257}
    assert (
        meta["completion_tokens"] == len(body["output_ids"]) == len(meta["output_token_logprobs"])
    )
    assert meta["weight_version"] == "v0"
    value, id, text = meta["output_token_logprobs"][0]
    assert (id, text, value < 0) == (body["output_ids"][0], "H", True)
    assert len(meta["output_top_logprobs"][0]) == 2
    assert meta["output_token_ids_logprobs"][0][0][1] == 9
    assert meta["input_token_logprobs"][0][:2] == [None, server.chat.encode("h")[0]]
    assert server.engine.requests[-1]["params"]["temperature"] == 3.5


def test_sglang_batches_and_streams(server):
    params = {"max_new_tokens": 3}
    batch = ok(
        server.post("/generate", input_ids=[[1], [2, 3]], sampling_params=params, rid=["a", "b"])
    )
    assert [item["meta_info"]["id"] for item in batch] == ["a", "b"]
    assert [item["meta_info"]["prompt_tokens"] for item in batch] == [1, 2]
    many = ok(server.post("/generate", text="a", sampling_params={**params, "n": 2}))
    assert [item["text"] for item in many] == ["Hel", "Hel"]
    parts = chunks(server.post("/generate", text="a", sampling_params=params, stream=True))
    assert [part["text"] for part in parts] == ["H", "He", "Hel"]  # cumulative
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    scored = ok(server.post("/generate", text="abc", sampling_params={"max_new_tokens": 0}))
    assert scored["output_ids"] == []
    stopped = ok(server.post("/generate", text="a", sampling_params={"stop": "lo"}))
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]["matched"]) == ("Hel", "lo")


def test_sglang_continues(server):
    """The noise of a continuation is keyed by the prompt that it began with."""
    ok(server.post("/generate", input_ids=[5, 0, 9], resume={"prompt_len": 2}))
    assert server.engine.requests[-1]["original_prompt"] == 2
    ok(server.post("/generate", input_ids=[5, 0, 9]))
    assert server.engine.requests[-1]["original_prompt"] == 0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "text, input_ids: wanted one of them"),
        ({"text": "a", "input_ids": [1]}, "text, input_ids: wanted one of them"),
        ({"text": "a", "sampling_params": {"top_k": 0}}, "top_k: wanted -1 or >= 1, got 0"),
        ({"text": "a", "sampling_params": {"repetition_penalty": 3}}, "repetition_penalty: wanted"),
        (
            {"text": "a", "sampling_params": {"ebnf": "x", "regex": "a"}},
            "wanted one of json_schema, regex, ebnf, got 2",
        ),
        (
            {"text": "a", "sampling_params": {"structural_tag": "x"}},
            "structural tags are not built",
        ),
        ({"text": "a", "rid": ["x", "y"]}, "rid: wanted 1, got 2"),
        ({"text": "a", "image_data": "x"}, "image_data: not built"),
    ],
)
def test_sglang_errors_have_its_shape(server, fields, text):
    response = server.post("/generate", **fields)
    assert response.status_code == 400
    assert list(response.json()["error"]) == ["message", "request_id"]
    assert text in response.json()["error"]["message"]


def test_tokenizer_routes(server):
    messages = [{"role": "user", "content": "a"}]
    body = ok(server.post("/tokenize", prompt="hü<|im_end|>", return_token_strs=True))
    assert body["tokens"] == [*server.chat.encode("hü"), 257]
    assert body["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xbc", "<|im_end|>"]
    assert (body["count"], body["max_model_len"]) == (4, 128)
    body = ok(server.post("/tokenize", messages=messages))
    assert body["tokens"] == server.chat.encode_chat(messages)
    refused(server.post("/tokenize"), 400, "prompt, messages: wanted one of them")
    text = ok(server.post("/detokenize", tokens=[*server.chat.encode("hü"), 257]))
    assert text == {"prompt": "hü<|im_end|>", "text": "hü<|im_end|>"}
    refused(server.post("/detokenize", tokens=[262]), 400, "tokens: wanted token ids in [0, 261]")
    longer = ok(server.post("/tokenize", prompt="a" * 200))  # than the context: that is to be seen
    assert longer["count"] == 200
    for asked in ({"prompt": "a" * 9000}, {"messages": [{"role": "user", "content": "a" * 9000}]}):
        refused(server.post("/tokenize", **asked), 400, "wanted fewer than 128 tokens")
    info = ok(server.http.get("/tokenizer_info"))
    assert info["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in info["chat_template"]


def test_a_model_goes_by_its_directory_too(server, served_model):
    """As with vLLM without served names; clients that load a tokenizer give it so."""
    for name in ("tiny", str(served_model)):
        answer = ok(server.post("/v1/completions", model=name, prompt="a", max_tokens=1))
        assert answer["model"] == name
    refused(server.post("/v1/completions", model="other", prompt="a"), 404, "wanted tiny", "model")
    refused(server.post("/v1/completions", model=str(served_model.parent), prompt="a"), 404, "tiny")


def test_small_routes(server):
    models = ok(server.http.get("/v1/models"))
    assert models["data"][0]["max_model_len"] == 128
    assert ok(server.http.get("/v1/models/tiny"))["id"] == "tiny"
    refused(server.http.get("/v1/models/a/b"), 404, "'a/b' is not served")
    for path in ("/health", "/ready", "/ping"):
        response = server.http.get(path)
        assert (response.status_code, response.content) == (200, b"")
        assert server.http.head(path).status_code == 200
    assert ok(server.http.get("/version"))["engine"] == "banyan"
    assert ok(server.http.get("/load")) == {"server_load": 0}
    assert ok(server.http.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0
    assert ok(server.http.get("/is_paused")) == {"is_paused": False}
    assert ok(server.http.get("/is_sleeping")) == {"is_sleeping": False}
    assert ok(server.http.get("/model_info"))["weight_version"] == "v0"
    assert ok(server.http.get("/server_info"))["state"]["num_pages"] == 100
    server.engine.state = "paused"
    try:
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200
        assert ok(server.http.get("/is_paused")) == {"is_paused": True}
        response = server.post("/v1/completions", prompt="a")
        refused(response, 503, "paused")
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "ServiceUnavailableError"
    finally:
        server.engine.state = "running"


def test_the_page_allows_only_its_own_parts(server):
    response = server.http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in response.text.replace("http-equiv", "").split("<script>")[0]
    assert "v1/chat/completions" in response.text


def test_the_document_describes_the_routes(server):
    document = ok(server.http.get("/openapi.json"))
    assert document["openapi"] == "3.1.0"
    paths = document["paths"]
    assert {"/v1/completions", "/generate", "/inference/v1/generate", "/openapi.json"} <= set(paths)
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["prompt"]
    assert body["properties"]["n"] == {
        "type": ["integer", "null"],
        "minimum": 1,
        "maximum": 128,
        "default": 1,
    }
    assert paths["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"
    for path, item in paths.items():
        for method, operation in item.items():
            assert {"200", "400"} <= set(operation["responses"]), (path, method)


def test_metrics_count_and_parse(server):
    def read():
        found = {}
        for line in server.http.get("/metrics").text.splitlines():
            if line.startswith("#"):
                word, name, rest = line.removeprefix("# ").split(" ", 2)
                assert word in ("HELP", "TYPE")
                assert rest
                continue
            name, value = line.rsplit(" ", 1)
            assert 'model_name="tiny"' in name
            found[name] = float(value)
        return found

    before = read()
    ok(server.post("/v1/completions", prompt="abc", n=2, max_tokens=4))
    after = read()
    label = '{model_name="tiny",engine="0"}'
    done = '{model_name="tiny",engine="0",finished_reason="length"}'
    grown = {name: after[name] - before[name] for name in before}
    assert grown[f"vllm:request_success_total{done}"] == 2
    assert grown[f"vllm:time_to_first_token_seconds_count{label}"] == 2
    assert grown[f"vllm:inter_token_latency_seconds_count{label}"] == 6
    assert grown[f"vllm:request_generation_tokens_sum{label}"] == 8
    assert grown[f"vllm:request_prompt_tokens_sum{label}"] == 3
    assert grown[f"banyan:kept_mass_count{label}"] == 8
    assert after[f"vllm:num_requests_running{label}"] == 0
    last = [
        value
        for name, value in after.items()
        if name.startswith("vllm:e2e_request_latency_seconds_bucket")
    ]
    assert last == sorted(last)
    assert after[f"banyan:evicted_pages_total{label}"] == 4
    wanted = "num_requests_waiting_by_reason engine_sleep_state kv_cache_usage_perc prefix_cache_queries_total"
    wanted += " prefix_cache_hits_total num_preemptions_total admission_rejections_total cache_config_info"
    for name in wanted.split():
        assert any(key.startswith(f"vllm:{name}{{") for key in after), name
