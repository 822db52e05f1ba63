"""`banyan serve`: a model over HTTP, in OpenAI's, vLLM's and SGLang's dialects."""

from __future__ import annotations

import argparse
import logging
import os
import random
import secrets
from pathlib import Path
from typing import Any

from banyan.cli import engine_flags, model_arguments
from banyan.config import rollout_table
from banyan.config.rollout_table import Settings
from banyan.errors import UserError, core_text
from banyan.trainer.inputs import check_model

_KEY_VARIABLE = "BANYAN_API_KEY"
_OWN = ("model", "model_path", "device", "dtype")  # options of the table that stand here
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # as the other commands call them
_QUEUED_REQUESTS = 4096  # where --max-num-queued-reqs says nothing: a queue without end is a leak


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --model DIR [options]"
    parser.add_argument(
        "--model", "--model-path", type=Path, required=True, help="Hugging Face model directory"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "npu"))
    parser.add_argument(
        "--dtype",
        default="bf16",
        choices=(*_DTYPES, "auto", "bfloat16", "float32", "float", "float16", "half"),
        help="compute type; float16 is refused (default: %(default)s)",
    )
    parser.add_argument("--kernels", default="native", choices=("native", "aten"))
    model_arguments.add_feature_arguments(parser)
    _add_listen_options(parser.add_argument_group("where to listen"))
    parser.add_argument(
        "--request-timeout", type=float, default=3600.0, help="seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring a chat template: it can keep the server busy",
    )
    engine_flags.add(parser, _OWN)


def _add_listen_options(group: Any) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="another address needs a key (default: %(default)s)"
    )
    group.add_argument("--port", type=int, default=8000, help="0: a free one (default: 8000)")
    group.add_argument("--uds", type=Path, help="a Unix socket instead of --host and --port")
    group.add_argument(
        "--api-key-file",
        type=Path,
        help=f"one key per line; or the environment variable {_KEY_VARIABLE}",
    )
    group.add_argument(
        "--admin-port", type=int, help="port of the control routes, on 127.0.0.1 (default: none)"
    )
    group.add_argument("--enable-admin", action="store_true", help="--admin-port = --port + 1")
    group.add_argument(
        "--admin-token-file", type=Path, help="token of the control routes; written if absent"
    )


def run(args: argparse.Namespace) -> int:
    from banyan.serve import load, server

    listen = server.Listen(
        host=args.host,
        port=args.port,
        uds=args.uds,
        keys=_keys(args.api_key_file),
        admin_port=_admin_port(args),
        admin_token=_admin_token(args),
    )
    server.check_listen(listen)
    options = engine_flags.read(args) | {"dtype": _DTYPES.get(args.dtype, args.dtype)}
    settings = rollout_table.for_server(options, where="--", device=args.device)
    settings.engine["max_num_queued_reqs"] = (
        settings.engine["max_num_queued_reqs"] or _QUEUED_REQUESTS
    )
    settings.engine["keep_pool"] = True
    served = _served(args, settings, seeded="seed" in options or "random_seed" in options)
    _start_log(settings)
    check_model(args.model, "--model")
    text = not settings.server["skip_tokenizer_init"]
    chat = load.read_chat(args.model, settings.server["chat_template"], text)
    sockets = server.bind(listen)
    engine, shape = _engine(args, settings, chat)
    longest = shape["max_positions"]
    wanted = settings.engine["max_model_len"]
    length = min(wanted, longest) if wanted > 0 else longest
    grammars = load.grammars(chat, shape["vocab"])
    context = load.context(engine, chat, shape["vocab"], length, served, grammars)
    context.settings = settings.effective | context.settings
    context.settings |= {"model": context.name, "max_model_len": length}
    context.settings |= {"max_num_queued_reqs": settings.engine["max_num_queued_reqs"]}
    context.start_calls = load.start_calls(settings.server)
    print(f"{context.name}: {server.address(sockets[0])}", flush=True)
    if sockets[1] is not None:
        print(f"control routes: {server.address(sockets[1])}", flush=True)
    server.run(context, listen, sockets)
    return 0


def _served(args: argparse.Namespace, settings: Settings, seeded: bool) -> Any:
    """How the model is shown; `seeded`: seeds of requests without one follow from --seed."""
    from banyan.serve import tools
    from banyan.serve.limits import Limits
    from banyan.serve.load import Served

    server = settings.server
    return Served(
        names=tuple(server["served_model_name"] or ()),
        generation_config=server["generation_config"],
        tool_format=tools.named(server["tool_call_parser"] or "auto"),
        logprobs_mode=server["logprobs_mode"],
        max_logprobs=server["max_logprobs"],
        trust_chat_template=args.trust_request_chat_template,
        return_sampling_mask=server["return_sampling_mask"],
        stream_interval=server["stream_interval"],
        release_level=server["release_level"] if server["enable_sleep_mode"] else None,
        log_stats=not server["disable_log_stats"],
        seeds=random.Random(server["seed"]) if seeded else random.SystemRandom(),
        limits=Limits(request_seconds=args.request_timeout),
    )


def _engine(args: argparse.Namespace, settings: Settings, chat: Any) -> tuple[Any, Any]:
    """The engine over the model, and the model's sizes."""
    from banyan.serve.text_stream import TokenText

    args.dtype = {full: short for short, full in _DTYPES.items()}[settings.server["dtype"]]
    core, model = model_arguments.load_model(args)
    shape = model.shape
    try:
        engine = core.Engine(
            model, settings.engine, TokenText(chat.tokenizer, shape["vocab"]).for_stops()
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(core_text(error)) from error
    return engine, shape


def _start_log(settings: Settings) -> None:
    """Log levels, and what the parameters had to say."""
    level = settings.server["log_level"].upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    http = settings.server["log_level_http"]
    logging.getLogger("uvicorn.error").setLevel(http.upper() if http else logging.ERROR)
    for note in settings.notes:
        logging.getLogger("banyan.serve").info(note)


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return tuple(filter(None, [os.environ.get(_KEY_VARIABLE, "")]))
    lines = (line.strip() for line in _read(path, "--api-key-file").splitlines())
    found = tuple(line for line in lines if line)
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


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option}: {path}: {error}") from error
