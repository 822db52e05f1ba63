"""Processes that compute the passes over equal samples together give what one process gives."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from banyan.log.jsonl import by_step, read
from processes import check_cases, run, small_run, torchrun
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
    return small_run(tmp_path, models / "qwen3")


def check(size: int, models: Path, num_cases: int) -> None:
    check_cases(size, "context_worker.py", str(models), num_cases=num_cases, changes=1e-6)


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
