"""A dense decoder in plain PyTorch, any dtype: the oracle of the exactness tests.

It shares no code with banyan: samples are padded on the right into one batch, attention is a masked softmax over
[B, H, S, S], log-probabilities come from full logits, and gradients from autograd. Weights are read by their HF
names from a dict; `config` is the dict of config.json (llama, qwen2, qwen3 or qwen3_moe, default RoPE).
"""

from __future__ import annotations

import math

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE on x [B, H, S, D] at positions 0..S-1, half-split form; the table is fp32, as models define it."""
    size, half = x.shape[-2], x.shape[-1] // 2
    frequency = 1.0 / (theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half)))
    angle = torch.arange(size).float()[:, None] * frequency
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def has_experts(config: dict, layer: int) -> bool:
    step = config.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or []
    return bool(config.get("num_experts")) and (layer + 1) % step == 0 and layer not in dense


def swiglu(x: torch.Tensor, weight, prefix: str) -> torch.Tensor:
    gate, up = (x @ weight(f"{prefix}.{part}_proj.weight").T for part in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ weight(f"{prefix}.down_proj.weight").T


def experts(x: torch.Tensor, weight, config: dict, logits: torch.Tensor) -> torch.Tensor:
    """Every expert on every token x [N, E], weighted with zero where it is not chosen."""
    probability = logits.softmax(-1)
    chosen = probability.topk(config["num_experts_per_tok"], -1).indices
    kept = torch.zeros_like(probability).scatter(-1, chosen, 1.0) * probability
    if config["norm_topk_prob"]:
        kept = kept / kept.sum(-1, keepdim=True)
    parts = [
        kept[:, e, None] * swiglu(x, weight, f"mlp.experts.{e}") for e in range(logits.shape[-1])
    ]
    return torch.stack(parts).sum(0)


def hidden_states(
    weights: dict[str, torch.Tensor],
    config: dict,
    ids: torch.Tensor,
    routed: dict[int, list[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """ids [B, S] (right padded) -> hidden after the final norm [B, S, E]. The routers' logits [B S, X] are appended to
    routed[layer]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    batch, size = ids.shape
    x = weights["model.embed_tokens.weight"][ids]
    causal = torch.full((size, size), -math.inf, dtype=x.dtype).triu(1)
    for layer in range(config["num_hidden_layers"]):

        def weight(name: str, layer: int = layer) -> torch.Tensor | None:
            return weights.get(f"model.layers.{layer}.{name}")

        normed = rms_norm(x, weight("input_layernorm.weight"), eps)
        projected = []
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            y = normed @ weight(f"self_attn.{part}_proj.weight").T
            bias = weight(f"self_attn.{part}_proj.bias")
            y = y if bias is None else y + bias
            y = y.view(batch, size, count, head_dim)
            norm = weight(f"self_attn.{part}_norm.weight")
            y = y if norm is None else rms_norm(y, norm, eps)
            y = y.transpose(1, 2)
            projected.append(rotate(y, theta) if part != "v" else y)
        q, k, v = projected
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(head_dim) + causal
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, size, heads * head_dim)
        x = x + attended @ weight("self_attn.o_proj.weight").T
        normed = rms_norm(x, weight("post_attention_layernorm.weight"), eps)
        if not has_experts(config, layer):
            x = x + swiglu(normed, weight, "mlp")
            continue
        flat = normed.flatten(0, 1)
        logits = flat @ weight("mlp.gate.weight").T
        if routed is not None:
            routed.setdefault(layer, []).append(logits)
        x = x + experts(flat, weight, config, logits).view_as(x)
    return rms_norm(x, weights["model.norm.weight"], eps)


def head(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def log_probs(
    weights: dict[str, torch.Tensor],
    config: dict,
    samples: list[list[int]],
    temperature: float = 1.0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities of tokens 1..n-1 of each sample and the entropies of the rows that predict them."""
    size = max(len(sample) for sample in samples)
    ids = torch.zeros((len(samples), size), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor(sample)
    logits = hidden_states(weights, config, ids) @ head(weights).T / temperature
    table = logits.log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    chosen = table[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    lengths = [len(sample) - 1 for sample in samples]
    return (
        [chosen[row, :length] for row, length in enumerate(lengths)],
        [entropy[row, :length] for row, length in enumerate(lengths)],
    )
