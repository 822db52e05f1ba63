"""banyan's attention for models of `transformers`: importing this module registers it as "banyan_trie".

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="banyan_trie")
    packed = banyan.trie.pack(samples)
    hidden = banyan.transformers.hidden_states(model, packed)   # [T, E], each unique token once

The trie travels as a keyword of the model's call (`banyan_trie=packed`), down to the attention function. Gradient
checkpointing keeps the keywords of a layer with the layer, so the recomputation in backward reads the same trie.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface

from banyan import ops
from banyan.trie import PackedTrie

__all__ = ["NAME", "hidden_states", "logprobs"]

NAME = "banyan_trie"


def hidden_states(model: transformers.PreTrainedModel, packed: PackedTrie) -> torch.Tensor:
    """The last hidden states of the unique tokens, after the final norm: [T, E]. No logits are made.

    Raises:
        ValueError: The model has another attention, or dropout that is on: two samples that share a token would
            need different masks on it.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != NAME:
        raise ValueError(
            f"[{NAME}] attention: wanted {NAME}, got {config._attn_implementation}; "
            f"call model.set_attn_implementation('{NAME}')"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.training and module.p > 0:
            raise ValueError(f"[{NAME}] {name}: wanted no dropout, got {module.p}; set it to 0")
    output = model.base_model(
        input_ids=packed.input_ids.to(model.device),
        position_ids=packed.position_ids.to(model.device),
        use_cache=False,
        banyan_trie=packed,
    )
    return output.last_hidden_state[0]


def logprobs(
    model: transformers.PreTrainedModel,
    packed: PackedTrie,
    temperature: float = 1.0,
    entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (and entropies) of the scored tokens by the model's own head: ops.edge_logprob.

    Raises:
        ValueError: As hidden_states; a head with a bias; a model that scales or caps its logits.
    """
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(
            f"[{NAME}] head: wanted no bias; use hidden_states with a head of your own"
        )
    config = model.config.get_text_config()
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise ValueError(f"[{NAME}] {key}: wanted none, got {getattr(config, key)}")
    return ops.edge_logprob(hidden_states(model, packed), head.weight, packed, temperature, entropy)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    banyan_trie: PackedTrie | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind the name: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises:
        ValueError: What a trie cannot answer exactly: no trie in the call, a padded or cached batch, positions that
            are not the trie's, a sliding window, a soft cap, sinks, dropout, attention that is not causal.
    """
    packed = _check_call(query, key, attention_mask, banyan_trie, kwargs.get("position_ids"))
    for name in ("sliding_window", "softcap", "s_aux", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"[{NAME}] {name}: wanted none, got a model that uses it")
    if dropout > 0:
        raise ValueError(f"[{NAME}] attention_dropout: wanted 0, got {dropout}")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError(f"[{NAME}] is_causal: wanted a causal model")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return ops.tree_attention(q, k, v, packed, scaling)[None], None


def _check_call(query, key, attention_mask, packed, position_ids) -> PackedTrie:
    if packed is None:
        raise ValueError(
            f"[{NAME}] trie: wanted {NAME}=packed in the model's call, got none; to generate, "
            "call model.set_attn_implementation('sdpa')"
        )
    if attention_mask is not None:
        raise ValueError(f"[{NAME}] attention_mask: wanted none, the trie is the mask")
    wanted = (1, packed.num_unique)
    for x, what in ((query, "batch"), (key, "keys (use_cache=False)")):
        if (x.shape[0], x.shape[2]) != wanted:
            raise ValueError(f"[{NAME}] {what}: wanted {wanted}, got {(x.shape[0], x.shape[2])}")
    if position_ids is not None and not torch.equal(
        position_ids.reshape(-1), packed.positions.to(position_ids.device)
    ):
        raise ValueError(f"[{NAME}] position_ids: wanted packed.position_ids, got others")
    return packed


def _no_mask(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """transformers asks for a mask once per call; a padded batch is refused here."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(f"[{NAME}] attention_mask: wanted no padding, got some")


transformers.AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)
