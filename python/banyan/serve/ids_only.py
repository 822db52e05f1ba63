"""Stands in for the tokenizer where `skip_tokenizer_init` is set: token ids in and out, text is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from banyan.data.chat import config_stop_ids
from banyan.errors import UserError


class IdsOnly:
    """What a context asks of `data.chat.Chat`, without text."""

    tokenizer = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.vocab_size = 0

    def stop_ids(self) -> list[int]:
        """End-of-sequence ids of the generation configuration and the model."""
        return config_stop_ids(self.directory)

    def special_names(self) -> dict[str, str]:
        return {}

    def encode(self, *arguments: Any, **named: Any) -> NoReturn:
        raise UserError("text: the server runs with skip_tokenizer_init, it takes token ids only")

    encode_rendered = mark_special = render = template_text = with_template = encode
