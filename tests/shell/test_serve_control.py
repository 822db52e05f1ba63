"""Keys, foreign pages, and the control socket."""

from __future__ import annotations

import asyncio
import os
import stat
import threading

import httpx
import pytest
from banyan.cli.main import main
from banyan.errors import UserError
from banyan.serve import routes
from banyan.serve.engine_client import EngineClient
from banyan.serve.load import Served
from banyan.serve.metrics import Metrics
from banyan.serve.server import Listen, bind, check_listen
from fake_engine import RequestError
from serve_running import chunks, ok, refused, running

pytest_plugins = ["serve_plugin"]
TOKEN = "a-token-for-the-tests"
KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def locked(served_model):
    listen = Listen(port=0, keys=KEYS, admin_port=0, admin_token=TOKEN)
    with running(served_model, listen) as found:
        yield found


@pytest.fixture
def admin(locked):
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(
        base_url=locked.admin_url, headers=headers, timeout=10, trust_env=False
    ) as found:
        yield found


def bearer(key):
    return {"authorization": f"Bearer {key}"}


OPEN = {route.path for route in routes.ROUTES if route.public}


def test_which_routes_are_open():
    wells = {"/health", "/ready", "/ping", "/health_generate"}
    assert {"/", "/version", "/metrics", *wells} == OPEN


@pytest.mark.parametrize("route", routes.ROUTES, ids=[route.path for route in routes.ROUTES])
def test_keys_guard_the_rest(locked, route):
    path = route.path.replace("{model:path}", "tiny")
    for headers in (
        {},
        bearer("wrong"),
        {"authorization": "Basic first-key"},
        bearer("first-key x"),
        {"authorization": "Bearer"},
    ):
        response = locked.http.request(route.method, path, headers=headers)
        if route.path in OPEN:
            assert response.status_code == 200
        else:
            assert response.status_code == 401
            assert response.json() == {"error": "Unauthorized"}
    for key in KEYS:
        assert locked.http.request(route.method, path, headers=bearer(key)).status_code in (
            200,
            400,
        )


def test_a_wrong_key_is_told_before_the_body_is_read(locked):
    response = locked.http.post("/v1/completions", content=b"{")
    assert response.status_code == 401


def test_the_control_socket_has_its_own_token(locked, admin):
    assert admin.post("/resume").status_code == 200
    for key in ("x", "first-key", TOKEN + "x", TOKEN[:-1]):
        with httpx.Client(base_url=locked.admin_url, headers=bearer(key), trust_env=False) as other:
            assert other.post("/resume").status_code == 401
    refused(
        locked.http.post("/resume", headers=bearer(TOKEN)), 404, "start with --enable-admin --admin"
    )
    assert locked.http.post("/resume", headers=bearer("first-key")).status_code == 404
    assert admin.post("/v1/completions", json={"prompt": "a"}).status_code == 404
    assert locked.http.get("/v1/models", headers=bearer(TOKEN)).status_code == 401


def test_vllm_spellings(locked, admin, served_model):
    calls = locked.engine.calls
    assert ok(admin.post("/pause?mode=keep")) == {"status": "paused"}
    assert calls[-1] == ("pause", "keep", 60.0)
    assert ok(admin.post("/resume")) == {"status": "resumed"}
    assert ok(admin.post("/resume")) == {"status": "resumed"}
    refused(
        admin.post("/pause?mode=soon"),
        400,
        "mode: wanted one of abort, wait, keep, retract, got 'soon'",
    )
    assert ok(admin.post("/sleep?level=2&mode=wait&timeout=5"))["level"] == 2
    assert calls[-1] == ("sleep", 2, "wait", 5.0)
    assert ok(locked.http.get("/is_sleeping", headers=bearer("first-key"))) == {"is_sleeping": True}
    assert ok(admin.post("/wake_up?tags=weights")) == {"status": "sleeping", "tags": ["kv_cache"]}
    assert ok(admin.post("/wake_up?tags=weights&tags=kv_cache")) == {"status": "awake", "tags": []}
    refused(admin.post("/sleep?level=3"), 400, "level: wanted a whole number >= 0 and <= 2, got 3")
    refused(admin.post("/sleep?level=x"), 400, "level: wanted a whole number")
    assert ok(admin.post("/release_kv_cache_memory")) == {"status": "kv_cache_released"}
    assert calls[-2:] == [("sleep", 1, "abort", 60.0), ("wake", ["weights"])]
    ok(admin.post("/wake_up"))
    assert ok(admin.post("/reset_prefix_cache?reset_running_requests=true")) == {"success": True}
    assert calls[-1] == ("reset_prefix_cache", True)
    assert ok(admin.post("/update_weight_version", json={"new_version": "v7"}))["success"]
    assert ok(admin.get("/weight_info"))["weight_version"] == "v7"
    assert ok(admin.get("/get_world_size?include_dp=true")) == {"world_size": 1}
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(served_model)}}
    ok(admin.post("/collective_rpc", json=rpc))
    assert calls[-1][:2] == ("update_weights_from_disk", str(served_model))
    refused(admin.post("/collective_rpc", json={"method": "eval"}), 400, "wanted reload_weights")
    refused(
        admin.post("/init_weight_transfer_engine", json={"init_info": {}}), 400, "process group"
    )


