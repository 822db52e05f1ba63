"""What a reward model reads: the actor's tokens, or its own tokens of the same conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from banyan.data.chat import Chat
from banyan.errors import UserError


class ModelText:
    """Prompt and response under the reward model's own tokenizer and chat template."""

    def __init__(self, directory: Path, actor: Chat, trust_remote_code: bool) -> None:
        """Reads the reward model's tokenizer. Raises UserError naming the file that is missing."""
        self._actor = actor
        self._chat = Chat(directory, trust_remote_code=trust_remote_code)

    def tokens(self, messages: list[dict[str, Any]] | None, item: dict[str, Any]) -> list[int]:
        """Token ids of one trajectory; a prompt that was given as token ids is one user message."""
        if messages is None:
            messages = [{"role": "user", "content": self._actor.decode(item["prompt"])}]
        answer = {"role": "assistant", "content": self._actor.decode(item["response"])}
        return self._chat.encode_chat([*messages, answer], add_generation_prompt=False)


def same_tokenizer(a: Path, b: Path) -> bool:
    """Whether two model directories give a text the same ids."""
    return _vocabulary(a) == _vocabulary(b)


def _vocabulary(directory: Path) -> Any:
    """What decides on the ids of a text. Raises UserError without a tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; wanted a tokenizer beside the model")
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = [(token["id"], token["content"]) for token in tokenizer.get("added_tokens", [])]
    return tokenizer["model"].get("vocab"), tokenizer["model"].get("merges"), added
