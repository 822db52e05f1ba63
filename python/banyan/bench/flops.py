"""Arithmetic of one update, forward and backward, over the unique tokens of its trie.

    6 * N_body * T + 12 * d_attn * L_attn * pairs + 6 * d * V * head_rows

T unique tokens, pairs (query, key) over the paths of the trie, head_rows the tokens that predict a
token of a response; N_body weights of the layers' matrices. Recomputed work does not count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrieSize:
    logical: int  # tokens with every sample counted by itself
    unique: int
    pairs: int
    head_rows: int


def trie_size(samples: list[tuple[list[int], list[int]]]) -> TrieSize:
    """Merges equal prefixes of (prompt, response) samples and counts."""
    children: dict[tuple[int, int], int] = {}  # (node, token) -> node; the root is 0
    sources: set[int] = set()
    pairs = 0
    for prompt, response in samples:
        node = 0
        for depth, token in enumerate(prompt + response):
            if depth >= len(prompt):
                sources.add(node)
            key = (node, token)
            if key not in children:
                children[key] = len(children) + 1
                pairs += depth + 1
            node = children[key]
    sources.discard(0)  # an empty prompt: no row predicts the first token
    logical = sum(len(prompt) + len(response) for prompt, response in samples)
    return TrieSize(logical, len(children), pairs, len(sources))


def _active_columns(config: dict) -> int:
    """Columns of gate (or up) that a token is multiplied with, summed over the layers."""
    layers = config["num_hidden_layers"]
    sparse = [
        layer
        for layer in range(layers)
        if config.get("num_experts")
        and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
        and layer not in (config.get("mlp_only_layers") or [])
    ]
    chosen = config.get("num_experts_per_tok", 0) * config.get("moe_intermediate_size", 0)
    return (layers - len(sparse)) * config["intermediate_size"] + len(sparse) * chosen


def update_flops(size: TrieSize, model: Path) -> float:
    """FLOPs of the update of `size` for the model directory (Llama, Qwen2, Qwen3 and Qwen3-MoE shapes)."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    body = layers * attention + 3 * hidden * _active_columns(config)
    return (
        6.0 * body * size.unique
        + 12.0 * heads * head_dim * layers * size.pairs
        + 6.0 * hidden * config["vocab_size"] * size.head_rows
    )
