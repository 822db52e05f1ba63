"""`banyan serve` in a process of its own, and the environments of the clients that talk to it.

A client runs as a program in its own environment (tests/peers/install.sh makes them), since its
packages must not meet ours. The programs are pytest files of their own; their outcome is one test
here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
sys.path.append(str(ROOT / "tests" / "shell"))  # the tiny model of its tests


def environment(peer: str) -> Path:
    return ROOT / "build" / "peers" / peer


def needs(peer: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not (environment(peer) / ".installed").is_file(),
        reason=f"{environment(peer)} is missing: run `make peers-test`",
    )


@dataclass
class Server:
    url: str
    model: Path
    process: subprocess.Popen


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(url: str, process: subprocess.Popen, log: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(url + "/health", timeout=2).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"banyan serve is not ready after {seconds} s:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def serving(model: Path, folder: Path, *arguments: str) -> Iterator[Server]:
    """`banyan serve` on a free port; interrupted at the end, when it must end by itself."""
    port = free_port()
    log = folder / "serve.log"
    command = [
        *(sys.executable, "-m", "banyan.cli.main", "serve", "--model", str(model)),
        *("--port", str(port), *arguments),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        yield Server(url, model, process)
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a tokenizer of 320 tokens and a chat template."""
    from banyan.convert import convert
    from test_convert import write_gguf

    folder = tmp_path_factory.mktemp("tiny")
    write_gguf(folder / "Tiny.F32.gguf")
    return convert(str(folder / "Tiny.F32.gguf"), folder / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_model, tmp_path_factory.mktemp("serve")) as server:
        yield server


def run_program(
    peer: str, program: str, server: Server, seconds: float = 300, **variables: str
) -> None:
    """Runs a pytest file of programs/ in the peer's environment; its output is the failure's text."""
    command = [
        *(str(environment(peer) / "bin" / "python"), "-m", "pytest", "-q", "-x", "--tb=short"),
        *(
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            str(PROGRAMS),
            str(PROGRAMS / program),
        ),
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env |= {
        "BANYAN_URL": server.url,
        "BANYAN_MODEL": str(server.model),
        "NO_COLOR": "1",
    } | variables
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
