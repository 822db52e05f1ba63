"""One actor update of a transformers model, by banyan's library and by PrefixGrouper: the same batch, model and loss.

    make extension peers
    .venv/bin/python benchmarks/library.py --model .cache/models/SmolLM2-135M-Instruct --json library.json

Prompts are GSM8K's (BANYAN_TEST_DATA or ../shared/data; else made up), banyan's arithmetic problems, which all begin
with the same worked examples, or random tokens; responses are random tokens, so that nothing but prompts is shared.
First both sides run once in fp32 and must agree in the mean log-probability and the gradient norm. Then each is timed
in processes of its own, in turn, the best of all runs counting. `ratio` is PrefixGrouper's time over banyan's;
`cpu_ratio` is the same of processor time, which a busy machine disturbs less (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

from banyan.bench.cli import find_model
from banyan.bench.work import Preset, prompts_of
from banyan.data import arithmetic
from banyan.data.chat import Chat
from banyan.errors import UserError

from banyan.bench import peers

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / "build" / "peers" / "transformers"
TOLERANCE = 2e-4  # relative, fp32: two orders of summation over the whole model


def make_work(args: argparse.Namespace, model: Path) -> tuple[dict, str]:
    """The work file's content, and where its prompts come from."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(1000, 40000) for _ in range(count)]

    source: str = args.source
    if source == "random":
        prompts = [ids(args.prompt_tokens) for _ in range(args.prompts)]
    elif source == "arithmetic":
        rows = arithmetic.generate(args.prompts, seed=1)
        prompts = [Chat(model).encode_chat(row["prompt"]) for row in rows]
    else:
        preset = Preset(args.prompts, args.group_size, args.response_tokens, args.group_size)
        prompts, source = prompts_of(preset, Chat(model))
    count = len(prompts) * args.group_size
    work = {
        "prompts": prompts,
        "responses": [ids(args.response_tokens) for _ in range(count)],
        "rewards": [draw.random() for _ in range(count)],
    }
    return work, source


class Sides:
    """Runs one side or the other in a child, with the same arguments and environment."""

    def __init__(self, args: argparse.Namespace, model: Path, work: Path, folder: Path) -> None:
        self._shared = ["--model", str(model), "--work", str(work), "--groups", str(args.groups)]
        self._folder = folder
        scripts = ROOT / "benchmarks"
        self._commands = {
            "banyan": [sys.executable, str(scripts / "library_update.py")],
            "prefix_grouper": [
                str(ENVIRONMENT / "bin" / "python"),
                str(scripts / "peers" / "prefix_grouper_update.py"),
            ],
        }

    def run(self, side: str, *arguments: str) -> dict:
        result = self._folder / f"{side}.json"
        command = [*self._commands[side], *self._shared, "--json", str(result), *arguments]
        peers.run(command, self._folder / f"{side}.log", keep_path=side == "banyan")
        return json.loads(result.read_text(encoding="utf-8"))


def agree(sides: Sides) -> dict[str, float]:
    """Both sides once in fp32. Raises RuntimeError where they compute different things."""
    ours, theirs = (
        sides.run(side, "--exact", "--repeats", "0") for side in ("banyan", "prefix_grouper")
    )
    difference = {}
    for key in ("mean_logprob", "grad_norm"):
        difference[key] = abs(ours[key] - theirs[key]) / abs(theirs[key])
        if difference[key] > TOLERANCE:
            raise RuntimeError(f"[bench] {key}: wanted {theirs[key]}, got {ours[key]}")
    return difference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the cached SmolLM2)")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8, help="responses of one prompt")
    parser.add_argument("--source", choices=("gsm8k", "arithmetic", "random"), default="gsm8k")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of random prompts")
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--groups", type=int, default=1, help="prompts of one micro-batch")
    parser.add_argument("--weights", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of one child")
    parser.add_argument("--rounds", type=int, default=2, help="children of each side, in turn")
    parser.add_argument("--no-check", dest="check", action="store_false", help="skip the fp32 run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not (ENVIRONMENT / ".installed").is_file():
        raise UserError(f"[bench] wanted {ENVIRONMENT}, which is missing; run `make peers`")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # what banyan sets for itself, for both sides
    model = find_model(args.model)
    work, source = make_work(args, model)
    with tempfile.TemporaryDirectory(prefix="banyan-library-") as name:
        folder = Path(name)
        (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
        sides = Sides(args, model, folder / "work.json", folder)
        difference = agree(sides) if args.check else None
        options = ["--weights", args.weights, "--repeats", str(args.repeats)]
        runs: dict[str, list[dict]] = {"banyan": [], "prefix_grouper": []}
        for _ in range(args.rounds):
            for side, results in runs.items():
                results.append(sides.run(side, *options))
                last = results[-1]
                print(
                    f"{side:<16}{last['seconds']:8.2f} s{last['cpu_seconds']:8.2f} s of processor",
                    flush=True,
                )
    ours, theirs = (
        {**results[0], **{key: min(r[key] for r in results) for key in ("seconds", "cpu_seconds")}}
        for results in runs.values()
    )
    report = {
        "prompts": source,
        "shape": [len(work["prompts"]), args.group_size, args.response_tokens],
        "prompt_tokens": [len(prompt) for prompt in work["prompts"]],
        "groups_per_micro_batch": args.groups,
        "ratio": theirs["seconds"] / ours["seconds"],
        "cpu_ratio": theirs["cpu_seconds"] / ours["cpu_seconds"],
        "activation_peak_ratio": theirs["activation_peak_bytes"] / ours["activation_peak_bytes"],
        "fp32_difference": difference,
        "banyan": ours,
        "prefix_grouper": theirs,
    }
    print(*(f"{key} {report[key]:.2f}" for key in report if key.endswith("ratio")), sep="  ")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
