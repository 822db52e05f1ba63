"""Mixed load on the rollout engine: `python tests/shell/rollout_soak.py --minutes 30`.

Requests of all kinds come and go in a pool that is too small for them, while weights change, runs
are paused, aborted and put to sleep, and wrong requests are refused. At the end every request must
have ended exactly once with everything that it promised, no page may be held, and resident memory
may not have grown by more than 16 MB (specification of reliability, R14) since the load was warm: two
fifths of the time are over, and pages have been evicted, so all of the pool has been written once (it
becomes resident only then).
"""

from __future__ import annotations

import argparse
import random
import select
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rollout_live import EOS, VOCAB, Live, prompt_of, resident_bytes, write_model

GROWTH = 16 << 20
MOST = 24  # requests in flight


class Soak:
    def __init__(self, core: Any, folder: Path, seed: int) -> None:
        self._core = core
        self._random = random.Random(seed)
        self._folders = [write_model(folder / f"model{i}", seed=i) for i in range(2)]
        model = core.Model.load(str(self._folders[0]))
        self._live = Live(
            core,
            model,
            kv_bytes=1 << 19,
            max_num_seqs=12,
            max_num_batched_tokens=160,
            schedule_conservativeness=0.1,  # admits too many on purpose: they must make room
        )
        self._asked: dict[str, dict[str, Any]] = {}  # in flight
        self._paused_until = 0.0
        self.counts: Counter[str] = Counter()

    def run(self, seconds: float) -> dict[str, Any]:
        start = time.monotonic()
        resident: list[int] = []
        touched, sampled = False, 0.0
        with self._live as live:
            while (now := time.monotonic() - start) < seconds:
                self._step(now)
                touched = touched or live.engine.stats()["counters"]["evicted_pages"] > 0
                if touched and now > 0.4 * seconds and now - sampled > seconds / 200:
                    sampled = now
                    resident.append(resident_bytes())
            live.engine.resume()
            self._collect(until_empty=True)
            stats = live.engine.stats()
        assert not self._asked
        assert (stats["running"], stats["waiting"], stats["used_pages"]) == (0, 0, 0), stats
        assert touched, "wanted a load that fills the pool"
        growth = resident[-1] - resident[0]
        assert growth <= GROWTH, f"resident memory grew by {growth} bytes"
        counters = stats["counters"]
        return {
            **self.counts,
            "preempted": counters["preemptions"],
            "cached_tokens": counters["prompt_tokens_cached"],
            "generated_tokens": counters["generation_tokens"],
            "growth_bytes": growth,
            "pages_cached": stats["cached_pages"],
        }

    def _step(self, now: float) -> None:
        rng, live = self._random, self._live
        if now >= self._paused_until > 0:
            live.engine.resume()
            self._paused_until = 0.0
        if len(self._asked) < MOST:
            for _ in range(rng.randrange(1, 4)):
                self._submit()
        draw = rng.random()
        if draw < 0.03 and self._asked:
            live.engine.abort(rng.sample(sorted(self._asked), min(3, len(self._asked))))
        elif draw < 0.04:
            live.engine.pause(rng.choice(["abort", "keep", "retract"]), 5.0)
            self._paused_until = now + 0.02
        elif draw < 0.05:
            folder = self._folders[self.counts["updates"] % 2]
            keep = rng.random() < 0.3
            live.engine.update_weights_from_disk(str(folder), str(now), keep, 10.0)
            self.counts["updates"] += 1
        elif draw < 0.055:
            live.engine.reset_prefix_cache(rng.random() < 0.5)
        elif draw < 0.058:
            live.engine.sleep(1, "retract", 10.0)
            live.engine.wake([])
            self.counts["sleeps"] += 1
        self._collect()

    def _submit(self) -> None:
        rng = self._random
        prompt = prompt_of(rng.choice([3, 40, 70, 140]), rng.randrange(6))
        prompt += prompt_of(rng.randrange(0, 60), rng.randrange(1000))
        params: dict[str, Any] = {
            "max_tokens": rng.choice([1, 5, 30, 120]),
            "seed": rng.randrange(1 << 30),
            "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
            "ignore_eos": rng.random() < 0.5,
        }
        n = 1 if params["temperature"] == 0.0 else rng.randrange(1, 7)
        for name, value in {
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.02,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {5: 1.0, 60: -3.0},
            "stop": [b"ab", b"("],
            "stop_token_ids": [33, 34],
            "top_logprobs": 3,
            "return_sampling_mask": True,
            "min_tokens": 1,
            "bad_words": [[50], [51, 52]],
        }.items():
            if rng.random() < 0.2:
                params[name] = value
        if rng.random() < 0.05:
            params[rng.choice(["top_p", "temperature", "max_tokens", "top_k"])] = -5
            n = rng.choice([n, 10**9])
        try:
            name = self._live.submit(
                prompt,
                n,
                priority=rng.randrange(3),
                cache_salt=rng.choice(["", "", "salt"]),
                **params,
            )
        except self._core.RequestError as error:
            if error.code not in (400, 409, 503):
                raise
            self.counts["refused"] += 1
            return
        self._asked[name] = params
        self.counts["accepted"] += 1

    def _collect(self, until_empty: bool = False) -> None:
        live = self._live
        deadline = time.monotonic() + 60.0
        while True:
            select.select([live.engine.event_fd()], [], [], 0.002)
            live.take()
            for name in [name for name in self._asked if live.done(name)]:
                self._check(name, self._asked.pop(name))
            if not until_empty or not self._asked:
                return
            assert time.monotonic() < deadline, live.engine.stats()

    def _check(self, name: str, params: dict[str, Any]) -> None:
        for i in range(self._live.wanted.pop(name)):
            response = self._live.responses.pop((name, i))
            count = len(response.tokens)
            assert not response.last["error"], response.last["error"]
            assert len(response.raw) == len(response.processed) == count
            assert count <= params["max_tokens"]
            assert all(0 <= token < VOCAB for token in response.tokens)
            assert response.finish in ("stop", "length", "abort")
            if response.finish == "length":
                assert count == params["max_tokens"]
            if params["ignore_eos"] and response.finish == "stop":
                assert response.last["stop_token"] != EOS
            self.counts["aborted" if response.finish == "abort" else "finished"] += 1


def soak(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Runs the load; returns what happened. Fails on the first thing that is not as promised."""
    from banyan import extension

    return Soak(extension.load(), folder, seed).run(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(Path(folder), 60.0 * args.minutes, args.seed)
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
