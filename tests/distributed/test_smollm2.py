"""SmolLM2 on GSM8K, and a random Qwen2.5, over two processes: five steps in fp32 with the rewards and losses of one,
and in bf16 with the losses of one on the same rollouts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from banyan.bench.work import find_gsm8k
from banyan.data import gsm8k
from conftest import needs_smollm2
from processes import run, small_run, torchrun
from shell_files import write_tiny_qwen
from test_data_parallel import MAIN, numbers, samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("banyan._C") is None,
        reason="the extension banyan._C is not built (make build)",
    ),
    pytest.mark.skipif(
        find_gsm8k() is None, reason="GSM8K is not on this machine (BANYAN_TEST_DATA)"
    ),
]
MEGATRON = "actor_rollout_ref.actor.megatron"
ACTOR = "actor_rollout_ref.actor"


def arguments(tmp_path: Path, model: Path, **changes: str) -> list[str]:
    rows = sorted(gsm8k.convert(find_gsm8k(), "train"), key=lambda row: len(json.dumps(row)))[:40]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *small_run(
            tmp_path,
            model,
            train_files=str(tmp_path / "train.jsonl"),
            **{
                "max_response_length": "12",
                "lr": "1e-6",
                "use_kl_loss": "false",
                "total_training_steps": "5",
                **changes,
            },
        ),
        # The far tail of a vocabulary is many tokens of a millionth each: rounding moves a draw from one to the next.
        "actor_rollout_ref.rollout.top_k=20",
        "trainer.save_freq=-1",
    ]


def equals_one_process(tmp_path: Path, given: list[str], forms: dict[str, str]) -> None:
    commands = {"one": [sys.executable, *MAIN, *given]}
    commands |= {name: torchrun(2, *MAIN, *given, key) for name, key in forms.items()}
    for name, command in commands.items():
        done = run([*command, f"trainer.default_local_dir={tmp_path / name}"], timeout=900)
        assert done.returncode == 0, done.stdout
    wanted = numbers(tmp_path / "one")
    assert sorted(wanted) == [1, 2, 3, 4, 5]
    for name in forms:
        got = numbers(tmp_path / name)
        for step, metrics in wanted.items():
            for metric in ("actor/loss", "actor/pg_loss", "critic/score/mean", "actor/grad_norm"):
                about = pytest.approx(metrics[metric], rel=1e-3, abs=1e-5)
                assert got[step][metric] == about, (name, step, metric)
            assert got[step]["actor/grad_norm"] > 0
        assert samples(tmp_path / name) == samples(tmp_path / "one"), name


def follows_one_process(tmp_path: Path, model: Path, forms: dict[str, str]) -> None:
    """In bf16, on rollouts that one process has kept: one response that rounding changed would change what follows."""
    kept = tmp_path / "rollouts"
    given = [
        *arguments(tmp_path, model, dtype="bfloat16", use_kl_loss="true", lr="1e-5"),
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "skip.rollout.enable=true",
        f"skip.rollout.dump_dir={kept}",
        "skip.rollout.steps=[1,2,3,4,5]",
    ]
    commands = {"one": [sys.executable, *MAIN, *given]}
    commands |= {name: torchrun(2, *MAIN, *given, key) for name, key in forms.items()}
    for name, command in commands.items():
        done = run([*command, f"trainer.default_local_dir={tmp_path / name}"], timeout=900)
        assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in kept.iterdir()) == [f"{step}.json" for step in range(1, 6)]
    wanted = numbers(tmp_path / "one")
    assert sorted(wanted) == [1, 2, 3, 4, 5]
    for name in forms:
        got = numbers(tmp_path / name)
        assert samples(tmp_path / name) == samples(tmp_path / "one"), name
        for step, metrics in wanted.items():
            for metric in ("actor/loss", "actor/pg_loss", "actor/kl_loss"):
                gap = abs(got[step][metric] - metrics[metric])
                assert gap < 5e-3, (name, step, metric)
            for metric, bound in (("actor/entropy", 2e-2), ("actor/grad_norm", 0.1)):
                about = pytest.approx(metrics[metric], rel=bound)
                assert got[step][metric] == about, (name, step, metric)
            assert got[step]["actor/grad_norm"] > 0


@needs_smollm2
def test_smollm2_in_bf16_on_the_same_rollouts(tmp_path, smollm2):
    follows_one_process(
        tmp_path,
        smollm2,
        {"fsdp": f"{ACTOR}.strategy=fsdp", "stages": f"{MEGATRON}.pipeline_model_parallel_size=2"},
    )


def test_a_random_qwen_in_bf16_on_the_same_rollouts(tmp_path):
    model = write_tiny_qwen(tmp_path / "qwen", tie_word_embeddings=False)
    follows_one_process(tmp_path, model, {"cut": f"{MEGATRON}.tensor_model_parallel_size=2"})


@needs_smollm2
def test_smollm2_in_parts_and_in_stages(tmp_path, smollm2):
    equals_one_process(
        tmp_path,
        arguments(tmp_path, smollm2),
        {"fsdp": f"{ACTOR}.strategy=fsdp", "stages": f"{MEGATRON}.pipeline_model_parallel_size=2"},
    )


def test_a_random_qwen_cut_over_two(tmp_path):
    model = write_tiny_qwen(tmp_path / "qwen", tie_word_embeddings=False)
    equals_one_process(
        tmp_path,
        arguments(tmp_path, model),
        {"cut": f"{MEGATRON}.tensor_model_parallel_size=2"},
    )
