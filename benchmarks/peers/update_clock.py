"""The clock of benchmarks/library.py: both sides load the same model, build the same optimizer and are timed alike."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import PeakMeter, parser, read_work, write_result
from transformers import AutoModelForCausalLM


def optimizer_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Clips, steps, clears; the gradient norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return norm.item()


def measure(
    description: str,
    attention_name: str,
    update: Callable[..., tuple[float, float]],
) -> None:
    """One update that is not timed, then `--repeats` timed ones; the best counts. Writes the result file.

    Args:
        update: (model, optimizer, work, groups, autocast) -> (mean log-probability, gradient norm) of one step.
    """
    args_parser = parser(description)
    args_parser.add_argument("--weights", choices=["fp32", "bf16"], default="fp32")
    args_parser.add_argument("--groups", type=int, default=1, help="prompts of one micro-batch")
    args_parser.add_argument("--exact", action="store_true", help="fp32 throughout")
    args = args_parser.parse_args()
    work = read_work(args.work)
    dtype = torch.float32 if args.weights == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, attn_implementation=attention_name
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    mixed = args.weights == "fp32" and not args.exact

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed)

    logprob, norm = update(model, optimizer, work, args.groups, autocast)  # not timed
    seconds, cpu_seconds, above, process_peak = [], [], 0, 0
    for _ in range(args.repeats):
        meter = PeakMeter()
        start, cpu_start = time.perf_counter(), time.process_time()
        update(model, optimizer, work, args.groups, autocast)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        peak = meter.stop()
        above, process_peak = max(above, peak[0]), max(process_peak, peak[1])
    write_result(
        args.json,
        seconds=min(seconds, default=None),
        cpu_seconds=min(cpu_seconds, default=None),
        all_seconds=seconds,
        peak_bytes=process_peak,
        activation_peak_bytes=above,
        mean_logprob=logprob,
        grad_norm=norm,
        weights=args.weights,
        compute="bf16 autocast" if mixed else args.weights,
        threads=torch.get_num_threads(),
    )
