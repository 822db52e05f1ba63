"""One process of test_gradients: its part of each mini-batch over Gloo, and the whole of it alone.

Prints one JSON line per case: relative gaps of loss, gradients and weight changes, bytes sent.
"""

from __future__ import annotations

import json
import random
import sys
from functools import cache

import torch
from banyan.launch import session

from banyan import extension

VOCAB = 288
STEPS, RATE = 3, 1e-3


@cache
def config(sharing: str, budget: int, *more: str) -> str:
    from banyan.config.resolve import resolve

    overrides = [
        "data.train_files=unused.jsonl",
        "actor_rollout_ref.model.path=unused",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=3",
        f"actor_rollout_ref.sharing.mode={sharing}",
        f"actor_rollout_ref.sharing.max_tokens_per_block={budget}",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        *more,
    ]
    tree = resolve(overrides).tree
    tree["_shell"] = {"num_train_rows": 1, "stop_ids": [0], "model_dir": "unused"}
    return json.dumps(tree)


def batch() -> tuple[list[dict], list[float]]:
    """Seven groups on two trunks, of unequal lengths."""
    draw = random.Random(5)
    trunks = [[draw.randrange(VOCAB) for _ in range(20)] for _ in range(2)]
    rows, advantages = [], []
    for row in range(7):
        prompt = trunks[row % 2] + [draw.randrange(VOCAB) for _ in range(row)]
        start = [draw.randrange(VOCAB) for _ in range(3)]
        for index in range(3):
            response = start + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
            rows.append({"row": row, "index": index, "prompt": prompt, "response": response})
            advantages.append(draw.gauss(0, 1))
    return rows, advantages


def train(core, directory, dtype, settings, ranks):
    """Loss and gradients of the first step, weight changes of three steps of AdamW."""
    model = core.Model.load(directory, dtype, with_backward=True)
    weights = model.params()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    leaves = [tensor.requires_grad_() for tensor in (t.detach() for t in weights.values())]
    optimizer = torch.optim.AdamW(leaves, lr=RATE)
    first = None
    for _ in range(STEPS):
        result = core.accumulate_gradients(model, settings, *batch(), ranks=ranks)
        grads = model.grads()
        if first is None:
            first = result["loss"], {name: grad.clone() for name, grad in grads.items()}
        for leaf, name in zip(leaves, weights, strict=True):
            leaf.grad = grads[name]
        optimizer.step()
        model.repack()
    changes = {name: weights[name].detach() - before[name] for name in before}
    return *first, changes


def gap(got, wanted) -> float:
    """The largest relative L2 distance of a tensor."""
    return max(
        float((got[name] - wanted[name]).double().norm() / wanted[name].double().norm())
        for name in wanted
    )


def main() -> None:
    core = extension.load()
    core.set_num_threads(1)
    with session.join(core, "{}", "cpu", 30.0) as ranks:
        for dtype in ("fp64", "fp32"):
            for sharing in ("on", "off"):
                settings = config(sharing, 16)
                loss, grads, changes = train(core, sys.argv[1], dtype, settings, ranks.core)
                if not ranks.is_first:
                    continue
                whole = train(core, sys.argv[1], dtype, settings, None)
                facts = {
                    "case": f"{dtype} {sharing}",
                    "loss": abs(loss - whole[0]) / abs(whole[0]),
                    "gradients": gap(grads, whole[1]),
                    "changes": gap(changes, whole[2]),
                }
                print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
