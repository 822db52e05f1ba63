"""The commands as a user types them, on a tiny random model with SmolLM2's tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import needs_smollm2
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = needs_smollm2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, smollm2) -> Path:
    """A two-layer model with the vocabulary and the tokenizer of SmolLM2."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tiny") / "model"
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in smollm2.iterdir():
        if file.name.startswith(("tokenizer", "special", "generation")):
            shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    banyan("data", "arithmetic", "--out", path, "--rows", 24, "--seed", 3)
    return path


def command(*args) -> list[str]:
    return [sys.executable, "-m", "banyan.cli.main", *map(str, args)]


def banyan(*args, code: int = 0) -> str:
    result = subprocess.run(
        command(*args), capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def train_arguments(model: Path, data: Path, directory: Path, steps: int) -> list:
    return [
        "train",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}",
        "data.train_batch_size=4",
        "data.max_response_length=8",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.05",
        "actor_rollout_ref.sharing.mode=on",  # auto decides from the seconds of each folder
        "reward.num_workers=1",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={directory}",
        f"trainer.total_training_steps={steps}",
    ]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_train_writes_a_model_that_transformers_loads(tiny, data, tmp_path):
    banyan(*train_arguments(tiny, data, tmp_path, 2))
    checkpoint = tmp_path / "global_step_2"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert model.dtype == torch.bfloat16
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["trie/unique_tokens"] < lines[0]["trie/logical_tokens"]
    assert lines[0]["training/rollout_probs_diff_max"] == 0
    report = (tmp_path / "report.html").read_text()
    assert "<svg" in report
    assert "http" not in report.replace("http://www.w3.org", "")


def test_a_killed_run_resumes_to_the_same_bits(tiny, data, tmp_path):
    banyan(*train_arguments(tiny, data, tmp_path / "straight", 4))
    arguments = train_arguments(tiny, data, tmp_path / "killed", 4)
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        deadline = time.monotonic() + 120
        while not (tmp_path / "killed/global_step_2").exists():
            assert time.monotonic() < deadline, "no checkpoint appeared"
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
    banyan(*arguments)
    for name in ("model.safetensors", "state/master.safetensors", "state/moments.safetensors"):
        straight = tmp_path / "straight/global_step_4" / name
        assert digest(straight) == digest(tmp_path / "killed/global_step_4" / name), name


def test_score_shares_trunks_and_agrees_with_transformers(tiny, tmp_path):
    trunk = list(range(500, 530))
    rows = [{"id": str(i), "input_ids": [*trunk, 600 + i, 700, 800 + i]} for i in range(4)]
    rows.append({"id": "text", "text": "Two apples and three pears."})
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = {}
    for share in ("on", "off"):
        out = tmp_path / f"{share}.jsonl"
        banyan(
            "score",
            "--model",
            tiny,
            "--in",
            source,
            "--out",
            out,
            "--share",
            share,
            "--dtype",
            "bf16",
        )
        results[share] = [json.loads(line) for line in out.read_text().splitlines()]
    assert results["on"] == results["off"]
    exact = tmp_path / "fp32.jsonl"
    banyan("score", "--model", tiny, "--in", source, "--out", exact, "--dtype", "fp32")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for row, line in zip(rows[:4], exact.read_text().splitlines(), strict=False):
        got = json.loads(line)
        ids = torch.tensor(row["input_ids"])
        with torch.no_grad():
            table = model(ids[None]).logits[0, :-1].log_softmax(-1)
        want = table.gather(-1, ids[1:, None])[:, 0]
        assert got["id"] == row["id"]
        assert got["logprobs"][0] is None
        assert len(got["entropy"]) == len(row["input_ids"])
        torch.testing.assert_close(torch.tensor(got["logprobs"][1:]), want, atol=1e-4, rtol=0)


def test_generate_and_eval_run(tiny, data, tmp_path):
    assert banyan(
        "generate", "--model", tiny, "--prompt", "What is 2 + 3?", "--max-tokens", 4
    ).strip()
    assert "greedy" in banyan("eval", "--model", tiny, "--data", data, "--max-tokens", 4)


def test_mistakes_end_in_one_line_and_exit_code_2(tiny, data, tmp_path):
    arguments = train_arguments(tiny, data, tmp_path, 1)
    text = banyan(*arguments, "actor_rollout_ref.rolout.n=3", code=2)
    assert "actor_rollout_ref.rollout.n" in text
    assert "Traceback" not in text
    with (tmp_path / "file").open("w"):
        text = banyan(*train_arguments(tiny, data, tmp_path / "file/run", 1), code=2)
    assert "trainer.default_local_dir" in text
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny, damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    text = banyan(*train_arguments(damaged, data, tmp_path / "run", 1), code=2)
    assert "model.safetensors" in text
    assert "Traceback" not in text


def test_two_runs_do_not_share_a_folder(tiny, data, tmp_path):
    arguments = train_arguments(tiny, data, tmp_path, 200)
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        deadline = time.monotonic() + 120
        while not (tmp_path / "global_step_1").exists():
            assert time.monotonic() < deadline, "no checkpoint appeared"
            time.sleep(0.01)
        text = banyan(*arguments, code=2)
        run.kill()
    assert "another run is writing into" in text


@pytest.mark.slow
def test_smollm2_learns_arithmetic(smollm2, tmp_path):
    """Thirty steps of the demo's recipe: the mean reward of the last ten is well above that of the first five."""
    banyan(
        "train",
        "+recipe=smollm2_arithmetic",
        f"actor_rollout_ref.model.path={smollm2}",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.total_training_steps=30",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reward = [line["critic/score/mean"] for line in lines]
    assert sum(reward[-10:]) / 10 > sum(reward[:5]) / 5 + 0.15
