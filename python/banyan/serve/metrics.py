"""GET /metrics: Prometheus text under vLLM's names, and banyan's own.

Counters and gauges of the engine are read when the page is asked for. Times are measured here, between the arrival of
a request and the events of its responses; buckets are vLLM's. docs/guides/serving.md lists the names.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
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
_TOKEN: tuple[float, ...] = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
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


_Sample = tuple[str, dict[str, str], float]  # end of the name, labels, value
_Family = tuple[str, str, str, list[_Sample]]  # name, type, help


def _one(value: float) -> list[_Sample]:
    return [("", {}, value)]


def _by(label: str, values: Mapping[str, float]) -> list[_Sample]:
    return [("", {label: key}, +value) for key, value in values.items()]


def _histogram_samples(buckets: Sequence[tuple[str, float]], total: float) -> list[_Sample]:
    """`buckets`: upper ends, the last of them infinite, and how many values are below."""
    rows: list[_Sample] = [("_bucket", {"le": le}, count) for le, count in buckets]
    return [*rows, ("_count", {}, buckets[-1][1]), ("_sum", {}, total)]


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
        for name, kind, help, samples in [
            *self._gauges(stats),
            *self._counters(stats),
            *(self._histogram(name, help) for name, (_, help) in _HISTOGRAMS.items()),
        ]:
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{end}{self._label(own)} {value}" for end, own, value in samples]
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

    def _gauges(self, stats: dict[str, Any]) -> list[_Family]:
        used, pages = stats.get("used_pages", 0), stats.get("num_pages", 0)
        asleep, missing = stats.get("state") == "asleep", bool(stats.get("weights_missing"))
        waiting = stats.get("waiting", 0)
        states = {
            "awake": not asleep,
            "weights_offloaded": asleep and not missing,
            "discard_all": asleep and missing,
        }
        reasons = {"capacity": waiting, "deferred": 0}
        cache = {"block_size": "64", "num_gpu_blocks": str(pages)}
        rows: list[tuple[str, str, list[_Sample]]] = [
            ("vllm:num_requests_running", "sequences running", _one(stats.get("running", 0))),
            ("vllm:num_requests_waiting", "sequences waiting", _one(waiting)),
            ("vllm:num_requests_waiting_by_reason", "sequences waiting", _by("reason", reasons)),
            (
                "vllm:engine_sleep_state",
                "1 for the state that the engine is in",
                _by("sleep_state", states),
            ),
            ("vllm:kv_cache_usage_perc", "share of pages in use", _one(used / (pages or 1))),
            ("vllm:cache_config_info", "the KV pool", [("", cache, 1)]),
            ("banyan:weight_epoch", "switches of weights", _one(stats.get("weight_epoch", 0))),
            ("banyan:groups_running", "groups running", _one(stats.get("groups_running", 0))),
        ]
        return [(name, "gauge", help, samples) for name, help, samples in rows]

    def _counters(self, stats: dict[str, Any]) -> list[_Family]:
        counts = stats.get("counters", {})
        rows: list[tuple[str, str, list[_Sample]]] = [
            (
                "banyan:step_seconds",
                "seconds in parts of a pass",
                _by("part", stats.get("seconds", {})),
            ),
            (
                "vllm:request_success",
                "responses that ended",
                _by("finished_reason", self._finished),
            ),
            (
                "vllm:admission_rejections",
                "requests refused with 503",
                _by("reason", {**self._rejected, "engine": counts.get("admission_rejections", 0)}),
            ),
        ]
        for key, count in counts.items():
            if not _TOLD.fullmatch(key):
                rows.append(
                    (*_COUNTERS.get(key, (f"banyan:{key}", key.replace("_", " "))), _one(count))
                )
        passes = _histogram_samples(
            [("+Inf", counts.get("passes", 0))], counts.get("pass_tokens", 0)
        )
        name = "vllm:iteration_tokens_total"
        return [
            *((f"{name}_total", "counter", help, samples) for name, help, samples in rows),
            (name, "histogram", "tokens of a forward pass", passes),
        ]

    def _histogram(self, name: str, help: str) -> _Family:
        histogram = self._histograms[name]
        bounds = (*map(str, histogram.bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        return name, "histogram", help, _histogram_samples(buckets, histogram.total)

    def _label(self, own: dict[str, str]) -> str:
        pairs = {**self._labels, **own}
        shown = ",".join(f'{key}="{_escaped(value)}"' for key, value in pairs.items())
        return "{" + shown + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
