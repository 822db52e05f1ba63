"""Small random models of each architecture, written by transformers, and helpers around them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 36,
    "head_dim": 24,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_theta=1e4, rms_norm_eps=1e-5),
    "llama_untied": LlamaConfig(**SIZES, tie_word_embeddings=False, rope_theta=1e5),
    "llama3_rope": LlamaConfig(**SIZES, rope_scaling=LLAMA3_ROPE, rope_theta=5e5),
    "yarn_rope": LlamaConfig(**SIZES, rope_scaling=YARN_ROPE, rope_theta=1e4),
    "linear_rope": LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "qwen2": Qwen2Config(**SIZES, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "qwen3": Qwen3Config(
        **SIZES, head_dim=24, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    # The step leaves layers 1 and 3, the list takes 3 away: one layer has experts.
    "qwen3_moe_mixed": Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 4},
        **EXPERTS,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        tie_word_embeddings=True,
    ),
}


def write_model(name: str, directory: Path, seed: int = 0) -> tuple[torch.nn.Module, Path]:
    """Saves a random model of CONFIGS[name] in fp32 and returns it with its directory."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], torch_dtype=torch.float32).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith((".bias", "norm.weight")):  # transformers starts these at 0 and 1
                value.add_(0.1 * torch.randn_like(value))
    path = directory / name
    model.save_pretrained(path)
    return model, path


def new_style_rope(path: Path) -> None:
    """Rewrites config.json with `rope_parameters`, as newer transformers write it."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["rope_parameters"] = {**rope, "rope_theta": config.pop("rope_theta")}
    config["dtype"] = config.pop("torch_dtype", "float32")
    file.write_text(json.dumps(config))


def random_samples(seed: int, vocab: int) -> list[list[int]]:
    """Samples that hang on shared trunks: two prompts, several responses, one duplicate, one prefix."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(1, vocab, (count,), generator=generator).tolist()

    system = ids(9)
    first, second = system + ids(12), system + ids(70)
    branch = first + ids(5)
    samples = [first + ids(n) for n in (3, 17, 1)] + [branch + ids(n) for n in (4, 66)]
    samples += [second + ids(n) for n in (2, 40)] + [second, ids(30)]
    samples.append(list(samples[1]))
    return samples
