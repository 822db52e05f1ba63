"""Sampling with transformers.generate: every prompt n times, exactly as many tokens as asked."""

from __future__ import annotations

import time

import torch
from common import parser, read_work, status_bytes, write_result
from transformers import AutoModelForCausalLM


def main() -> None:
    args_parser = parser(__doc__)
    args_parser.add_argument("--weights", choices=["fp32", "bf16"], default="bf16")
    args_parser.add_argument("--batch", type=int, default=64, help="sequences of one call")
    args = args_parser.parse_args()
    work = read_work(args.work)
    dtype = torch.float32 if args.weights == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, attn_implementation="sdpa"
    )
    model.eval()
    width = max(map(len, work.prompts))
    prompts = [p for p in work.prompts for _ in range(work.group_size)]
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    length = len(work.responses[0])

    def generate(new_tokens: int) -> None:
        for first in range(0, len(prompts), args.batch):
            rows = slice(first, first + args.batch)
            out = model.generate(
                ids[rows],
                attention_mask=mask[rows],
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
            assert out.shape[1] == width + new_tokens

    generate(4)  # not timed
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        generate(length)
        seconds.append(time.perf_counter() - start)
    write_result(
        args.json,
        seconds=min(seconds),
        all_seconds=seconds,
        peak_bytes=status_bytes("VmHWM"),
        weights=args.weights,
        batch=args.batch,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
