"""Rules between keys, old names of keys and values, and hints on values that verl takes and banyan does not yet."""

from __future__ import annotations

from typing import Any

from banyan.config import spellings
from banyan.errors import UserError

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

# Values with two names (T19).
_ALIASES = {
    ("algorithm.adv_estimator", "grpo_vectorized"): "grpo",
    ("algorithm.adv_estimator", "rloo_vectorized"): "rloo",
}
_HINTS = {
    f"{_ACTOR}.optim.lr_scheduler_type": "other schedules are not built yet",
    "reward.reward_manager.name": "other reward managers are not built yet",
    "trainer.v1.trainer_mode": "rollout.over_sample_rate with banyan.partial_rollout lets responses go on",
    "skip.rollout.action": "responses that another step drew answer other prompts",
    f"{_ROLLOUT}.dtype": "bfloat16 has the packed kernels, float32 is for checks",
}
_K1 = "as a loss its expected gradient is zero (T7)"
# Older homes of keys -> the key that is read.
_RENAMED = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "custom_reward_function.reward_kwargs": "reward.custom_reward_function.reward_kwargs",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
}


# Estimators that do not compare the responses of a group, so that one response per prompt is enough.
ALONE = ("gae", "reinforce_plus_plus", "remax")


def alias(name: str, value: Any) -> Any:
    """The value under the name that the core knows."""
    return _ALIASES.get((name, value), value) if isinstance(value, str) else value


def hint(name: str, value: Any) -> str:
    """A reason to add to a refused value, or nothing."""
    if name == f"{_ACTOR}.kl_loss_type" and value in ("kl", "k1"):
        return f": {_K1}"
    if name == f"{_ACTOR}.policy_loss.loss_mode" and value == "bypass_mode":
        return ": keep your loss and set algorithm.rollout_correction.bypass_mode=true (T35)"
    return f": {_HINTS[name]}" if name in _HINTS else ""


def rename(values: dict[str, Any]) -> list[str]:
    """Moves values from older homes to the keys that are read, fits sizes; returns lines to say."""
    return spellings.rename(values, _RENAMED) + _fit_mini_batch(values)


def _fit_mini_batch(values: dict[str, Any]) -> list[str]:
    """A mini-batch larger than the batch is the whole batch."""
    name = f"{_ACTOR}.ppo_mini_batch_size"
    batch, mini = values["data.train_batch_size"], values[name]
    if batch is None or mini is None or mini <= batch:
        return []
    values[name] = batch
    return [
        f"{name}={mini}: more than data.train_batch_size; the batch of {batch} is one mini-batch"
    ]


def check_between_keys(values: dict[str, Any]) -> None:
    """Rules that need more than one key. Raises UserError for the first that is broken."""
    _check_batch(values)
    _check_sampling(values)
    _check_lengths(values)
    _check_resume(values)


def _check_batch(values: dict[str, Any]) -> None:
    batch, mini = values["data.train_batch_size"], values[f"{_ACTOR}.ppo_mini_batch_size"]
    if batch % mini:
        raise UserError(
            f"{_ACTOR}.ppo_mini_batch_size: wanted a divisor of data.train_batch_size ({batch}), got {mini}"
        )
    estimator = values["algorithm.adv_estimator"]
    if values[f"{_ROLLOUT}.n"] < 2 and estimator not in ALONE and ":" not in estimator:
        raise UserError(
            f"{_ROLLOUT}.n: wanted >= 2 with algorithm.adv_estimator={estimator}, "
            f"got {values[f'{_ROLLOUT}.n']}: the advantage of a group of one is always 0 (T20)"
        )


def _check_sampling(values: dict[str, Any]) -> None:
    if not values[f"{_ROLLOUT}.do_sample"]:
        raise UserError(
            f"{_ROLLOUT}.do_sample: wanted true in training, got false: a greedy group is n equal samples"
        )
    val = f"{_ROLLOUT}.val_kwargs"
    greedy = not values[f"{val}.do_sample"] or values[f"{val}.temperature"] == 0
    if greedy and values[f"{val}.n"] > 1:
        raise UserError(
            f"{val}.n: wanted 1 with greedy validation (do_sample=false or temperature=0), "
            f"got {values[f'{val}.n']}: all samples would be equal (T5)"
        )


def _check_lengths(values: dict[str, Any]) -> None:
    prompt, response = values["data.max_prompt_length"], values[f"{_ROLLOUT}.response_length"]
    if values[f"{_ROLLOUT}.prompt_length"] != prompt:
        raise UserError(
            f"{_ROLLOUT}.prompt_length: wanted data.max_prompt_length ({prompt}), "
            f"got {values[f'{_ROLLOUT}.prompt_length']}"
        )
    limit = values[f"{_ROLLOUT}.max_model_len"]
    if limit is not None and limit < prompt + response:
        raise UserError(
            f"{_ROLLOUT}.max_model_len: wanted >= prompt and response together ({prompt + response}), got {limit}"
        )


def _check_resume(values: dict[str, Any]) -> None:
    if values["trainer.resume_mode"] == "resume_path" and not values["trainer.resume_from_path"]:
        raise UserError(
            "trainer.resume_from_path: wanted a folder global_step_N with resume_mode=resume_path, got null"
        )
