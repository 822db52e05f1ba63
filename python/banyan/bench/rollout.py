"""`banyan bench rollout`: generation by the engine, the machine's limit, and the same work by others.

banyan runs in a child, every preset after the other; then each peer does, in the environment of its
own that `make peers` made. Every side is warmed up first and the median of its runs counts. A ratio
is banyan's tokens per second over the other's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from banyan.bench import peers
from banyan.bench.work import ROLLOUT_PRESETS, find_preset, prompts_of
from banyan.data.chat import Chat

PEERS = ["vllm", "transformers"]
OPTIONAL_PEERS = ["llama_cpp"]  # measured where `make peers-llama` has built it
LIMIT_PRESET = "8x8"  # whose share of the machine's limit and transformers' ratio are reported
GROUPED = {"trunk_tokens": 2048, "n": 32, "new_tokens": 64}


def run(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Measures, prints, and returns the figures. Raises UserError for a missing peer."""
    names = PEERS + [name for name in OPTIONAL_PEERS if peers.is_there(name)] if args.peers else []
    peers.check(names)
    work, source = make_work(args.preset or list(ROLLOUT_PRESETS), model)
    ours = run_banyan(args, model, work, folder)
    print_banyan(ours)
    work_file = folder / "rollouts.json"
    work_file.write_text(json.dumps({"rollouts": work}), encoding="utf-8")
    others = {}
    for name in names:
        print(f"timing {name} ...", flush=True)
        others[name] = peers.measure(name, model, work_file, folder, args.repeats)
        print_peer(name, others[name], ours)
    result = {"prompts": source, **ours, **ratios(ours, others), "peers": others}
    for key in result:
        if "ratio" in key or key.startswith("limit_fraction"):
            print(f"  {key:<32}{result[key]:8.2f}")
    return result


def make_work(names: list[str], model: Path) -> tuple[dict[str, Any], str]:
    """Prompts and sizes of each preset, as banyan's child and the peers read them."""
    chat, work, source = Chat(model), {}, ""
    for name in names:
        preset = find_preset(name)
        prompts, source = prompts_of(preset, chat)
        work[name] = {
            "prompts": prompts,
            "group_size": preset.group_size,
            "response_length": preset.response_length,
        }
    if source == "generated":
        print("GSM8K is not on this machine (BANYAN_TEST_DATA): prompts are generated", flush=True)
    return work, source


def run_banyan(
    args: argparse.Namespace, model: Path, work: dict[str, Any], folder: Path
) -> dict[str, Any]:
    print("timing banyan ...", flush=True)
    result_file = folder / "banyan.json"
    tiny = all(name.startswith("tiny") for name in work)
    spec = {
        "what": "rollout",
        "model": str(model),
        "presets": work,
        "kernels": args.kernels,
        "repeats": args.repeats,
        "grouped": {
            **({"trunk_tokens": 200, "n": 4, "new_tokens": 4} if tiny else GROUPED),
            "repeats": args.repeats,
        },
        "result_file": str(result_file),
    }
    spec_file = folder / "spec.json"
    spec_file.write_text(json.dumps(spec), encoding="utf-8")
    command = [sys.executable, "-m", "banyan.bench.child", str(spec_file)]
    peers.run(command, folder / "banyan.log", keep_path=True)
    return json.loads(result_file.read_text(encoding="utf-8"))


def ratios(ours: dict[str, Any], others: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Every ratio of what was measured, and the share of the machine's limit."""
    found: dict[str, float] = {"grouped_ratio": ours["grouped"]["ratio"]}
    if LIMIT_PRESET in ours["presets"]:
        limits = ours["presets"][LIMIT_PRESET]
        found |= {key: limits[key] for key in ("limit_fraction", "limit_fraction_with_prompts")}
    for name, peer in others.items():
        for preset, theirs in peer["rollouts"].items():
            ratio = ours["presets"][preset]["tokens_per_s"] / theirs["tokens_per_s"]
            if name != "transformers":
                found[f"{name}_ratio_{preset}"] = ratio
            elif preset == LIMIT_PRESET:
                found["generate_ratio_transformers"] = ratio
    return found


def print_banyan(ours: dict[str, Any]) -> None:
    rates = ours["rates"]
    print(
        f"machine: {rates['flops_per_s'] / 1e9:.0f} GFLOP/s at {rates['rows']} rows, "
        f"{rates['bytes_per_s'] / 1e9:.1f} GB/s over {rates['weight_bytes'] / 1e6:.0f} MB of packed "
        f"weights, {ours['threads']} threads"
    )
    for name, found in ours["presets"].items():
        print(
            f"  {name:<6}{found['tokens_per_s']:9.1f} tokens/s  B={found['B']} p={found['p']:.0f} "
            f"r={found['r']} n={found['n']}  {found['GB_per_s']:.1f} GB/s  "
            f"{found['GFLOP_per_s']:.0f} GFLOP/s  {found['limit_fraction']:.2f} of the limit"
        )
    grouped = ours["grouped"]
    print(
        f"  trunk of {grouped['trunk_tokens']} tokens, n={grouped['n']}: decode "
        f"{grouped['on']['decode_seconds']:.2f} s, without grouped attention "
        f"{grouped['off']['decode_seconds']:.2f} s",
        flush=True,
    )


def print_peer(name: str, peer: dict[str, Any], ours: dict[str, Any]) -> None:
    for preset, theirs in peer["rollouts"].items():
        ratio = ours["presets"][preset]["tokens_per_s"] / theirs["tokens_per_s"]
        print(
            f"  {name:<14}{preset:<6}{theirs['tokens_per_s']:9.1f} tokens/s   banyan is "
            f"{ratio:.2f} times as fast"
        )
