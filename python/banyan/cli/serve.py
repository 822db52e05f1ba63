"""`banyan serve`: a model over HTTP, in OpenAI's, vLLM's and SGLang's dialects."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from banyan.cli import model_arguments
from banyan.data.chat import Chat
from banyan.errors import UserError, core_text
from banyan.serve.tools import FORMATS

_KEY_VARIABLE = "BANYAN_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments.add_model_arguments(parser)
    listen = parser.add_argument_group("where to listen")
    listen.add_argument(
        "--host", default="127.0.0.1", help="another address needs a key (default: %(default)s)"
    )
    listen.add_argument(
        "--port", type=int, default=8000, help="0: a free one (default: %(default)s)"
    )
    listen.add_argument("--uds", type=Path, help="a Unix socket instead of --host and --port")
    listen.add_argument(
        "--api-key-file",
        type=Path,
        help=f"one key per line; or the environment variable {_KEY_VARIABLE}",
    )
    listen.add_argument(
        "--admin-port",
        type=int,
        help="port of the control routes, on 127.0.0.1 only (default: none; --enable-admin: --port + 1)",
    )
    listen.add_argument("--enable-admin", action="store_true", help="--admin-port = --port + 1")
    listen.add_argument(
        "--admin-token-file",
        type=Path,
        help="token of the control routes; written if there is none",
    )
    _add_model_options(parser.add_argument_group("what to serve"))
    _add_engine_options(parser.add_argument_group("the engine"))


def _add_model_options(group: Any) -> None:
    group.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME")
    group.add_argument("--chat-template", type=Path, help="file, instead of the model's own")
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring a chat template: it can keep the server busy",
    )
    group.add_argument(
        "--tool-parser", "--tool-call-parser", choices=FORMATS, default="auto", help="default: auto"
    )
    group.add_argument(
        "--generation-config",
        default="auto",
        help="auto: sampling defaults of the model; vllm: neutral; or a directory (default: auto)",
    )
    group.add_argument(
        "--logprobs-mode",
        choices=("raw_logprobs", "processed_logprobs"),
        default="raw_logprobs",
        help="which of both the standard fields show (default: %(default)s)",
    )
    group.add_argument(
        "--max-logprobs", type=int, default=20, help="-1: the vocabulary (default: %(default)s)"
    )
    group.add_argument(
        "--request-timeout", type=float, default=3600.0, help="seconds (default: %(default)s)"
    )


def _add_engine_options(group: Any) -> None:
    group.add_argument("--max-model-len", type=int, default=0, help="0: the model's")
    group.add_argument("--max-num-seqs", type=int, default=256, help="default: %(default)s")
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="default: %(default)s"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.5,
        help="share of the free memory for keys and values (default: %(default)s)",
    )
    group.add_argument("--kv-cache-memory-bytes", type=int, default=0, help="instead of the share")
    group.add_argument("--max-num-queued-reqs", type=int, default=4096, help="default: %(default)s")
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )


def run(args: argparse.Namespace) -> int:
    from banyan.serve import load, server
    from banyan.serve.limits import Limits
    from banyan.serve.structured import Grammars

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    listen = server.Listen(
        host=args.host,
        port=args.port,
        uds=args.uds,
        keys=_keys(args.api_key_file),
        admin_port=_admin_port(args),
        admin_token=_admin_token(args),
    )
    server.check_listen(listen)
    model_arguments.check(args)
    chat = Chat(args.model, _template(args.chat_template))
    sockets = server.bind(listen)
    engine, vocab, length = _engine(args, chat)
    served = load.Served(
        names=tuple(args.served_model_name),
        generation_config=args.generation_config,
        tool_format=args.tool_parser,
        logprobs_mode=args.logprobs_mode,
        max_logprobs=args.max_logprobs,
        trust_chat_template=args.trust_request_chat_template,
        limits=Limits(request_seconds=args.request_timeout),
    )
    context = load.context(engine, chat, vocab, length, served, None)
    context.grammars = Grammars(context.tokens.for_stops())
    context.settings |= _engine_options(args) | {"max_model_len": length, "dtype": args.dtype}
    print(f"{context.name}: {server.address(sockets[0])}", flush=True)
    if sockets[1] is not None:
        print(f"control routes: {server.address(sockets[1])}", flush=True)
    server.run(context, listen, sockets)
    return 0


def _engine(args: argparse.Namespace, chat: Chat) -> tuple[Any, int, int]:
    """The engine, the model's number of ids, and the longest prompt with response."""
    from banyan.serve.text_stream import TokenText

    core, model = model_arguments.load_model(args)
    shape = model.shape
    tokens = TokenText(chat.tokenizer, shape["vocab"])
    try:
        engine = core.Engine(model, _engine_options(args), tokens.for_stops())
    except (ValueError, RuntimeError) as error:
        raise UserError(core_text(error)) from error
    longest = shape["max_positions"]
    length = min(args.max_model_len, longest) if args.max_model_len > 0 else longest
    return engine, shape["vocab"], length


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "memory_share": args.gpu_memory_utilization,
        "kv_bytes": args.kv_cache_memory_bytes,
        "max_num_queued_reqs": args.max_num_queued_reqs,
        "share_prefix": args.enable_prefix_caching,
        "keep_pool": True,
    }


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return tuple(filter(None, [os.environ.get(_KEY_VARIABLE, "")]))
    found = tuple(
        line.strip() for line in _read(path, "--api-key-file").splitlines() if line.strip()
    )
    if not found:
        raise UserError(f"--api-key-file: {path}: wanted a key per line, got none")
    return found


def _admin_port(args: argparse.Namespace) -> int | None:
    if args.admin_port is None and args.enable_admin:
        return args.port + 1 if args.port else 0
    return args.admin_port


def _admin_token(args: argparse.Namespace) -> str:
    """The token of the file; a file that is not there is written, for its owner only."""
    path = args.admin_token_file
    if path is None:
        return ""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        token = _read(path, "--admin-token-file").strip()
        if len(token) < 16:
            raise UserError(f"--admin-token-file: {path}: wanted at least 16 letters") from None
        return token
    except OSError as error:
        raise UserError(f"--admin-token-file: {path}: {error.strerror}") from error
    token = secrets.token_urlsafe(32)
    with os.fdopen(handle, "w") as file:
        file.write(token + "\n")
    return token


def _template(path: Path | None) -> str | None:
    return None if path is None else _read(path, "--chat-template")


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option}: {path}: {error}") from error