def test_weights_are_compared(admin):
    found = ok(admin.post("/weight_checker", json={"action": "checksum"}))["checksums"]
    same = ok(admin.post("/weight_checker", json={"action": "compare", "baseline": found}))
    assert same == {"match": True, "mismatches": []}
    other = ok(admin.post("/weight_checker", json={"action": "compare", "baseline": {"x": "1"}}))
    assert other == {"match": False, "mismatches": ["model.embed_tokens.weight", "x"]}
    assert ok(admin.post("/weights_checker", json={"action": "reset"})) == {"status": "reset"}


def test_sglang_spellings(locked, admin, served_model):
    calls = locked.engine.calls
    ok(admin.post("/pause_generation", json={"mode": "in_place"}))
    assert calls[-1][:2] == ("pause", "keep")
    ok(admin.post("/continue_generation", json={}))
    ok(admin.post("/flush_cache?timeout=5"))
    body = {"model_path": str(served_model), "weight_version": "step-3"}
    assert ok(admin.post("/update_weights_from_disk", json=body))["success"] is True
    assert calls[-1][1:4] == (str(served_model), "step-3", False)
    refused(
        admin.post("/update_weights_from_disk", json={"model_path": "/no/such"}),
        400,
        "wanted a directory",
    )
    ok(admin.post("/release_memory_occupation", json={"tags": ["kv_cache"]}))
    assert calls[-2:] == [("sleep", 1, "abort", 60.0), ("wake", ["weights"])]
    ok(admin.post("/release_memory_occupation"))
    assert calls[-1][:2] == ("sleep", 2)
    ok(admin.post("/resume_memory_occupation"))
    refused(admin.post("/abort_request", json={}), 400, "rid: wanted a request id")
    refused(admin.post("/update_weights_from_distributed", json={}), 400, "process group")


def test_an_abort_does_not_wait_for_a_pause(locked, admin, monkeypatch):
    """A pause that waits for requests ends with them, however long its own time is."""
    begun, aborted = threading.Event(), threading.Event()
    waited = []

    def pause(mode, timeout):
        begun.set()
        waited.append(aborted.wait(5))

    monkeypatch.setattr(locked.engine, "pause", pause)
    monkeypatch.setattr(locked.engine, "abort", lambda ids: aborted.set() or 3)
    pausing = threading.Thread(target=admin.post, args=("/pause?mode=wait",))
    pausing.start()
    assert begun.wait(5)
    assert ok(admin.post("/abort_requests", json={})) == {"status": "aborted", "aborted": 3}
    pausing.join()
    assert waited == [True]


@pytest.mark.parametrize("path", ["/resume", "/continue_generation"])
def test_a_resume_does_not_wait_for_a_pause(path, locked, admin, monkeypatch):
    """It calls off a pause that waits for requests."""
    begun, resumed = threading.Event(), threading.Event()
    answers = []

    def pause(mode, timeout):
        begun.set()
        if resumed.wait(5):
            raise RequestError(409, "", "[rollout] pause: called off by a resume")

    monkeypatch.setattr(locked.engine, "pause", pause)
    monkeypatch.setattr(locked.engine, "resume", resumed.set)
    wait = threading.Thread(target=lambda: answers.append(admin.post("/pause?mode=wait")))
    wait.start()
    assert begun.wait(5)
    assert admin.post(path, json={}).status_code == 200
    wait.join()
    refused(answers[0], 409, "called off by a resume")


