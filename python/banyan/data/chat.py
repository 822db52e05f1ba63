"""Tokenizer and chat template of a model directory: messages in, token ids out, and back.

`tokenizer.json` is read by the `tokenizers` package, which loads no torch; a directory without one goes through
transformers' AutoTokenizer. Templates run in jinja2's immutable sandbox with Hugging Face's options. A special token
that is spelled out in a message's text stays text: those characters never become that token.
"""

from __future__ import annotations

import copy
import datetime
import json
from pathlib import Path
from typing import Any

from banyan.errors import UserError

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_MARK = "\ue000{}\ue001"  # private-use characters around the number of a spelled-out special token


class Chat:
    """Chat template and tokenizer of one model directory."""

    def __init__(
        self, directory: Path, template: str | None = None, trust_remote_code: bool = False
    ) -> None:
        """Reads the tokenizer. Raises UserError naming the file that is missing or damaged."""
        self.directory = directory
        self._config = _read_json(directory / "tokenizer_config.json")
        self._tokenizer = _load_tokenizer(directory, trust_remote_code)
        self._special = [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special
        ]
        self._template_text = template
        self._template: Any = None

    def with_template(self, template: str) -> Chat:
        """The same tokenizer under another template."""
        other = copy.copy(self)
        other._template_text, other._template = template, None
        return other

    def template_text(self) -> str:
        """Source of the template. Raises UserError if the directory has none."""
        return self._template_text or _find_template(self.directory, self._config)

    def encode_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of the messages under the template, with the opening of the answer at the end."""
        marked, spelled = self.mark_special(messages)
        return self.encode_rendered(self.render(marked, template_kwargs), spelled)[0]

    def encode_rendered(
        self, text: str, spelled: list[str]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of rendered text with marks, and the letters [begin, end) of `text` behind each token."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        begin = 0
        for piece in _split_marks(text, len(spelled)):
            if isinstance(piece, int):
                end = begin + len(_MARK.format(piece))
                own = self.encode(spelled[piece], as_text=True)
                places += [(begin, end)] * len(own)
            else:
                end = begin + len(piece)
                found = self._encoding(piece, as_text=False)
                own = found.ids
                places += [(begin + first, begin + last) for first, last in found.offsets]
            ids += own
            begin = end
        return ids, places

    def special_tokens(self) -> list[str]:
        """Texts of the special tokens."""
        return [token for token in self._special if token]

    def special_names(self) -> dict[str, str]:
        """bos_token, eos_token, pad_token, unk_token -> text, those that the tokenizer has."""
        named = {name: _token_text(self._config.get(name)) for name in _SPECIAL_NAMES}
        return {name: text for name, text in named.items() if text is not None}

    def encode(
        self, text: str, as_text: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of plain text; with `as_text` the names of special tokens in it stay text. `add_special_tokens`
        adds what the tokenizer puts around a text by itself, such as the one that begins it."""
        return self._encoding(text, as_text, add_special_tokens).ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    @property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def stop_ids(self) -> list[int]:
        """End-of-sequence ids: the tokenizer's, the generation configuration's and the model's, sorted."""
        found: set[int] = set()
        eos = self._tokenizer.token_to_id(_token_text(self._config.get("eos_token")) or "")
        if eos is not None:
            found.add(eos)
        return sorted(found.union(config_stop_ids(self.directory)))

    def mark_special(
        self, messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Messages with spelled-out special tokens replaced by marks, and the texts behind the marks."""
        spelled: list[str] = []
        special = sorted(self.special_tokens(), key=len, reverse=True)

        def marked(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: marked(item) for key, item in value.items()}
            if isinstance(value, list):
                return [marked(item) for item in value]
            if not isinstance(value, str):
                return value
            for token in special:
                if token in value:
                    value = value.replace(token, _MARK.format(len(spelled)))
                    spelled.append(token)
            return value

        return marked(messages), spelled

    def _encoding(self, text: str, as_text: bool, add_special_tokens: bool = False) -> Any:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UserError(
                "text: wanted Unicode, got half a surrogate pair or a byte that is not UTF-8"
            )
        self._tokenizer.encode_special_tokens = as_text
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def render(self, messages: list[dict[str, Any]], template_kwargs: dict[str, Any]) -> str:
        """Text of (marked) messages under the template; `template_kwargs` win over the opening of an answer."""
        import jinja2

        try:
            if self._template is None:
                self._template = _environment().from_string(self.template_text())
            values = {"add_generation_prompt": True, **self.special_names(), **template_kwargs}
            return self._template.render(messages=messages, **values)
        except UserError:
            raise
        except jinja2.TemplateError as error:
            raise UserError(f"{self.directory}: chat template: {error}") from error
        except (
            Exception
        ) as error:  # a template is other people's code: it may raise anything on given messages
            kind = type(error).__name__
            raise UserError(f"{self.directory}: chat template: {kind}: {error}") from error


def config_stop_ids(directory: Path) -> list[int]:
    """End-of-sequence ids of generation_config.json and config.json, sorted."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = _read_json(path).get("eos_token_id") if path.is_file() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)


def _environment() -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def raise_exception(message: str) -> None:
        from jinja2 import TemplateError

        raise TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return _from_transformers(directory, trust_remote_code)
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise UserError(f"{path}: not a tokenizer: {error}") from error


def _from_transformers(directory: Path, trust_remote_code: bool) -> Any:
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise UserError(
            f"{directory}: wanted tokenizer.json, and transformers found none either: {error}"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"{directory}: wanted tokenizer.json, got only a slow tokenizer; convert it with transformers"
        )
    return tokenizer.backend_tokenizer


def _find_template(directory: Path, config: dict[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item["name"]: item["template"] for item in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"{directory}: wanted a chat template in tokenizer_config.json or chat_template.jinja; "
            "give one as actor_rollout_ref.model.custom_chat_template"
        )
    return template


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _split_marks(text: str, count: int) -> list[str | int]:
    """The text cut at its marks; a mark becomes its number."""
    pieces: list[str | int] = [text]
    for number in range(count):
        mark = _MARK.format(number)
        cut: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                cut.append(piece)
                continue
            for index, part in enumerate(piece.split(mark)):
                cut += ([number] if index else []) + ([part] if part else [])
        pieces = cut
    return pieces


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: wanted an object, got {type(value).__name__}")
    return value
