"""`banyan launch --ray local` gives what torchrun gives, under every way to lay out a model over two processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from processes import run, small_run, torchrun
from test_data_parallel import MAIN, numbers, samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("banyan._C") is None,
        reason="the extension banyan._C is not built (make build)",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="the package ray is missing"
    ),
]
ACTOR = "actor_rollout_ref.actor"
LAUNCH = (sys.executable, "-m", "banyan.cli.main", "launch", "--ray", "local", "--ranks", "2", "--")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shell_files import write_tiny_qwen

    return write_tiny_qwen(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


@pytest.mark.parametrize(
    "key",
    [
        f"{ACTOR}.strategy=fsdp",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
    ],
)
def test_it_gives_what_torchrun_gives(tmp_path, model, key):
    arguments = [*small_run(tmp_path, model, total_training_steps="2"), key]
    folders = {name: tmp_path / name for name in ("torchrun", "ray")}
    there = {name: f"trainer.default_local_dir={folder}" for name, folder in folders.items()}
    both = run(torchrun(2, *MAIN, *arguments, there["torchrun"]))
    assert both.returncode == 0, both.stdout
    placed = run([*LAUNCH, "train", *arguments, there["ray"]])
    assert placed.returncode == 0, placed.stdout
    assert "step 2" in placed.stdout
    wanted = numbers(folders["torchrun"])
    assert sorted(wanted) == [1, 2]
    assert all(metrics["actor/grad_norm"] > 0 for metrics in wanted.values())
    assert numbers(folders["ray"]) == wanted
    assert samples(folders["ray"]) == samples(folders["torchrun"])
    weights = [folder / "global_step_2/model.safetensors" for folder in folders.values()]
    assert weights[0].read_bytes() == weights[1].read_bytes()
