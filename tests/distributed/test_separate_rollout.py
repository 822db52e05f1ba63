"""A process that only generates beside one that trains."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from banyan.log.jsonl import read
from processes import environment, run, torchrun
from test_data_parallel import (  # noqa: F401 (fixtures)
    MAIN,
    arguments,
    numbers,
    rank_process,
    samples,
    tiny,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
NODES = "actor_rollout_ref.rollout.nnodes=1"
SYNC = ["actor_rollout_ref.hybrid_engine=false", NODES]
AHEAD = [
    NODES,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
]


def weights(directory: Path, step: int) -> bytes:
    return (directory / f"global_step_{step}/state/master.safetensors").read_bytes()


def test_one_step_off_policy_ends_in_the_same_place_twice(tmp_path, arguments):  # noqa: F811
    steps = "trainer.total_training_steps=10"
    for name in ("first", "second"):
        there = f"trainer.default_local_dir={tmp_path / name}"
        done = run(torchrun(2, *MAIN, *arguments, *AHEAD, steps, there))
        assert done.returncode == 0, done.stdout
        assert "each batch is one step old" in done.stdout
    first, second = (tmp_path / name for name in ("first", "second"))
    assert weights(first, 10) == weights(second, 10)
    assert numbers(first) == numbers(second)
    assert samples(first) == samples(second)
    metrics = numbers(first)
    assert sorted(metrics) == list(range(1, 11))
    for step, found in metrics.items():
        age = 0 if step == 1 else 1
        for kind in ("mean", "max", "min"):
            assert found[f"training/off_policy/trajectory_staleness/{kind}"] == age
            assert found[f"training/off_policy/trajectory_spans/{kind}"] == 1
            assert found[f"rollout/weight_version/{kind}"] == step - 1 - age
        assert found["actor/grad_norm"] > 0
    assert (first / "rank_1.log").is_file()


def test_a_number_that_does_not_fit_the_processes_is_refused(tmp_path, arguments):  # noqa: F811
    there = f"trainer.default_local_dir={tmp_path / 'run'}"
    done = run([sys.executable, *MAIN, *arguments, *SYNC, there])
    assert done.returncode == 2, done.stdout
    assert (
        "actor_rollout_ref.rollout.nnodes x n_gpus_per_node: wanted fewer than the processes of the run (1), got 1"
        in done.stdout
    )


@pytest.mark.slow
def test_in_the_order_of_one_process_it_gives_what_that_gives(tmp_path, arguments):  # noqa: F811
    one, two = tmp_path / "one", tmp_path / "two"
    alone = run([sys.executable, *MAIN, *arguments, f"trainer.default_local_dir={one}"])
    assert alone.returncode == 0, alone.stdout
    both = run(torchrun(2, *MAIN, *arguments, *SYNC, f"trainer.default_local_dir={two}"))
    assert both.returncode == 0, both.stdout
    assert numbers(two) == numbers(one)
    assert samples(two) == samples(one)
    assert weights(two, 3) == weights(one, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_a_side_that_dies_is_named_by_the_other(tmp_path, arguments, victim, number):  # noqa: F811
    directory = tmp_path / "run"
    more = [
        f"trainer.default_local_dir={directory}",
        "trainer.total_training_steps=100000",
        f"actor_rollout_ref.nccl_timeout={60 if number == signal.SIGKILL else 8}",
    ]
    command = torchrun(2, *MAIN, *arguments, *AHEAD, *more)
    process = start(command)
    try:
        until = time.monotonic() + 90
        while not read(directory / "metrics.jsonl") and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        began = time.monotonic()
        os.kill(rank_process(process.pid, victim), number)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    if victim == 1:
        assert "in group hand_over: rank 0 waited for rank 1 in vain" in out, out
        assert "rank 1 is gone or hangs" in out, out
    else:
        assert "rank 1 waited for rank 0 in vain" in out, out


@pytest.mark.slow
def test_a_restarted_run_has_the_bits_of_one_that_was_left_alone(tmp_path, arguments):  # noqa: F811
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = [*AHEAD, "trainer.total_training_steps=12", "trainer.save_freq=1"]
    alone = run(torchrun(2, *MAIN, *arguments, *more, f"trainer.default_local_dir={whole}"))
    assert alone.returncode == 0, alone.stdout
    command = torchrun(2, *MAIN, *arguments, *more, f"trainer.default_local_dir={parts}")
    command.insert(4, "--max-restarts=1")
    process = start(command)
    try:
        until = time.monotonic() + 90
        while not (parts / "global_step_2").exists() and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(rank_process(process.pid, 1), signal.SIGKILL)
        out, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert "resumed from" in out, out
    assert numbers(parts) == numbers(whole)
    assert weights(parts, 12) == weights(whole, 12)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the package ray is missing")
def test_ray_places_both_sides(tmp_path, arguments):  # noqa: F811
    launch = [sys.executable, "-m", "banyan.cli.main", "launch", "--ray", "local", "--", "train"]
    there = f"trainer.default_local_dir={tmp_path / 'run'}"
    placed = run([*launch, *arguments, *AHEAD, there])
    assert placed.returncode == 0, placed.stdout
    found = numbers(tmp_path / "run")
    assert found[3]["training/off_policy/trajectory_staleness/mean"] == 1


def start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
