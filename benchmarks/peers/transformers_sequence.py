"""Forward and backward in plain PyTorch over transformers, one unpadded sequence at a time.

The work is {"sequences": [{"tokens", "scored"}]}: the loss is the mean negative log-probability of the scored tokens of
all sequences. Without padding there is no mask, so attention takes sdpa's causal kernel; the head runs on the tokens
that predict a scored one alone. Gradients add up; there is no optimizer step.
"""

from __future__ import annotations

import json
import time

import torch
from common import PeakMeter, parser, write_result
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM


def run(model: torch.nn.Module, sequences: list[dict], num_scored: int) -> float:
    """The loss of all sequences; gradients are added."""
    total = 0.0
    for sequence in sequences:
        ids = torch.tensor([sequence["tokens"]])
        targets = torch.tensor(sequence["scored"]).nonzero().flatten()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids, logits_to_keep=targets - 1, use_cache=False).logits
        loss = cross_entropy(logits[0].float(), ids[0, targets], reduction="sum") / num_scored
        loss.backward()
        total += loss.item()
    return total


def main() -> None:
    args = parser(__doc__.splitlines()[0]).parse_args()
    sequences = json.loads(args.work.read_text(encoding="utf-8"))["sequences"]
    num_scored = sum(sum(sequence["scored"]) for sequence in sequences)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.train()
    run(model, sequences[:1], num_scored)  # creates the gradients; not timed
    seconds, losses, above, process_peak = [], [], 0, 0
    for _ in range(args.repeats):
        model.zero_grad(set_to_none=False)
        meter = PeakMeter()
        start = time.perf_counter()
        losses.append(run(model, sequences, num_scored))
        seconds.append(time.perf_counter() - start)
        peak = meter.stop()
        above, process_peak = max(above, peak[0]), max(process_peak, peak[1])
    write_result(
        args.json,
        seconds=min(seconds),
        all_seconds=seconds,
        loss=losses[-1],
        peak_bytes=process_peak,
        activation_peak_bytes=above,
        weights="fp32",
        compute="bf16 autocast",
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
