"""Processes that compute the passes over equal samples together give what one process gives."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from banyan.log.jsonl import by_step, read
from processes import HERE, run, torchrun
from test_data_parallel import MAIN, numbers, samples

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
ACTOR = "actor_rollout_ref.actor"
RANGES = f"{ACTOR}.megatron.context_parallel_size"
HEADS = f"{ACTOR}.ulysses_sequence_parallel_size"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that two processes, and two times two, can share."""
    from shell_files import write_tiny_qwen

    directory = tmp_path_factory.mktemp("models")
    write_tiny_qwen(
        directory / "qwen3", "qwen3", vocab_size=288, num_attention_heads=8, num_key_value_heads=2
    )
    return directory


@pytest.fixture
def arguments(tmp_path: Path, models: Path) -> list[str]:
    """Three steps in fp32, whose reward varies with the response."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(ord(letter) % 2 for letter in solution_str) / max(1, len(solution_str))\n"
    )
    return [
        f"actor_rollout_ref.model.path={models / 'qwen3'}",
        "data.train_files='arithmetic:train?rows=40&seed=1'",
        "data.train_batch_size=4",
        "data.max_prompt_length=640",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.use_kl_loss=true",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.02",
        "actor_rollout_ref.sharing.mode=on",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.total_training_steps=3",
        "trainer.logger=[console]",
    ]


def check(size: int, models: Path, num_cases: int) -> None:
    done = run(torchrun(size, str(HERE / "context_worker.py"), str(models)))
    assert done.returncode == 0, done.stdout
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == num_cases, done.stdout
    for case in cases:
        bound = 1e-10 if case["case"].startswith("fp64") else 1e-5
        assert case["loss"] < bound, case
        assert case["gradients"] < bound, case
        assert case["changes"] < (1e-6 if bound == 1e-10 else 1e-3), case


def test_gradients_and_weight_changes_equal_one_process(models):
    check(2, models, 3 * 3)


@pytest.mark.slow
def test_they_do_beside_other_ranks_and_cuts(models):
    check(4, models, 6 * 3)


def expect_equal(got: Path, wanted: Path) -> None:
    steps = numbers(wanted)
    for step, metrics in steps.items():
        for name, value in metrics.items():
            assert numbers(got)[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (
                step,
                name,
            )
    assert sorted(numbers(got)) == sorted(steps) == [1, 2, 3]
    assert samples(got) == samples(wanted)
    assert by_step(read(got / "metrics.jsonl"))[1]["comm/cp/all_to_all_bytes"] > 0


@pytest.mark.parametrize("key", [RANGES, pytest.param(HEADS, marks=pytest.mark.slow)])
def test_a_run_over_two_processes_equals_one(tmp_path, arguments, key):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = run([sys.executable, *MAIN, *arguments, f"trainer.default_local_dir={one}"])
    assert alone.returncode == 0, alone.stdout
    both = run(torchrun(2, *MAIN, *arguments, f"{key}=2", f"trainer.default_local_dir={two}"))
    assert both.returncode == 0, both.stdout
    expect_equal(two, one)


@pytest.mark.slow
def test_a_run_with_weights_in_parts_equals_one(tmp_path, arguments):
    one, parts = tmp_path / "one", tmp_path / "parts"
    alone = run([sys.executable, *MAIN, *arguments, f"trainer.default_local_dir={one}"])
    assert alone.returncode == 0, alone.stdout
    more = [f"{HEADS}=2", f"{ACTOR}.strategy=fsdp", f"trainer.default_local_dir={parts}"]
    four = run(torchrun(4, *MAIN, *arguments, *more))
    assert four.returncode == 0, four.stdout
    expect_equal(parts, one)


def test_what_does_not_fit_is_refused_by_name(tmp_path, arguments):
    there = f"trainer.default_local_dir={tmp_path / 'run'}"
    done = run([sys.executable, *MAIN, *arguments, f"{RANGES}=2", there])
    assert done.returncode != 0
    assert f"{RANGES}: wanted a divisor of the number of processes (1)" in done.stdout
