"""RewardManager: what the trainer sees of scoring. `submit` returns at once, `poll` collects.

Managers (verl's names): `naive` takes the score as it is, and so does `gdpo`, whose components are entries of the
scorer's mapping; `dapo` adds a penalty for long responses,

    min(-(T - (L - b)) / b * p, 0)    T tokens of the response, L = reward_kwargs.max_resp_len,
                                      b, p = overlong_buffer_cfg.{len, penalty_factor}
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import IO, Any

from banyan.errors import UserError
from banyan.reward import registry
from banyan.reward.pool import Pool
from banyan.reward.result import ScoreResult, failure, from_answer

_MANAGERS = ("naive", "gdpo", "dapo")
_MAX_LOG_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Overlong:
    """The penalty of `dapo`, from reward.reward_kwargs."""

    max_resp_len: int
    buffer_len: int
    penalty_factor: float
    log: bool

    def __post_init__(self) -> None:
        if not 0 < self.buffer_len <= self.max_resp_len:
            raise UserError(
                "[reward] reward.reward_kwargs.overlong_buffer_cfg.len: wanted 1 to max_resp_len "
                f"({self.max_resp_len}), got {self.buffer_len}"
            )

    def apply(self, result: ScoreResult, num_tokens: int) -> ScoreResult:
        over = num_tokens - (self.max_resp_len - self.buffer_len)
        penalty = min(-over / self.buffer_len * self.penalty_factor, 0.0)
        extra = dict(result.extra)
        if self.log:
            extra |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
        return dataclasses.replace(result, value=result.value + penalty, extra=extra)


class RewardManager:
    """Scores trajectories in worker processes with a time limit.

    Args:
        tree: The resolved configuration; its nodes `reward` and `banyan.reward` are read.
        log_path: File for what the reward function prints, started anew at 64 MiB; None drops it.

    Raises:
        UserError: [reward] for a manager that is unknown, a reward file that cannot be loaded.
    """

    def __init__(self, tree: Mapping[str, Any], log_path: Path | None = None) -> None:
        reward = tree["reward"]
        limits = tree["banyan"]["reward"]
        name = reward.get("reward_manager", {}).get("name", "naive")
        if name not in _MANAGERS:
            wanted = ", ".join(_MANAGERS)
            raise UserError(f"reward.reward_manager.name: wanted one of {wanted}, got {name}")
        self._overlong = _overlong(reward.get("reward_kwargs") or {}) if name == "dapo" else None
        self._custom = reward["custom_reward_function"]
        path = self._custom["path"]
        settings = {
            "path": str(Path(path).expanduser().resolve()) if path else None,
            "name": self._custom.get("name") or "compute_score",
            "reward_kwargs": dict(self._custom.get("reward_kwargs") or {}),
            "timeout_s": limits["timeout_s"],
            "memory_limit_bytes": limits["memory_limit_mb"] << 20,
        }
        self._model_scores = bool(reward.get("reward_model", {}).get("enable"))
        self._known: list[tuple[Hashable, ScoreResult]] = []  # submitted as numbers
        self._num_tokens: dict[Hashable, int] = {}
        self._statuses: Counter[str] = Counter()
        self._log: IO[bytes] | None = log_path.open("ab") if log_path else None
        try:
            self._pool = Pool(settings, reward["num_workers"], self._log or subprocess.DEVNULL)
        except BaseException:
            if self._log:
                self._log.close()
            raise

    def check_data_sources(self, data_sources: set[str]) -> None:
        """Raises UserError [reward] if one has no scorer; any is fine with a function of the user or a reward model."""
        if not self._custom["path"] and not self._model_scores:
            for name in sorted(data_sources):
                registry.find(name)

    def submit(
        self,
        key: Hashable,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        num_tokens: int | None = None,
    ) -> None:
        """Queues one trajectory and returns at once.

        Args:
            key: Comes back with the result.
            num_tokens: Length of the response; `dapo` needs it.

        Raises:
            UserError: [reward] for a row that has no JSON form.
        """
        if self._overlong:
            if num_tokens is None:
                raise UserError("[reward] dapo: wanted the response's number of tokens, got none")
            self._num_tokens[key] = num_tokens
        job = {
            "data_source": data_source,
            "solution_str": solution_str,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        }
        try:
            self._pool.submit(key, job)
        except TypeError as error:
            raise UserError(f"[reward] row of {data_source}: {error}") from error

    def submit_number(self, key: Hashable, value: float | None, num_tokens: int) -> None:
        """Queues what is scored already, by a reward model; None: it had nothing to read."""
        self._num_tokens[key] = num_tokens
        empty = failure("invalid", "the reward model had an empty response")
        self._known.append((key, empty if value is None else from_answer(value)))

    def poll(self) -> list[tuple[Any, ScoreResult]]:
        """Waits for all that was submitted; (key, result) in the order of submission, numbers last.

        Ends in bounded time: whatever the reward function does, each job has its time limit.
        """
        results = [*self._pool.collect(), *self._known]
        self._known.clear()
        if self._overlong:
            results = [
                (key, r if r.failed else self._overlong.apply(r, self._num_tokens[key]))
                for key, r in results
            ]
        self._num_tokens.clear()
        self._statuses.update(result.status for _, result in results)
        # A worker may write files up to a limit; printing into a longer log would fail.
        if self._log and os.fstat(self._log.fileno()).st_size > _MAX_LOG_BYTES:
            self._log.truncate(0)
        return results

    def statuses(self) -> dict[str, int]:
        """Number of results so far by status: ok, timeout, error, killed, invalid."""
        return dict(self._statuses)

    def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        self._pool.close()
        if self._log:
            self._log.close()

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _overlong(kwargs: Mapping[str, Any]) -> Overlong | None:
    buffer = kwargs.get("overlong_buffer_cfg") or {}
    if not buffer.get("enable", False):
        return None
    if kwargs.get("max_resp_len") is None:
        raise UserError("[reward] reward.reward_kwargs.max_resp_len: wanted a length, got none")
    return Overlong(
        max_resp_len=int(kwargs["max_resp_len"]),
        buffer_len=int(buffer["len"]),
        penalty_factor=float(buffer["penalty_factor"]),
        log=bool(buffer.get("log", False)),
    )
