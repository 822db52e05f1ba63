"""Training runs whose tokens come from `banyan serve`, a process of its own, in both dialects.

Server and trainer run the same kernels on weights that went through a folder of safetensors, so their log-probabilities
have the same bits at every step.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from banyan.cli.main import main
from shell_files import write_tiny_llama
from test_server_runs import argv, at, numbers  # noqa: F401  a fixture among them

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
KEY = "a-key-for-the-tests"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def serving(tiny, tmp_path_factory):
    """(address, address of the control routes, file with the key, file with their token)"""
    folder = tmp_path_factory.mktemp("serve")
    key = folder / "key"
    key.write_text(KEY + "\n")
    log = folder / "serve.log"
    command = [sys.executable, "-m", "banyan.cli.main", "serve", "--model", tiny, "--port", "0"]
    command += ["--admin-port", "0", "--admin-token-file", folder / "token"]
    command += ["--api-key-file", key, "--kv-cache-memory-bytes", "16M"]
    with log.open("w") as stream:
        process = subprocess.Popen(list(map(str, command)), stdout=stream, stderr=stream)
    try:
        url, admin = wait_for(process, log)
        yield url, admin, key, folder / "token"
    finally:
        process.terminate()
        process.wait(20)


def wait_for(process, log: Path) -> tuple[str, str]:
    """The addresses that the server prints, once it answers."""
    for _ in range(600):
        lines = [line.split(": ")[-1] for line in log.read_text().splitlines() if "http://" in line]
        assert process.poll() is None, log.read_text()
        if len(lines) >= 2:
            try:
                urllib.request.urlopen(lines[0] + "/health", timeout=2).close()
                return lines[0], lines[1]
            except (urllib.error.URLError, OSError):
                pass
        time.sleep(0.1)
    raise TimeoutError(log.read_text())


def test_the_settings_shown_are_those_in_force(serving, tiny):
    url, *_ = serving
    asked = urllib.request.Request(f"{url}/server_info", headers={"Authorization": f"Bearer {KEY}"})
    shown = json.loads(urllib.request.urlopen(asked, timeout=5).read())["settings"]
    name = Path(tiny).name
    wanted = {"model": name, "served_model_name": [name], "kv_cache_memory_bytes": 16 << 20}
    wanted |= {"max_num_queued_reqs": 4096, "dtype": "bfloat16"}
    assert {key: shown[key] for key in wanted} == wanted


@pytest.mark.parametrize("colocated", ["false", "true"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_run_on_banyans_own_server_has_its_bits(
    dialect,
    colocated,
    tmp_path,
    argv,  # noqa: F811
    serving,
    capsys,
):
    url, admin, key, token = serving
    server = [
        f"actor_rollout_ref.rollout.name={dialect}",
        f"actor_rollout_ref.rollout.server_urls=[{url}]",
        f"banyan.rollout.admin_urls=[{admin}]",
        f"banyan.rollout.api_key_file={key}",
        f"banyan.rollout.admin_token_file={token}",
        f"banyan.rollout.colocated={colocated}",
    ]
    assert main([*argv, at(tmp_path / "run"), *server]) == 0
    asked = urllib.request.Request(f"{url}/is_sleeping", headers={"Authorization": f"Bearer {KEY}"})
    assert urllib.request.urlopen(asked, timeout=5).read() == b'{"is_sleeping":false}'
    out = capsys.readouterr().out
    assert "differ from the trainer's by 0.0000" in out
    found = numbers(tmp_path / "run")
    assert sorted(found) == [1, 2]
    for step in (1, 2):
        assert found[step]["training/rollout_probs_diff_max"] == 0.0
        assert found[step]["actor/grad_norm"] > 0
