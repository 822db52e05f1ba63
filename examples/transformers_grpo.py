"""GRPO in plain PyTorch over a transformers model, with banyan's trie in the update.

Sampling, rewards, the loss and the optimizer are this file's own; banyan packs the batch and computes each unique token
once, forward and backward. Two ways to run it on a laptop's processor:

    python examples/transformers_grpo.py --tiny                    # a random two-layer model, seconds
    python examples/transformers_grpo.py --model DIR --steps 20    # SmolLM2-135M-Instruct on arithmetic, minutes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import banyan.transformers  # registers attn_implementation="banyan_trie"
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel


@dataclass
class Task:
    """What is trained on: the prompts of a step, and a number for each response."""

    prompts: Callable[[int], list[list[int]]]  # step -> token ids of each prompt
    reward: Callable[[int, int, list[int]], float]  # step, prompt, response -> reward
    stop_ids: list[int]
    response_length: int


@dataclass
class History:
    """Per step: mean reward, gradient norm, logical and unique tokens of the update."""

    reward: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    logical_tokens: list[int] = field(default_factory=list)
    unique_tokens: list[int] = field(default_factory=list)


@torch.no_grad()
def sample(model: PreTrainedModel, task: Task, prompts: list[list[int]]) -> list[list[int]]:
    """One response to each prompt, by transformers: a padded batch under its usual attention."""
    model.set_attn_implementation("sdpa")
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=task.response_length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=task.stop_ids,
        pad_token_id=task.stop_ids[0],
    )
    responses = []
    for row in out[:, width:].tolist():
        stop = next((i for i, token in enumerate(row) if token in task.stop_ids), len(row) - 1)
        responses.append(row[: stop + 1])
    return responses


def advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """GRPO: each reward against the mean and spread of its own prompt's responses."""
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()


def clipped_loss(logprob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """All arguments hold one entry per response token of the whole batch."""
    ratio = torch.exp(logprob - old)
    return torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()


def train(
    model: PreTrainedModel,
    task: Task,
    steps: int,
    group_size: int,
    lr: float,
    updates: int = 1,
    autocast: Callable[[], AbstractContextManager] = lambda: torch.autocast("cpu", enabled=False),
) -> History:
    """`updates` optimizer steps on each sampled batch; the first is on-policy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    history = History()
    for step in range(steps):
        start = time.perf_counter()
        prompts = [prompt for prompt in task.prompts(step) for _ in range(group_size)]
        model.eval()
        with autocast():
            responses = sample(model, task, prompts)
        rewards = torch.tensor(
            [task.reward(step, i // group_size, response) for i, response in enumerate(responses)]
        )
        sampled = time.perf_counter()

        # The batch as a trie: prompts are computed once for all of their responses, and what prompts have in common
        # once for all prompts. Only response tokens are scored.
        packed = banyan.trie.pack(
            [prompt + response for prompt, response in zip(prompts, responses, strict=True)],
            scored=[
                [0] * len(prompt) + [1] * len(response)
                for prompt, response in zip(prompts, responses, strict=True)
            ],
        )
        advantage = advantages(rewards, group_size)[packed.edges.logical_sample]
        model.train()
        model.set_attn_implementation("banyan_trie")
        old = None
        for _ in range(updates):
            with autocast():
                logprob = banyan.transformers.logprobs(model, packed)
            old = logprob.detach() if old is None else old
            clipped_loss(logprob, old, advantage).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        history.reward.append(rewards.mean().item())
        history.grad_norm.append(norm.item())
        history.logical_tokens.append(packed.num_logical)
        history.unique_tokens.append(packed.num_unique)
        print(
            f"step {step + 1:3d}  reward {rewards.mean():.3f}  grad norm {norm:.3f}  "
            f"tokens {packed.num_unique} of {packed.num_logical}  "
            f"sampling {sampled - start:.1f} s  update {time.perf_counter() - sampled:.1f} s",
            flush=True,
        )
    return history


def tiny_task(num_prompts: int) -> Task:
    """Prompts of random tokens behind one shared beginning; the reward is the share of even tokens."""

    def prompts(step: int) -> list[list[int]]:
        draw = torch.Generator().manual_seed(step)
        return [
            [5, 6, 7, 8, *torch.randint(2, 64, (6,), generator=draw).tolist()]
            for _ in range(num_prompts)
        ]

    def reward(step: int, prompt: int, response: list[int]) -> float:
        return sum(token % 2 == 0 for token in response) / len(response)

    return Task(prompts, reward, stop_ids=[1], response_length=8)


def tiny_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="banyan_trie")


def arithmetic_task(model_directory: str, num_prompts: int) -> Task:
    """banyan's word problems: three worked examples before every question; 1 for the right number after `####`."""
    from banyan.data import arithmetic
    from banyan.reward.scorers import gsm8k

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    rows = arithmetic.generate(2000, seed=1)

    def of_step(step: int) -> list[dict]:
        first = step * num_prompts % (len(rows) - num_prompts + 1)
        return rows[first : first + num_prompts]

    def prompts(step: int) -> list[list[int]]:
        return [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
            for row in of_step(step)
        ]

    def reward(step: int, prompt: int, response: list[int]) -> float:
        text = tokenizer.decode(response, skip_special_tokens=True)
        return gsm8k.compute_score(text, of_step(step)[prompt]["reward_model"]["ground_truth"])

    return Task(prompts, reward, stop_ids=[tokenizer.eos_token_id], response_length=24)


def main(arguments: list[str] | None = None) -> History:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tiny", action="store_true", help="a random two-layer model")
    source.add_argument("--model", help="directory of SmolLM2-135M-Instruct or a model like it")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=8, help="of a step; default: %(default)s")
    parser.add_argument("--group-size", type=int, default=8, help="responses; default: %(default)s")
    parser.add_argument("--updates", type=int, default=1, help="per batch; default: %(default)s")
    parser.add_argument("--lr", type=float, help="default: 1e-5, and 1e-2 with --tiny")
    args = parser.parse_args(arguments)
    torch.manual_seed(1)
    if args.tiny:
        model, task = tiny_model(), tiny_task(args.prompts)
        return train(model, task, args.steps, args.group_size, args.lr or 1e-2, args.updates)
    # fp32 weights, bf16 products: the precision of most CPU and GPU trainers.
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="banyan_trie"
    )
    task = arithmetic_task(args.model, args.prompts)
    return train(
        model,
        task,
        args.steps,
        args.group_size,
        args.lr or 1e-5,
        args.updates,
        autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )


if __name__ == "__main__":
    main()
