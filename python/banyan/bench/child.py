"""banyan's side of a benchmark, in a process of its own: `python -m banyan.bench.child SPEC.json`.

A process of its own, so that its peak memory is its own. SPEC holds model, preset shape, prompts,
share, kernels, repeats and the paths of two files to write: the result, and the work for the peers.
The first step warms up and is not counted; the median of the others counts.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from banyan.bench import profile, scale
from banyan.bench.flops import trie_size, update_flops
from banyan.bench.host import BenchHost, FinishedError, status_bytes


def config_json(spec: dict[str, Any], num_steps: int, folder: str) -> str:
    """The resolved configuration of the measured run, as the core takes it."""
    from banyan.config.resolve import resolve
    from banyan.data.chat import Chat

    prompts = spec["prompts"]
    config = resolve(
        [
            f"actor_rollout_ref.model.path={spec['model']}",
            "data.train_files=in_memory.jsonl",
            f"data.train_batch_size={len(prompts)}",
            f"data.max_prompt_length={max(map(len, prompts))}",
            f"data.max_response_length={spec['response_length']}",
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.sharing.mode={spec['share']}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={len(prompts)}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={spec['micro_batch']}",
            "actor_rollout_ref.actor.ppo_epochs=1",
            "actor_rollout_ref.actor.use_kl_loss=false",
            f"actor_rollout_ref.rollout.n={spec['group_size']}",
            "actor_rollout_ref.rollout.ignore_eos=true",
            "actor_rollout_ref.rollout.dtype=bfloat16",
            f"banyan.kernels={spec['kernels']}",
            f"trainer.total_training_steps={num_steps + 1}",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            f"trainer.default_local_dir={folder}",
        ]
    )
    tree = json.loads(json.dumps(config.tree))
    tree["_shell"] = {
        "num_train_rows": len(prompts),
        "stop_ids": Chat(Path(spec["model"])).stop_ids(),
        "model_dir": str(spec["model"]),
    }
    return json.dumps(tree)


def run_step(spec: dict[str, Any], core: Any) -> dict[str, Any]:
    """Whole training steps: stages, tokens, memory, and the trajectories as work for the peers."""
    timed_steps = 1 + spec["repeats"]
    num_steps = timed_steps + (1 if spec["profile"] else 0)
    rows: list[dict[str, Any]] = []

    def on_step(done: int) -> None:
        if spec["profile"] and done == timed_steps:
            core.profile_start()
        if spec["profile"] and done == num_steps:
            rows.extend(core.profile_stop(spec["trace"]))

    host = BenchHost(spec["prompts"], num_steps, on_step)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FinishedError):
        core.train(config_json(spec, num_steps, folder), host)
    timed = sorted(host.metrics[1:timed_steps], key=lambda metrics: metrics["timing_s/step"])
    median = timed[len(timed) // 2]
    stages = {
        k.removeprefix("timing_s/"): v for k, v in median.items() if k.startswith("timing_s/")
    }
    check_lengths(host.trajectories, spec)
    result = {
        "stages": stages,
        "all_step_seconds": [metrics["timing_s/step"] for metrics in host.metrics],
        "logical_tokens": median["perf/total_num_tokens"],
        "unique_tokens": median["trie/unique_tokens"],
        "computed_tokens": median["trie/computed_tokens"],
        "threads": core.capabilities()["num_threads"],
        "peak_bytes": host.peak_bytes,
        "activation_peak_bytes": max(
            m["perf/update_peak_bytes"] - m["perf/state_bytes"] for m in host.metrics[1:]
        ),
    }
    if spec["profile"]:
        result["profile"] = profile_of(rows, host, median["timing_s/step"], spec, core)
    if spec["with_mfu"]:
        result |= mfu(
            host.trajectories, stages["update_actor"], Path(spec["model"]), core.bench_matrix_rate()
        )
    if spec["work_file"]:
        write_work(Path(spec["work_file"]), spec["prompts"], host.trajectories)
    return result


def profile_of(
    rows: list[dict[str, Any]], host: BenchHost, timed: float, spec: dict[str, Any], core: Any
) -> dict[str, Any]:
    """The table of the profiled step, which is the last one, and the rates that it is held to."""
    memory = core.bench_memory()
    flops_per_s, bytes_per_s = core.bench_matrix_rate(), max(memory.values())
    size = trie_size([(t["prompt"], t["response"]) for t in host.trajectories])
    return {
        "seconds": host.metrics[-1]["timing_s/step"],
        "timed_seconds": timed,
        "flops_per_s": flops_per_s,
        "bytes_per_s": bytes_per_s,
        **memory,
        "update_flops": profile.update_flops(rows),
        "closed_form_flops": update_flops(size, Path(spec["model"])),
        "rows": profile.with_limits(rows, flops_per_s, bytes_per_s),
    }


def run_rollout(spec: dict[str, Any], core: Any) -> dict[str, Any]:
    """Generation alone, by the engine: every preset, the machine's rates, and grouped attention."""
    model = core.Model.load(spec["model"], dtype="bf16", device="cpu", kernels=spec["kernels"])
    rates = core.bench_rates(model)
    presets = {
        name: time_rollout(core, model, {**spec, **preset}, rates)
        for name, preset in spec["presets"].items()
    }
    return {
        "presets": presets,
        "rates": rates,
        "grouped": core.bench_grouped(model, spec["grouped"]),
        "threads": core.capabilities()["num_threads"],
        "peak_bytes": status_bytes("VmHWM"),
    }


