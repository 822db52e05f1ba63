"""The older switches of prefix sharing, mapped to actor_rollout_ref.sharing.

`prefix_sharing_config` may stand under the actor, its engine node or Megatron's override node. An explicit
`enable_prefix_sharing` wins over the environment variable ENABLE_PREFIX_SHARING; false means off. The variable takes 1
true yes on y / 0 false no off n and the empty text, in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan.errors import UserError

_ACTOR = "actor_rollout_ref.actor"
_PLACES = tuple(
    f"{_ACTOR}{engine}.prefix_sharing_config"
    for engine in ("", ".megatron.override_transformer_config", ".megatron", ".fsdp_config")
)
# Key -> values that are taken; None means any. Those but the first three have nothing to choose here.
_KEYS: dict[str, tuple[Any, ...] | None] = {
    "enable_prefix_sharing": (True, False),
    "min_prefix_len": None,
    "min_group_size": None,
    "detector": ("trie",),
    "backend": ("torch_ref", "flash_atten_gpu", "flash_atten_npu", "reference", "aten", "auto"),
    "boundary_strategy": ("prefix_last_restore",),
    "supported_cp_size": (1,),
    "supported_rope_fusion": (True, False),
    "supported_fused_qkv_rope": (True, False),
    "validate_precision": (False,),
    "integrate_mode": ("verl_megatron_actor", "banyan"),
    "model_type": ("text_only_causal_lm",),
}
_TRUE = ("1", "true", "yes", "on", "y")
_FALSE = ("0", "false", "no", "off", "n", "")


def is_key(name: str) -> bool:
    """True for a key of prefix_sharing_config in one of its places, or the node itself."""
    return any(name == place or name.removeprefix(place + ".") in _KEYS for place in _PLACES)


def apply(leaves: dict[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Moves the older switches in `leaves` (key -> value) to actor_rollout_ref.sharing; returns lines to say."""
    notes: list[str] = []
    enable: bool | None = None
    home = "actor_rollout_ref.sharing"
    for place in reversed(_PLACES):
        for key, allowed in _KEYS.items():
            name = f"{place}.{key}"
            if name not in leaves:
                continue
            value = leaves.pop(name)
            if allowed is not None and value not in allowed:
                raise UserError(
                    f"{name}: wanted {' or '.join(str(item) for item in allowed)}, got {value!r}"
                )
            if key == "enable_prefix_sharing":
                enable = value
            elif key in ("min_prefix_len", "min_group_size"):
                leaves[f"{home}.{key}"] = value
            notes.append(f"{name}={value}: equivalent, prefix sharing is {home}")
    if enable is None:
        enable = None if _environment(environ) else False
    if enable is False:
        leaves[f"{home}.mode"] = "off"
        notes.append(
            f"{home}.mode=off: switched off by enable_prefix_sharing or ENABLE_PREFIX_SHARING"
        )
    elif enable and leaves[f"{home}.mode"] == "auto":
        leaves[f"{home}.mode"] = "on"
    return notes


def _environment(environ: Mapping[str, str]) -> bool:
    """False only where ENABLE_PREFIX_SHARING says so."""
    if "ENABLE_PREFIX_SHARING" not in environ:
        return True
    text = environ["ENABLE_PREFIX_SHARING"].strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise UserError("ENABLE_PREFIX_SHARING must be one of: 1/0, true/false, yes/no, on/off")
