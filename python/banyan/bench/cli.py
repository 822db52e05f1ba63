"""`banyan bench step`: banyan with sharing on, with sharing off, then the peers, in turn.
`banyan bench rollout`: generation, the machine's limit and the peers (banyan.bench.rollout).
`banyan bench trie`: what sharing is worth to a forward and backward pass (banyan.bench.trie).

Each side runs in a process of its own and nothing runs beside it. Ratios are times of the other
over times of banyan: above 1 means banyan is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from banyan import version
from banyan.bench import bars, peers, profile, rollout, scale, trie
from banyan.bench.work import PRESETS, ROLLOUT_PRESETS, Preset, find_preset, prompts_of
from banyan.errors import UserError

_DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_STEP_PEERS = ["transformers_update", "transformers_generate", "trl_step"]  # of the preset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("step", "rollout", "trie"),
        help="a training step, generation, or a pass with sharing on and off",
    )
    parser.add_argument(
        "--preset",
        nargs="+",
        metavar="NAME",
        help=f"step: one of {', '.join(PRESETS)}; rollout: any of them (default: "
        f"{' '.join(ROLLOUT_PRESETS)}); trie: shapes such as P512R512n8, turns10n8, tree-b2d6 "
        "(default: the listed ones of the guide)",
    )
    parser.add_argument("--model", type=Path, help="model directory (default: the cached one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="time the peers too: step: transformers and TRL; rollout: vLLM, transformers, "
        "llama.cpp where it is built (`make peers` first)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="step: one more step with sharing on, timed op by op against the machine's limits",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="step: with --profile, its trace, for chrome://tracing or Perfetto",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs (default: %(default)s)")
    parser.add_argument(
        "--max-tokens-per-block", type=int, default=8192, help="trie: default: %(default)s"
    )
    parser.add_argument(
        "--longest-path",
        action="store_true",
        help="trie: sharing on under a budget of the longest path",
    )
    parser.add_argument("--seed", type=int, default=1, help="trie: of the random tokens")
    parser.add_argument(
        "--kernels", default="native", choices=("native", "aten"), help="default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints, writes. Raises UserError for a missing model, core or peer."""
    from banyan import extension
    from banyan.data.chat import Chat

    model = find_model(args.model)
    if args.trace and not args.profile:
        raise UserError("--trace: wanted --profile too")
    if args.profile and args.what != "step":
        raise UserError(f"--profile: wanted `banyan bench step`, got {args.what}")
    if args.what == "trie":
        result = {**describe(args, model), **trie.run(args, model, extension.load())}
        write(args, result)
        return 0
    if args.repeats < 1:
        raise UserError(f"--repeats: wanted at least 1, got {args.repeats}")
    if args.what == "rollout":
        extension.load()  # says here, not in a child, that it is not built
        with tempfile.TemporaryDirectory(prefix="banyan-bench-") as folder:
            result = {**describe(args, model), **rollout.run(args, model, Path(folder))}
        write(args, result)
        return 0
    args.preset = (args.preset or list(PRESETS))[0]
    preset = find_preset(args.preset)
    names = _STEP_PEERS if args.peers else []
    if names:
        peers.check(names)
    extension.load()
    prompts, source = prompts_of(preset, Chat(model))
    if source == "generated":
        print("GSM8K is not on this machine (BANYAN_TEST_DATA): prompts are generated", flush=True)
    with tempfile.TemporaryDirectory(prefix="banyan-bench-") as folder:
        bench = Bench(args, preset, model, prompts, Path(folder))
        described = {**describe(args, model), "preset": args.preset, "prompts": source}
        result = {**described, **bench.measure(names)}
    print_result(result)
    if "profile" in result:
        profile.print_profile(result["profile"])
    write(args, result)
    return 0


def write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def find_model(given: Path | None) -> Path:
    """--model, else a converted SmolLM2 in ./.cache/models or banyan's cache. Raises UserError."""
    from banyan.convert import cache_dir
    from banyan.trainer.inputs import check_model

    if given is None:
        known = [Path(".cache"), cache_dir()]
        places = [folder / "models" / _DEFAULT_MODEL for folder in known]
        given = next((place for place in places if place.is_dir()), None)
        if given is None:
            raise UserError("--model: wanted a model directory; run `banyan convert`, or name one")
    check_model(given, "--model")
    return given.resolve()


