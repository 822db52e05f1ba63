"""100 SFT steps of SmolLM2 in fp32 against plain PyTorch over transformers: the loss and gradient-norm curves agree.

With BANYAN_KEEP_FIGURES=1 the curves are kept in tests/parity/figures.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import curves
import finetune_rows as rows_of
import pytest
import torch
from conftest import needs_smollm2

STEPS, BATCH = 100, 3


def rows(model: Path) -> list[list[rows_of.Sample]]:
    """Arithmetic questions, each with three ways to answer it: one batch hangs on one question."""
    from banyan.data import arithmetic
    from banyan.data.chat import Chat

    chat, out = Chat(model), []
    for row in arithmetic.generate(STEPS, 3, levels=(1, 2, 3)):
        info, truth = row["extra_info"], row["reward_model"]["ground_truth"]
        question = chat.encode(f"Q: {info['question']}\nA:")
        for answer in (f" {info['answer']}\n", f" {truth}\n", f" The answer is {truth}.\n"):
            ids = chat.encode(answer)
            out.append([(question + ids, [0] * len(question) + [1] * len(ids))])
    return out


def banyan_curve(model: Path, data, directory: str) -> tuple[list[tuple[float, float]], dict]:
    from banyan import _C

    tree = rows_of.tree(
        "sft",
        len(data),
        model__path=model,
        engine__dtype="float32",
        data__train_batch_size=BATCH,
        optim__lr=1e-5,
        trainer__total_training_steps=STEPS,
        trainer__default_local_dir=directory,
    )
    host = rows_of.Host(data)
    _C.finetune(json.dumps(tree), host)
    steps = [host.metrics[step] for step in range(1, STEPS + 1)]
    shared = sum(step["trie/logical_tokens"] for step in steps)
    unique = sum(step["trie/unique_tokens"] for step in steps)
    curve = [(step["train/loss"], step["train/grad_norm"]) for step in steps]
    return curve, {"optim": tree["optim"], "logical_tokens": shared, "unique_tokens": unique}


def torch_curve(model: Path, data, optim: dict) -> list[tuple[float, float]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32).eval()
    optimizer = curves.adamw(net, optim)
    out = []
    for step in range(STEPS):
        batch = [row[0] for row in data[step * BATCH : (step + 1) * BATCH]]
        found = curves.token_log_probs(net, [tokens for tokens, _ in batch])
        masks = [torch.tensor(scored[1:], dtype=torch.bool) for _, scored in batch]
        loss = -torch.cat([f[m] for f, m in zip(found, masks, strict=True)]).mean()
        norm = curves.descend(net, optimizer, loss, optim["clip_grad"])
        out.append((loss.item(), norm))
    return out


def figures(model: Path) -> dict:
    data = rows(model)
    with tempfile.TemporaryDirectory() as directory:
        ours, about = banyan_curve(model, data, directory)
    theirs = torch_curve(model, data, about["optim"])
    about["optim"] = {
        key: about["optim"][key] for key in ("lr", "betas", "weight_decay", "clip_grad")
    }
    return curves.compare(ours, theirs, model="SmolLM2-135M-Instruct", dtype="float32", **about)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_smollm2
def test_100_sft_steps_follow_plain_pytorch(smollm2):
    found = figures(smollm2)
    curves.check("sft_curve", found)
    losses = [loss for loss, _ in found["banyan"]]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])  # and the steps were steps of learning
