"""SFT, DPO and reward models over two processes, under every way to lay out a model, give what one process gives."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from processes import run, torchrun
from test_data_parallel import numbers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
FORMS = {
    "parts": "engine.strategy=fsdp",
    "tensor": "engine.tensor_model_parallel_size=2",
    "stages": "engine.pipeline_model_parallel_size=2",
    "ranges": "engine.context_parallel_size=2",
    "heads": "engine.ulysses_sequence_parallel_size=2",
}
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shell_files import write_tiny_qwen

    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_tiny_qwen(tmp_path_factory.mktemp("model"), "qwen3", hidden_size=32, **sizes)


def arguments(tmp_path: Path, model: Path, trainer: str) -> list[str]:
    from shell_files import write_jsonl

    rows = [
        {"prompt": f"{word}?", "response": word * 2, "chosen": word * 2, "rejected": "x" * (1 + i)}
        for i, word in enumerate(WORDS)
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    return [
        "-m",
        "banyan.cli.main",
        trainer,
        f"model.path={model}",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=4",
        "data.max_token_len_per_gpu=24",
        "engine.dtype=float32",
        "optim.lr=1e-3",
        "sharing.mode=on",
        "trainer.total_training_steps=3",
        "trainer.test_freq=1",
        "trainer.logger=[console]",
    ]


def expect_near(got: dict, wanted: dict) -> None:
    assert sorted(got) == sorted(wanted)
    for step, metrics in wanted.items():
        for name, value in metrics.items():
            is_tied = name.endswith("accuracies") and step < 2  # the model is still its reference
            if name.startswith(("train/", "val/", "rewards/", "logps/")) and not is_tied:
                about = pytest.approx(value, rel=1e-3, abs=1e-5)
                assert got[step][name] == about, (step, name)


def check(tmp_path: Path, model: Path, trainer: str, forms: list[str]) -> None:
    given = arguments(tmp_path, model, trainer)
    one = tmp_path / "one"
    alone = run([sys.executable, *given, f"trainer.default_local_dir={one}"])
    assert alone.returncode == 0, alone.stdout
    wanted = numbers(one)
    assert all(metrics["train/grad_norm"] > 0 for step, metrics in wanted.items() if step > 0)
    for form in forms:
        there = f"trainer.default_local_dir={tmp_path / form}"
        both = run(torchrun(2, *given, FORMS[form], there))
        assert both.returncode == 0, both.stdout
        expect_near(numbers(tmp_path / form), wanted)
    # The last one goes on in one process.
    again = run([sys.executable, *given, "trainer.total_training_steps=4", there])
    assert again.returncode == 0, again.stdout
    assert "resumed from" in again.stdout


def test_sft_in_parts_equals_one_process_which_goes_on(tmp_path, model):
    check(tmp_path, model, "sft", ["parts"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "forms"),
    [
        ("sft", ["tensor", "stages", "ranges", "heads"]),
        ("dpo", ["parts", "tensor"]),
        ("reward-model", ["stages"]),
    ],
)
def test_they_do_under_every_form(tmp_path, model, trainer, forms):
    check(tmp_path, model, trainer, forms)


def test_sizes_that_do_not_fit_are_refused_before_a_model_loads(tmp_path, model):
    given = [*arguments(tmp_path, model, "sft"), f"trainer.default_local_dir={tmp_path / 'run'}"]
    done = run([sys.executable, *given, FORMS["tensor"]])
    assert done.returncode == 2
    assert (
        "engine.tensor_model_parallel_size: wanted a divisor of the number of processes (1), got 2"
    ) in done.stdout
