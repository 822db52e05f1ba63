"""Processes that share the samples of a step give what one process gives."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from banyan.log.jsonl import by_step, read
from processes import check_cases, environment, run, torchrun

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
MAIN = ("-m", "banyan.trainer.main_ppo")
# These say how work was laid out, or measure the machine.
LAYOUT = ("timing", "perf/", "actor/perf/", "global_seqlen/", "trie/", "rollout/computed", "comm/")


def numbers(directory: Path) -> dict[int, dict[str, float]]:
    steps = by_step(read(directory / "metrics.jsonl"))
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith(LAYOUT)}
        for step, metrics in steps.items()
    }


def samples(directory: Path) -> list[tuple]:
    return [(s["uid"], s["output"], s["score"]) for s in read(directory / "samples.jsonl")]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shell_files import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def arguments(tmp_path: Path, tiny: Path) -> list[str]:
    """A small run in fp32 whose reward varies with the response."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    share = sum(letter in 'aeiou' for letter in solution_str) / max(1, len(solution_str))\n"
        "    return {'score': share, 'acc': float(share > 0), 'pred': solution_str[:1]}\n"
    )
    return [
        f"actor_rollout_ref.model.path={tiny}",
        "data.train_files='arithmetic:train?rows=40&seed=1'",
        "data.val_files='arithmetic:test?rows=5&seed=1'",
        "data.train_batch_size=4",
        "data.max_prompt_length=640",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.02",
        "actor_rollout_ref.sharing.mode=on",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.total_training_steps=3",
        "trainer.test_freq=2",
        "trainer.logger=[console]",
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_and_weight_changes_equal_one_process(size, tiny):
    check_cases(size, "gradient_worker.py", str(tiny), num_cases=4)


def test_a_run_over_two_processes_equals_one(tmp_path, arguments):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = run([sys.executable, *MAIN, *arguments, f"trainer.default_local_dir={one}"])
    assert alone.returncode == 0, alone.stdout
    both = run(torchrun(2, *MAIN, *arguments, f"trainer.default_local_dir={two}"))
    assert both.returncode == 0, both.stdout
    wanted, got = numbers(one), numbers(two)
    assert sorted(got) == sorted(wanted) == [0, 1, 2, 3]
    for step, metrics in wanted.items():
        for name, value in metrics.items():
            assert got[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)
    assert all(got[step]["actor/grad_norm"] > 0 for step in (1, 2, 3))
    assert samples(two) == samples(one)
    assert by_step(read(two / "metrics.jsonl"))[1]["trie/dp_imbalance"] >= 1
    assert (two / "rank_1.log").is_file()
    assert (two / "report.html").is_file()

    # A resumed run, over as many processes, goes on where it was; on one process too.
    more = "trainer.total_training_steps=4"
    again = run(torchrun(2, *MAIN, *arguments, more, f"trainer.default_local_dir={two}"))
    assert again.returncode == 0, again.stdout
    assert "resumed from" in again.stdout
    assert sorted(numbers(two)) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_sft_over_two_processes_equals_one(tmp_path, tiny):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "x" * (1 + i % 5)},
            ]
        }
        for i in range(8)
    ]
    from shell_files import write_jsonl

    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    arguments = [
        "-m",
        "banyan.trainer.sft_trainer",
        f"model.path={tiny}",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=4",
        "optim.lr=1e-3",
        "trainer.total_training_steps=4",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    alone = run([sys.executable, *arguments, f"trainer.default_local_dir={one}"])
    assert alone.returncode == 0, alone.stdout
    both = run(torchrun(2, *arguments, f"trainer.default_local_dir={two}"))
    assert both.returncode == 0, both.stdout
    wanted, got = numbers(one), numbers(two)
    assert sorted(got) == sorted(wanted)
    for step, metrics in wanted.items():
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            if name in metrics:
                assert got[step][name] == pytest.approx(metrics[name], rel=2e-2), (step, name)


def test_ranks_that_disagree_are_refused_by_the_key(tmp_path, arguments):
    script = tmp_path / "start.sh"
    line = " ".join(f'"{argument}"' for argument in (*MAIN, *arguments))
    script.write_text(
        f"exec {sys.executable} {line} trainer.default_local_dir={tmp_path / 'run'} "
        "actor_rollout_ref.actor.optim.lr=$((RANK + 1))e-3\n"
    )
    done = run(torchrun(2, "--no-python", "bash", str(script)))
    assert done.returncode != 0
    assert (
        "[parallel] actor_rollout_ref.actor.optim.lr: wanted one value on all ranks, got 0.001 on rank 0 and "
        "0.002 on rank 1"
    ) in done.stdout
    assert not (tmp_path / "run").exists()


def test_what_several_processes_cannot_do_is_refused_by_name(tmp_path, arguments):
    rollout = "actor_rollout_ref.rollout"
    change = [f"{rollout}.server_urls=[http://127.0.0.1:1]", f"{rollout}.name=vllm"]
    there = f"trainer.default_local_dir={tmp_path / 'run'}"
    done = run(torchrun(2, *MAIN, *arguments, *change, there))
    assert done.returncode != 0
    assert (
        "actor_rollout_ref.rollout.server_urls: wanted none with several processes" in done.stdout
    )
    # Ways to split a model that are not built.
    change = "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"
    alone = run([sys.executable, *MAIN, *arguments, change, there])
    assert alone.returncode == 2
    assert "pipeline_model_parallel_size: wanted 1, got 2: this way of splitting" in alone.stdout


@pytest.mark.slow
def test_a_restarted_run_has_the_bits_of_one_that_was_left_alone(tmp_path, arguments):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ["trainer.total_training_steps=12", "trainer.save_freq=1", "trainer.test_freq=-1"]
    alone = run(torchrun(2, *MAIN, *arguments, *more, f"trainer.default_local_dir={whole}"))
    assert alone.returncode == 0, alone.stdout
    command = torchrun(2, *MAIN, *arguments, *more, f"trainer.default_local_dir={parts}")
    command.insert(4, "--max-restarts=1")
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
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
    weights = "global_step_12/model.safetensors"
    assert (parts / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_or_freezes_ends_the_job_and_is_named(tmp_path, arguments, number):
    directory = tmp_path / "run"
    command = torchrun(
        2,
        *MAIN,
        *arguments,
        f"trainer.default_local_dir={directory}",
        "trainer.total_training_steps=100000",
        # A closed connection is noticed at once, a frozen process only after this.
        f"actor_rollout_ref.nccl_timeout={60 if number == signal.SIGKILL else 8}",
    )
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        until = time.monotonic() + 90
        while not read(directory / "metrics.jsonl") and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        victim = rank_process(process.pid, 1)
        os.kill(victim, number)
        began = time.monotonic()
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    if number == signal.SIGKILL:
        assert re.search(r"rank\s*: 1", out), out  # torchrun's own summary: root cause
        assert "Signal 9 (SIGKILL)" in out
    assert "rank 0 waited for rank 1 in vain" in out, out
    assert "rank 1 is gone or hangs" in out, out


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank below torchrun."""
    for entry in Path("/proc").iterdir():
        try:
            if f"PPid:\t{launcher}\n" not in (entry / "status").read_text():
                continue
            if f"RANK={rank}" in (entry / "environ").read_bytes().decode().split("\0"):
                return int(entry.name)
        except (OSError, ValueError):
            continue
    raise AssertionError(f"no process of rank {rank} below {launcher}")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the package ray is missing")
def test_ray_places_the_same_processes(tmp_path, arguments):
    folders = {launcher: tmp_path / launcher for launcher in ("torchrun", "ray")}
    there = {name: f"trainer.default_local_dir={folder}" for name, folder in folders.items()}
    both = run(torchrun(2, *MAIN, *arguments, there["torchrun"]))
    assert both.returncode == 0, both.stdout
    launch = [sys.executable, "-m", "banyan.cli.main", "launch", "--ray", "local"]
    placed = run([*launch, "--", "train", *arguments, "trainer.n_gpus_per_node=2", there["ray"]])
    assert placed.returncode == 0, placed.stdout
    assert "step 3" in placed.stdout
    assert numbers(folders["ray"]) == numbers(folders["torchrun"])
    weights = [folder / "global_step_3/model.safetensors" for folder in folders.values()]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    # A rank that fails ends the others, and its words are shown.
    bad = "actor_rollout_ref.rollout.name=nobody"
    failed = run([*launch, "--ranks", "2", "--", "train", *arguments, bad, there["ray"]])
    assert failed.returncode == 2, failed.stdout
    assert "actor_rollout_ref.rollout.name" in failed.stdout
