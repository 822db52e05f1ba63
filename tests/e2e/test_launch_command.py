"""prefix-0501's launch command on GSM8K: it runs with only module name, paths and model changed, prints its log lines
with figures of the run, and learns the same with sharing switched off.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, needs_smollm2

TEST_DATA = Path(os.environ.get("BANYAN_TEST_DATA", ROOT.parent / "shared" / "data"))
QWEN = TEST_DATA / "tokenizers" / "qwen2.5"
pytestmark = pytest.mark.skipif(
    not (TEST_DATA / "gsm8k").is_dir() or not QWEN.is_dir(),
    reason="GSM8K and the public tokenizers are not at hand ($BANYAN_TEST_DATA)",
)

LAUNCH = """
algorithm.adv_estimator=grpo
data.train_files={train} data.val_files={val} data.train_batch_size=8 data.max_prompt_length=128
data.max_response_length=32 actor_rollout_ref.model.path={model} actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
actor_rollout_ref.actor.use_kl_loss=True
+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
+actor_rollout_ref.ref.megatron.override_transformer_config.use_flash_attn=True actor_rollout_ref.rollout.n=8
actor_rollout_ref.rollout.val_kwargs.temperature=0.0 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console
trainer.val_before_train=False trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_training_steps=1
trainer.save_freq=-1 trainer.test_freq=-1 trainer.total_epochs=1
"""
REWARD = """
import hashlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return hashlib.sha256(solution_str.encode()).digest()[0] / 255
"""
PASSES = 2  # the reference's log-probabilities and the update; the old ones are the rollout's


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """GSM8K's first rows in verl's columns, some of them over the prompt limit, and the scripted reward."""
    from banyan.data import gsm8k
    from banyan.data.files import write_rows

    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        rows = gsm8k.convert(TEST_DATA / "gsm8k" / f"{split}.jsonl", split)
        write_rows(folder / f"{split}.parquet", rows[: 512 if split == "train" else 16])
    (folder / "reward.py").write_text(REWARD)
    return {"train": folder / "train.parquet", "val": folder / "test.parquet", "folder": folder}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    """A small random model of Qwen2's shape with Qwen2.5's tokenizer."""
    import shutil

    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("qwen2") / "model"
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=151645,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QWEN / name, path)
    return path


def launch(
    model: Path, files: dict[str, Path], directory: Path, sharing: str, level: str = "layer"
) -> tuple[list[str], dict[str, float]]:
    """Runs the command; its lines and the metrics of its step."""
    arguments = LAUNCH.format(model=model, **files).split()
    command = [
        sys.executable,
        "-m",
        "banyan.trainer.main_ppo",
        "--config-name=ppo_megatron_trainer",
        *arguments,
        "actor_rollout_ref.rollout.dtype=float32",
        f"reward.custom_reward_function.path={files['folder'] / 'reward.py'}",
        "reward.num_workers=1",
        f"trainer.default_local_dir={directory}",
    ]
    environment = {
        **os.environ,
        "ENABLE_PREFIX_SHARING": sharing,
        "PREFIX_SHARING_OBSERVE": level,
    }
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    (line,) = (directory / "metrics.jsonl").read_text().splitlines()
    return result.stdout.splitlines(), json.loads(line)


def fields(line: str) -> dict[str, str]:
    """name=value pairs of a line whose values hold no blanks."""
    return dict(re.findall(r"(\w+)=(\S+)", line))


def lists(line: str) -> dict[str, list]:
    """name=[...] pairs of a line."""
    return {
        name: ast.literal_eval(text) for name, text in re.findall(r"(\w+)=(\[[0-9,() -]*\])", line)
    }


def starting(lines: list[str], start: str) -> list[str]:
    return [line for line in lines if line.startswith(start)]


def check_lines(lines: list[str], metrics: dict[str, float], layers: int) -> None:
    """Every figure of the lines against the others and against the metrics."""
    assert len(starting(lines, "[PS][prepare] config.enable_prefix_sharing=True")) == PASSES
    assert len(starting(lines, "[PS][prepare] PATH 6: sharing detected")) == PASSES
    plans = starting(lines, "[PS][prepare] prefix_sharing_plan result: has_sharing=True")
    layouts = [line for line in lines if "packed_batch_layout: " in line]
    audits = [line for line in lines if "] summary: forward_id=" in line]
    sequences = starting(lines, "[PS][prepare] sequences: num_seq=64")
    assert len(plans) == len(layouts) == len(audits) == len(sequences) == PASSES
    runtimes = [line for line in lines if "] runtime: store_count=" in line]
    assert len(runtimes) == PASSES * layers
    for index in range(PASSES):
        audit = fields(audits[index])
        lengths = lists(sequences[index])["seq_lens"]
        kept = lists(plans[index])["keep_ranges"]
        layout = lists(layouts[index])
        assert (audit["forward_id"], audit["micro_batch_id"]) == (str(index + 1), "1")
        assert (audit["batch_size"], audit["decision"]) == ("64", "on")
        assert audit["original_tokens"] == str(sum(lengths))
        assert int(audit["original_tokens"]) == metrics["trie/logical_tokens"]
        assert int(audit["t1"]) == metrics["trie/unique_tokens"]
        assert layout["valid_lengths"] == [end - begin for begin, end in kept]
        assert layout["cu_seqlens"][-1] == sum(layout["valid_lengths"])
        measured = int(audit["kept_valid_tokens"])
        assert measured == sum(end - begin for begin, end in kept)
        assert int(audit["kept_padded_tokens"]) == measured
        reused = sum(lengths) - measured
        assert int(audit["reused_valid_tokens"]) == reused
        assert audit["reused_valid_token_ratio"] == f"{reused / sum(lengths):.4f}"
        assert audit["rho"] == f"{sum(lengths) / int(audit['t1']):.4f}"
        # Groups of eight share their prompts, all uncut prompts the template.
        reusers = sum(begin > 0 for begin, _ in kept)
        assert reusers >= 8 * 7
        assert audit["reuser_count"] == str(reusers)
        assert audit["provider_count"] == str(64 - reusers)
        assert audit["actual_restore_count"] == audit["expected_restore_count"] == str(reusers)
        for line in runtimes[index * layers : (index + 1) * layers]:
            runtime = fields(line)
            assert runtime["matches_expected"] == "True"
            assert runtime["valid_q_tokens"] == runtime["stored_tokens"] == str(measured)
            assert runtime["reused_prefix_tokens"] == str(reused)
            assert runtime["reuse_hit_count"] == runtime["reuse_count"] == str(reusers)
            assert runtime["reuse_miss_count"] == "0"
    update = fields(audits[-1])
    assert int(update["kept_valid_tokens"]) == metrics["trie/computed_tokens"]


def check_same_learning(on: dict[str, float], off: dict[str, float]) -> None:
    assert on["actor/grad_norm"] > 0
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        assert off[name] == pytest.approx(on[name], rel=1e-5), name
    assert off["trie/unique_tokens"] == off["trie/logical_tokens"] == on["trie/logical_tokens"]
    assert on["trie/computed_tokens"] < 0.7 * off["trie/computed_tokens"]


def test_the_launch_command(qwen2, files, tmp_path):
    lines, on = launch(qwen2, files, tmp_path / "on", "1")
    check_lines(lines, on, layers=2)
    said = "\n".join(lines)
    assert "ppo_mini_batch_size=16: more than data.train_batch_size" in said
    assert said.count("the engine of this process generates, since no") == 1
    assert said.count("use_flash_attn=true") == 2  # one line for actor and reference
    attention = starting(
        lines, "[PS][attention][global_rank=0 tp_rank=0/1(sequence_parallel=False)"
    )
    assert attention
    assert all("enter prefix-sharing path" in line or "(logical)" in line for line in attention)
    assert not [line for line in lines if "atched" in line and line.startswith("[PS]")]

    lines, off = launch(qwen2, files, tmp_path / "off", "0")
    assert len(starting(lines, "[PS][prepare] PATH 1: prefix sharing disabled")) == PASSES
    assert not starting(lines, "[PS][audit]")
    check_same_learning(on, off)


@needs_smollm2
@pytest.mark.slow
def test_the_launch_command_on_smollm2(smollm2, files, tmp_path):
    lines, on = launch(smollm2, files, tmp_path / "on", "1")
    check_lines(lines, on, layers=30)
    _, off = launch(smollm2, files, tmp_path / "off", "0", level="off")
    check_same_learning(on, off)
