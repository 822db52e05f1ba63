"""Processes that hold different layers each give what one process gives."""

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
MEGATRON = "actor_rollout_ref.actor.megatron"
STAGES = f"{MEGATRON}.pipeline_model_parallel_size"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers: biased with an untied head, and with norms of heads and a tied one."""
    from shell_files import write_tiny_qwen

    directory = tmp_path_factory.mktemp("models")
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    write_tiny_qwen(directory / "qwen2", tie_word_embeddings=False, **sizes)
    write_tiny_qwen(directory / "qwen3", "qwen3", **sizes)
    return directory


@pytest.fixture
def arguments(tmp_path: Path, models: Path) -> list[str]:
    return small_run(tmp_path, models / "qwen3")


def check(size: int, models: Path, num_cases: int) -> None:
    check_cases(size, "tensor_worker.py", str(models), "pipeline", num_cases=num_cases)


def test_gradients_and_weight_changes_equal_one_process(models):
    check(2, models, 2 * 2 * 3)


@pytest.mark.slow
def test_they_do_over_four_processes(models):
    check(4, models, 4 * 2 * 3)


@pytest.mark.slow
def test_they_do_beside_tensor_and_data_parallel_ranks(models):
    check(8, models, 2 * 3)


def test_a_run_over_two_stages_equals_one_process_and_one_resumes_it(tmp_path, arguments):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = run([sys.executable, *MAIN, *arguments, f"trainer.default_local_dir={one}"])
    assert alone.returncode == 0, alone.stdout
    there = f"trainer.default_local_dir={two}"
    both = run(torchrun(2, *MAIN, *arguments, f"{STAGES}=2", there))
    assert both.returncode == 0, both.stdout
    wanted, got = numbers(one), numbers(two)
    assert sorted(got) == sorted(wanted) == [1, 2, 3]
    for step, metrics in wanted.items():
        for name, value in metrics.items():
            assert got[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)
    assert all(got[step]["actor/grad_norm"] > 0 for step in got)
    assert samples(two) == samples(one)
    assert by_step(read(two / "metrics.jsonl"))[1]["comm/pp/send_bytes"] > 0
    again = run([sys.executable, *MAIN, *arguments, "trainer.total_training_steps=4", there])
    assert again.returncode == 0, again.stdout
    assert "resumed from" in again.stdout


@pytest.mark.slow
def test_interleaved_stages_and_sharing_decided_by_the_cost_model(tmp_path, arguments):
    there = f"trainer.default_local_dir={tmp_path / 'run'}"
    interleaved = f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"
    auto = "actor_rollout_ref.sharing.mode=auto"
    done = run(torchrun(2, *MAIN, *arguments, f"{STAGES}=2", interleaved, auto, there))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "run" / "cost_model.json").is_file()


def test_stages_that_do_not_fit_are_refused(tmp_path, arguments):
    there = f"trainer.default_local_dir={tmp_path / 'run'}"
    done = run([sys.executable, *MAIN, *arguments, f"{STAGES}=2", there])
    assert done.returncode != 0
    assert f"{STAGES}: wanted a divisor of the number of processes (1), got 2" in done.stdout
