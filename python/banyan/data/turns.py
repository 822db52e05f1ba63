"""Chats to token ids with an exact mask of what the assistant wrote.

The template is rendered for the messages before an assistant turn with the opening of an answer (what a rollout is
given) and for the messages up to the turn; the text between the two is the turn. It ends with the special token that
closes it: text that the template puts behind (a line feed) is written by nobody and is not scored. The whole chat is
tokenised once and a token is scored if its letters lie inside a turn. A token that crosses an edge, or an opening that
is tokenised differently on its own, means that a rollout would have seen other tokens: such a chat is refused, or cut
at the edges on request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from banyan.data.chat import Chat
from banyan.errors import UserError

_MISMATCH = (
    "message {}: its tokens inside the whole chat differ from those that a rollout would produce; "
    "data.ignore_input_ids_mismatch=true takes the latter"
)
_REWRITTEN = (
    "message {}: the chat template renders this turn differently once later messages follow; "
    "banyan.data.each_turn=true makes each turn a sample of its own"
)
_NO_OPENING = "message {}: the chat template does not render this turn as a continuation of the opening of an answer"


@dataclass(frozen=True)
class Options:
    """How chats become samples."""

    each_turn: (
        bool  # each assistant turn a sample of its own, with the history as rendered at that turn
    )
    ignore_mismatch: bool
    template_kwargs: dict[str, Any]


@dataclass(frozen=True)
class Turns:
    """Token ids of a chat; `scored[t]` tells whether the assistant wrote token t."""

    tokens: list[int]
    scored: list[int]


@dataclass(frozen=True)
class _Span:
    message: int
    begin: int  # letters of the text that was rendered up to the turn
    end: int
    text: str


def encode_turns(
    chat: Chat, messages: list[dict[str, Any]], first: int, options: Options
) -> list[Turns]:
    """Samples of one chat: the assistant turns from message `first` on are scored.

    Raises:
        ValueError: why this chat has no exact mask, naming the message.
    """
    marked, spelled = chat.mark_special([_clean(message) for message in messages])
    try:
        spans = _spans(chat, marked, first, options.template_kwargs)
        if not spans:
            raise ValueError("wanted an assistant message to train on, got none")
        if options.each_turn:
            return [_encode(chat, span.text, spelled, [span], options) for span in spans]
        text = spans[-1].text
        if spans[-1].message + 1 < len(messages):
            text = chat.render(marked, {**options.template_kwargs, "add_generation_prompt": False})
        for span in spans:
            if not text.startswith(span.text):
                raise ValueError(_REWRITTEN.format(span.message))
        return [_encode(chat, text, spelled, spans, options)]
    except UserError as error:  # the template refuses the messages
        raise ValueError(str(error)) from error


def _spans(
    chat: Chat, messages: list[dict[str, Any]], first: int, kwargs: dict[str, Any]
) -> list[_Span]:
    special = chat.special_tokens()
    spans = []
    for index in range(first, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        opening = chat.render(messages[:index], {**kwargs, "add_generation_prompt": True})
        text = chat.render(messages[: index + 1], {**kwargs, "add_generation_prompt": False})
        if not text.startswith(opening):
            raise ValueError(_NO_OPENING.format(index))
        spans.append(_Span(index, len(opening), _end_of_turn(text, len(opening), special), text))
    return spans


def _end_of_turn(text: str, begin: int, special: list[str]) -> int:
    """Behind the last special token of the turn if only white space follows it, else the end of the text."""
    ends = [at + len(token) for token in special if (at := text.rfind(token, begin)) >= 0]
    return max(ends) if ends and not text[max(ends) :].strip() else len(text)


def _encode(
    chat: Chat, text: str, spelled: list[str], spans: list[_Span], options: Options
) -> Turns:
    tokens, places = chat.encode_rendered(text, spelled)
    scored = [0] * len(tokens)
    for span in spans:
        inside = [t for t, (a, b) in enumerate(places) if a < span.end and b > span.begin]
        exact = all(places[t][0] >= span.begin and places[t][1] <= span.end for t in inside)
        opening, _ = chat.encode_rendered(text[: span.begin], spelled)
        if not exact or tokens[: len(opening)] != opening or inside[:1] != [len(opening)]:
            if not options.ignore_mismatch:
                raise ValueError(_MISMATCH.format(span.message))
            return _encode_pieces(chat, text, spelled, spans)
        for t in inside:
            scored[t] = 1
    return Turns(tokens, scored)


def _encode_pieces(chat: Chat, text: str, spelled: list[str], spans: list[_Span]) -> Turns:
    """Tokens of the text cut at the edges of the turns."""
    tokens: list[int] = []
    scored: list[int] = []
    begin = 0
    for span in [*spans, None]:
        edges = (span.begin, span.end) if span else (len(text), len(text))
        for wanted, end in zip((0, 1), edges, strict=True):
            piece, _ = chat.encode_rendered(text[begin:end], spelled)
            tokens += piece
            scored += [wanted] * len(piece)
            begin = end
    return Turns(tokens, scored)


def _clean(message: dict[str, Any]) -> dict[str, Any]:
    """The message without the empty entries that columns of objects bring along; content is always text."""
    kept = {key: value for key, value in message.items() if value is not None}
    return {"content": "", **kept}