def time_rollout(
    core: Any, model: Any, spec: dict[str, Any], rates: dict[str, Any]
) -> dict[str, Any]:
    """One preset: seconds and rates, and what the machine could do at best (rollout_limit.h)."""
    length, n = spec["response_length"], spec["group_size"]
    lengths = [len(prompt) for prompt in spec["prompts"]]
    engine = core.Engine(model, {"max_model_len": max(lengths) + length})
    params = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True}
    rows = [{"row": i, "tokens": p, "n": n} for i, p in enumerate(spec["prompts"])]
    seconds, stats = [], {}
    for step in range(1 + spec["repeats"]):
        found: list[dict[str, Any]] = []
        start = time.perf_counter()
        stats = engine.generate(rows, {**params, "step": step}, found.append)
        seconds.append(time.perf_counter() - start)
        check_lengths(found, spec)
    median = statistics.median(seconds[1:])
    sequences = len(lengths) * n
    cost = core.bench_limit(model, lengths, n, length, rates["flops_per_s"], rates["bytes_per_s"])
    return {
        "B": sequences,
        "p": sum(lengths) / len(lengths),
        "r": length,
        "n": n,
        "seconds": median,
        "all_seconds": seconds[1:],
        "tokens_per_s": sequences * length / median,
        "GB_per_s": cost["bytes"] / median / 1e9,
        "GFLOP_per_s": cost["flops"] / median / 1e9,
        "limit_tokens_per_s": sequences * length / cost["decode_seconds"],
        "limit_fraction": cost["decode_seconds"] / median,
        "limit_fraction_with_prompts": (cost["decode_seconds"] + cost["prompt_seconds"]) / median,
        "computed_prompt_tokens": stats["computed_prompt_tokens"],
        "passes": stats["num_passes"],
    }


def check_lengths(trajectories: list[dict[str, Any]], spec: dict[str, Any]) -> None:
    """Every response of every prompt, each of exactly the preset's length."""
    wanted = len(spec["prompts"]) * spec["group_size"]
    lengths = {len(t["response"]) for t in trajectories}
    if len(trajectories) != wanted or lengths != {spec["response_length"]}:
        raise ValueError(
            f"[bench] wanted {wanted} responses of {spec['response_length']} tokens, "
            f"got {len(trajectories)} of {sorted(lengths)}"
        )


def mfu(
    trajectories: list[dict[str, Any]], seconds: float, model: Path, rate: float
) -> dict[str, float]:
    """Share of `rate`, the machine's bf16 matrix rate in FLOP/s, that the update reaches."""
    size = trie_size([(t["prompt"], t["response"]) for t in trajectories])
    flops = update_flops(size, model)
    return {"mfu": flops / seconds / rate, "update_flops": flops, "matrix_flops_per_s": rate}


def write_work(path: Path, prompts: list[list[int]], trajectories: list[dict[str, Any]]) -> None:
    from banyan.bench.host import reward_of

    responses = [t["response"] for t in trajectories]
    work = {
        "prompts": prompts,
        "responses": responses,
        "rewards": [reward_of(tokens) for tokens in responses],
    }
    path.write_text(json.dumps(work), encoding="utf-8")


def main() -> None:
    from banyan import extension

    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    core = extension.load()
    runs = {
        "step": run_step,
        "rollout": run_rollout,
        "sharing": scale.run_sharing,
        "growth": scale.run_growth,
    }
    result = runs[spec["what"]](spec, core)
    Path(spec["result_file"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
