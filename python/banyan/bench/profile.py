"""`banyan bench step --profile`: a step op by op, against what the machine can do.

The core times ops and counts their work (src/banyan/core/profile.h). The limit of an op is the least
time that its work could take: the larger of FLOPs over the matrix rate and bytes over the memory
rate, both measured in the same run. FLOPs done again (the logits in the head's backward, the scores
in attention's) count towards the limit and stand in a column of their own. Seconds are of the op
itself, without the ops inside it. An op whose operands stay in the cache can pass the memory limit.
"""

from __future__ import annotations

from typing import Any

UPDATE_PHASES = ("forward", "loss", "backward", "recompute", "optimizer")


def with_limits(
    rows: list[dict[str, Any]], flops_per_s: float, bytes_per_s: float
) -> list[dict[str, Any]]:
    """Adds to each row: GFLOP_per_s, GB_per_s, limit_seconds and limit_share (None without work)."""
    out = []
    for row in rows:
        flops, seconds = row["flops"] + row["repeated_flops"], max(row["seconds"], 1e-12)
        limit = max(flops / flops_per_s, row["bytes"] / bytes_per_s)
        out.append(
            {
                **row,
                "GFLOP_per_s": flops / seconds / 1e9,
                "GB_per_s": row["bytes"] / seconds / 1e9,
                "limit_seconds": limit,
                "limit_share": limit / seconds if limit > 0 else None,
            }
        )
    return out


def update_flops(rows: list[dict[str, Any]]) -> int:
    """FLOPs of forward and backward that the result needs; recomputed ones excluded."""
    return sum(row["flops"] for row in rows if row["phase"] in ("forward", "backward"))


def print_profile(profile: dict[str, Any]) -> None:
    rows = profile["rows"]
    print(
        f"\none profiled step: {profile['seconds']:.2f} s (others: {profile['timed_seconds']:.2f} s); "
        f"limits: {profile['flops_per_s'] / 1e12:.2f} TFLOP/s, {profile['bytes_per_s'] / 1e9:.1f} GB/s\n"
    )
    print(
        f"  {'phase':<10}{'op':<30}{'calls':>7}{'s':>9}{'% step':>8}{'GFLOP':>9}{'again':>8}"
        f"{'GB':>8}{'GFLOP/s':>9}{'GB/s':>7}{'limit s':>9}{'share':>7}"
    )
    for phase in dict.fromkeys(row["phase"] for row in rows):
        of_phase = [row for row in rows if row["phase"] == phase]
        for row in of_phase:
            print(_line(phase, row, profile["seconds"]))
        total = {
            key: sum(row[key] for row in of_phase)
            for key in ("calls", "seconds", "flops", "repeated_flops", "bytes", "limit_seconds")
        }
        print(_line(phase, {"op": "= all", **total}, profile["seconds"]))
    print("\n  furthest above the limit (seconds that a perfect op would save):")
    by_gap = sorted(rows, key=lambda row: row["limit_seconds"] - row["seconds"])
    for row in by_gap[:12]:
        print(
            f"    {row['seconds'] - row['limit_seconds']:7.2f} s  {row['phase']:<10}{row['op']:<28}"
            f"  {_share(row)}"
        )
    print(
        f"\n  FLOPs of the update: {profile['update_flops']:.6e}; "
        f"by the closed form: {profile['closed_form_flops']:.6e}"
    )


def _line(phase: str, row: dict[str, Any], step_seconds: float) -> str:
    seconds = max(row["seconds"], 1e-12)
    flops = row["flops"] + row["repeated_flops"]
    return (
        f"  {phase:<10}{row['op']:<30}{row['calls']:>7}{row['seconds']:>9.3f}"
        f"{100 * row['seconds'] / step_seconds:>8.1f}{row['flops'] / 1e9:>9.0f}"
        f"{row['repeated_flops'] / 1e9:>8.0f}{row['bytes'] / 1e9:>8.2f}"
        f"{flops / seconds / 1e9:>9.0f}{row['bytes'] / seconds / 1e9:>7.1f}"
        f"{row['limit_seconds']:>9.3f}{_share(row):>7}"
    )


def _share(row: dict[str, Any]) -> str:
    return (
        f"{row['limit_seconds'] / max(row['seconds'], 1e-12):.2f}" if row["limit_seconds"] else "-"
    )
