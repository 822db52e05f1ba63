"""Other spellings of verl's keys in the documents of verl, MindSpeed and prefix-0501, and settings with two homes.

MindSpeed takes some settings in `megatron.override_transformer_config` that verl has in `megatron`. Either place
suffices; two values that differ are an error, never a silent choice. Sizes of context parallel may stand in any of
their places, 1 standing for nothing said; roles that say nothing follow the actor.
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
    f"{_ACTOR}.context_parallel_size": f"{_ACTOR}.megatron.context_parallel_size",  # see _SIZES
    f"{_ACTOR}.megatron.{_OVERRIDE}.virtual_pipeline_model_parallel_size": (
        f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size"
    ),
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
_TWO_HOMES = ("sequence_parallel", "use_distributed_optimizer")
_CONTEXT, _ULYSSES = "context_parallel_size", "ulysses_sequence_parallel_size"
# Another place of a size -> the one that is read.
_SIZES = {
    f"{_ACTOR}.{_CONTEXT}": f"{_ACTOR}.megatron.{_CONTEXT}",
    **{f"{role}.megatron.{_OVERRIDE}.{_CONTEXT}": f"{role}.megatron.{_CONTEXT}" for role in _ROLES},
    **{
        f"{role}.{'fsdp' if role == 'critic' else 'fsdp_config'}.{_ULYSSES}": f"{role}.{_ULYSSES}"
        for role in _ROLES
    },
}
_ALGORITHM = f"{_ACTOR}.megatron.{_OVERRIDE}.context_parallel_algo"
_TWO_NAMES = ("fused_permute_unpermute", "use_fused_moe_token_permute_and_unpermute")


def verls(key: str) -> str:
    """The key under verl's spelling."""
    for spelling, node in _SPELLINGS.items():
        if key == spelling or key.startswith(spelling + "."):
            return node + key.removeprefix(spelling)
    return key


def _fill_devices(leaves: dict[str, Any]) -> None:
    """Machines that only generate have as many devices as the others, unless their own key says otherwise."""
    own, others = "actor_rollout_ref.rollout.n_gpus_per_node", "trainer.n_gpus_per_node"
    if leaves.get(own) is None and others in leaves:
        leaves[own] = leaves[others]


def rename(values: dict[str, Any], renamed: dict[str, str]) -> list[str]:
    """Moves the values of older names, where they are set, to the names that are read; returns lines to say."""
    notes = []
    for old, new in renamed.items():
        if values[old] is not None:
            values[new] = values[old]
            notes.append(f"{old}: older name of {new}")
    return notes


def apply(leaves: dict[str, Any]) -> list[str]:
    """Renames the other spellings in `leaves` and checks what has two homes; returns lines to say."""
    notes = _take_sizes(leaves)
    for name in [name for name in leaves if verls(name) != name]:
        value = leaves.pop(name)
        home = verls(name)
        _check_equal(leaves, home, value, name)
        leaves[home] = value
        notes.append(f"{name}: verl's key is {home}")
    _fill_devices(leaves)
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


def _take_sizes(leaves: dict[str, Any]) -> list[str]:
    """Brings the sizes of context parallel to the places that are read; returns lines to say."""
    notes = []
    for name, home in _SIZES.items():
        value = leaves.pop(name, None)
        if value in (None, 1, False):  # false: the older default
            continue
        _set_size(leaves, home, value, name)
        notes.append(f"{name}: read as {home}")
        if home.startswith(_ACTOR):
            for role in _ROLES[1:]:
                own = role + home.removeprefix(_ACTOR)
                leaves[own] = value if leaves.get(own, 1) == 1 else leaves[own]
    if leaves.get(_ALGORITHM) == "ulysses_cp_algo":
        del leaves[_ALGORITHM]
        notes.append(f"{_ALGORITHM}=ulysses_cp_algo: read as {_ACTOR}.{_ULYSSES}")
        for role in _ROLES:
            size = leaves.get(f"{role}.megatron.{_CONTEXT}", 1)
            _set_size(leaves, f"{role}.{_ULYSSES}", size, f"{role}.megatron.{_CONTEXT}")
            leaves[f"{role}.megatron.{_CONTEXT}"] = 1
    return notes


def _set_size(leaves: dict[str, Any], home: str, value: Any, name: str) -> None:
    if leaves.get(home, 1) != 1:
        _check_equal(leaves, home, value, name)
    leaves[home] = value


def _check_equal(leaves: dict[str, Any], name: str, value: Any, other: str) -> None:
    if leaves.get(name) not in (None, value):
        raise UserError(
            f"{name} and {other}: wanted one value, got {_show(leaves[name])} and {_show(value)}"
        )


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