def test_stopping_does_not_wait_for_a_pause():
    class Engine:
        def __init__(self):
            self.begun, self.stopped = threading.Event(), threading.Event()
            self.ends = os.pipe()

        def event_fd(self):
            return self.ends[0]

        def start(self): ...

        def pause(self, mode, timeout):
            self.begun.set()
            return self.stopped.wait(timeout)

        def stop(self, timeout):
            self.stopped.set()

    async def run():
        engine = Engine()
        client = EngineClient(engine, Metrics("tiny"))
        client.start()
        pausing = asyncio.create_task(client.control("pause", "wait", 10.0))
        await asyncio.to_thread(engine.begun.wait, 5)
        await asyncio.wait_for(client.stop(1.0), 5)
        assert await pausing is True

    asyncio.run(run())


def test_aborted_requests_return_their_partials(locked, admin):
    """By the id that the client gave (vllm-project/vllm#22197)."""
    locked.engine.pass_seconds = 0.02
    answers = {}

    def ask(name):
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "request_id": name, "n": 2}
        answers[name] = locked.http.post("/v1/completions", json=body, headers=bearer("first-key"))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    while locked.engine.stats()["running"] < 6 or locked.engine._generated < 10:
        threading.Event().wait(0.02)
    assert (
        ok(admin.post("/abort_requests", json={"request_ids": ["two", "nobody"]}))["aborted"] == 1
    )
    assert ok(admin.post("/abort_requests", json={"request_ids": ["nobody"]}))["aborted"] == 0
    assert ok(admin.post("/abort_requests"))["aborted"] == 2
    for thread in threads:
        thread.join()
    locked.engine.pass_seconds = 0.0
    for answer in answers.values():
        choices = ok(answer)["choices"]
        assert {choice["finish_reason"] for choice in choices} == {"abort"}
        assert all(choice["text"] for choice in choices)


def test_foreign_pages_are_refused(server, locked):
    url = server.url.removeprefix("http://")
    assert server.http.get("/v1/models", headers={"origin": server.url}).status_code == 200
    refused(
        server.http.get("/v1/models", headers={"origin": "https://evil.example"}),
        403,
        "other web pages",
    )
    refused(server.http.get("/v1/models", headers={"origin": "null"}), 403, "other web pages")
    refused(
        server.http.get("/v1/models", headers={"host": "evil.example"}), 403, "wanted localhost"
    )
    for host in (url, f"localhost:{server.port}", "[::1]:1"):
        assert server.http.get("/v1/models", headers={"host": host}).status_code == 200
    headers = {"host": "name.example", **bearer("first-key")}
    assert locked.http.get("/v1/models", headers=headers).status_code == 200


def test_request_ids_are_kept_or_made(server):
    assert (
        server.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"]
        == "abc-1"
    )
    made = server.http.get("/health", headers={"x-request-id": "a b\tc" * 50}).headers[
        "x-request-id"
    ]
    assert made.startswith("req-")


def test_other_addresses_need_a_key():
    check_listen(Listen(host="0.0.0.0", keys=("k",)))
    for host in ("0.0.0.0", "10.1.2.3", "::"):
        with pytest.raises(UserError, match="give --api-key-file to listen elsewhere"):
            check_listen(Listen(host=host))
    with pytest.raises(UserError, match="--admin-token-file"):
        check_listen(Listen(admin_port=0))


def test_a_unix_socket_is_its_owners(served_model, tmp_path):
    path = tmp_path / "s.sock"
    with running(served_model, Listen(uds=path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.http.get("/v1/models", headers={"host": "whatever"}).status_code == 200
        with pytest.raises(UserError, match="is in use"):
            bind(Listen(uds=path))
    assert not path.exists()


def test_a_taken_port_is_one_line(served_model, capsys):
    with running(served_model) as server:
        code = main(["serve", "--model", str(served_model), "--port", str(server.port)])
    assert code == 2
    assert "cannot listen on 127.0.0.1 port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--host", "0.0.0.0"], "--host: wanted 127.0.0.1"),
        (["--admin-port", "0"], "--admin-port: wanted --admin-token-file"),
        (["--api-key-file", "nowhere"], "--api-key-file: nowhere"),
        (["--chat-template", "nowhere"], "--chat-template: nowhere"),
        (["--dtype", "half"], "float16 has no kernels here"),
        (["--tool-call-parser", "mistral"], "--tool-call-parser: wanted one of auto, none, hermes"),
    ],
)
def test_wrong_options_are_one_line(served_model, arguments, text, capsys):
    code = main(["serve", "--model", str(served_model), *arguments])
    captured = capsys.readouterr()
    assert code == 2
    assert text in captured.err
    assert "Traceback" not in captured.err


