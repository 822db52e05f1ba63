"""What a client cannot do to the server: sizes, framing, deadlines, floods; and what it can leave behind: nothing."""

from __future__ import annotations

import json
import random
import resource
import socket
import threading
import time

import pytest
from banyan.serve.load import Served
from serve_running import Running, chunks, ok, refused, running

pytest_plugins = ["serve_plugin"]
MIB = 1 << 20


def talk(server: Running, *parts: bytes, pause: float = 0.0) -> bytes:
    """Sends parts, reads until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(pause)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer.split(b" ", 2)[1])


def request(
    body: bytes = b"", *headers: bytes, method: bytes = b"POST", path: bytes = b"/v1/completions"
) -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", *headers]
    return b"\r\n".join([*lines, b"", b""]) + body


def completion(**fields) -> bytes:
    body = json.dumps({"prompt": "a", **fields}).encode()
    return request(body, b"Content-Length: %d" % len(body), b"Connection: close")


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (request(b"", b"Content-Length: 5", b"Content-Length: 5"), 400),
        (request(b"hello", b"Content-Length: +5"), 400),
        (request(b"", b"Content-Length: " + b"9" * 30), 400),
        (request(b"", b"Content-Length: 52428800"), 413),
        (request(b"0\r\n\r\n", b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400),
        (request(b"zz\r\nhello\r\n", b"Transfer-Encoding: chunked"), 400),
        (request(b"", b"Transfer-Encoding: gzip, chunked"), 400),
        (request(b"", b"A: b\0c"), 400),
        (request(b"", b"A " + b": c"), 400),
        (request(b"", b"A: " + b"b" * 9000), 431),
        (request(b"", *[b"A: b"] * 120), 431),
        (request(b"", path=b"/" + b"a" * 9000), 414),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"hello\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
    ],
)
def test_bad_framing_is_refused_and_closed(server, sent, wanted):
    answer = talk(server, sent)
    assert status(answer) == wanted
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == wanted
    assert error["request_id"].encode() in head


def test_fifty_mib_are_refused_before_they_are_read(server):
    part = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"
    before = resident_mib()
    for _ in range(3):
        answer = talk(server, request(b"", b"Content-Length: 52428800"), *[part] * 50)
        assert status(answer) == 413
        answer = talk(server, request(b"", b"Transfer-Encoding: chunked"), *[part] * 50)
        assert status(answer) == 413
    assert resident_mib() - before < 30
    response = server.http.post("/v1/completions", content=b" " * (50 * MIB))
    refused(response, 413, f"body: wanted <= {8 * MIB} bytes, got {50 * MIB}")
    ok(server.post("/v1/completions", prompt="a"))


def test_a_body_of_eight_mib_is_read(server):
    text = json.dumps({"prompt": "a", "max_tokens": 1, "pad": " " * (8 * MIB - 60)}).encode()
    assert 8 * MIB - 60 < len(text) <= 8 * MIB
    assert server.http.post("/v1/completions", content=text).status_code == 200


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"[" * 10000, "nesting <= 64 deep"),
        (b'{"prompt": ' + b"[" * 10000 + b"]" * 10000 + b"}", "nesting <= 64 deep"),
        (b'{"prompt": "\xff\xfe"}', "bad byte"),
        (b'{"prompt": "\\udead"}', "surrogate"),
        (b'{"prompt": "a", "n": 1e999}', "finite number"),
        (b'{"prompt": "a", "prompt": "b"}', "each key once"),
        (b'{"prompt": "a"} x', "Extra data"),
        ("ü".encode("latin-1"), "bad byte"),
    ],
)
def test_bad_json_is_refused(server, body, text):
    refused(server.http.post("/v1/completions", content=body), 400, text)


def test_slow_clients_are_cut_off_and_others_served(served_model):
    quick = {"header_seconds": 0.4, "body_seconds": 0.4, "idle_seconds": 0.4}
    with running(served_model, limits=quick) as server:
        begin = time.monotonic()
        assert status(talk(server, b"POST /v1/comp")) == 408
        assert status(talk(server, request(b"{", b"Content-Length: 100"))) == 408
        assert talk(server) == b""  # idle: closed without a word
        assert time.monotonic() - begin < 6
        trickle = [b"P", b"O", b"S", b"T", b" ", b"/", b"a", b"b"]
        assert (
            status(talk(server, *trickle, pause=0.1)) == 408
        )  # every byte does not start the clock again
        ok(server.post("/v1/completions", prompt="a"))


def test_a_reader_that_does_not_read_is_dropped(served_model):
    """Its request is aborted, and others are served meanwhile. A long model name makes chunks of 20 KB."""
    served = Served(names=("n" * 20000,))
    with running(
        served_model, limits={"write_seconds": 0.5}, served=served, pass_seconds=0.01
    ) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        fields = {"prompt": "a", "n": 8, "max_tokens": 120, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        connection.sendall(request(body, b"Content-Length: %d" % len(body)))
        wait_until(lambda: server.engine.stats()["running"] == 8)
        ok(server.post("/v1/completions", prompt="a"))
        wait_until(lambda: len(server.engine.aborted) == 1)
        wait_until(lambda: server.context.metrics.in_flight == 0)
        connection.close()


def wait_until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(served_model, stream):
    with running(served_model, pass_seconds=0.02) as server:
        body = json.dumps(
            {"prompt": ["a", "b"], "n": 3, "max_tokens": 100, "ignore_eos": True, "stream": stream}
        )
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(request(body.encode(), b"Content-Length: %d" % len(body)))
        wait_until(lambda: server.engine.stats()["running"] == 6)
        if stream:
            assert connection.recv(100)
        connection.close()
        wait_until(lambda: len(server.engine.aborted) == 2)
        wait_until(lambda: server.engine.stats()["running"] == 0)
        wait_until(lambda: server.context.metrics.in_flight == 0)
        wait_until(lambda: not server.context.engine._subscriptions)
        wait_until(lambda: not server.context.engine._public)


def test_a_request_that_takes_too_long_is_ended(served_model):
    with running(served_model, pass_seconds=0.05, limits={"request_seconds": 0.3}) as server:
        refused(
            server.post("/v1/completions", prompt="a", max_tokens=100), 408, "longer than 0.3 s"
        )
        parts = chunks(server.post("/v1/completions", prompt="a", max_tokens=100, stream=True))
        assert parts[-1]["error"]["code"] == 408
        wait_until(lambda: len(server.engine.aborted) == 2)
        wait_until(lambda: server.engine.stats()["running"] == 0)


def test_a_full_queue_answers_503(served_model):
    with running(served_model, max_queued=1, pass_seconds=0.05) as server:
        body = completion(max_tokens=15, ignore_eos=True)
        first = threading.Thread(target=talk, args=(server, body))
        first.start()
        wait_until(lambda: server.engine.stats()["running"] == 1)
        response = server.post("/v1/completions", prompt="b")
        refused(response, 503, "queue: full")
        assert response.headers["retry-after"] == "2"
        first.join()
        ok(server.post("/v1/completions", prompt="b"))


def test_a_failed_submission_leaves_nothing(served_model):
    """The second prompt is refused by the engine: the first is aborted."""
    with running(served_model, max_queued=1, pass_seconds=0.02) as server:
        refused(
            server.post("/v1/completions", prompt=["a", "b"], max_tokens=100), 503, "queue: full"
        )
        wait_until(lambda: server.engine.stats()["running"] == 0)
        wait_until(lambda: server.context.metrics.in_flight == 0)


def test_bodies_together_have_a_limit(served_model):
    with running(served_model, limits={"bodies_bytes": MIB}) as server:
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(request(b" " * (MIB - 1000), b"Content-Length: %d" % (2 * MIB)))
        wait_until(lambda: server.context.bodies > MIB // 2)
        refused(
            server.http.post("/v1/completions", content=b" " * 65536), 503, "bodies are being read"
        )
        slow.close()
        wait_until(lambda: server.context.bodies == 0)
        ok(server.post("/v1/completions", prompt="a"))


def test_idle_connections_make_room(served_model):
    with running(served_model, limits={"connections": 50}) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(120)]
        ok(server.post("/v1/completions", prompt="a"))
        time.sleep(0.2)
        open_ones = sum(1 for connection in idle if is_open(connection))
        assert open_ones <= 50
        for connection in idle:
            connection.close()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_thousands_of_idle_connections_are_cheap(served_model):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 4000
    wanted = 2 * count + 500
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, wanted), hard))
    with running(served_model) as server:
        ok(server.post("/v1/completions", prompt="a"))
        before = resident_mib()
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
        ok(server.post("/v1/completions", prompt="a"))
        assert (resident_mib() - before) * 1024 / count < 64  # KiB each, with the client's side
        for connection in idle:
            connection.close()


def test_pipelined_requests_are_answered_in_order(server):
    one = completion(max_tokens=1).replace(b"Connection: close\r\n", b"")
    answer = talk(server, one + one + completion(max_tokens=2))
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"text":"H"') == 2


def test_expect_100_is_refused_before_the_body(server):
    answer = talk(server, request(b"", b"Content-Length: 52428800", b"Expect: 100-continue"))
    assert status(answer) == 413


def test_an_engine_error_is_a_request_error(served_model, caplog):
    with running(served_model) as server:
        server.engine.error = "/secret/path: not finite"
        error = refused(server.post("/v1/completions", prompt="a"), 500, "the engine failed")
        assert "secret" not in error["message"]
        assert any(
            error["request_id"] in record.getMessage()
            and server.engine.error in str(record.exc_info[1])
            for record in caplog.records
        )
        server.engine.error = "sampling: wanted at least one token that may follow, got none"
        refused(server.post("/v1/completions", prompt="a"), 400, server.engine.error)
        server.engine.error = "lost"
        parts = chunks(server.post("/v1/completions", prompt="a", stream=True))
        assert parts[-1]["error"]["code"] == 500
        server.engine.error = ""
        ok(server.post("/v1/completions", prompt="a"))


def test_a_fault_of_ours_shows_no_detail(served_model, monkeypatch, caplog):
    with running(served_model) as server:

        def broken(*arguments, **named):
            raise KeyError("/home/someone/secret")

        monkeypatch.setattr(server.context.engine, "open", broken)
        error = refused(server.post("/v1/completions", prompt="a"), 500, "internal error")
        assert error["message"] == "internal error"
        assert any(error["request_id"] in record.getMessage() for record in caplog.records)


def test_three_hundred_clients_leave_and_nothing_stays(served_model):
    with running(served_model, pass_seconds=0.005) as server:
        fields = {"prompt": "a", "n": 2, "max_tokens": 100, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        sent = request(body, b"Content-Length: %d" % len(body))

        def leave(count: int) -> None:
            for _ in range(count):
                with socket.create_connection(("127.0.0.1", server.port)) as connection:
                    connection.sendall(sent)
                    assert connection.recv(10)

        leave(50)
        wait_until(lambda: server.engine.stats()["running"] == 0)
        before = resident_mib()
        threads = [threading.Thread(target=leave, args=(50,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: server.engine.stats()["running"] == 0)
        server.engine.requests.clear()
        assert resident_mib() - before < 16
        client = server.context.engine
        wait_until(lambda: not client._subscriptions and not client._public)
        wait_until(lambda: server.context.metrics.in_flight == 0)
        ok(server.post("/v1/completions", prompt="a"))


def test_mangled_requests_are_answered_or_closed(served_model):
    """A seeded storm of changed bytes: a status below 500 or a closed connection, and the next request is served."""
    rng = random.Random(7)
    body = json.dumps(
        {"prompt": "abc", "max_tokens": 3, "stop": ["x"], "logit_bias": {"3": 1}}
    ).encode()
    whole = request(body, b"Content-Length: %d" % len(body), b"Connection: close")
    chunked = request(b"", b"Transfer-Encoding: chunked", b"Connection: close")
    chunked += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    quick = {"header_seconds": 0.2, "body_seconds": 0.2, "idle_seconds": 0.2}
    with running(served_model, limits=quick) as server:
        before = resident_mib()
        for _ in range(250):
            sent = bytearray(rng.choice((whole, chunked)))
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(len(sent))
                kind = rng.randrange(4)
                if kind == 0:
                    sent[place] = rng.randrange(256)
                elif kind == 1:
                    del sent[place : place + rng.randint(1, 9)]
                elif kind == 2:
                    sent[place:place] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
                else:
                    sent[place:place] = sent[: rng.randint(1, 40)]
            answer = talk(server, bytes(sent))
            assert not answer or status(answer) < 500, bytes(sent)
        assert resident_mib() - before < 16
        ok(server.post("/v1/completions", prompt="a"))
