"""What has come of one response, in columns, whatever dialect it is told in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from banyan.serve.engine_client import Event, masks
from banyan.serve.text_stream import TextStream, TokenText

Top = list[tuple[int, float, int]]  # (id, log-probability, rank)


class Delta(NamedTuple):
    """What an event brought: text to show, and tokens [begin, end) of the response."""

    text: str
    begin: int
    end: int


@dataclass(frozen=True)
class TextOptions:
    """How the tokens of a request become text."""

    stops: tuple[str, ...] = ()
    skip_special: bool = True
    include_stop: bool = False
    with_offsets: bool = False
    show: bool = True  # false: ids only


@dataclass
class Choice:
    """One response. `request` is the number of its prompt, `index` its number in the whole answer."""

    request: int
    index: int
    tokens: TokenText
    options: TextOptions
    start: int = 0  # letters of an echoed prompt before it
    ids: list[int] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop_reason: int | str | None = None
    final: Event | None = None

    def __post_init__(self) -> None:
        self._texts = self.options.stops
        self._stops = [text for text in self._texts if text not in self.tokens.by_special_text]
        self._names = {
            self.tokens.by_special_text[text]: text
            for text in self._texts
            if text in self.tokens.by_special_text
        }
        self.stream = TextStream(
            self.tokens,
            [text.encode() for text in self._stops],
            self.options.skip_special,
            self.options.include_stop,
            self.options.with_offsets,
            self.start,
        )

    def take(self, event: Event) -> Delta:
        begin = len(self.ids)
        self.ids += event["tokens"]
        self.raw += event["raw"]
        self.processed += event["processed"]
        self.kept += event["log_kept_mass"]
        self.top += event["top"] or []
        self.masks += masks(event)
        stop_string = None
        if event["finished"]:
            self.final = event
            self.finish = event["finish"]
            stop_string = event["stop_string"]
            self.stop_reason = self._reason(event)
        text = ""
        if self.options.show:
            ended = self.finish == "stop" and stop_string is None
            drop_last = ended and not self.options.include_stop
            text = self.stream.push(event["tokens"], event["finished"], stop_string, drop_last)
            self.text += text
        return Delta(text, begin, len(self.ids))

    def shown(self, processed: bool) -> list[float]:
        """The log-probability of each token that standard fields show: one array with `top`, where there is one."""
        if self.top:
            return [top[0][1] for top in self.top]
        return self.processed if processed else self.raw

    def offsets(self) -> list[int]:
        return self.stream.offsets

    def versions(self) -> list[dict[str, Any]]:
        """[start, end) of tokens and the version of the weights that drew them."""
        spans = (self.final or {}).get("spans") or []
        return [{key: span[key] for key in ("version", "start", "end")} for span in spans]

    def epochs(self) -> list[dict[str, Any]]:
        spans = (self.final or {}).get("spans") or []
        return [{key: span[key] for key in ("epoch", "start", "end")} for span in spans]

    def _reason(self, event: Event) -> int | str | None:
        if event["stop_string"] is not None:
            return self._stops[event["stop_string"]]
        id = event["stop_token"]
        return self._names.get(id, id) if id is not None else None
