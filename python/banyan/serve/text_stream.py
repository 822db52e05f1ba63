"""Text of a response as its tokens come: exact, and never taken back.

Bytes of tokens are joined and read as UTF-8. What is not safe to show is held back: the bytes of a letter that is not
whole, and the longest tail that may be the beginning of a stop string. The engine decides where a response ends; here
its text is cut at that stop string. The pieces of `push`, joined, are the whole text, whatever the cuts between events.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from banyan.data.token_bytes import special_ids, token_bytes

_utf8 = codecs.getincrementaldecoder("utf-8")


class TokenText:
    """Bytes and printable names of token ids."""

    def __init__(self, tokenizer: Any, vocab: int) -> None:
        """`tokenizer`: None where ids stay ids; every text is empty then."""
        self.known = tokenizer is not None
        self.bytes = token_bytes(tokenizer, vocab) if self.known else [b""] * vocab
        self.longest = max(map(len, self.bytes), default=0)
        self.special = special_ids(tokenizer) if self.known else frozenset()
        self.by_special_text = {
            self.bytes[id].decode("utf-8", "replace"): id for id in self.special
        }

    def for_stops(self) -> list[bytes]:
        """Bytes of each id as they count for stop strings: special tokens are no text. Nothing without a tokenizer."""
        if not self.known:
            return []
        return [b"" if id in self.special else text for id, text in enumerate(self.bytes)]

    def name(self, id: int) -> str:
        """Text of one token; a token that is no whole UTF-8 is written `bytes:\\xe2\\x80`, as OpenAI does."""
        text = self.of(id)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)

    def of(self, id: int) -> bytes:
        return self.bytes[id] if 0 <= id < len(self.bytes) else b""


class TextStream:
    """Text of one response."""

    def __init__(
        self,
        tokens: TokenText,
        stops: Sequence[bytes] = (),
        skip_special: bool = True,
        include_stop: bool = False,
        with_offsets: bool = False,
        start: int = 0,
    ) -> None:
        """`start`: letters that stand before the response in the text shown (an echoed prompt)."""
        self.length = start  # letters given out
        self.offsets: list[int] = []  # per token: letters before it, those of a cut stop string too
        self._tokens = tokens
        self._stops = stops
        self._skip_special = skip_special
        self._include_stop = include_stop
        self._held = bytearray()  # bytes not given to the decoder yet
        self._decoder = _utf8("replace")
        self._with_offsets = with_offsets
        self._seen = start  # letters of all bytes so far, held ones too
        self._seen_decoder = _utf8("replace")

    def push(
        self,
        ids: Sequence[int],
        finished: bool = False,
        stop_string: int | None = None,
        drop_last: bool = False,
    ) -> str:
        """Text that may be shown after these tokens.

        `stop_string`: number of the stop string that ended the response with the last token; `drop_last`: the last
        token ended it and is no text.
        """
        before_last = len(self._held)
        for index, id in enumerate(ids):
            before_last = len(self._held)
            if self._with_offsets:
                self.offsets.append(self._seen)
            if (id in self._tokens.special and self._skip_special) or (
                drop_last and index == len(ids) - 1
            ):
                continue
            self._add(self._tokens.of(id))
        if stop_string is not None:
            self._cut(self._stops[stop_string], before_last)
        safe = len(self._held) if finished else len(self._held) - self._hold_back()
        text = self._decoder.decode(bytes(self._held[:safe]), final=finished)
        del self._held[:safe]
        self.length += len(text)
        return text

    def _add(self, text: bytes) -> None:
        self._held += text
        if self._with_offsets:
            self._seen += len(self._seen_decoder.decode(text))

    def _cut(self, stop: bytes, before_last: int) -> None:
        """Ends the text at the match that the last token completed; a whole match is always held back until then."""
        found = self._held.find(stop, max(0, before_last - len(stop) + 1))
        if found >= 0:
            del self._held[found + (len(stop) if self._include_stop else 0) :]

    def _hold_back(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop), len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
