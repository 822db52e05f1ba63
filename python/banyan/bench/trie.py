"""`banyan bench trie`: a batch with sharing on and off, forward and backward; the core measures.

Each preset runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from banyan.errors import RunError


def run(args: argparse.Namespace, model: Path, core: Any) -> dict[str, Any]:
    """Figures of one preset, or of several by name."""
    names = args.preset or core.bench_presets()
    if len(names) == 1:
        return measure(args, model, core, names[0])
    return {name: in_process(args, model, name) for name in names}


def measure(args: argparse.Namespace, model: Path, core: Any, name: str) -> dict[str, Any]:
    """One preset, here; prints its figures."""
    options = {
        "preset": name,
        "repeats": args.repeats,
        "max_tokens_per_block": args.max_tokens_per_block,
        "longest_path": args.longest_path,
        "seed": args.seed,
    }
    loaded = core.Model.load(str(model), kernels=args.kernels, with_backward=True)
    result = core.bench_trie(loaded, options)
    low, high = result["ratio_spread"]
    print(
        f"{name}: {result['logical_tokens']} logical, {result['unique_tokens']} unique tokens\n"
        f"  ratio {result['ratio']:.3f} ({low:.3f} to {high:.3f}), ideal {result['ideal']:.3f}, "
        f"efficiency {result['efficiency']:.3f}; sharing.mode=auto means "
        f"{'on' if result['auto_shares'] else 'off'}"
    )
    for side in ("on", "off"):
        figures, peak = result[side], result[f"peak_bytes_{side}"] / 2**30
        print(
            f"  {side:<3} {figures['median']:8.3f} s x {len(figures['seconds'])}, "
            f"modelled {figures['modelled_seconds']:.3f} s, planning "
            f"{figures['plan_seconds'] * 1e3:.2f} ms; {figures['blocks']} blocks, "
            f"{figures['live_tokens']} live tokens, {peak:.2f} GiB",
            flush=True,
        )
    return {"preset": name, "seed": args.seed, **result}


def in_process(args: argparse.Namespace, model: Path, name: str) -> dict[str, Any]:
    """One preset in a child that prints its own figures. Raises RunError if the child fails."""
    with tempfile.TemporaryDirectory(prefix="banyan-bench-") as folder:
        file = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "banyan.cli.main", "bench", "trie", "--preset", name),
            *("--model", str(model), "--json", str(file), "--kernels", args.kernels),
            *("--repeats", str(args.repeats), "--seed", str(args.seed)),
            *("--max-tokens-per-block", str(args.max_tokens_per_block)),
            *(["--longest-path"] if args.longest_path else []),
        ]
        code = subprocess.run(command).returncode
        if code != 0:
            raise RunError(f"bench trie --preset {name} ended with {code}")
        return json.loads(file.read_text(encoding="utf-8"))
