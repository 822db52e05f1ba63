"""The bytes behind every token id of a tokenizer, so that text can be put together token by token.

Joined bytes of a response, read as UTF-8, are the text that the tokenizer's own decoder gives (a test compares them;
where bytes are no UTF-8, sentence pieces show one mark per byte and this reading one per letter).
Two families write their tokens differently:

byte level       a letter of the token stands for one byte (the table of GPT-2: printable Latin-1 letters for
                 themselves, the other 68 bytes as U+0100 and up)
sentence piece   U+2581 stands for a space, `<0x0A>` for one byte, everything else for itself

Added tokens stand for their own text in both.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from banyan.errors import UserError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any, size: int = 0) -> list[bytes]:
    """Bytes of ids 0.. of a `tokenizers.Tokenizer`, at least `size` of them; ids without a token are empty.

    Raises UserError for a decoder of another family.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
    read = _byte_level if _is_byte_level(tokenizer) else _sentence_piece
    found = [b""] * max(size, max(vocabulary.values(), default=-1) + 1)
    for token, id in vocabulary.items():
        found[id] = added[id].encode() if id in added else read(token)
    return found


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens: they are no text."""
    return frozenset(
        id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special
    )


def _is_byte_level(tokenizer: Any) -> bool:
    kinds = set(_decoder_kinds(json.loads(tokenizer.to_str()).get("decoder")))
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"} or "Replace" in kinds:
        return False
    raise UserError(
        "tokenizer: wanted a byte-level or sentence-piece decoder, got "
        f"{', '.join(sorted(kinds)) or 'none'}"
    )


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_kinds(part)]
    return [decoder["type"]]


@cache
def _letters() -> dict[str, int]:
    """Letter -> byte of the byte-level alphabet."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def _byte_level(token: str) -> bytes:
    letters = _letters()
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:  # a token that is no byte-level text stands for itself
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()
