"""The byte-level BPE tokenizer of a GGUF file as `tokenizer.json`.

GGUF keeps the vocabulary, the merges in order of rank, a type per token and the *name* of the rule
that splits text before BPE (`tokenizer.ggml.pre`); the rules themselves are written here. Types:
3 = control (special), 4 = defined by the model's author (added, not special), 1 = ordinary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from banyan.convert.errors import ConvertError
from banyan.convert.gguf_model import field, reader_id

_CONTROL = 3
_USER_DEFINED = 4

# The published patterns of the model families; `{digits}` is all that differs between the two.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_WORDS.format(digits=digits))
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, behavior="isolated"), _byte_level(False)]
    )


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(True)]
    )


_PRE_TOKENIZERS = {
    "smollm": _smollm,
    "gpt-2": lambda: _byte_level(True),
    "default": lambda: _byte_level(True),
    "qwen2": lambda: _split(r"\p{N}"),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
}


def build_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """The tokenizer that the metadata describes.

    Raises:
        ConvertError: [convert] for a vocabulary that is not byte-level BPE or an unknown rule.
    """
    kind = field(reader, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConvertError(f"[convert] tokenizer: wanted byte-level BPE (gpt2), got {kind!r}")
    rule = field(reader, "tokenizer.ggml.pre", "default")
    if rule not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ConvertError(f"[convert] tokenizer.ggml.pre: wanted one of {known}, got {rule!r}")
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, "tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer


def _named_tokens(reader: gguf.GGUFReader) -> dict[str, str]:
    tokens = field(reader, "tokenizer.ggml.tokens")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named = {}
    for kind, name in names.items():
        token_id = reader_id(reader, kind)
        if token_id is not None:
            named[name] = tokens[token_id]
    return named


def write_tokenizer(reader: gguf.GGUFReader, target: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    build_tokenizer(reader).save(str(target / "tokenizer.json"))
    named = _named_tokens(reader)
    arch = field(reader, "general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(field(reader, f"{arch}.context_length")),
        "clean_up_tokenization_spaces": False,
        **named,
    }
    template = field(reader, "tokenizer.chat_template", "")
    if template:
        config["chat_template"] = template
    for name, value in {"tokenizer_config": config, "special_tokens_map": named}.items():
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (target / f"{name}.json").write_text(text, encoding="utf-8")


def generation_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Ids that end a response (eos, and eot where it differs), begin it and pad it."""
    ids = {"bos_token_id": reader_id(reader, "bos"), "pad_token_id": reader_id(reader, "padding")}
    ends = [reader_id(reader, "eos"), reader_id(reader, "eot")]
    eos = list(dict.fromkeys(i for i in ends if i is not None))
    known = {name: value for name, value in ids.items() if value is not None}
    return {**known, "eos_token_id": eos}
