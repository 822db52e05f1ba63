"""One process of test_tensor_parallel and test_pipeline: every model under every cut of these processes, against this
process alone. After the folder of the models: tensor or pipeline.

Prints one JSON line per case: relative gaps of loss, gradients and weight changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from banyan.launch import session
from gradient_worker import RATE, STEPS, batch, config, gap

from banyan import extension

BUDGET = 48  # tokens of a block: trunks are cut
# (sizes of the axes, sequence parallel, chunks) by number of processes; what is left is data parallel.
FORMS = {
    "tensor": {
        2: [({"tp": 2}, False, 1), ({"tp": 2}, True, 1)],
        4: [
            ({"tp": 2}, False, 1),
            ({"tp": 2}, True, 1),
            ({"tp": 4}, False, 1),
            ({"tp": 4}, True, 1),
        ],
    },
    "pipeline": {
        2: [({"pp": 2}, False, 1), ({"pp": 2}, False, 2)],
        4: [
            ({"pp": 4}, False, 1),
            ({"pp": 2}, False, 2),
            ({"tp": 2, "pp": 2}, True, 1),
            ({"tp": 2, "pp": 2}, False, 2),
        ],
        8: [({"tp": 2, "pp": 2}, True, 1)],
    },
}


def train(core, directory, dtype, settings, groups, sequence_parallel=False, chunks=1):
    """Loss and whole gradients of the first step, whole weight changes of three steps of AdamW."""
    model = core.Model.load(
        directory,
        dtype,
        with_backward=True,
        groups=groups,
        sequence_parallel=sequence_parallel,
        chunks=chunks,
    )
    before = core.whole_params(model, groups)
    own = model.params()
    leaves = [tensor.requires_grad_() for tensor in (t.detach() for t in own.values())]
    optimizer = torch.optim.AdamW(leaves, lr=RATE)
    first = None
    for _ in range(STEPS):
        result = core.accumulate_gradients(model, settings, *batch(), ranks=groups)
        if first is None:
            first = result["loss"], core.whole_grads(model, groups)
        grads = model.grads()
        for leaf, name in zip(leaves, own, strict=True):
            leaf.grad = grads[name]
        optimizer.step()
        model.repack()
    after = core.whole_params(model, groups)
    return *first, {name: after[name] - before[name] for name in before}


def main() -> None:
    core = extension.load()
    core.set_num_threads(1)
    alone = {}  # what the first process gives without the others
    models = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    with session.join(core, "{}", "cpu", 30.0) as ranks:
        for form, sequence_parallel, chunks in FORMS[sys.argv[2]][ranks.world_size]:
            groups = core.Groups(ranks.arranged(core, **form).core)
            for directory in models:
                if form.get("tp") == 4 and directory.name == "qwen2":
                    continue  # four ranks cannot share three kv heads
                for dtype, sharing in (("fp64", "on"), ("fp64", "off"), ("fp32", "on")):
                    settings = config(sharing, BUDGET)
                    case = (str(directory), dtype, settings)
                    got = train(core, *case, groups, sequence_parallel, chunks)
                    if not ranks.is_first:
                        continue
                    if case not in alone:
                        alone[case] = train(core, *case, core.Groups(None))
                    whole = alone[case]
                    facts = {
                        "case": f"{dtype} {directory.name} {form} sp={sequence_parallel} v={chunks} sharing={sharing}",
                        "loss": abs(got[0] - whole[0]) / abs(whole[0]),
                        "gradients": gap(got[1], whole[1]),
                        "changes": gap(got[2], whole[2]),
                    }
                    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
