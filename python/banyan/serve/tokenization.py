"""/tokenize, /detokenize, /tokenizer_info: what the server's tokenizer and template make of text and ids."""

from __future__ import annotations

from typing import Any

from banyan.errors import UserError
from banyan.serve.context import Context
from banyan.serve.errors import bad
from banyan.serve.render import encode_messages

Fields = dict[str, Any]


def tokenize(context: Context, fields: Fields) -> Fields:
    """Runs off the loop."""
    context.check_model(fields["model"])
    if (fields["prompt"] is None) == (fields["messages"] is None):
        raise bad("prompt, messages: wanted one of them", "prompt")
    special = fields["add_special_tokens"]
    if fields["messages"] is not None:
        ids = encode_messages(context, {**fields, "add_special_tokens": bool(special)})
    else:
        context.check_length(fields["prompt"])
        ids = context.chat.encode(fields["prompt"], add_special_tokens=special is not False)
    found: Fields = {
        "count": len(ids),
        "max_model_len": context.shape.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if fields["return_token_strs"]:
        found["token_strs"] = [context.tokens.name(id) for id in ids]
    return found


def detokenize(context: Context, fields: Fields) -> Fields:
    """The text of ids, special tokens written out; `prompt` is vLLM's name for it, `text` SGLang's."""
    context.check_model(fields["model"])
    joined = b"".join(context.tokens.of(id) for id in fields["tokens"])
    text = joined.decode("utf-8", "replace")
    return {"prompt": text, "text": text}


def info(context: Context) -> Fields:
    try:
        template: str | None = context.chat.template_text()
    except UserError:
        template = None
    names = context.chat.special_names()
    return {
        **names,
        "chat_template": template,
        "vocab_size": context.chat.vocab_size,
        "model_max_length": context.shape.max_model_len,
    }
