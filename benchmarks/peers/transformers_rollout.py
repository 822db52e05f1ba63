"""Sampling with transformers.generate for `banyan bench rollout`: every prompt n times.

Rollouts of more than `--most` sequences are left out: they take minutes and say nothing new.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from common import parser, read_rollouts, time_rollout, write_result
from transformers import AutoModelForCausalLM
from transformers_generate import Batches


def main() -> None:
    args_parser = parser(__doc__)
    args_parser.add_argument("--batch", type=int, default=64, help="sequences of one call")
    args_parser.add_argument("--most", type=int, default=64, help="sequences of a rollout")
    args = args_parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.eval()
    found = {}
    for name, rollout in read_rollouts(args.work).items():
        if rollout.num_sequences > args.most:
            continue
        batches = Batches(model, rollout.prompts, rollout.group_size, args.batch)
        batches.generate(4)  # not timed
        length = rollout.response_length
        found[name] = time_rollout(
            rollout, args.repeats, lambda b=batches, length=length: b.generate(length)
        )
    write_result(
        args.json,
        rollouts=found,
        version=version("transformers"),
        weights="bf16",
        batch=args.batch,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
