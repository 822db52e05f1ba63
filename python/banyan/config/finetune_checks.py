"""Rules between the keys of `banyan sft` and `banyan dpo`, and old names of keys."""

from __future__ import annotations

from typing import Any

from banyan.config import spellings
from banyan.errors import UserError

_HINTS = {
    "optim.lr_scheduler_type": "other schedules are not built yet",
    "engine.dtype": "bfloat16 has the packed kernels, float32 is for checks",
}
_RENAMED = {"optim.grad_clip": "optim.clip_grad", "optim.warmup_style": "optim.lr_scheduler_type"}


def alias(name: str, value: Any) -> Any:
    """The value under the name that the core knows."""
    if (name, value) == ("data.enable_thinking_default", "none"):
        return None
    return "off" if name == "sharing.mode" and value is False else value  # a bare off in YAML


def hint(name: str, value: Any) -> str:
    """A reason to add to a refused value, or nothing."""
    return f": {_HINTS[name]}" if name in _HINTS else ""


def rename(values: dict[str, Any]) -> list[str]:
    """Moves values from older names to the keys that are read; returns lines to say."""
    return spellings.rename(values, _RENAMED)


def check_between_keys(values: dict[str, Any]) -> None:
    """Rules that need more than one key. Raises UserError for the first that is broken."""
    if values["trainer.resume_mode"] == "resume_path" and not values["trainer.resume_from_path"]:
        raise UserError(
            "trainer.resume_from_path: wanted a folder global_step_N with resume_mode=resume_path, got null"
        )
    if values["banyan.data.each_turn"] and "preference.objective" in values:
        raise UserError(
            "banyan.data.each_turn: wanted false, got true: an answer of a pair is one sample, whatever its turns"
        )
