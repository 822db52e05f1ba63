"""Writes what the tests of the shell run on: a model directory without weights, data rows, data files."""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST_DATA = Path(os.environ.get("BANYAN_TEST_DATA", ROOT.parent / "shared" / "data"))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model_dir(directory: Path) -> Path:
    """Tokenizer (one token per byte, three special ones), config and an empty weight file."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data_row(question: str = "2 + 3?", truth: str = "5", **changes) -> dict:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0},
        **changes,
    }


def write_tiny_llama(directory: Path) -> Path:
    """A random two-layer Llama with the byte tokenizer; its fp32 weights are saved as they are."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_model_dir(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        eos_token_id=257,
        bos_token_id=None,
    )
    (directory / "model.safetensors").unlink()
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def write_tiny_moe(directory: Path, num_hidden_layers: int = 2) -> Path:
    """A random Qwen3-MoE of a dense layer and others with experts, likewise."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    write_model_dir(directory)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        eos_token_id=257,
        bos_token_id=None,
    )
    (directory / "model.safetensors").unlink()
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def write_tiny_qwen(directory: Path, model_type: str = "qwen2", **sizes: int) -> Path:
    """A random two-layer Qwen2 or Qwen3 with the byte tokenizer; its fp32 weights are saved as they are."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    write_model_dir(directory)
    torch.manual_seed(1)
    shape = {
        "vocab_size": 289,
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": 257,
        "bos_token_id": None,
    } | sizes
    (directory / "model.safetensors").unlink()
    if model_type == "qwen2":
        Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(directory)
    else:
        Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16)).save_pretrained(directory)
    return directory
