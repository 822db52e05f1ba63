"""The rollout cut over processes by keys of its own, whatever the training does with its weights."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from banyan.log.jsonl import by_step, read
from processes import run, small_run, torchrun
from test_data_parallel import MAIN, numbers, rank_process, samples
from test_separate_rollout import start

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
MEGATRON = "actor_rollout_ref.actor.megatron"
SEPARATE = ["actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=2"]
TRAIN = {
    "data": (2, []),
    "parts": (2, ["actor_rollout_ref.actor.strategy=fsdp"]),
    "in place": (4, [f"{MEGATRON}.tensor_model_parallel_size=2"]),
    "stages": (4, [f"{MEGATRON}.pipeline_model_parallel_size=2"]),
    "separate": (3, SEPARATE),
}
AT_ONCE = ("parts", "separate")


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of one process, and its arguments."""
    from shell_files import write_tiny_qwen

    folder = tmp_path_factory.mktemp("rollout_layout")
    write_tiny_qwen(folder / "model", num_hidden_layers=2)
    arguments = small_run(folder, folder / "model")
    one = folder / "one"
    done = run([sys.executable, *MAIN, *arguments, f"trainer.default_local_dir={one}"])
    assert done.returncode == 0, done.stdout
    return one, arguments


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in AT_ONCE else pytest.mark.slow) for n in TRAIN]
)
def test_a_run_is_that_of_one_process(tmp_path, alone, name):
    one, arguments = alone
    size, more = TRAIN[name]
    directory = tmp_path / "run"
    command = torchrun(
        size, *MAIN, *arguments, *more, SIZE, f"trainer.default_local_dir={directory}"
    )
    done = run(command)
    assert done.returncode == 0, done.stdout
    wanted, got = numbers(one), numbers(directory)
    assert sorted(got) == sorted(wanted) == [1, 2, 3]
    for step, metrics in wanted.items():
        for key, value in metrics.items():
            assert got[step][key] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, key)
    assert samples(directory) == samples(one)
    sent = by_step(read(directory / "metrics.jsonl"))[1]
    assert ("comm/rollout_tp/all_gather_bytes" in sent) == (name in ("data", "parts", "stages"))


@pytest.mark.slow
def test_a_process_that_dies_is_named_by_the_one_it_generates_with(tmp_path, alone):
    _, arguments = alone
    directory = tmp_path / "run"
    more = [f"trainer.default_local_dir={directory}", "trainer.total_training_steps=100000"]
    command = torchrun(3, *MAIN, *arguments, *SEPARATE, SIZE, *more)
    process = start(command)
    try:
        until = time.monotonic() + 90
        while not read(directory / "metrics.jsonl") and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(rank_process(process.pid, 2), signal.SIGKILL)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "rank 1 waited for rank 2 in vain" in out, out
    assert "rank 2 is gone or hangs" in out, out


def test_a_size_that_does_not_fit_the_processes_is_refused(tmp_path, alone):
    _, arguments = alone
    there = f"trainer.default_local_dir={tmp_path / 'run'}"
    size = SIZE.replace("=2", "=3")
    done = run(torchrun(2, *MAIN, *arguments, size, there))
    assert done.returncode != 0
    wanted = "wanted a divisor of the number of processes that generate (2), got 3"
    assert f"{size.partition('=')[0]}: {wanted}" in done.stdout
