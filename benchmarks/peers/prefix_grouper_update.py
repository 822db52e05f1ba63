"""The actor update with PrefixGrouper over transformers: a prompt stands once per row, its responses behind it.

As the package's README describes it (concat_input, one keyword in the model's call, split_output with the prompt's last
token), with the loss, optimizer and precision of transformers_update.py. Three choices in the peer's favour: the head
runs on the tokens that predict responses alone; masks are made once per micro-batch, not per layer; a prompt without
padding takes the causal kernel without a mask. Attention is transformers' sdpa, which the package leaves to the caller
on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import Work
from prefix_grouper import PrefixGrouper
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers_update import advantages, clipped_loss
from update_clock import measure, optimizer_step

NAME = "prefix_grouper_sdpa"


class Grouped:
    """A micro-batch in the package's form, with its position ids and the masks of its two attentions."""

    def __init__(self, prompts: list[list[int]], responses: list[list[int]]) -> None:
        prompt_ids, prompt_mask = pad(prompts)
        response_ids, response_mask = pad(responses)
        group_size = len(responses) // len(prompts)
        self.grouper = PrefixGrouper.from_ungrouped_masks(
            prompt_mask, response_mask, group_size, padding_mode="right"
        )
        self.ids = self.grouper.concat_input(prompt_ids, prompt_mask, response_ids, response_mask)
        self.targets = self.grouper.convert_padding(response_ids, response_mask, "right")
        self.positions = torch.zeros_like(self.ids)
        for row, prompt in enumerate(prompts):
            lengths = [len(r) for r in responses[row * group_size : (row + 1) * group_size]]
            parts = [torch.arange(len(prompt))]
            parts += [torch.arange(len(prompt), len(prompt) + length) for length in lengths]
            places = torch.cat(parts)
            self.positions[row, : len(places)] = places
        self.prefix_mask = causal_mask(self.grouper.prefix_attn_mask, prompt_mask.shape[1])
        self.suffix_mask = causal_mask(self.grouper.suffix_attn_mask, response_mask.shape[1])
        if self.grouper.prefix_attn_mask.all():
            self.prefix_mask = None


def pad(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded on the left: ids and mask, [rows, width]."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def causal_mask(keys: torch.Tensor, queries: int) -> torch.Tensor:
    """keys [b, L] marks real keys; the last `queries` positions ask. [b, 1, queries, L], True = seen."""
    length = keys.shape[1]
    places = torch.arange(length)
    own = places[length - queries :, None]
    seen = keys[:, None, None, :] & (places[None, :] <= own)[None, None]
    return seen | (places[None, :] == own)[None, None]  # a padded query sees itself: no empty row


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    grouped: Grouped = kwargs["prefix_grouper"]

    def sdpa(q, k, v, mask_2d):
        is_prefix = mask_2d is grouped.grouper.prefix_attn_mask
        mask = grouped.prefix_mask if is_prefix else grouped.suffix_mask
        return sdpa_attention_forward(module, q, k, v, mask, dropout=dropout, scaling=scaling)[0]

    return grouped.grouper.forward(sdpa, query, key, value), None


def micro_batches(work: Work, groups: int) -> list[tuple[range, Grouped]]:
    """Rows of responses and the micro-batch of `groups` prompts each."""
    n = work.group_size
    out = []
    for first in range(0, len(work.prompts), groups):
        prompts = work.prompts[first : first + groups]
        rows = range(first * n, (first + len(prompts)) * n)
        out.append((rows, Grouped(prompts, [work.responses[r] for r in rows])))
    return out


def update(model, optimizer, work: Work, groups: int, autocast: Callable) -> tuple[float, float]:
    """One optimizer step; (mean log-probability, gradient norm)."""
    advantage = advantages(work)
    num_tokens = sum(map(len, work.responses))
    total = 0.0
    for rows, grouped in micro_batches(work, groups):
        with autocast():
            hidden = model.model(
                input_ids=grouped.ids,
                position_ids=grouped.positions,
                use_cache=False,
                prefix_grouper=grouped,
            ).last_hidden_state
            _, _, suffix, mask = grouped.grouper.split_output(hidden, include_prefix_last=1)
            kept = mask[:, 1:].bool()
            logits = model.lm_head(suffix[:, :-1][kept]).float()
        logp = -cross_entropy(logits, grouped.targets[kept], reduction="none")
        lengths = torch.tensor([len(work.responses[r]) for r in rows])
        weight = advantage[rows.start : rows.stop].repeat_interleave(lengths)
        (clipped_loss(logp, logp.detach(), weight) / num_tokens).backward()
        total += logp.detach().sum().item()
    return total / num_tokens, optimizer_step(model, optimizer)


def main() -> None:
    AttentionInterface.register(NAME, attention)
    measure(__doc__.splitlines()[0], NAME, update)


if __name__ == "__main__":
    main()
