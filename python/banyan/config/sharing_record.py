"""prefix-0501's record `prefix_sharing_config`: its keys, defaults and checks (specification B2, B4).

A raw record is null, true, false, a mapping or an object with such fields; fields that begin with "_" are ignored. An
explicit `enable_prefix_sharing` wins over the environment variable ENABLE_PREFIX_SHARING. Where it says no, nothing is
checked. `integrate_mode` "banyan" stands for banyan's own engine, which runs layouts that prefix-0501 refuses.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from banyan.errors import UserError

NAME = "prefix_sharing_config"
OVERRIDE = "override_transformer_config"
TRUE = ("1", "true", "yes", "on", "y")
FALSE = ("0", "false", "no", "off", "n", "")
_BACKENDS = ("torch_ref", "flash_atten_gpu", "flash_atten_npu", "flash_atten_npu_tnd")
_OWN_BACKENDS = ("reference", "aten", "auto")


class PrefixSharingConfigError(UserError, ValueError):
    """A value of the record, or of the model's configuration beside it, that prefix sharing cannot take."""


class PrefixSharingTypeError(UserError, TypeError):
    """A key that the record does not have, or a record that is neither null, a bool nor a mapping."""


@dataclass(frozen=True)
class PrefixSharingConfig:
    """The record with prefix-0501's defaults."""

    enable_prefix_sharing: bool = False
    detector: str = "trie"
    backend: str = "torch_ref"
    min_prefix_len: int = 1
    min_group_size: int = 2
    boundary_strategy: str = "prefix_last_restore"
    supported_cp_size: int = 1
    supported_rope_fusion: bool = False
    supported_fused_qkv_rope: bool = False
    validate_precision: bool = False
    integrate_mode: str = "verl_megatron_actor"
    model_type: str = "text_only_causal_lm"

    @classmethod
    def from_raw(cls, raw: Any, environ: Mapping[str, str]) -> PrefixSharingConfig:
        """From null, a bool, a mapping or an object with such fields. Raises PrefixSharingTypeError."""
        given = as_mapping(raw)
        if "enable_prefix_sharing" not in given:
            given["enable_prefix_sharing"] = bool(environment_switch(environ))
        return cls(**given)

    def validate(self, model: Any = None) -> None:
        """Checks the record and the model's parallel layout (a mapping or an object), only if enabled."""
        if not self.enable_prefix_sharing:
            return
        self._check_values()
        if self.integrate_mode not in ("verl_megatron_actor", "banyan"):
            raise PrefixSharingConfigError(
                f"integrate_mode must be verl_megatron_actor or banyan, got {self.integrate_mode!r}"
            )
        stages = _field(model, "pipeline_model_parallel_size", None)
        if stages is None:
            stages = _field(model, "pipeline_parallel_size", 1)
        if not isinstance(stages, int) or stages < 1:
            raise PrefixSharingConfigError(
                f"pipeline_model_parallel_size={stages}: wanted at least 1"
            )
        if self.integrate_mode != "banyan":
            self._check_model(model)

    def validate_for_engine(self, use_remove_padding: bool, integrate_mode: str) -> None:
        """Checks of the engine form: the record's values, and the packed layout unless banyan's engine runs."""
        if not self.enable_prefix_sharing:
            return
        self._check_values()
        if not use_remove_padding and integrate_mode != "banyan":
            raise PrefixSharingConfigError(
                "use_remove_padding=False: prefix sharing needs the packed layout"
            )

    def _check_values(self) -> None:
        _one_of("detector", self.detector, ("trie", "trie_online"))
        if self.backend not in (*_BACKENDS, *_OWN_BACKENDS):
            raise PrefixSharingConfigError(
                f"Unknown backend {self.backend!r}: backend must be one of "
                f"{', '.join((*_BACKENDS, *_OWN_BACKENDS))}"
            )
        _one_of("boundary_strategy", self.boundary_strategy, ("prefix_last_restore",))
        for key, least in (("min_prefix_len", 1), ("min_group_size", 2)):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PrefixSharingConfigError(
                    f"{key} must be an integer >= {least}, got {value!r}"
                )

    def _check_model(self, model: Any) -> None:
        """What prefix-0501 cannot run and banyan's own engine can."""

        def refuse(key: str, value: Any, wanted: str) -> None:
            raise PrefixSharingConfigError(f"{key}={value}: wanted {wanted} with prefix sharing")

        for key, wanted in (
            ("virtual_pipeline_model_parallel_size", (None, 1)),
            ("num_layers_per_virtual_pipeline_stage", (None,)),
        ):
            value = _field(model, key, None)
            if value not in wanted:
                refuse(key, value, " or ".join(str(item) for item in wanted))
        context = _field(model, "context_parallel_size", 1)
        if context != self.supported_cp_size:
            refuse("context_parallel_size", context, f"{self.supported_cp_size}")
        for key, supported in (
            ("apply_rope_fusion", self.supported_rope_fusion),
            ("fused_single_qkv_rope", self.supported_fused_qkv_rope),
        ):
            if _field(model, key, False) and not supported:
                refuse(key, True, "False")
        if self.model_type != "text_only_causal_lm":
            refuse("model_type", self.model_type, "text_only_causal_lm")


KEYS = tuple(field.name for field in fields(PrefixSharingConfig))


def as_mapping(raw: Any) -> dict[str, Any]:
    """The explicit keys of a raw record. Raises PrefixSharingTypeError for another type or an unknown key."""
    if raw is None:
        return {}
    if isinstance(raw, bool):
        return {"enable_prefix_sharing": raw}
    if isinstance(raw, Mapping):
        given = dict(raw)
    elif hasattr(raw, "__dict__") and not isinstance(raw, type):
        given = {key: value for key, value in vars(raw).items() if not key.startswith("_")}
    else:
        raise PrefixSharingTypeError(
            f"{NAME}: wanted null, true, false or a mapping, got {raw!r} ({type(raw).__name__})"
        )
    for key in given:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.4)
            hint = f"; the nearest known key is {near[0]}" if near else ""
            raise PrefixSharingTypeError(f"{NAME}.{key}: unknown key{hint}")
    for key in ("enable_prefix_sharing", "validate_precision"):
        if not isinstance(given.get(key, False), bool):
            raise PrefixSharingTypeError(f"{NAME}.{key}: wanted true or false, got {given[key]!r}")
    return given


def environment_switch(environ: Mapping[str, str]) -> bool | None:
    """What ENABLE_PREFIX_SHARING says, None where it is not set. Raises PrefixSharingConfigError."""
    if "ENABLE_PREFIX_SHARING" not in environ:
        return None
    text = environ["ENABLE_PREFIX_SHARING"].strip().lower()
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise PrefixSharingConfigError(
        "ENABLE_PREFIX_SHARING must be one of: 1/0, true/false, yes/no, on/off"
    )


def read_override(engine: Any) -> Any:
    """The raw record of an engine configuration: its override node's; without such a node, its own."""
    override = _field(engine, OVERRIDE, None)
    return _field(engine if override is None else override, NAME, None)


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PrefixSharingConfigError(
            f"{key} must be {'one of ' if len(allowed) > 1 else ''}{', '.join(allowed)}, got {value!r}"
        )


def _field(node: Any, name: str, default: Any) -> Any:
    """An entry of a mapping or an attribute of an object."""
    if node is None:
        return default
    if isinstance(node, Mapping):
        return node.get(name, default)
    return getattr(node, name, default)
