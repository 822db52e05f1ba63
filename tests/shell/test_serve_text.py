"""Text token by token: bytes of tokens, letters that are not whole, stop strings across token borders."""

from __future__ import annotations

import pytest
import tokenizers
from banyan.data.chat import Chat
from banyan.data.token_bytes import special_ids, token_bytes
from banyan.errors import UserError
from banyan.serve.choice import Choice, TextOptions
from banyan.serve.generation import Merger
from banyan.serve.text_stream import TextStream, TokenText
from conftest import needs_smollm2
from hypothesis import given, settings
from hypothesis import strategies as st
from shell_files import write_model_dir


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Chat:
    return Chat(write_model_dir(tmp_path_factory.mktemp("text") / "model"))


@pytest.fixture(scope="module")
def tokens(chat) -> TokenText:
    return TokenText(chat.tokenizer, 262)


def sentence_piece() -> tokenizers.Tokenizer:
    """As Llama 2 writes its tokens: U+2581 for a space, bytes for letters that it lacks."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁a", "b")]
    model = tokenizers.models.BPE(
        vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 258), max_size=40))
def test_joined_bytes_are_what_the_tokenizer_decodes(chat, tokens, ids):
    stream = TextStream(tokens)
    text = "".join(stream.push([id]) for id in ids) + stream.push([], finished=True)
    assert text == chat.decode(ids)
    assert stream.length == len(text)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab ü🌍\n", max_size=30))
def test_sentence_pieces_too(text):
    tokenizer = sentence_piece()
    ids = tokenizer.encode(text.replace(" ", "▁")).ids
    stream = TextStream(TokenText(tokenizer, 0))
    shown = "".join(stream.push([id]) for id in ids) + stream.push([], finished=True)
    assert shown == text == tokenizer.decode(ids, skip_special_tokens=True)


@needs_smollm2
def test_a_real_vocabulary(smollm2):
    chat = Chat(smollm2)
    tokens = TokenText(chat.tokenizer, 49152)
    ids = chat.encode("Ünï 日本語 🙂🌍 <|im_end|> x = {'a': [1, 2]}\n\n\tend")
    for end in range(len(ids)):
        stream = TextStream(tokens)
        text = "".join(stream.push([id]) for id in ids[:end]) + stream.push([], finished=True)
        assert text == chat.decode(ids[:end])


def test_a_decoder_of_another_family_is_refused():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(UserError, match="byte-level or sentence-piece decoder, got WordPiece"):
        token_bytes(tokenizer)


def test_special_tokens_and_padding(chat, tokens):
    end = chat.encode("<|im_end|>")[0]
    assert end in special_ids(chat.tokenizer)
    assert tokens.name(end) == "<|im_end|>"
    assert tokens.for_stops()[end] == b""
    assert tokens.of(261) == b""
    assert TextStream(tokens, skip_special=False).push([end], finished=True) == "<|im_end|>"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab#üx", max_size=20),
    stops=st.lists(st.text(alphabet="ab#ü", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    per_event=st.integers(1, 4),
)
def test_a_stop_string_cuts_exactly_and_nothing_is_taken_back(
    chat, tokens, text, stops, include, per_event
):
    """One token per byte, so every stop string crosses token borders; the reference looks at whole texts."""
    ids = chat.encode(text)
    encoded = [stop.encode() for stop in stops]
    number, end = None, len(ids)
    for end in range(1, len(ids) + 1):
        said = b"".join(tokens.of(id) for id in ids[:end])
        number = next((n for n, stop in enumerate(encoded) if said.endswith(stop)), None)
        if number is not None:
            break
    said = b"".join(tokens.of(id) for id in ids[:end])
    if number is not None and not include:
        said = said[: -len(encoded[number])]
    stream = TextStream(tokens, encoded, include_stop=include)
    shown, used = "", ids[:end]
    for begin in range(0, max(1, len(used)), per_event):
        part = used[begin : begin + per_event]
        last = begin + per_event >= len(used)
        shown += stream.push(part, finished=last, stop_string=number if last else None)
        assert said.decode("utf-8", "replace").startswith(shown)
    assert shown == said.decode("utf-8", "replace")


def test_offsets_count_letters(chat, tokens):
    ids = chat.encode("aü🌍b")
    stream = TextStream(tokens, with_offsets=True, start=10)
    for id in ids:
        stream.push([id])
    assert stream.offsets == [10, 11, 11, 12, 12, 12, 12, 13]


def test_the_token_that_ended_a_response_is_no_text(chat, tokens):
    ids = chat.encode("ab!")
    assert TextStream(tokens).push(ids, finished=True, drop_last=True) == "ab"


def test_a_sampling_mask_stays_beside_its_token():
    """Where nothing was cut the engine gives none: an empty list in its place."""
    choice = Choice(0, 0, TokenText(None, 10), TextOptions(show=False))
    columns = {"raw": [-1.0], "processed": [-1.0], "log_kept_mass": [0.0], "top": None}
    for id, mask in ((4, [[4, 5]]), (6, None), (7, [[7]])):
        choice.take({"tokens": [id], "sampling_mask": mask, "finished": False, **columns})
    assert choice.masks == [[4, 5], [], [7]]


def test_events_that_are_joined_keep_their_masks():
    columns = {"raw": [-1.0], "processed": [-1.0], "log_kept_mass": [0.0], "top": None}
    merger = Merger(3)
    found = []
    for id, mask in ((1, None), (4, None), (6, [[6, 8]]), (7, None)):
        event = {"request": "a", "index": 0, "tokens": [id], "sampling_mask": mask}
        found += merger.take([{**event, "finished": False, **columns}])
    assert [event["tokens"] for event in found] == [[1], [4, 6, 7]]
    assert found[1]["sampling_mask"] == [[], [6, 8], []]
