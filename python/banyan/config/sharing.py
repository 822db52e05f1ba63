"""prefix-0501's switches: `prefix_sharing_config`, its environment variables, and what they mean here.

The record may stand in three places. `actor.prefix_sharing_config` is read first. Else, in the engine's node
(`actor.megatron` or `actor.fsdp_config`), `override_transformer_config.prefix_sharing_config`; and only where no
override node was given, the engine node's own `prefix_sharing_config`. A record is null, true, false or a mapping. An
explicit `enable_prefix_sharing` wins over the environment variable ENABLE_PREFIX_SHARING. Switched off, nothing else
in it is checked. What it says moves to `actor_rollout_ref.sharing` (specification B1-B4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan.config import schema
from banyan.config.sharing_record import (
    FALSE,
    NAME,
    OVERRIDE,
    PrefixSharingConfig,
    PrefixSharingConfigError,
    as_mapping,
    environment_switch,
)

HOME = "actor_rollout_ref.sharing"
_ACTOR = "actor_rollout_ref.actor"
_ENGINES = (f"{_ACTOR}.megatron", f"{_ACTOR}.fsdp_config")
LEVELS = ("off", "summary", "layer", "profile", "debug")
# Variables without a reader -> why.
_UNREAD = {
    "PREFIX_SHARING_ASYNC_PREFETCH": "equivalent, a plan takes less than a hundredth of the pass that it serves",
    "PREFIX_SHARING_DIAG_DUMP": "not read, `banyan score` writes every token's log-probability",
    "PREFIX_SHARING_DIAG_SKIP_RESTORE": "not read, log-probabilities lie on the trie's edges and nothing is restored",
    "PROFILE_OUTPUT_DIR": f"not read, {HOME}.observe=profile prints the time of each layer's attention",
    "USE_FIXED_ROLLOUT": "not read, the responses of a run depend on rollout.seed alone",
    "USE_SYNTHETIC_PREFIX": "not read, prompts come from data.train_files",
}


def _places() -> tuple[str, ...]:
    nodes = [_ACTOR]
    for engine in _ENGINES:
        nodes += [f"{engine}.{OVERRIDE}", engine]
    return tuple(f"{node}.{NAME}" for node in nodes)


_PLACES = _places()


def is_key(name: str) -> bool:
    """True for the record in one of its places and anything below it; apply() tells unknown keys."""
    return any(name == place or name.startswith(place + ".") for place in _PLACES)


def apply(leaves: dict[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Moves the switches in `leaves` (key -> value) to actor_rollout_ref.sharing; returns lines to say."""
    notes: list[str] = []
    for key in ("mode", "observe", "verify"):  # YAML reads a bare off as false
        if isinstance(leaves.get(f"{HOME}.{key}"), bool):
            leaves[f"{HOME}.{key}"] = "on" if leaves[f"{HOME}.{key}"] else "off"
    place, raw = _take_record(leaves, notes)
    given = as_mapping(raw)
    switch = given.get("enable_prefix_sharing")
    if switch is None:
        switch = environment_switch(environ)
    if switch is not False:
        notes += _move(_checked(place, given, leaves, environ), given, place, leaves)
    _switch(leaves, switch, "enable_prefix_sharing" in given, environ, notes)
    _observe(leaves, raw is not None or switch is not None, environ)
    notes += [
        f"{name}={environ[name]}: {why}" for name, why in _UNREAD.items() if environ.get(name)
    ]
    return notes


def _take_record(leaves: dict[str, Any], notes: list[str]) -> tuple[str, Any]:
    """Takes the record out of the leaves: its place and its raw value (None where there is none)."""
    overridden = {node for node in _ENGINES if _any_given_below(leaves, f"{node}.{OVERRIDE}")}
    records = {place: _take(leaves, place) for place in _PLACES if _any_below(leaves, place)}
    for place in _PLACES:
        leaves.pop(place, None)  # a record that is null
    found: tuple[str, Any] = ("", None)
    for place, raw in records.items():
        node = place.removesuffix(f".{NAME}")
        if found[0]:
            notes.append(f"{place}: not read, {found[0]} is given")
        elif node in overridden:
            notes.append(f"{place}: not read, {node}.{OVERRIDE} is given: the record belongs there")
        else:
            found = (place, raw)
    return found


def _any_below(leaves: dict[str, Any], node: str) -> bool:
    return any(
        name.startswith(node + ".") or (name == node and leaves[name] is not None)
        for name in leaves
    )


