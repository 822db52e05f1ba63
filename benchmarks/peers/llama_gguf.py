"""Writes a Llama model directory as a bf16 GGUF file without a tokenizer, for llama_rollout.py.

The weights keep their bits; norms become fp32, as llama.cpp wants them. The rows of the query and
key projections are permuted, because GGUF rotates neighbouring pairs (2i, 2i + 1) where
transformers rotates halves. Format: github.com/ggml-org/ggml, docs/gguf.md (MIT).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_bf16(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file as the uint16 behind their bf16 numbers."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"[gguf] {name}: wanted BF16, got {entry['dtype']}")
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[begin:end], np.uint16).reshape(entry["shape"])
    return tensors


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """[H*D, E] halves -> neighbouring pairs."""
    halves = rows.reshape(num_heads, 2, -1, rows.shape[-1])  # [H, half, D/2, E]
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write(model: Path, target: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, bits in read_bf16(model / "model.safetensors").items():
        if bits.ndim == 1:
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(gguf_name(name), values)
            continue
        if "q_proj" in name or "k_proj" in name:
            bits = permute(bits, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(
            gguf_name(name),
            np.ascontiguousarray(bits).view(np.uint8),
            raw_dtype=gguf.GGMLQuantizationType.BF16,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