def test_a_control_token_is_made_once(tmp_path, served_model, capsys):
    path = tmp_path / "token"
    arguments = [
        "serve",
        "--model",
        str(served_model),
        "--admin-token-file",
        str(path),
        "--host",
        "0.0.0.0",
    ]
    assert main(arguments) == 2
    token = path.read_text()
    assert len(token) > 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(arguments) == 2
    assert path.read_text() == token
    path.write_text("short")
    assert main(arguments) == 2
    assert "at least 16 letters" in capsys.readouterr().err


def test_every_parameter_of_the_table_is_an_option(served_model, capsys):
    """Under each of its names; what they mean is tested with the table."""
    import argparse

    from banyan.cli import engine_flags, serve
    from banyan.config import rollout_table

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    known = {name.replace("_", "-") for name in rollout_table.names("banyan")}
    assert {f"--{name}" for name in known} <= set(parser._option_string_actions)
    given = "--page-size=16 --no-enable-prefix-caching --max-running-requests 3 --enable-chunked-prefill".split()
    args = parser.parse_args(["--model", "m", *given])
    assert engine_flags.read(args) == {
        "page_size": 16,
        "enable_prefix_caching": False,
        "max_running_requests": 3,
        "enable_chunked_prefill": True,
    }
    assert main(["serve", "--model", "m", "--max-num-sqs", "3"]) == 2
    assert "nearest known option is --max-num-seqs" in capsys.readouterr().err
    assert main(["serve", "--model", "m", "--quantization", "fp8"]) == 2
    assert "quantised weights are not built" in capsys.readouterr().err


def test_sleeping_can_be_forbidden(served_model):
    served = Served(names=("tiny",), release_level=None)
    listen = Listen(port=0, admin_port=0, admin_token=TOKEN)
    with running(served_model, listen, served=served) as server:
        response = httpx.post(server.admin_url + "/sleep", headers=bearer(TOKEN))
        refused(response, 400, "enable_sleep_mode = false")


def test_parameters_of_the_server(served_model):
    """stream_interval, return_sampling_mask, seed."""
    import random

    served = Served(
        names=("tiny",), stream_interval=4, return_sampling_mask=True, seeds=random.Random(5)
    )
    with running(served_model, served=served) as server:
        asked = {"prompt": "a", "max_tokens": 10, "logprobs": 1}
        parts = chunks(server.post("/v1/completions", **asked, stream=True))
        sizes = [len(part["choices"][0]["logprobs"]["tokens"]) for part in parts]
        assert sizes == [1, 4, 4, 1]
        (choice,) = ok(server.post("/v1/completions", **asked))["choices"]
        assert [c for part in parts for c in part["choices"][0]["sampling_mask"]] == choice[
            "sampling_mask"
        ]
        seeds = [request["params"]["seed"] for request in server.engine.requests]
        again = random.Random(5)
        assert seeds == [again.getrandbits(63), again.getrandbits(63)]


def test_without_a_tokenizer_ids_stay_ids(served_model):
    with running(served_model, text=False) as server:
        body = ok(
            server.post(
                "/inference/v1/generate", token_ids=[1, 2], sampling_params={"max_tokens": 3}
            )
        )
        assert len(body["choices"][0]["token_ids"]) == 3
        (choice,) = ok(
            server.post("/v1/completions", prompt=[1], max_tokens=3, return_token_ids=True)
        )["choices"]
        assert (choice["text"], len(choice["token_ids"])) == ("", 3)
        assert server.engine.requests[-1]["params"]["eos_ids"] == [258]
        for path, fields in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"prompt": "a"}),
            ("/generate", {"text": "a"}),
        ):
            response = server.post(path, **fields)
            assert response.status_code == 400
            assert "skip_tokenizer_init" in response.json()["error"]["message"]
        assert ok(server.http.get("/tokenizer_info"))["chat_template"] is None


def test_a_line_of_figures():
    from banyan.serve.stats_log import line

    before = {"counters": {"generation_tokens": 10, "prompt_tokens": 0}}
    after = {
        "counters": {"generation_tokens": 60, "prompt_tokens": 20},
        "running": 2,
        "num_pages": 50,
        "used_pages": 5,
    }
    text = "prompt tokens/s 2, drawn tokens/s 5, running 2, waiting 0, KV pages in use 10 %"
    assert line(before, after, 10.0) == text
    assert line(before, {**before, "running": 0}, 10.0) == ""
