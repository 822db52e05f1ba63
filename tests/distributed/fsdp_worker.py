"""One process of test_fsdp: a model whose layers lie in parts on all processes, against the whole of it in one.

Prints one JSON line per case: relative gaps of loss, gradients and weight changes, and whether bits are equal where
they must be.
"""

from __future__ import annotations

import json
import sys

import torch
from banyan.launch import session
from gradient_worker import RATE, STEPS, batch, config, gap, train

from banyan import extension

# By the number of processes: dtype, sharing, mesh, how the model is cut.
CASES = {
    2: [
        ("fp64", "on", {}, {}),
        ("fp64", "off", {}, {"reshard_after_forward": False, "forward_prefetch": True}),
        ("fp32", "on", {}, {"forward_prefetch": True, "recompute_layers": 1}),
        ("fp32", "off", {}, {"reduce_each_block": False}),
    ],
    4: [
        ("fp64", "on", {"shard": 2}, {"forward_prefetch": True}),
        ("fp64", "off", {"shard": 2}, {"recompute_layers": 2}),
        ("fp32", "on", {}, {"reduce_each_block": False}),
    ],
}


def train_in_parts(core, directory, dtype, settings, ranks, cut):
    """As gradient_worker.train."""
    model = core.Model.load(directory, dtype, with_backward=True)
    before = {name: tensor.clone() for name, tensor in model.params().items()}
    parts = core.FullyShardedModel(model, ranks, **cut)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in parts.parts().items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=RATE)
    first = None
    for _ in range(STEPS):
        result = core.accumulate_gradients(model, settings, *batch(), ranks=ranks)
        if first is None:
            first = result["loss"], parts.grads()
        grads = parts.part_grads()
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
        optimizer.step()
        parts.changed()
    return *first, {name: tensor - before[name] for name, tensor in parts.params().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def main() -> None:
    core = extension.load()
    core.set_num_threads(1)
    with session.join(core, "{}", "cpu", 30.0) as ranks:
        for dtype, sharing, mesh, cut in CASES[ranks.world_size]:
            settings = config(sharing, 16)
            arranged = ranks.arranged(core, **mesh).core
            arguments = (core, sys.argv[1], dtype, settings, arranged)
            loss, grads, changes = train_in_parts(*arguments, cut)
            facts = {"case": f"{dtype} {sharing} {mesh} {cut}"}
            if dtype == "fp32":
                facts["repeats"] = equal(changes, train_in_parts(*arguments, cut)[2])
            if not cut.get("reduce_each_block", True):
                facts["as_zero_1"] = equal(changes, train(*arguments)[2])
            if not ranks.is_first:
                continue
            whole = train(core, sys.argv[1], dtype, settings, None)
            facts |= {
                "loss": abs(loss - whole[0]) / abs(whole[0]),
                "gradients": gap(grads, whole[1]),
                "changes": gap(changes, whole[2]),
            }
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
