"""Runs the training kernels' benchmark and writes benchmarks/results/kernels.md from its JSON.

    python benchmarks/kernel_report.py build/release/benchmarks/kernels/training_bench
    python benchmarks/kernel_report.py --smoke BINARY    # every benchmark once; writes nothing

The page has a section per kernel: what it computes, then time, rates and share of the limit for each
shape, and above them what they were measured on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "kernels.md"

# Kernel -> (what it is, its benchmarks and the words around their arguments).
SECTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "Attention over a trie": (
        "Queries attend the ranges of their ancestors in place: online softmax over tiles of the path, keys and values "
        "neither masked nor copied. Backward computes the scores again and adds dK and dV of shared tokens in fp32 in "
        "a fixed order. The shapes are presets of `banyan bench trie`. Reference: `ops/attention_reference`.",
        {"attention_forward": "{}", "attention_backward": "{}"},
    ),
    "Edge log-probabilities": (
        "The vocabulary head, softmax and entropy, tiled over rows and vocabulary; no logits are kept, so backward "
        "multiplies with the head once more. Reference: `ops/detail/edge_logprob_aten`.",
        {"edge_logprob_forward": "{} rows", "edge_logprob_backward": "{} rows"},
    ),
    "Linear": (
        "Products with packed bf16 weights: forward, gradient of the input (dgrad), gradient of the weight (wgrad, "
        "added to an fp32 buffer). Reference: `at::linear` and `at::mm`.",
        {
            "linear_forward": "{0} rows, {2} to {1}",
            "linear_dgrad": "{0} rows, {2} to {1}",
            "linear_wgrad": "{0} rows, {2} to {1}",
        },
    ),
    "RMSNorm": (
        "Rows of 576. Reference: plain LibTorch operators in `ops/rms_norm.cpp`.",
        {"rms_norm_forward": "{} rows", "rms_norm_backward": "{} rows"},
    ),
    "RoPE": (
        "9 heads of 64; backward is the same kernel with the angle negated.",
        {"rope": "{} rows"},
    ),
    "SwiGLU": (
        "Rows of 2 x 1,536 to 1,536.",
        {"swiglu_forward": "{} rows", "swiglu_backward": "{} rows"},
    ),
    "Embedding": (
        "Rows out of the packed weight, and their gradient: each thread owns columns and walks the tokens in order.",
        {"embedding_forward": "{} rows", "embedding_backward": "{} rows"},
    ),
    "Optimizer": (
        "AdamW and the gradient norm over 33.6 million weights (fp32 master, gradient and two moments), and packing "
        "49,152 x 576 masters into both bf16 forms.",
        {"adamw": "33.6 M weights", "gradient_norm": "33.6 M weights", "repack": "49152 x 576"},
    ),
    "Profile": (
        "A scope while no profile is taken: what an op pays for being measurable.",
        {"profile_scope_off": ""},
    ),
}
_TO_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def measure(binary: Path, repetitions: int, smoke: bool) -> dict[str, Any]:
    """google-benchmark's JSON of a run of `binary`."""
    with tempfile.TemporaryDirectory(prefix="banyan-bench-") as folder:
        file = Path(folder) / "result.json"
        arguments = (
            ["--benchmark_min_time=0"]
            if smoke
            else ["--benchmark_min_time=0.05", f"--benchmark_repetitions={repetitions}"]
        )
        # As python/banyan/__init__.py: threads that spin for long slow each other down.
        env = {"GOMP_SPINCOUNT": "1000", **os.environ}
        command = [str(binary), *arguments, f"--benchmark_out={file}"]
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text(encoding="utf-8"))


def medians(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Benchmark -> its shapes in order: {arguments, us, spread, and its counters}."""
    found: dict[str, list[dict[str, Any]]] = {}
    spread = {
        entry["run_name"]: entry["real_time"]
        for entry in result["benchmarks"]
        if entry.get("aggregate_name") == "cv"
    }
    for entry in result["benchmarks"]:
        if entry.get("aggregate_name", "median") != "median" or (
            entry["run_type"] == "iteration" and entry.get("repetitions", 1) > 1
        ):
            continue
        name, *arguments = entry["run_name"].removesuffix("/real_time").split("/")
        found.setdefault(name, []).append(
            {
                "arguments": arguments,
                "us": entry["real_time"] * _TO_MICROSECONDS[entry["time_unit"]],
                "spread": spread.get(entry["run_name"], 0.0),
                "counters": {k: entry[k] for k in ("GFLOP/s", "GB/s", "limit_share") if k in entry},
            }
        )
    return found


def page(result: dict[str, Any], repetitions: int) -> str:
    measured = medians(result)
    lines = [
        "# Kernels of the training step",
        "",
        "Written by `make bench-kernels`. Shapes are SmolLM2-135M's (width 576, 9 query and 3 key heads of 64, "
        "intermediate width 1,536, 49,152 tokens), in bf16.",
        "",
        f"Measured on {facts(result)}. Medians of {repetitions} runs; spread is the coefficient of variation. "
        "share is the least time that the work could take over the time it took: FLOPs (recomputed ones counted) over "
        "the rate of the best of 20 bf16 `at::mm` of [2048, 1536] x [1536, 1536], or bytes (each operand and result "
        "once) over the best rate of reading or copying memory, whichever is longer; both measured in the same "
        "process. Operands that stay in the cache can pass the memory's rate.",
    ]
    for title, (text, kernels) in SECTIONS.items():
        lines += ["", f"## {title}", "", text, ""]
        lines += [
            "| kernel | shape | time | spread | GFLOP/s | GB/s | share |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        for name, words in kernels.items():
            lines += [row(name, words, shape) for shape in measured.pop(name)]
    if measured:
        raise ValueError(f"benchmarks without a section: {', '.join(measured)}")
    return "\n".join(lines) + "\n"


def row(name: str, words: str, shape: dict[str, Any]) -> str:
    counters = shape["counters"]
    microseconds = shape["us"]
    time = (
        f"{microseconds / 1e3:,.2f} ms"
        if microseconds >= 1e3
        else f"{microseconds:,.1f} µs"
        if microseconds >= 0.1
        else f"{microseconds * 1e3:.2f} ns"
    )
    flops = counters.get("GFLOP/s", 0.0)
    cells = [
        name.replace("_", " "),
        words.format(*shape["arguments"]),
        time,
        f"{100 * shape['spread']:.0f} %",
        f"{flops:,.0f}" if flops else "",
        f"{counters['GB/s']:,.1f}" if "GB/s" in counters else "",
        f"**{counters['limit_share']:.2f}**" if "limit_share" in counters else "",
    ]
    return "| " + " | ".join(cells) + " |"


def facts(result: dict[str, Any]) -> str:
    """Processor, cores, torch, commit and date of the run."""
    import torch
    from banyan.bench.cli import processor

    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "no repository"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"{processor()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, "
        f"commit {commit}, {date}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--smoke", action="store_true", help="run each once, write nothing")
    parser.add_argument("--repetitions", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    args = parser.parse_args()
    result = measure(args.binary, args.repetitions, args.smoke)
    text = page(result, args.repetitions)
    if not args.smoke:
        args.page.parent.mkdir(parents=True, exist_ok=True)
        args.page.write_text(text, encoding="utf-8")
        print(args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