class Bench:
    """One call of the command: children one after another, and their ratios."""

    def __init__(
        self,
        args: argparse.Namespace,
        preset: Preset,
        model: Path,
        prompts: list[list[int]],
        folder: Path,
    ) -> None:
        self._model = model
        self._folder = folder
        self._spec: dict[str, Any] = {
            "model": str(model),
            "prompts": prompts,
            "group_size": preset.group_size,
            "response_length": preset.response_length,
            "micro_batch": preset.micro_batch,
            "kernels": args.kernels,
            "repeats": args.repeats,
            "profile": args.profile,
            "trace": str(args.trace.resolve()) if args.trace else None,
        }

    def measure(self, names: list[str]) -> dict[str, Any]:
        work_file = self._folder / "work.json"
        on = self._step("on", work_file)
        # A profile alone is a look at one side.
        off = self._step("off", None) if names or not self._spec["profile"] else None
        others = {}
        for name in names:
            print(f"timing {name} ...", flush=True)
            others[name] = peers.measure(name, self._model, work_file, self._folder)
        seconds = on["stages"]["step"]
        against_off = (
            {
                "stages_share_off": off["stages"],
                "share_on_ratio": off["stages"]["step"] / seconds,
            }
            if off
            else {}
        )
        result = {
            **on,
            "seconds": seconds,
            "logical_tokens_per_s": on["logical_tokens"] / seconds,
            "unique_tokens_per_s": on["unique_tokens"] / seconds,
            **against_off,
            **ratios(on, others),
            "peers": others,
        }
        if names:
            result |= self._scale(on["stages"]["update_actor"] / on["unique_tokens"])
        return {**result, "bars": bars.held(result)}

    def _scale(self, update_seconds_per_token: float) -> dict[str, Any]:
        sequences = self._folder / "sequences.json"
        sharing = self._child(
            "sharing", {"preset": scale.PRESET, "work_file": str(sequences)}, scale.PRESET
        )
        print("timing transformers_sequence ...", flush=True)
        peer = peers.measure("transformers_sequence", self._model, sequences, self._folder)
        growth = self._child(
            "growth", {"presets": scale.TOKENS, "million": scale.MILLION}, "growth with the tokens"
        )
        return {
            **scale.figures(sharing, peer["seconds"], growth, update_seconds_per_token),
            "sharing": sharing,
            "growth": growth,
            "transformers_sequence": peer,
        }

    def _step(self, share: str, work_file: Path | None) -> dict[str, Any]:
        spec = {
            "share": share,
            "with_mfu": share == "on",
            "profile": self._spec["profile"] and share == "on",
            "work_file": str(work_file) if work_file else None,
        }
        return self._child("step", spec, f"sharing {share}")

    def _child(self, what: str, spec: dict[str, Any], words: str) -> dict[str, Any]:
        """Runs banyan.bench.child over the common specification and `spec`."""
        print(f"timing banyan, {words} ...", flush=True)
        name = words.replace(" ", "_")
        result_file = self._folder / f"banyan_{name}.json"
        spec_file = self._folder / f"spec_{name}.json"
        spec = {**self._spec, "what": what, **spec, "result_file": str(result_file)}
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "banyan.bench.child", str(spec_file)]
        peers.run(command, self._folder / f"banyan_{name}.log", keep_path=True)
        return json.loads(result_file.read_text(encoding="utf-8"))


def ratios(on: dict[str, Any], others: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Times of the peers over times of banyan, and the peers' memory; only what was measured."""
    found: dict[str, Any] = {}
    if "trl_step" in others:
        found["step_ratio_trl"] = others["trl_step"]["seconds"] / on["stages"]["step"]
    if "transformers_update" in others:
        update = others["transformers_update"]
        found["update_ratio_transformers"] = update["seconds"] / on["stages"]["update_actor"]
        found["peak_bytes_transformers"] = update["peak_bytes"]
        found["activation_peak_bytes_transformers"] = update["activation_peak_bytes"]
        found["activation_peak_ratio_transformers"] = (
            on["activation_peak_bytes"] / update["activation_peak_bytes"]
        )
    if "transformers_generate" in others:
        generate = others["transformers_generate"]
        found["generate_ratio_transformers"] = generate["seconds"] / on["stages"]["gen"]
    return found


def describe(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """What was measured, and where."""
    return {
        "bench": args.what,
        "model": model.name,
        "banyan": version(),
        "kernels": args.kernels,
        "weights": "fp32 masters, bf16 compute" if args.what == "step" else "bf16",
        "machine": {"processor": processor(), "cores": os.cpu_count(), "os": platform.release()},
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def print_result(result: dict[str, Any]) -> None:
    """The figures as a person reads them."""
    print(
        f"\n{result['bench']} {result['preset']} ({result['prompts']} prompts), {result['model']}"
    )
    for name, seconds in result["stages"].items():
        off = result.get("stages_share_off", {}).get(name)
        if seconds > 0 or off:
            beside = f"    sharing off {off:9.2f} s" if off is not None else ""
            print(f"  {name:<16}{seconds:9.2f} s{beside}")
    rates = result["logical_tokens_per_s"], result["unique_tokens_per_s"]
    print(f"  tokens/s        {rates[0]:9.0f} logical, {rates[1]:.0f} unique")
    print(f"  peak memory     {_gib(result['peak_bytes'])}")
    for name in ("activation_peak_bytes", "activation_peak_bytes_transformers"):
        if name in result:
            print(f"  {name:<36}{_gib(result[name])}")
    if "mfu" in result:
        rate = result["matrix_flops_per_s"] / 1e12
        print(
            f"  mfu             {result['mfu']:9.3f}     of {rate:.2f} TFLOP/s by {result['threads']} threads"
        )
    for name, peer in result["peers"].items():
        precision = f"{peer['weights']} weights, {peer.get('compute', peer['weights'])} compute"
        print(f"  {name:<24}{peer['seconds']:8.2f} s   {precision}")
    for name in result:
        if "_ratio" in name and name not in result["bars"]:
            print(f"  {name:<28}{result[name]:8.2f}")
    bars.print_bars(result["bars"])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:9.2f} GiB"
