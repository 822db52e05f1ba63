"""GET /metrics: Prometheus text under vLLM's names, and banyan's own.

Counters and gauges of the engine are read when the page is asked for. Times are measured here, between the arrival of
a request and the events of its responses; buckets are vLLM's. docs/guides/serving.md lists the names.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT: tuple[float, ...] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_LONG: tuple[float, ...] = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_TOKEN = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_COUNT = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_FEW = (1, 2, 5, 10, 20, 64, 128)
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (_SHORT, "from arrival to the first token"),
    "vllm:inter_token_latency_seconds": (_TOKEN, "between tokens of a response"),
    "vllm:request_time_per_output_token_seconds": (_TOKEN, "mean time per token after the first"),
    "vllm:e2e_request_latency_seconds": (_LONG, "from arrival to the last token"),
    "vllm:request_queue_time_seconds": (_LONG, "from arrival to the engine's first work on it"),
    "vllm:request_inference_time_seconds": (
        _LONG,
        "from the engine's first work to the last token",
    ),
    "vllm:request_prefill_time_seconds": (_LONG, "from the engine's first work to the first token"),
    "vllm:request_decode_time_seconds": (_LONG, "from the first token to the last"),
    "vllm:request_prompt_tokens": (_COUNT, "prompt tokens of a request"),
    "vllm:request_generation_tokens": (_COUNT, "tokens of a response"),
    "vllm:request_params_n": (_FEW, "parameter n"),
    "vllm:request_params_max_tokens": (_COUNT, "parameter max_tokens"),
    "banyan:kept_mass": (
        (0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0),
        "probability that truncation kept",
    ),
}
# counter of EngineStats -> (metric, help); the engine's other counters are shown under its own names
_COUNTERS = {
    "preemptions": ("vllm:num_preemptions", "sequences put back in the queue"),
    "prompt_tokens": ("vllm:prompt_tokens", "prompt tokens taken"),
    "prompt_tokens_cached": ("vllm:prompt_tokens_cached", "prompt tokens found in the cache"),
    "generation_tokens": ("vllm:generation_tokens", "tokens drawn"),
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "tokens looked up in the cache"),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "tokens found in the cache"),
    "spilled_pages": ("banyan:num_spilled_blocks", "pages moved to host memory"),
    "sibling_shared_tokens": ("banyan:sibling_shared_tokens", "prompt tokens that siblings shared"),
    "dropped_groups": ("banyan:groups_dropped", "groups that were dropped unfinished"),
}
# Told in other metrics: request_success, admission_rejections, iteration_tokens.
_TOLD = re.compile("finished_.*|admission_rejections|passes|pass_tokens")


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _Times:
    """When things happened to one engine request."""

    def __init__(self, request: dict[str, Any], now: float) -> None:
        self.arrived = now
        self.left = request["n"]
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.tokens: dict[int, int] = defaultdict(int)


class Metrics:
    """Figures of one served model."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._histograms = {name: _Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self._finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "repetition"), 0)
        self._rejected: dict[str, int] = {"queue_full": 0}
        self._times: dict[str, _Times] = {}

    @property
    def in_flight(self) -> int:
        return len(self._times)

    def on_submit(self, request: dict[str, Any]) -> None:
        self._times[request["id"]] = _Times(request, time.monotonic())
        self._add("vllm:request_prompt_tokens", len(request["prompt"]))
        self._add("vllm:request_params_n", request["n"])
        self._add("vllm:request_params_max_tokens", request["params"]["max_tokens"])

    def on_events(self, events: list[dict[str, Any]], now: float) -> None:
        """Takes what one drain of the engine brought."""
        for event in events:
            times = self._times.get(event["request"])
            if times is None:
                continue
            index, count = event["index"], len(event["tokens"])
            if count:
                self._tokens(times, index, count, now)
                for mass in event["log_kept_mass"]:
                    if mass < 0:
                        self._histograms["banyan:kept_mass"].add(2.718281828459045**mass)
            if event["finished"]:
                self._finish(times, event, now)
                if times.left == 0:
                    del self._times[event["request"]]

    def forget(self, id: str) -> None:
        """A request that its client left: what comes of it is not counted."""
        times = self._times.pop(id, None)
        if times:
            self._finished["abort"] += times.left

    def reject(self, reason: str) -> None:
        self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def text(self, stats: dict[str, Any]) -> str:
        """The page. `stats`: EngineStats."""
        lines: list[str] = []
        self._gauges(lines, stats)
        counters = stats.get("counters", {})
        for key, count in counters.items():
            if not _TOLD.fullmatch(key):
                name, help = _COUNTERS.get(key, (f"banyan:{key}", key.replace("_", " ")))
                self._sample(lines, name, "counter", help, [({}, count)])
        done = [({"finished_reason": reason}, count) for reason, count in self._finished.items()]
        self._sample(lines, "vllm:request_success", "counter", "responses that ended", done)
        refused = {**self._rejected, "engine": counters.get("admission_rejections", 0)}
        values = [({"reason": reason}, count) for reason, count in refused.items()]
        self._sample(
            lines, "vllm:admission_rejections", "counter", "requests refused with 503", values
        )
        passes = (counters.get("passes", 0), counters.get("pass_tokens", 0))
        self._head(lines, "vllm:iteration_tokens_total", "histogram", "tokens of a forward pass")
        self._bucket(lines, "vllm:iteration_tokens_total", {}, [("+Inf", passes[0])], *passes)
        for name, (_, help) in _HISTOGRAMS.items():
            self._histogram(lines, name, help)
        return "\n".join(lines) + "\n"

    def _tokens(self, times: _Times, index: int, count: int, now: float) -> None:
        if index not in times.first:
            times.first[index] = now
            self._add("vllm:time_to_first_token_seconds", now - times.arrived)
            count -= 1
            times.tokens[index] += 1
        elif count:
            step = (now - times.last[index]) / count
            for _ in range(count):
                self._add("vllm:inter_token_latency_seconds", step)
        times.tokens[index] += count
        times.last[index] = now

    def _finish(self, times: _Times, event: dict[str, Any], now: float) -> None:
        index = event["index"]
        times.left -= 1
        reason = event["finish"] or "abort"
        self._finished[reason] = self._finished.get(reason, 0) + 1
        tokens = times.tokens[index]
        first = times.first.get(index, now)
        queued = event["queue_seconds"]
        whole = now - times.arrived
        self._add("vllm:request_generation_tokens", tokens)
        self._add("vllm:e2e_request_latency_seconds", whole)
        self._add("vllm:request_queue_time_seconds", queued)
        self._add("vllm:request_inference_time_seconds", max(0.0, whole - queued))
        self._add("vllm:request_prefill_time_seconds", max(0.0, first - times.arrived - queued))
        self._add("vllm:request_decode_time_seconds", now - first)
        if tokens > 1:
            self._add("vllm:request_time_per_output_token_seconds", (now - first) / (tokens - 1))

    def _add(self, name: str, value: float) -> None:
        self._histograms[name].add(value)

    def _gauges(self, lines: list[str], stats: dict[str, Any]) -> None:
        used, pages = stats.get("used_pages", 0), stats.get("num_pages", 0)
        asleep = stats.get("state") == "asleep"
        waiting = stats.get("waiting", 0)
        rows: list[tuple[str, str, list[tuple[dict[str, str], float]]]] = [
            ("vllm:num_requests_running", "sequences running", [({}, stats.get("running", 0))]),
            ("vllm:num_requests_waiting", "sequences waiting", [({}, waiting)]),
            (
                "vllm:num_requests_waiting_by_reason",
                "sequences waiting",
                [({"reason": "capacity"}, waiting), ({"reason": "deferred"}, 0)],
            ),
            (
                "vllm:engine_sleep_state",
                "1 for the state that the engine is in",
                [
                    ({"sleep_state": "awake"}, int(not asleep)),
                    (
                        {"sleep_state": "weights_offloaded"},
                        int(asleep and not stats.get("weights_missing")),
                    ),
                    (
                        {"sleep_state": "discard_all"},
                        int(asleep and bool(stats.get("weights_missing"))),
                    ),
                ],
            ),
            (
                "vllm:kv_cache_usage_perc",
                "share of pages in use",
                [({}, used / pages if pages else 0)],
            ),
            (
                "vllm:cache_config_info",
                "the KV pool",
                [({"block_size": "64", "num_gpu_blocks": str(pages)}, 1)],
            ),
            ("banyan:weight_epoch", "switches of weights", [({}, stats.get("weight_epoch", 0))]),
            ("banyan:groups_running", "groups running", [({}, stats.get("groups_running", 0))]),
        ]
        for name, help, values in rows:
            self._sample(lines, name, "gauge", help, values)
        parts = [({"part": part}, value) for part, value in stats.get("seconds", {}).items()]
        self._sample(lines, "banyan:step_seconds", "counter", "seconds in parts of a pass", parts)

    def _sample(
        self,
        lines: list[str],
        name: str,
        kind: str,
        help: str,
        values: Sequence[tuple[dict[str, str], float]],
    ) -> None:
        suffix = "_total" if kind == "counter" else ""
        self._head(lines, name + suffix, kind, help)
        lines += [f"{name}{suffix}{self._label(own)} {value}" for own, value in values]

    def _histogram(self, lines: list[str], name: str, help: str) -> None:
        self._head(lines, name, "histogram", help)
        histogram = self._histograms[name]
        running, buckets = 0, []
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            running += count
            buckets.append((str(bound), running))
        self._bucket(lines, name, {}, buckets, running, histogram.total)

    def _bucket(
        self,
        lines: list[str],
        name: str,
        labels: dict[str, str],
        buckets: Sequence[tuple[str, float]],
        count: float,
        total: float,
    ) -> None:
        lines += [
            f"{name}_bucket{self._label({**labels, 'le': le})} {value}" for le, value in buckets
        ]
        lines += [
            f"{name}_count{self._label(labels)} {count}",
            f"{name}_sum{self._label(labels)} {total}",
        ]

    @staticmethod
    def _head(lines: list[str], name: str, kind: str, help: str) -> None:
        lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]

    def _label(self, own: dict[str, str]) -> str:
        pairs = {**self._labels, **own}
        shown = ",".join(f'{key}="{_escaped(value)}"' for key, value in pairs.items())
        return "{" + shown + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
