"""Sampling with transformers.generate: every prompt n times, exactly as many tokens as asked."""

from __future__ import annotations

import time

import torch
from common import parser, read_work, status_bytes, write_result
from transformers import AutoModelForCausalLM


class Batches:
    """Every prompt n times, padded on the left, in calls of at most `batch` sequences."""

    def __init__(
        self, model: torch.nn.Module, prompts: list[list[int]], group_size: int, batch: int
    ) -> None:
        self._model = model
        self._batch = batch
        self._width = max(map(len, prompts))
        rows = [p for p in prompts for _ in range(group_size)]
        self._ids = torch.tensor([[0] * (self._width - len(p)) + p for p in rows])
        self._mask = torch.tensor([[0] * (self._width - len(p)) + [1] * len(p) for p in rows])

    def generate(self, new_tokens: int) -> None:
        for first in range(0, len(self._ids), self._batch):
            rows = slice(first, first + self._batch)
            out = self._model.generate(
                self._ids[rows],
                attention_mask=self._mask[rows],
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
            assert out.shape[1] == self._width + new_tokens


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
    batches = Batches(model, work.prompts, work.group_size, args.batch)
    batches.generate(4)  # not timed
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        batches.generate(len(work.responses[0]))
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
