"""The outside world of the training loop: src/banyan/core/host.h in Python.

Tokens become text here, text becomes scores in the workers of the reward manager, numbers go to the loggers. Every
method is called from the training thread, in the order in which a step needs it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from banyan.config.resolve import Resolved
from banyan.data.dataset import Prompt
from banyan.data.loader import Loader
from banyan.log.loggers import RunLog
from banyan.trainer.inputs import Inputs
from banyan.trainer.metrics import validation_metrics

Trajectory = dict[str, Any]  # fields of core/sample.h
Score = dict[str, Any]
_KEPT_SAMPLES = 4  # per step in samples.jsonl, for the report


class RewardManager(Protocol):
    """What the host needs of banyan.reward.manager.RewardManager."""

    def submit(
        self,
        key: Any,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Any,
        num_tokens: int | None = None,
    ) -> None: ...

    def submit_number(self, key: Any, value: float | None, num_tokens: int) -> None: ...

    def poll(self) -> list[tuple[Any, Any]]: ...


class Host:
    """Implements core/host.h over a data set, a tokenizer, a reward manager and the loggers."""

    def __init__(
        self,
        config: Resolved,
        inputs: Inputs,
        rewards: RewardManager,
        log: RunLog,
        should_stop: Callable[[], bool],
        is_first: bool = True,
    ) -> None:
        """`is_first`: of several processes with a host each, the one that keeps samples."""
        self._config = config
        validation = inputs.validation.prompts if inputs.validation else []
        self._data = {False: inputs.train.prompts, True: validation}
        self._chat = inputs.chat
        self._reward_text = inputs.reward_text
        self._rewards = rewards
        # A function of the user gets the reward model's number; without one the number is the score.
        self._model_scores = (
            config["reward.reward_model.enable"]
            and not config["reward.custom_reward_function.path"]
        )
        self._log = log
        self._should_stop = should_stop
        self._loader = Loader(len(inputs.train), config["data.shuffle"], config["data.seed"] or 0)
        self._is_first = is_first
        self._steps_done = 0  # the step of a checkpoint
        self._texts: dict[
            tuple[int, int], str
        ] = {}  # responses of the pass at hand, by (row, index)
        # The core asked for its first prompts, or whether to stop: models and checkpoint are loaded.
        self.has_started = False

    def next_prompts(self, num_rows: int) -> list[dict[str, Any]]:
        self.has_started = True
        return [
            {"row": row, "tokens": self._data[False][row].tokens}
            for row in self._loader.next(num_rows)
        ]

    def validation_prompts(self) -> list[dict[str, Any]]:
        self.has_started = True
        return [
            {"row": row, "tokens": prompt.tokens} for row, prompt in enumerate(self._data[True])
        ]

    def submit(self, trajectory: Trajectory, validation: bool) -> None:
        key = (trajectory["row"], trajectory["index"])
        prompt = self._data[validation][trajectory["row"]]
        text = self._chat.decode(trajectory["response"])
        self._texts[key] = text
        length = len(trajectory["response"])
        number = trajectory.get("reward_model_score")
        if self._model_scores:
            self._rewards.submit_number(key, number, length)
            return
        numbers = {} if number is None else {"reward_model": number}
        extra = {**prompt.extra_info, "num_turns": 2, "rollout_reward_scores": numbers}
        self._rewards.submit(key, prompt.data_source, text, prompt.ground_truth, extra, length)

    def reward_model_tokens(
        self, trajectories: list[Trajectory], validation: bool
    ) -> list[list[int]] | None:
        """What the reward model reads; None where that is the actor's tokens as they are."""
        if self._reward_text is None:
            return None
        data = self._data[validation]
        return [self._reward_text.tokens(data[t["row"]].messages, t) for t in trajectories]

    def poll(self) -> list[Score]:
        scores = []
        reasons: Counter[str] = Counter()
        for (row, index), result in self._rewards.poll():
            if result.failed:
                reasons[result.reason] += 1
            scores.append(
                {
                    "row": row,
                    "index": index,
                    "failed": result.failed,
                    "reason": result.reason,
                    "value": result.value,
                    "extra": result.extra,
                    "texts": result.text,
                }
            )
        for reason, count in reasons.items():
            self.say(f"reward: {count} sample{'s' if count > 1 else ''} left out: {reason}")
        return scores

    def on_samples(
        self, step: int, validation: bool, trajectories: list[Trajectory], scores: list[Score]
    ) -> None:
        if not validation:
            self._steps_done = step
        if not self._is_first:
            self._texts.clear()
            return
        by_key = {(score["row"], score["index"]): score for score in scores}
        records = [self._record(step, validation, item, by_key) for item in trajectories]
        self._texts.clear()
        for record in _spread(records, _KEPT_SAMPLES):
            self._log.log_sample(step, {"validation": validation, **record})
        folder = self._config[
            "trainer.validation_data_dir" if validation else "trainer.rollout_data_dir"
        ]
        if folder:
            _dump(Path(folder) / f"{step}.jsonl", records)
        if validation:
            for record in records[: self._config["trainer.log_val_generations"]]:
                self.say(
                    f"validation sample: {record['input']!r} -> {record['output']!r} ({record['score']})"
                )

    def validation_metrics(
        self, trajectories: list[Trajectory], scores: list[Score]
    ) -> dict[str, float]:
        by_key = {(score["row"], score["index"]): score for score in scores}
        groups: dict[int, list[dict[str, Any]]] = {}
        failed = 0
        for item in trajectories:
            score = by_key.get((item["row"], item["index"]))
            samples = groups.setdefault(item["row"], [])
            if score is None or score["failed"]:
                failed += 1
            else:
                label = score.get("texts", {})
                predicted = {"pred": label["pred"]} if "pred" in label else {}
                samples.append({**score["extra"], "reward": score["value"], **predicted})
        pairs = [
            (self._data[True][row].data_source, samples) for row, samples in sorted(groups.items())
        ]
        return {**validation_metrics(pairs), "val-aux/failed": float(failed)}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._log.log(step, metrics)

    def say(self, line: str) -> None:
        self._log.say(line)

    def should_stop(self) -> bool:
        self.has_started = True  # where others draw the prompts
        return self._should_stop()

    def save_state(self) -> str:
        state = {
            "epoch": self._loader.epoch,
            "position": self._loader.position,
            "steps_given": self._steps_done,
        }
        return json.dumps(state)

    def load_state(self, state: str) -> None:
        position = json.loads(state)
        self._loader.seek(position["epoch"], position["position"])
        self._steps_done = position["steps_given"]
        self._log.start(self._steps_done)

    def _record(
        self, step: int, validation: bool, item: Trajectory, scores: dict[tuple[int, int], Score]
    ) -> dict[str, Any]:
        """One line of a dump, in verl's columns."""
        key = (item["row"], item["index"])
        prompt: Prompt = self._data[validation][item["row"]]
        text = self._texts.get(key)
        if text is None:  # another process handed it to its scorer
            text = self._chat.decode(item["response"])
        score = scores.get(
            key, {"failed": True, "value": None, "extra": {}, "reason": "not scored"}
        )
        return {
            "input": prompt.text,
            "output": text,
            "gts": prompt.ground_truth,
            "score": None if score["failed"] else score["value"],
            "step": step,
            "uid": f"{item['row']}-{item['index']}",
            **score["extra"],
            **score.get("texts", {}),
        }


def _spread(records: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """`count` records spread over rewards: best, worst and between, so that a report shows both."""
    scored = sorted(
        (record for record in records if record["score"] is not None), key=lambda r: -r["score"]
    )
    if len(scored) <= count:
        return scored
    return [scored[round(i * (len(scored) - 1) / (count - 1))] for i in range(count)]


def _dump(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
