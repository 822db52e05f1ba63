"""The server over the real engine and a tiny random model: what it says is what the engine computes."""

from __future__ import annotations

import os
import random
import re
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from banyan.cli.main import main
from banyan.serve import load
from banyan.serve.server import Listen
from banyan.serve.text_stream import TokenText
from serve_running import Running, chunks, flat, ok, refused

from banyan import extension

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-for-the-tests"
PROMPT = "the cat and the hat"
MESSAGES = [{"role": "user", "content": "the hat sat there"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a tokenizer of about 320 tokens."""
    from banyan.convert import convert
    from test_convert import write_gguf

    folder = tmp_path_factory.mktemp("tiny")
    write_gguf(folder / "Tiny.F32.gguf")
    return convert(str(folder / "Tiny.F32.gguf"), folder / "tiny")


@pytest.fixture(scope="module")
def core() -> Any:
    return extension.load()


@pytest.fixture(scope="module")
def model(core: Any, directory: Path) -> Any:
    return core.Model.load(str(directory), dtype="fp32")


@pytest.fixture(scope="module")
def server(core: Any, model: Any, directory: Path) -> Iterator[Running]:
    chat = load.Chat(directory)
    vocab = model.shape["vocab"]
    tokens = TokenText(chat.tokenizer, vocab)
    options = {
        "max_num_seqs": 64,
        "kv_bytes": 8 << 20,
        "keep_pool": True,
        "max_num_queued_reqs": 64,
    }
    engine = core.Engine(model, options, tokens.for_stops())
    grammars = load.grammars(chat, vocab)
    context = load.context(engine, chat, vocab, 512, load.Served(names=("tiny",)), grammars)
    with Running(context, Listen(port=0, admin_port=0, admin_token=TOKEN)) as found:
        yield found
    grammars.close()


@pytest.fixture
def admin(server: Running) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(
        base_url=server.admin_url, headers=headers, timeout=60, trust_env=False
    ) as found:
        yield found


def test_greedy_text_is_the_engines(core, model, server):
    ids = server.chat.encode(PROMPT)
    engine = core.Engine(model, {"max_model_len": 64})
    found = []
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    engine.generate([{"row": 0, "tokens": ids, "n": 1}], params, found.append)
    asked = {"prompt": ids, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    (choice,) = ok(server.post("/v1/completions", **asked, return_token_ids=True))["choices"]
    assert choice["token_ids"] == found[0]["response"]
    assert choice["text"] == server.chat.decode(found[0]["response"])
    assert choice["finish_reason"] == "length"


def test_streams_and_groups_agree(server):
    asked = {"prompt": PROMPT, "max_tokens": 24, "n": 3, "seed": 40, "logprobs": 2}
    whole = ok(server.post("/v1/completions", **asked, return_token_ids=True))
    parts = chunks(server.post("/v1/completions", **asked, return_token_ids=True, stream=True))
    for choice in whole["choices"]:
        own = [
            part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert flat(part["token_ids"] for part in own) == choice["token_ids"]
        shown = flat(part["logprobs"]["token_logprobs"] for part in own)
        assert shown == choice["logprobs"]["token_logprobs"]
        alone = ok(
            server.post("/v1/completions", prompt=PROMPT, max_tokens=24, seed=40 + choice["index"])
        )
        assert alone["choices"][0]["text"] == choice["text"]
    assert whole["usage"]["prompt_tokens"] == len(server.chat.encode(PROMPT))


def test_log_probabilities_are_the_models(core, model, server):
    """Drawn tokens and an echoed prompt are scored as core.score scores them."""
    asked = {
        "prompt": PROMPT,
        "max_tokens": 8,
        "seed": 3,
        "echo": True,
        "logprobs": 1,
        "return_rl": True,
    }
    (choice,) = ok(server.post("/v1/completions", **asked, return_token_ids=True))["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    wanted = core.score(model, [ids])["logprobs"][0].tolist()
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
    assert choice["rl"]["raw"] == pytest.approx(wanted[-len(choice["token_ids"]) :], abs=1e-4)
    top = {**asked, "top_p": 0.5, "echo": False}
    (choice,) = ok(server.post("/v1/completions", **top, return_token_ids=True))["choices"]
    ids = choice["prompt_token_ids"] if "prompt_token_ids" in choice else server.chat.encode(PROMPT)
    wanted = core.score(model, [ids + choice["token_ids"]])["logprobs"][0].tolist()
    joined = [
        a + b for a, b in zip(choice["rl"]["processed"], choice["rl"]["log_kept_mass"], strict=True)
    ]
    assert joined == pytest.approx(wanted[-len(joined) :], abs=1e-4)


def test_stop_strings_end_where_they_match(server):
    whole = ok(
        server.post("/v1/completions", prompt=PROMPT, max_tokens=60, seed=1, ignore_eos=True)
    )
    text = whole["choices"][0]["text"]
    stop = next(text[i : i + 3] for i in range(8, len(text) - 3) if "�" not in text[i : i + 3])
    for stream in (False, True):
        asked = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True, "stop": [stop]}
        response = server.post("/v1/completions", **asked, stream=stream)
        choices = (
            [c for part in chunks(response) for c in part["choices"]]
            if stream
            else ok(response)["choices"]
        )
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


def test_structured_output_holds(server):
    for seed in range(3):
        asked = {"prompt": PROMPT, "max_tokens": 40, "seed": seed}
        regex = {"regex": "(ab|c)[0-9]{2,3}x"}
        (choice,) = ok(server.post("/v1/completions", **asked, structured_outputs=regex))["choices"]
        assert re.fullmatch(regex["regex"], choice["text"]), choice
        assert choice["finish_reason"] == "stop"
        form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
        body = {"messages": MESSAGES, "max_tokens": 40, "seed": seed, "response_format": form}
        (choice,) = ok(server.post("/v1/chat/completions", **body))["choices"]
        assert choice["message"]["content"] in ('"yes"', '"no"')
    for fields in (
        {"structured_outputs": {"grammar": 'root ::= ("ab" | "c") [0-9]{2,3} "x"'}},
        {"guided_grammar": 'root ::= ("ab" | "c") [0-9]{2,3} "x"'},
    ):
        (choice,) = ok(server.post("/v1/completions", prompt=PROMPT, max_tokens=40, **fields))[
            "choices"
        ]
        assert re.fullmatch(regex["regex"], choice["text"]), choice
    ebnf = {"ebnf": 'root ::= "yes" | "no"', "max_new_tokens": 40}
    assert ok(server.post("/generate", text="a", sampling_params=ebnf))["text"] in ("yes", "no")
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        body = {"messages": MESSAGES, "max_tokens": 40, **fields}
        (choice,) = ok(server.post("/v1/chat/completions", **body))["choices"]
        assert choice["message"]["content"].startswith("{")
    refused(
        server.post("/v1/completions", prompt="a", structured_outputs={"grammar": "root ::= ("}),
        400,
        "structured output: [grammar] line 1: wanted ')', got the end",
    )
    refused(
        server.post("/v1/completions", prompt="a", structured_outputs={"regex": "("}),
        400,
        "structured",
    )


def test_all_dialects_draw_the_same(server):
    ids = server.chat.encode(PROMPT)
    params = {"max_tokens": 10, "seed": 9, "logprobs": 0}
    asked = {"prompt": ids, "max_tokens": 10, "seed": 9, "return_token_ids": True}
    first = ok(server.post("/v1/completions", **asked))["choices"][0]["token_ids"]
    second = ok(server.post("/inference/v1/generate", token_ids=ids, sampling_params=params))
    assert second["choices"][0]["token_ids"] == first
    third = {"input_ids": ids, "sampling_params": {"max_new_tokens": 10, "sampling_seed": 9}}
    assert ok(server.post("/generate", **third))["output_ids"] == first


def test_a_continuation_goes_on_as_it_would_have(server):
    ids = server.chat.encode(PROMPT)
    asked = {
        "prompt": ids,
        "max_tokens": 12,
        "seed": 6,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    whole = ok(server.post("/v1/completions", **asked))["choices"][0]["token_ids"]
    rest = {**asked, "prompt": ids + whole[:5], "max_tokens": 7, "resume": {"prompt_len": len(ids)}}
    assert ok(server.post("/v1/completions", **rest))["choices"][0]["token_ids"] == whole[5:]


def test_control_over_http(server, admin, directory):
    before = ok(server.post("/v1/completions", prompt=PROMPT, max_tokens=8, seed=2))["choices"][0][
        "text"
    ]
    ok(admin.post("/pause?mode=abort"))
    assert ok(server.http.get("/is_paused")) == {"is_paused": True}
    assert server.http.get("/ready").status_code == 503
    refused(server.post("/v1/completions", prompt="a"), 503, "")
    ok(admin.post("/resume"))
    ok(admin.post("/sleep?level=1"))
    assert ok(server.http.get("/is_sleeping")) == {"is_sleeping": True}
    assert ok(admin.post("/wake_up")) == {"status": "awake", "tags": []}
    body = {"model_path": str(directory), "weight_version": "again"}
    ok(admin.post("/update_weights_from_disk", json=body))
    assert ok(admin.get("/weight_info"))["weight_version"] == "again"
    asked = {"prompt": PROMPT, "max_tokens": 8, "seed": 2, "return_weight_versions": True}
    (choice,) = ok(server.post("/v1/completions", **asked))["choices"]
    assert choice["text"] == before
    assert choice["weight_versions"][0]["version"] == "again"
    refused(
        admin.post("/update_weights_from_disk", json={"model_path": "/no/such/folder"}), 400, ""
    )
    sums = ok(admin.post("/weight_checker", json={"action": "checksum"}))["checksums"]
    assert ok(admin.post("/weight_checker", json={"action": "compare", "baseline": sums}))["match"]
    ok(admin.post("/reset_prefix_cache?reset_running_requests=true"))


def test_a_pause_that_waits_is_ended(server, admin):
    """By its own deadline or by a resume; what runs goes on, and requests are taken."""
    asked = {"prompt": PROMPT, "ignore_eos": True, "max_tokens": 500, "n": 8}
    answers: list[httpx.Response] = []

    def call(target: Any, *arguments: Any, **named: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(target(*arguments, **named)))
        thread.start()
        return thread

    def wait_for(what: Any) -> None:
        until = time.monotonic() + 30
        while not what() and time.monotonic() < until:
            time.sleep(0.005)
        assert what()

    running = call(server.post, "/v1/completions", **asked)
    wait_for(lambda: ok(server.http.get("/v1/loads"))["loads"][0]["num_running_reqs"])
    late = admin.post("/pause?mode=wait&timeout=0.01")
    if late.status_code != 200:  # on a machine that fast, the requests have ended
        refused(late, 503, "[rollout] pause: waited 0.01 s for 1 requests")
    pausing = call(admin.post, "/pause?mode=wait&timeout=60")
    time.sleep(0.05)
    begun = time.monotonic()
    ok(admin.post("/resume"))
    assert time.monotonic() - begun < 5
    for thread in (pausing, running):
        thread.join()
    by_path = {answer.request.url.path: answer for answer in answers}
    assert by_path["/pause"].status_code in (200, 409)  # 200: the requests ended first
    assert len(ok(by_path["/v1/completions"])["choices"]) == 8
    ok(admin.post("/resume"))
    ok(server.post("/v1/completions", prompt="a", max_tokens=2))


def test_a_pool_without_room_names_the_servers_options(directory, capsys):
    arguments = ["serve", "--model", str(directory), "--port", "0", "--kv-cache-memory-bytes", "1"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "raise --kv-cache-memory-bytes (or --gpu-memory-utilization)" in error


def test_the_guides_examples_run(server, admin):
    guide = (ROOT / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
    posts = re.findall(r"^curl http://127.0.0.1:8000(\S+) -H .*? -d '(.*?)'$", guide, re.M | re.S)
    assert {path for path, _ in posts} >= {"/v1/chat/completions", "/generate"}
    for path, body in posts:
        response = server.http.post(path, content=body)
        assert response.status_code == 200, (path, response.text)
    control = re.findall(r'^curl -X POST .*? "http://127.0.0.1:8001(\S+)"$', guide, re.M)
    assert [ok(admin.post(path))["status"] for path in control] == ["paused", "resumed"]


def test_times_add_up(server):
    """Queue, prefill and decode of a response make its whole time."""

    def sums() -> dict[str, float]:
        text = server.http.get("/metrics").text
        found = re.findall(r"vllm:(\w+)_sum\{[^}]*\} (\S+)", text)
        return {name: float(value) for name, value in found}

    before = sums()
    ok(server.post("/v1/completions", prompt=PROMPT, max_tokens=40, n=2, ignore_eos=True))
    after = sums()
    grown = {name: after[name] - before[name] for name in after}
    parts = [grown[f"request_{name}_time_seconds"] for name in ("queue", "prefill", "decode")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(grown["e2e_request_latency_seconds"], rel=1e-6)
    assert parts[0] < parts[2]  # nothing else ran


def test_what_the_engine_refuses_is_a_400(server):
    refused(
        server.post("/v1/completions", prompt=[5] * 511, max_tokens=16),
        400,
        "max_tokens: wanted <= 1",
    )
    refused(server.post("/v1/completions", prompt=[5] * 512), 400, "wanted fewer than 512 tokens")


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def test_mixed_load_leaves_nothing_behind(server):
    """Streams, groups, wrong requests and clients that leave. BANYAN_LOAD_SECONDS=1800 makes the long version of it."""
    seconds = float(os.environ.get("BANYAN_LOAD_SECONDS", "4"))
    end = time.monotonic() + seconds
    faults: list[str] = []

    def load_one(seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
            while time.monotonic() < end and not faults:
                body = {
                    "prompt": PROMPT * rng.randint(1, 3),
                    "max_tokens": rng.randint(1, 60),
                    "n": rng.randint(1, 4),
                }
                kind = rng.choice(["whole", "stream", "leave", "wrong", "chat"])
                try:
                    one(client, kind, body)
                except AssertionError as error:
                    faults.append(f"{kind}: {error}")

    def one(client: httpx.Client, kind: str, body: dict[str, Any]) -> None:
        if kind == "wrong":
            assert client.post("/v1/completions", json={**body, "n": 1000}).status_code == 400
        elif kind == "chat":
            chat = {"messages": MESSAGES, "max_tokens": body["max_tokens"]}
            assert client.post("/v1/chat/completions", json=chat).status_code in (200, 503)
        elif kind == "whole":
            assert client.post("/v1/completions", json=body).status_code in (200, 503)
        else:
            with client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as response:
                assert response.status_code in (200, 503)
                for _ in response.iter_lines():
                    if kind == "leave":
                        break

    threads = [threading.Thread(target=load_one, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 2)
    half_way = resident_mib()
    for thread in threads:
        thread.join()
    assert not faults
    assert resident_mib() - half_way < 16
    deadline = time.monotonic() + 30
    subscriptions, metrics = server.context.engine._subscriptions, server.context.metrics
    while (
        (stats := server.engine.stats())["running"]
        or stats["waiting"]
        or stats["used_pages"]
        or metrics.in_flight
        or subscriptions
    ):
        assert time.monotonic() < deadline, (stats, metrics.in_flight, list(subscriptions))
        time.sleep(0.05)
    text = server.http.get("/metrics").text
    assert re.search(r"vllm:generation_tokens_total\{[^}]*\} [1-9]", text)
