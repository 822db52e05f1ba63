"""`banyan sft`, `dpo` and `reward-model` as a user types them, on a tiny model with the tokenizer of SmolLM2."""

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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

pytestmark = needs_smollm2
PARTS = ("model.safetensors", "state/master.safetensors", "state/moments.safetensors")


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


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Say {word}."},
                {"role": "assistant", "content": word},
                {"role": "user", "content": "Again."},
                {"role": "assistant", "content": f"{word}, {word}"},
            ]
        }
        for word in ("one", "two", "red", "blue", "cat", "dog", "sun", "moon")
    ]
    return write(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    rows = [
        {"prompt": f"{i} + {i}?", "chosen": f"{2 * i}", "rejected": f"no idea about {i}"}
        for i in range(1, 9)
    ]
    return write(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", rows)


def command(*args) -> list[str]:
    return [sys.executable, "-m", "banyan.cli.main", *map(str, args)]


def banyan(*args, code: int = 0) -> str:
    result = subprocess.run(
        command(*args), capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def arguments(verb: str, model: Path, data: Path, directory: Path, *more: str) -> list[str]:
    return [
        verb,
        f"model.path={model}",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=4",
        "optim.lr=1e-2",
        f"trainer.default_local_dir={directory}",
        "trainer.logger=[console]",
        "trainer.save_freq=1",
        "sharing.mode=on",  # auto decides from measured seconds: two folders may decide differently
        *more,
    ]


def metrics(directory: Path) -> dict[int, dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def test_sft_learns_and_writes_a_model_that_transformers_loads(tiny, chats, tmp_path):
    said = banyan(*arguments("sft", tiny, chats, tmp_path, "trainer.total_epochs=8"))
    steps = metrics(tmp_path)
    assert list(steps) == list(
        range(17)
    )  # two batches an epoch, and the validation before the first
    assert steps[16]["val/loss"] < 0.5 * steps[0]["val/loss"]
    assert steps[1]["trie/unique_tokens"] < steps[1]["trie/logical_tokens"]
    assert "validation loss, first and last" in said
    assert "Loss" in (tmp_path / "report.html").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_16", dtype="auto")
    assert model.dtype == torch.bfloat16


def test_each_turn_gives_the_same_loss_and_more_sharing(tiny, chats, tmp_path):
    losses = {}
    for each in ("false", "true"):
        more = (f"banyan.data.each_turn={each}", "engine.dtype=float32", "trainer.total_epochs=1")
        banyan(*arguments("sft", tiny, chats, tmp_path / each, *more))
        losses[each] = metrics(tmp_path / each)
    whole, turns = losses["false"], losses["true"]
    for step in (1, 2):
        assert turns[step]["train/loss"] == pytest.approx(whole[step]["train/loss"], abs=1e-4)
        assert turns[step]["train/num_tokens"] == whole[step]["train/num_tokens"]
    assert turns[1]["trie/ratio"] > 1.3 * whole[1]["trie/ratio"]


def test_dpo_moves_the_pairs_apart_and_drops_the_reference_on_request(tiny, pairs, tmp_path):
    for precompute in ("false", "true"):
        more = (
            "trainer.total_epochs=4",
            "optim.lr=1e-3",
            f"preference.precompute_ref_log_probs={precompute}",
        )
        banyan(*arguments("dpo", tiny, pairs, tmp_path / precompute, *more))
    steps = metrics(tmp_path / "false")
    assert steps[1]["train/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert steps[1]["rewards/margins"] == 0.0
    assert steps[8]["val/rewards/accuracies"] == 1.0
    assert steps[8]["val/rewards/margins"] > 0.1
    assert [metrics(tmp_path / "true")[step]["train/loss"] for step in range(1, 9)] == [
        steps[step]["train/loss"] for step in range(1, 9)
    ]


def test_a_reward_model_scores_in_transformers_as_it_did_in_training(tiny, pairs, tmp_path):
    more = ("trainer.total_epochs=3", "optim.lr=1e-3", "engine.dtype=float32")
    said = banyan(*arguments("reward-model", tiny, pairs, tmp_path, *more))
    assert "no value head there; it starts from random weights" in said
    last = metrics(tmp_path)[6]
    assert last["val/rewards/accuracies"] == 1.0
    path = tmp_path / "global_step_6"
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    from banyan.data.chat import Chat

    chat, found = Chat(tiny), []
    for row in map(json.loads, pairs.read_text().splitlines()):
        for answer in (row["chosen"], row["rejected"]):
            messages = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": answer},
            ]
            ids = chat.encode(chat.render(messages, {"add_generation_prompt": False}))
            with torch.no_grad():
                found.append(model(torch.tensor([ids])).logits[0, 0].item())
    margin = sum(found[::2]) / 8 - sum(found[1::2]) / 8
    assert last["val/rewards/margins"] == pytest.approx(margin, rel=0.02)  # the file is bf16


@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_a_killed_run_resumes_to_the_same_bits(verb, tiny, chats, pairs, tmp_path):
    data = chats if verb == "sft" else pairs
    more = ("trainer.total_epochs=3", "trainer.test_freq=2", "data.train_batch_size=3")
    more += ("sharing.mode=auto",)
    banyan(*arguments(verb, tiny, data, tmp_path / "straight", *more))
    again = arguments(verb, tiny, data, tmp_path / "killed", *more)
    measured = (tmp_path / "straight/cost_model.json").read_bytes()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/cost_model.json").write_bytes(measured)
    with subprocess.Popen(
        command(*again), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        deadline = time.monotonic() + 120
        while not (tmp_path / "killed/global_step_3").exists():
            assert time.monotonic() < deadline, "no checkpoint appeared"
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
    assert "resumed from" in banyan(*again)
    assert (tmp_path / "killed/cost_model.json").read_bytes() == measured
    for name in PARTS:
        digests = [
            hashlib.sha256((tmp_path / run / "global_step_6" / name).read_bytes()).hexdigest()
            for run in ("straight", "killed")
        ]
        assert digests[0] == digests[1], name
    straight, killed = (metrics(tmp_path / run) for run in ("straight", "killed"))
    assert list(straight) == list(killed)
    for step, values in straight.items():
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            assert values.get(name) == killed[step].get(name), (step, name)


def test_verls_module_name_runs_and_mistakes_are_one_line(tiny, chats, tmp_path):
    args = arguments("sft", tiny, chats, tmp_path, "trainer.total_training_steps=1")[1:]
    result = subprocess.run(
        [sys.executable, "-m", "banyan.trainer.sft_trainer", *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "global_step_1").is_dir()
    said = banyan(*arguments("sft", tiny, chats, tmp_path, "data.messages_key=chat"), code=2)
    assert f"{chats}:1: wanted column 'chat', or 'prompt' and 'response', or 'input_ids'" in said
    said = banyan(*arguments("dpo", tiny, chats, tmp_path), code=2)
    assert "wanted columns 'chosen' and 'rejected'; got messages" in said
    said = banyan(*arguments("dpo", tmp_path / "none", chats, tmp_path), code=2)
    assert "model.path: wanted a local model directory" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_trained_reward_model_scores_a_run(tiny, pairs, tmp_path):
    banyan(
        *arguments(
            "reward-model", tiny, pairs, tmp_path / "scorer", "trainer.total_training_steps=1"
        )
    )
    rows = [
        {
            "data_source": "no/scorer",
            "prompt": [{"role": "user", "content": f"{i} + {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        }
        for i in range(4)
    ]
    run = tmp_path / "run"
    banyan(
        "train",
        f"actor_rollout_ref.model.path={tiny}",
        f"data.train_files={write(tmp_path / 'prompts.jsonl', rows)}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.05",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={tmp_path / 'scorer' / 'global_step_1'}",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={run}",
        "trainer.logger=[console]",
    )
    step = metrics(run)[1]
    assert step["reward/failed"] == 0
    assert step["critic/score/min"] < step["critic/score/max"]
    assert step["actor/grad_norm"] > 0