def _any_given_below(leaves: dict[str, Any], node: str) -> bool:
    """As _any_below, but for honoured keys that have their default."""
    honoured = schema.honoured()
    given = {
        name: value
        for name, value in leaves.items()
        if name not in honoured or value != honoured[name].default
    }
    return _any_below(given, node)


def _take(leaves: dict[str, Any], place: str) -> Any:
    """The value at `place`, keys below it as a mapping."""
    below = {
        name.removeprefix(place + "."): leaves.pop(name)
        for name in list(leaves)
        if name.startswith(place + ".")
    }
    return below or leaves.pop(place)


def _checked(
    place: str,
    given: dict[str, Any],
    leaves: dict[str, Any],
    environ: Mapping[str, str],
) -> PrefixSharingConfig:
    """The record as banyan's engine takes it, checked. Without a switch sharing is on by itself (mode auto)."""
    record = {**given, "enable_prefix_sharing": True}
    record.setdefault("integrate_mode", "banyan")
    variable = environ.get("PREFIX_SHARING_BACKEND", "").strip()
    if variable and record.get("backend", "torch_ref") == "torch_ref":
        record["backend"] = variable
        place = "PREFIX_SHARING_BACKEND" if not given else place
    config = PrefixSharingConfig(**record)
    packed = leaves.get("actor_rollout_ref.model.use_remove_padding", True) is not False
    try:
        config.validate(_model_layout(leaves))
        config.validate_for_engine(packed, config.integrate_mode)
    except PrefixSharingConfigError as error:
        raise PrefixSharingConfigError(f"{place or NAME}: {error}") from error
    return config


def _model_layout(leaves: dict[str, Any]) -> dict[str, Any]:
    """The keys of Megatron's nodes that the record is checked against; the override node wins."""
    names = (
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "context_parallel_size",
        "apply_rope_fusion",
        "fused_single_qkv_rope",
    )
    nodes = (f"{_ACTOR}.megatron", f"{_ACTOR}.megatron.{OVERRIDE}")
    return {
        name: leaves[f"{node}.{name}"]
        for node in nodes
        for name in names
        if f"{node}.{name}" in leaves
    }


def _move(
    config: PrefixSharingConfig, given: dict[str, Any], place: str, leaves: dict[str, Any]
) -> list[str]:
    """Writes what the record says into the keys that are read; returns lines to say."""
    notes = []
    for key in given:
        if key in ("min_prefix_len", "min_group_size", "detector"):
            leaves[f"{HOME}.{key}"] = given[key]
        notes.append(f"{place}.{key}={given[key]}: equivalent, prefix sharing is {HOME}")
    if config.validate_precision:
        leaves[f"{HOME}.verify"] = "first"
        notes.append(f"{HOME}.verify=first: from validate_precision")
    if config.backend != given.get("backend", "torch_ref"):
        notes.append(f"PREFIX_SHARING_BACKEND={config.backend}: read as the backend")
    if config.backend in ("reference", "aten"):
        leaves["banyan.kernels"] = "aten"
        notes.append(f"banyan.kernels=aten: from the backend {config.backend}")
    return notes


def _switch(
    leaves: dict[str, Any],
    switch: bool | None,
    is_explicit: bool,
    environ: Mapping[str, str],
    notes: list[str],
) -> None:
    """Sets sharing.mode; ENABLE_PREFIX_SHARING counts only where the record says nothing."""
    name = f"{HOME}.mode"
    source = "enable_prefix_sharing" if is_explicit else "ENABLE_PREFIX_SHARING"
    if switch is False:
        leaves[name] = "off"
        notes.append(f"{name}=off: switched off by {source}")
    elif switch and leaves[name] == "auto":
        leaves[name] = "on"
        notes.append(f"{name}=on: switched on by {source}")
    if environ.get("PREFIX_SHARING_FORCE_ZERO_PREFIX", "").strip().lower() not in FALSE:
        leaves[name] = "off"
        notes.append(f"{name}=off: PREFIX_SHARING_FORCE_ZERO_PREFIX plans without shared prefixes")


def _observe(leaves: dict[str, Any], is_used: bool, environ: Mapping[str, str]) -> None:
    """The level of the [PS] lines: the key, else PREFIX_SHARING_OBSERVE, else summary for users of these switches."""
    name = f"{HOME}.observe"
    if leaves.get(name) is not None:
        return
    level = environ.get("PREFIX_SHARING_OBSERVE", "").strip().lower()
    if level and level not in LEVELS:
        raise PrefixSharingConfigError(
            f"PREFIX_SHARING_OBSERVE must be one of {', '.join(LEVELS)}, got {level!r}"
        )
    leaves[name] = level or ("summary" if is_used else "off")
