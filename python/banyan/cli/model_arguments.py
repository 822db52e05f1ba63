"""Options that generate, eval and score have in common, and what they load."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from banyan.data.chat import Chat
from banyan.errors import UserError, core_text
from banyan.feature import loading
from banyan.feature.registry import Registry
from banyan.trainer.inputs import check_model


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="compute type (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda", "npu"), help="default: %(default)s"
    )
    parser.add_argument(
        "--kernels", default="native", choices=("native", "aten"), help="default: %(default)s"
    )
    add_feature_arguments(parser)


def add_feature_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--feature",
        action="append",
        default=[],
        metavar="FILE.py",
        help="file or module with features that the model was trained under (docs/guides/features.md)",
    )
    parser.add_argument(
        "--feature-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of those features, as banyan.feature.args.NAME",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--n", type=_at_least(1), default=1, help="responses per prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=-1, help="-1: all (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=_at_least(1), default=512, help="of a response (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_at_least(0), default=42, help="default: %(default)s")
    parser.add_argument(
        "--share", choices=("on", "off"), default="on", help="compute shared prefixes once"
    )


def check(args: argparse.Namespace) -> Chat:
    """Checks the model directory and reads its tokenizer, before the model is loaded."""
    check_model(args.model, "--model")
    return Chat(args.model)


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The extension and the model; features are in force until the command ends. Raises UserError."""
    from banyan import extension

    features = _features(args)
    core = extension.load()
    try:
        model = core.Model.load(
            str(args.model), dtype=args.dtype, device=args.device, kernels=args.kernels
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(core_text(error)) from error
    args.at_exit.enter_context(loading.in_force(features, core, [], lambda line: None))
    return core, model


def _features(args: argparse.Namespace) -> Registry | None:
    """The checked features that --feature names; None without any."""
    import yaml

    if not args.feature and not args.feature_arg:
        return None
    given = {}
    for text in args.feature_arg:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--feature-arg: wanted NAME=VALUE, got {text}")
        given[name] = yaml.safe_load(value)
    values = {loading.MODULES_KEY: args.feature, loading.ARGS_KEY: given}
    registry = loading.registry(values, {})
    registry.prepare()
    return registry


def generate(
    core: Any,
    model: Any,
    chat: Chat,
    prompts: list[list[int]],
    args: argparse.Namespace,
    greedy: bool = False,
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Trajectories of each prompt, in order of their index, and the engine's statistics."""
    longest = max(len(tokens) for tokens in prompts)
    engine = core.Engine(
        model, {"share_prefix": args.share == "on", "max_model_len": longest + args.max_tokens}
    )
    count = 1 if greedy else args.n
    params = {
        "temperature": 0.0 if greedy else args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "max_tokens": args.max_tokens,
        "eos_ids": chat.stop_ids(),
        "seed": args.seed,
    }
    found: list[list[dict[str, Any]]] = [[] for _ in prompts]
    rows = [{"row": row, "tokens": tokens, "n": count} for row, tokens in enumerate(prompts)]
    try:
        stats = engine.generate(rows, params, lambda item: found[item["row"]].append(item))
    except (ValueError, IndexError) as error:
        raise UserError(core_text(error)) from error
    return [sorted(items, key=lambda item: item["index"]) for items in found], stats


def _at_least(low: int):
    def convert(text: str) -> int:
        number = int(text)
        if number < low:
            raise argparse.ArgumentTypeError(f"wanted a whole number >= {low}, got {number}")
        return number

    return convert
