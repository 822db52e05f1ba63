"""Processes that hold a part of every layer each give what one process gives."""

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
SIZE = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biased, with norms of heads, and with fewer kv heads than ranks."""
    from shell_files import write_tiny_llama, write_tiny_qwen

    directory = tmp_path_factory.mktemp("models")
    write_tiny_qwen(directory / "qwen2")
    sizes = {"vocab_size": 288, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_tiny_qwen(directory / "qwen3", "qwen3", **sizes)
    write_tiny_llama(directory / "llama")
    return directory


@pytest.fixture
def arguments(tmp_path: Path, models: Path) -> list[str]:
    """Five steps of the model of Qwen2.5's shape; whether prefixes are shared is the tests' to say."""
    given = small_run(tmp_path, models / "qwen2", total_training_steps="5")
    return [argument for argument in given if "sharing.mode" not in argument]


def check(size: int, models: Path, num_cases: int) -> None:
    check_cases(size, "tensor_worker.py", str(models), "tensor", num_cases=num_cases)


def test_gradients_and_weight_changes_equal_one_process(models):
    # Llama has two heads on one kv head here: two ranks, not four.
    check(2, models, 2 * 3 * 3)


@pytest.mark.slow
def test_they_do_beside_data_parallel_ranks_and_over_four(models, tmp_path):
    for name in ("qwen2", "qwen3"):
        (tmp_path / name).symlink_to(models / name)
    check(4, tmp_path, 2 * 2 * 3 + 2 * 1 * 3)


def test_a_run_over_two_processes_equals_one(tmp_path, arguments):
    one, two = tmp_path / "one", tmp_path / "two"
    sharing = "actor_rollout_ref.sharing.mode=on"
    alone = run([sys.executable, *MAIN, *arguments, sharing, f"trainer.default_local_dir={one}"])
    assert alone.returncode == 0, alone.stdout
    both = run(
        torchrun(2, *MAIN, *arguments, sharing, f"{SIZE}=2", f"trainer.default_local_dir={two}")
    )
    assert both.returncode == 0, both.stdout
    wanted, got = numbers(one), numbers(two)
    assert sorted(got) == sorted(wanted) == [1, 2, 3, 4, 5]
    for step, metrics in wanted.items():
        for name, value in metrics.items():
            assert got[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)
    assert all(got[step]["actor/grad_norm"] > 0 for step in got)
    assert samples(two) == samples(one)
    assert by_step(read(two / "metrics.jsonl"))[1]["comm/tp/all_to_all_bytes"] > 0


@pytest.mark.slow
def test_sharing_is_decided_by_one_clock_and_one_process_resumes(tmp_path, arguments):
    """mode=auto measures the cut model: ranks that saw different times would wait for each other for ever."""
    there = f"trainer.default_local_dir={tmp_path / 'run'}"
    done = run(torchrun(2, *MAIN, *arguments, f"{SIZE}=2", there))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "run" / "cost_model.json").is_file()
    again = run([sys.executable, *MAIN, *arguments, "trainer.total_training_steps=6", there])
    assert again.returncode == 0, again.stdout
    assert "resumed from" in again.stdout


def test_a_size_that_does_not_fit_the_processes_is_refused(tmp_path, arguments):
    there = f"trainer.default_local_dir={tmp_path / 'run'}"
    done = run([sys.executable, *MAIN, *arguments, f"{SIZE}=2", there])
    assert done.returncode != 0
    assert f"{SIZE}: wanted a divisor of the number of processes (1), got 2" in done.stdout
