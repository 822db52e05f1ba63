"""One process of test_context_parallel: passes that these processes compute together, against this process alone.

Prints one JSON line per case: relative gaps of loss, gradients and weight changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from banyan.launch import session
from fsdp_worker import train_in_parts
from gradient_worker import config, gap
from tensor_worker import train

from banyan import extension

BUDGET = 32  # tokens of a block of one process: trunks are cut
ACTOR = "actor_rollout_ref.actor"
RANGES = f"{ACTOR}.megatron.context_parallel_size"
HEADS = f"{ACTOR}.ulysses_sequence_parallel_size"
# (key of the size, sizes of the axes, weights in parts) by number of processes; what is left is data parallel.
FORMS = {
    2: [(RANGES, {"cp": 2}, False), (HEADS, {"cp": 2}, False), (HEADS, {"cp": 2}, True)],
    4: [
        (RANGES, {"cp": 2}, False),
        (HEADS, {"cp": 2}, False),
        (RANGES, {"cp": 2, "tp": 2}, False),
        (HEADS, {"cp": 2, "tp": 2}, False),
        (RANGES, {"cp": 2}, True),
        (HEADS, {"cp": 2, "shard": 2}, True),
    ],
}


def main() -> None:
    core = extension.load()
    core.set_num_threads(1)
    alone = {}  # what the first process gives without the others
    models = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    with session.join(core, "{}", "cpu", 30.0) as ranks:
        for key, form, in_parts in FORMS[ranks.world_size]:
            arranged = ranks.arranged(core, **form).core
            groups = core.Groups(arranged)
            for directory in models:
                for dtype, sharing in (("fp64", "on"), ("fp64", "off"), ("fp32", "on")):
                    settings = config(sharing, BUDGET, f"{key}={form['cp']}")
                    if in_parts:
                        got = train_in_parts(core, str(directory), dtype, settings, arranged, {})
                    else:
                        got = train(core, str(directory), dtype, settings, groups, True)
                    if not ranks.is_first:
                        continue
                    case = (str(directory), dtype, sharing)
                    if case not in alone:
                        alone[case] = train(
                            core, *case[:2], config(sharing, BUDGET), core.Groups(None)
                        )
                    whole = alone[case]
                    facts = {
                        "case": f"{dtype} {directory.name} {key} {form} parts={in_parts} sharing={sharing}",
                        "loss": abs(got[0] - whole[0]) / abs(whole[0]),
                        "gradients": gap(got[1], whole[1]),
                        "changes": gap(got[2], whole[2]),
                    }
                    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
