"""The actor update in plain PyTorch over transformers: padded batches of 8 samples.

forward -> log-probabilities of the responses -> clipped loss -> backward, per micro-batch of 8;
then clip the gradient norm and take one AdamW step. On-policy: the old log-probabilities are the
detached new ones, as banyan does with one update per batch.
"""

from __future__ import annotations

import time

import torch
from common import PeakMeter, Work, parser, read_work, write_result
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

MICRO_BATCH = 8


def advantages(work: Work) -> torch.Tensor:
    """GRPO: (reward - mean of the group) / (std of the group + 1e-6). [S]"""
    rewards = torch.tensor(work.rewards, dtype=torch.float64).view(len(work.prompts), -1)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return (centred / (rewards.std(dim=1, keepdim=True) + 1e-6)).flatten().float()


def pad(work: Work, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left, responses of equal length: ids and mask, [8, width]."""
    prompts = [work.prompts[row // work.group_size] for row in rows]
    width = max(map(len, prompts))
    ids = [
        [0] * (width - len(p)) + p + work.responses[r] for p, r in zip(prompts, rows, strict=True)
    ]
    mask = [
        [0] * (width - len(p)) + [1] * (len(p) + len(work.responses[r]))
        for p, r in zip(prompts, rows, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def clipped_loss(logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logp - old)
    clipped = ratio.clamp(0.8, 1.2)
    return torch.max(-advantage * ratio, -advantage * clipped).sum()


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Work, autocast: bool
) -> None:
    advantage = advantages(work)
    num_tokens = sum(map(len, work.responses))
    for first in range(0, len(work.responses), MICRO_BATCH):
        rows = range(first, min(first + MICRO_BATCH, len(work.responses)))
        ids, mask = pad(work, rows)
        length = len(work.responses[first])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(
                ids, attention_mask=mask, logits_to_keep=length + 1, use_cache=False
            ).logits
        logits = logits[:, :-1].float().flatten(0, 1)  # [8 * length, V]
        logp = -cross_entropy(logits, ids[:, -length:].flatten(), reduction="none")
        logp = logp.view(-1, length)
        loss = clipped_loss(logp, logp.detach(), advantage[first : first + len(rows), None])
        (loss / num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def main() -> None:
    args_parser = parser(__doc__)
    args_parser.add_argument("--weights", choices=["fp32", "bf16"], default="fp32")
    args_parser.add_argument("--no-autocast", dest="autocast", action="store_false")
    args = args_parser.parse_args()
    work = read_work(args.work)
    dtype = torch.float32 if args.weights == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, attn_implementation="sdpa"
    )
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01
    )
    update(model, optimizer, work, args.autocast)  # creates gradients and moments; not timed
    seconds, above, process_peak = [], 0, 0
    for _ in range(args.repeats):
        meter = PeakMeter()
        start = time.perf_counter()
        update(model, optimizer, work, args.autocast)
        seconds.append(time.perf_counter() - start)
        peak = meter.stop()
        above, process_peak = max(above, peak[0]), max(process_peak, peak[1])
    compute = "bf16 autocast" if args.autocast and dtype == torch.float32 else args.weights
    write_result(
        args.json,
        seconds=min(seconds),
        all_seconds=seconds,
        peak_bytes=process_peak,
        activation_peak_bytes=above,
        weights=args.weights,
        compute=compute,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
