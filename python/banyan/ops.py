"""Differentiable operations on a packed trie (banyan.trie.pack), for models written in PyTorch.

bf16 on a CPU runs banyan's native kernels; fp32, fp64 and other devices run plain torch operators in the core. Under
torch.autocast the inputs are cast to its type, as matrix products are. Gradients are exact first derivatives of the
merged batch, which are those of the separate samples; second derivatives are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from banyan.trie import PackedTrie

__all__ = ["edge_logprob", "tree_attention"]


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: PackedTrie,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T over each token's ancestors and itself) v. No key is copied, no mask is made.

    Shapes:
        q [T, H, D], k and v [T, K, D], H a multiple of K (query head h reads head h // (H / K)) -> [T, H, D].
        Keys and queries after norm and RoPE. bf16, fp32 or fp64.

    Args:
        scale: 1 / sqrt(D) if left out.

    Raises:
        ValueError: Other shapes or dtypes.
    """
    q, k, v = (_autocast(x) for x in (q, k, v))
    if q.dim() != 3:
        raise ValueError(f"[tree_attention] q: wanted [T, H, D], got {list(q.shape)}")
    return _TreeAttention.apply(q, k, v, packed, q.shape[-1] ** -0.5 if scale is None else scale)


def edge_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    packed: PackedTrie,
    temperature: float = 1.0,
    entropy: bool = False,
    per_edge: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(hidden weight^T / temperature) at the scored tokens, without a [T, V] tensor.

    Differentiable in `hidden` and `weight`. Each token with a scored child takes one row of the head, each distinct
    (token, child) one log-probability; both are then gathered to the samples.

    Shapes:
        hidden [T, E] or [1, T, E] (what goes into the head), weight [V, E] (of the head, which has no bias).
        Returns [U] fp32 (fp64 for fp64): the scored tokens, sample by sample (`packed.split` cuts them apart,
        `packed.edges.logical_sample` names the sample of each). With per_edge: [X].

    Args:
        entropy: Also return the entropy of the distribution that predicts each scored token, [U]; with per_edge one
            per head row, [R].

    Raises:
        ValueError: Other shapes, a token id outside the vocabulary, temperature <= 0.
    """
    # The weight is not cast: the core rounds it where it packs it, and its gradient stays in its own type.
    hidden = _autocast(packed.rows(hidden, "edge_logprob"))
    if hidden.dim() != 2:
        raise ValueError(f"[edge_logprob] hidden: wanted [T, E], got {list(hidden.shape)}")
    edges = packed.edges
    rows = hidden.index_select(0, edges.source.to(hidden.device))
    logprob, entropies = _EdgeLogprob.apply(rows, weight, packed, temperature, entropy)
    if not per_edge:
        logprob = logprob.index_select(0, edges.logical_edge.to(logprob.device))
    if not entropy:
        return logprob
    if not per_edge:
        entropies = entropies.index_select(0, edges.logical_row.to(entropies.device))
    return logprob, entropies


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, packed: PackedTrie, scale: float) -> torch.Tensor:
        out, lse = packed._core.attention_forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed, ctx.scale = packed, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        with torch.no_grad():
            grads = ctx.packed._core.attention_backward(grad_out, q, k, v, out, lse, ctx.scale)
        return *_once("tree_attention", grads, grad_out, q, k, v), None, None


class _EdgeLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows, weight, packed: PackedTrie, temperature: float, with_entropy: bool):
        logprob, lse, entropy = packed._core.logprob_forward(
            rows, weight, temperature, with_entropy
        )
        ctx.save_for_backward(rows, weight, lse, entropy)
        ctx.packed, ctx.temperature = packed, temperature
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob, grad_entropy):
        rows, weight, lse, entropy = ctx.saved_tensors
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None
        given = [None if g is None else g.contiguous() for g in (grad_logprob, grad_entropy)]
        with torch.no_grad():
            grad_rows, grad_weight = ctx.packed._core.logprob_backward(
                rows, weight, lse, entropy, *given, ctx.temperature
            )
        grads = (grad_rows, grad_weight.to(weight.dtype))
        sources = [x for x in (*given, rows, weight) if x is not None]
        return *_once("edge_logprob", grads, *sources), None, None, None


class _Once(torch.autograd.Function):
    """Hands gradients on; differentiating them is refused by name instead of giving zeros."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors):
        ctx.name = name
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads):
        raise RuntimeError(
            f"[{ctx.name}] second derivatives: wanted first derivatives only, got a backward through the backward"
        )


def _once(name: str, grads, *sources) -> tuple[torch.Tensor, ...]:
    """`grads`, tied to `sources` where the backward itself is recorded (create_graph=True)."""
    if not torch.is_grad_enabled():
        return tuple(grads)
    return _Once.apply(name, len(grads), *grads, *sources)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))
