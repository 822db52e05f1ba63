"""`banyan chat`: talk to a model in the terminal. Answers come as they are drawn; ctrl-c stops an answer."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from banyan.cli import model_arguments
from banyan.data.chat import Chat
from banyan.errors import UserError, core_text
from banyan.serve.load import read_chat
from banyan.serve.text_stream import TextStream, TokenText

_HELP = (
    "/reset begins anew, /system TEXT sets the system prompt, /retry answers again, /exit or ctrl-d "
    "ends; ctrl-c stops an answer"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments.add_model_arguments(parser)
    parser.add_argument("--system", default="", help="system prompt")
    parser.add_argument("--chat-template", type=Path, help="file, instead of the model's own")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=-1, help="-1: all (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="default: another one each time")


def run(args: argparse.Namespace) -> int:
    model_arguments.check(args)
    chat = read_chat(args.model, args.chat_template)
    core, model = model_arguments.load_model(args)
    shape = model.shape
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing for input()
    tokens = TokenText(chat.tokenizer, shape["vocab"])
    engine = core.Engine(model, {"max_num_seqs": 1, "keep_pool": True}, tokens.for_stops())
    talk = Conversation(engine, chat, tokens, shape["max_positions"], vars(args))
    engine.start()
    try:
        repl(talk)
    finally:
        engine.stop(10.0)
    return 0


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(
        self,
        engine: Any,
        chat: Chat,
        tokens: TokenText,
        context: int,
        settings: dict[str, Any],
    ) -> None:
        """`settings`: system, temperature, top_p, top_k, max_tokens, seed. `engine`: started by the caller."""
        self.system = settings["system"]
        self.messages: list[dict[str, str]] = []
        self.is_cut = False  # the last answer ended with its tokens
        self._engine, self._chat, self._tokens = engine, chat, tokens
        self._context, self._settings = context, settings

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer. KeyboardInterrupt ends it; what was said until then stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except UserError:
            self.messages.pop()
            raise
        answer = ""
        try:
            for piece in self._generate(prompt):
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def retry(self) -> Iterator[str]:
        """Another answer to the last question."""
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise UserError("nothing has been asked yet")
        yield from self.ask(self.messages.pop()["content"])

    def reset(self) -> None:
        self.messages.clear()

    def _prompt(self) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt = self._chat.encode_chat([*system, *self.messages])
        if len(prompt) >= self._context:
            raise UserError(
                f"the conversation has {len(prompt)} tokens, the context {self._context}: /reset begins anew"
            )
        return prompt

    def _generate(self, prompt: list[int]) -> Iterator[str]:
        settings = self._settings
        seed = secrets.randbits(63) if settings["seed"] is None else settings["seed"]
        params = {
            "temperature": settings["temperature"],
            "top_p": settings["top_p"],
            "top_k": settings["top_k"],
            "max_tokens": min(settings["max_tokens"], self._context - len(prompt)),
            "eos_ids": self._chat.stop_ids(),
            "seed": seed,
        }
        request = {"id": f"chat-{secrets.token_hex(8)}", "prompt": prompt, "n": 1, "params": params}
        stream = TextStream(self._tokens)
        try:
            id = self._engine.submit(request)
        except ValueError as error:
            raise UserError(core_text(error)) from error
        finished = False
        try:
            while not finished:
                select.select([self._engine.event_fd()], [], [])
                for event in self._engine.drain():
                    if event["request"] != id:
                        continue  # the end of an answer that was stopped
                    finished = event["finished"]
                    if event.get("error"):
                        raise UserError(event["error"])
                    self.is_cut = finished and event["finish"] == "length"
                    drop_last = finished and event["finish"] == "stop"
                    yield stream.push(event["tokens"], finished, drop_last=drop_last)
        finally:
            if not finished:
                self._engine.abort([id])


def repl(talk: Conversation) -> None:
    """Reads lines until the end of the input."""
    print(_HELP, file=sys.stderr)
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/exit or ctrl-d ends", file=sys.stderr)
            continue
        if line == "/exit":
            return
        if line:
            _obey(talk, line)


def _obey(talk: Conversation, line: str) -> None:
    command, _, rest = line.partition(" ")
    if command == "/reset":
        talk.reset()
    elif command == "/system":
        talk.system = rest.strip()
        talk.reset()
    elif command == "/help":
        print(_HELP, file=sys.stderr)
    elif command.startswith("/") and command != "/retry":
        print(f"unknown command {command}; {_HELP}", file=sys.stderr)
    else:
        talk.is_cut = False
        _show(talk.retry() if command == "/retry" else talk.ask(line))
        if talk.is_cut:
            print("(cut: --max-tokens, or the end of the context)", file=sys.stderr)


def _show(pieces: Iterator[str]) -> None:
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        print("\n(stopped)", file=sys.stderr)
    except UserError as error:
        print(error, file=sys.stderr)
