"""banyan's side of benchmarks/library.py: the update of an unmodified transformers model on packed tries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import banyan.transformers
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from common import Work
from transformers_update import advantages, clipped_loss
from update_clock import measure, optimizer_step


def update(model, optimizer, work: Work, groups: int, autocast: Callable) -> tuple[float, float]:
    """One optimizer step; (mean log-probability, gradient norm). Micro-batches are tries of `groups` prompts."""
    advantage = advantages(work)
    num_tokens = sum(map(len, work.responses))
    step = groups * work.group_size
    total = 0.0
    for first in range(0, len(work.responses), step):
        responses = work.responses[first : first + step]
        prompts = [work.prompts[(first + i) // work.group_size] for i in range(len(responses))]
        pairs = list(zip(prompts, responses, strict=True))
        packed = banyan.trie.pack(
            [prompt + response for prompt, response in pairs],
            scored=[[0] * len(prompt) + [1] * len(response) for prompt, response in pairs],
        )
        with autocast():
            logp = banyan.transformers.logprobs(model, packed)
        weight = advantage[first : first + step][packed.edges.logical_sample]
        (clipped_loss(logp, logp.detach(), weight) / num_tokens).backward()
        total += logp.detach().sum().item()
    return total / num_tokens, optimizer_step(model, optimizer)


if __name__ == "__main__":
    torch.manual_seed(0)
    measure(__doc__.splitlines()[0], banyan.transformers.NAME, update)
