"""`banyan eval`: accuracy of a model on a data file, sampled as in training and greedy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from banyan.cli import model_arguments
from banyan.config.resolve import defaults
from banyan.data import dataset
from banyan.data.chat import Chat
from banyan.data.dataset import Dataset
from banyan.trainer.metrics import validation_metrics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments.add_model_arguments(parser)
    parser.add_argument("--data", nargs="+", required=True, help="data files with verl's columns")
    parser.add_argument("--rows", type=int, default=-1, help="only the first rows (-1: all)")
    parser.add_argument("--max-prompt-tokens", type=int, default=4096, help="default: %(default)s")
    parser.add_argument(
        "--reward", help="Python file with compute_score; default: the scorer of each data_source"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    model_arguments.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    chat = model_arguments.check(args)
    options = dataset.Options(
        prompt_key="prompt",
        reward_fn_key="data_source",
        max_prompt_length=args.max_prompt_tokens,
        truncation="error",
        filter_overlong_prompts=False,
        max_samples=args.rows,
        template_kwargs={},
    )
    data = dataset.load(args.data, chat, options)
    core, model = model_arguments.load_model(args)
    results = {}
    for name, greedy in (("sampled", False), ("greedy", True)):
        tokens = [prompt.tokens for prompt in data.prompts]
        found, stats = model_arguments.generate(core, model, chat, tokens, args, greedy)
        results[name] = {**_score(found, data, chat, args.reward), "seconds": stats["seconds"]}
        print(f"{name}: {_line(results[name])}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _score(
    found: list[list[dict[str, Any]]], data: Dataset, chat: Chat, reward_file: str | None
) -> dict[str, float]:
    """Validation metrics of the responses, in verl's names."""
    from banyan.reward.manager import RewardManager

    tree = defaults()
    tree["reward"]["custom_reward_function"]["path"] = reward_file
    manager = RewardManager(tree)
    try:
        for row, items in enumerate(found):
            prompt = data.prompts[row]
            for item in items:
                extra = {**prompt.extra_info, "num_turns": 2, "rollout_reward_scores": {}}
                text = chat.decode(item["response"])
                manager.submit(
                    (row, item["index"]), prompt.data_source, text, prompt.ground_truth, extra
                )
        samples: list[list[dict[str, Any]]] = [[] for _ in found]
        for (row, _), result in manager.poll():
            if not result.failed:
                predicted = {"pred": result.text["pred"]} if "pred" in result.text else {}
                samples[row].append({**result.extra, "reward": result.value, **predicted})
    finally:
        manager.close()
    return validation_metrics(
        [(data.prompts[row].data_source, items) for row, items in enumerate(samples)]
    )


def _line(metrics: dict[str, float]) -> str:
    shown = [
        f"{k.removeprefix('val-core/')} {v:.3f}"
        for k, v in metrics.items()
        if k.startswith("val-core/")
    ]
    return "  ".join(shown) + f"  ({metrics['seconds']:.1f} s)"
