"""Weights and configuration of a GGUF file, under the names that transformers uses.

GGUF keeps `[out, in]` matrices in the same order of elements as PyTorch. One thing differs: for
`llama` the rows of the query and key projections are permuted, because GGUF rotates neighbouring
pairs (2i, 2i + 1) where transformers rotates halves (i, i + D/2). Within each head of D rows,

    row of transformers  h*D + half*D/2 + i   =   row of GGUF  h*D + 2*i + half

`qwen2` and `qwen3` are stored unpermuted. Format: github.com/ggml-org/ggml, docs/gguf.md (MIT).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from banyan.convert.errors import ConvertError

_SHARD_BYTES = 4 << 30

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CLASS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Maps the file. Raises [convert] if it is damaged or cut short."""
    try:
        return gguf.GGUFReader(str(path))
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ConvertError(f"[convert] {path}: damaged GGUF file: {error}") from error


def field(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """The value of a metadata key; a missing key without a default raises [convert]."""
    entry = reader.get_field(key)
    if entry is not None:
        return entry.contents()
    if default is None:
        raise ConvertError(f"[convert] GGUF metadata: wanted key {key}, which is missing")
    return default


def config_of(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The `config.json` of the model as transformers reads it."""
    arch = field(reader, "general.architecture")
    if arch not in _CLASS:
        raise ConvertError(
            f"[convert] architecture: wanted one of {', '.join(_CLASS)}, got {arch!r}"
        )
    names = {tensor.name for tensor in reader.tensors}
    _refuse_scaled_rope(reader, arch, names)
    heads = int(field(reader, f"{arch}.attention.head_count"))
    hidden = int(field(reader, f"{arch}.embedding_length"))
    head_dim = int(field(reader, f"{arch}.attention.key_length", hidden // heads))
    eps = float(field(reader, f"{arch}.attention.layer_norm_rms_epsilon"))
    return {
        "architectures": [_CLASS[arch]],
        "model_type": arch,
        "vocab_size": _rows(reader, "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": int(field(reader, f"{arch}.feed_forward_length")),
        "num_hidden_layers": int(field(reader, f"{arch}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field(reader, f"{arch}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(field(reader, f"{arch}.context_length")),
        # fp32 in the file: 9.999999747e-06 stands for 1e-05.
        "rms_norm_eps": float(f"{eps:.6g}"),
        "rope_theta": float(field(reader, f"{arch}.rope.freq_base", 10000.0)),
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": reader_id(reader, "bos"),
        "eos_token_id": reader_id(reader, "eos"),
        "pad_token_id": reader_id(reader, "padding"),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def reader_id(reader: gguf.GGUFReader, kind: str) -> int | None:
    """Id of the `bos`, `eos`, `eot`, `padding` or `unknown` token, or None."""
    entry = reader.get_field(f"tokenizer.ggml.{kind}_token_id")
    return None if entry is None else int(entry.contents())


def _refuse_scaled_rope(reader: gguf.GGUFReader, arch: str, names: set[str]) -> None:
    kind = field(reader, f"{arch}.rope.scaling.type", "none")
    if kind != "none" or "rope_freqs.weight" in names:
        raise ConvertError(
            f"[convert] rotary scaling: wanted none, got {kind!r}; GGUF does not keep the "
            "parameters that config.json needs: take the model as safetensors instead"
        )


def _rows(reader: gguf.GGUFReader, name: str) -> int:
    for tensor in reader.tensors:
        if tensor.name == name:
            return int(tensor.shape[-1])
    raise ConvertError(f"[convert] tensor {name}: missing in the GGUF file")


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises [convert]."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if not match or match[2] not in _LAYER:
        raise ConvertError(f"[convert] tensor {name}: no place for it in the model")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's order of query or key rows (file head). [H*D, ...] in and out."""
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [H, D/2, half, ...]
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _dense(tensor: gguf.ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    """One tensor in bf16, PyTorch's shape and row order."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    values = values.reshape([int(n) for n in reversed(tensor.shape)])
    if config["model_type"] == "llama":
        if ".attn_q." in tensor.name:
            values = unpermute(values, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            values = unpermute(values, config["num_key_value_heads"])
    return torch.from_numpy(np.array(values, order="C", copy=True)).to(torch.bfloat16)


def save_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """8 bytes of header length, the header as JSON padded to 8 bytes, then the bf16 data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def write_weights(reader: gguf.GGUFReader, config: dict[str, Any], target: Path) -> None:
    """Writes `model.safetensors`, or shards of 4 GiB with their index. Holds one shard at a time.

    Raises:
        ConvertError: [convert] for a tensor without a place, and for one that is missing.
    """
    shards: list[list[gguf.ReaderTensor]] = [[]]
    num_bytes = 0
    for tensor in reader.tensors:
        size = 2 * int(np.prod(tensor.shape, dtype=np.int64))
        if shards[-1] and num_bytes + size > _SHARD_BYTES:
            shards.append([])
            num_bytes = 0
        shards[-1].append(tensor)
        num_bytes += size
    _check_complete(reader, config)
    weight_map: dict[str, str] = {}
    total = 0
    for i, shard in enumerate(shards):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        dense = {hf_name(t.name): _dense(t, config) for t in shard}
        save_safetensors(target / file, dense)
        weight_map.update(dict.fromkeys(dense, file))
        total += sum(t.nbytes for t in dense.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2) + "\n"
        (target / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _check_complete(reader: gguf.GGUFReader, config: dict[str, Any]) -> None:
    have = {hf_name(tensor.name) for tensor in reader.tensors}
    parts = [p for p in _LAYER.values() if p != "self_attn.q_norm" and p != "self_attn.k_norm"]
    if config["model_type"] == "qwen3":
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    want = {"model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(config["num_hidden_layers"]):
        want |= {f"model.layers.{layer}.{part}.weight" for part in parts}
    if missing := sorted(want - have):
        raise ConvertError(f"[convert] tensor {missing[0]}: missing in the GGUF file")
