"""Other spellings of verl's keys in the documents of verl, MindSpeed and prefix-0501, and settings with two homes.

MindSpeed takes some settings in `megatron.override_transformer_config` that verl has in `megatron`. Either place
suffices; two values that differ are an error, never a silent choice.
"""

from __future__ import annotations

from typing import Any

from banyan.errors import UserError

_ACTOR = "actor_rollout_ref.actor"
_ROLES = (_ACTOR, "actor_rollout_ref.ref", "critic")
_OVERRIDE = "override_transformer_config"
# Node or key as some documents spell it -> as verl has it.
_SPELLINGS = {
    "actor_rollout_ref.model.megatron": f"{_ACTOR}.megatron",
    f"{_ACTOR}.context_parallel_size": f"{_ACTOR}.megatron.context_parallel_size",
    # Recompute in verl's first Megatron configurations.
    **{
        f"{model}.gradient_checkpointing_kwargs.activations_checkpoint_{key}": (
            f"{role}.megatron.{_OVERRIDE}.recompute_{key}"
        )
        for model, role in (
            ("actor_rollout_ref.model", _ACTOR),
            ("critic.model", "critic"),
        )
        for key in ("granularity", "method", "num_layers")
    },
}
_TWO_HOMES = ("context_parallel_size", "sequence_parallel", "use_distributed_optimizer")
_TWO_NAMES = ("fused_permute_unpermute", "use_fused_moe_token_permute_and_unpermute")


def verls(key: str) -> str:
    """The key under verl's spelling."""
    for spelling, node in _SPELLINGS.items():
        if key == spelling or key.startswith(spelling + "."):
            return node + key.removeprefix(spelling)
    return key


def apply(leaves: dict[str, Any]) -> list[str]:
    """Renames the other spellings in `leaves` and checks what has two homes; returns lines to say."""
    notes = []
    for name in [name for name in leaves if verls(name) != name]:
        value = leaves.pop(name)
        if name.endswith("context_parallel_size") and value is False:  # the older default
            value = 1
        home = verls(name)
        _check_equal(leaves, home, value, name)
        leaves[home] = value
        notes.append(f"{name}: verl's key is {home}")
    for role in _ROLES:
        override = f"{role}.megatron.{_OVERRIDE}"
        for key in _TWO_HOMES:
            if f"{override}.{key}" in leaves:
                _check_equal(
                    leaves,
                    f"{role}.megatron.{key}",
                    leaves[f"{override}.{key}"],
                    f"{override}.{key}",
                )
        first, second = (f"{override}.{key}" for key in _TWO_NAMES)
        if second in leaves:
            _check_equal(leaves, first, leaves[second], second)
        if (
            leaves.get(f"{override}.use_flash_attn") is False
            and leaves.get("trainer.device") == "npu"
        ):
            raise UserError(
                f"{override}.use_flash_attn: wanted true on trainer.device=npu, got false: "
                "attention there is flash attention"
            )
    return notes


def _check_equal(leaves: dict[str, Any], name: str, value: Any, other: str) -> None:
    if leaves.get(name) not in (None, value):
        raise UserError(
            f"{name} and {other}: wanted one value, got {_show(leaves[name])} and {_show(value)}"
        )


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
