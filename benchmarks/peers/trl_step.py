"""Whole GRPO steps by TRL's GRPOTrainer: sample, reward, update; the best after the first counts.

The shape equals banyan's: P prompts, n responses each of exactly the given length, no reference
model, one optimizer step over all samples in micro-batches of 8. Precision is what GRPOTrainer
chooses for CPU training by itself: fp32 weights under bf16 autocast. One default is turned off in
the peer's favour: gradient checkpointing, which computes every forward pass twice.
"""

from __future__ import annotations

import tempfile
import time

import torch
from common import parser, read_work, status_bytes, write_result
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MICRO_BATCH = 8


class StepClock(TrainerCallback):
    """Seconds of each whole step: generation runs inside it, at its first micro-batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Synthetic, cheap, and different within a group."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def main() -> None:
    args = parser(__doc__).parse_args()
    work = read_work(args.work)
    length = len(work.responses[0])
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer.decode(ids) for ids in work.prompts]
    clock = StepClock()
    lengths: list[int] = []

    def counted_reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return reward(completion_ids)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=len(work.responses) // MICRO_BATCH,
            num_generations=work.group_size,
            max_completion_length=length,
            generation_kwargs={"min_new_tokens": length},
            gradient_checkpointing=False,
            learning_rate=1e-6,
            max_steps=1 + args.repeats,
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=args.model,
            reward_funcs=counted_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    num_samples = len(work.responses) * (1 + args.repeats)
    if lengths != [length] * num_samples:
        raise ValueError(f"[bench] wanted {num_samples} responses of {length}, got {lengths}")
    write_result(
        args.json,
        seconds=min(clock.seconds[1:]),
        all_seconds=clock.seconds,
        peak_bytes=status_bytes("VmHWM"),
        weights=str(trainer.model.dtype).removeprefix("torch."),
        compute="bf16 autocast" if config.bf16 else "as weights",
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
