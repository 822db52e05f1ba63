"""prefix-0501's record: every value, every error and every place of it (specification B1-B4)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from banyan.config.resolve import resolve
from banyan.config.sharing_record import (
    PrefixSharingConfig,
    PrefixSharingConfigError,
    PrefixSharingTypeError,
    read_override,
)
from banyan.errors import UserError
from test_config import BASE

ACTOR = "actor_rollout_ref.actor"
OVERRIDE = f"{ACTOR}.megatron.override_transformer_config"
RECORD = f"{ACTOR}.prefix_sharing_config"
MODE = "actor_rollout_ref.sharing.mode"
OBSERVE = "actor_rollout_ref.sharing.observe"
ENVIRONMENT_ERROR = "ENABLE_PREFIX_SHARING must be one of: 1/0, true/false, yes/no, on/off"


def record(raw=True, **environ) -> PrefixSharingConfig:
    return PrefixSharingConfig.from_raw(raw, environ)


def enabled(**values) -> PrefixSharingConfig:
    return record({"enable_prefix_sharing": True, **values})


def resolved(*argv: str, **environ):
    return resolve([*BASE, *argv], environ=environ)


def error_of(*argv: str, **environ) -> UserError:
    with pytest.raises(UserError) as caught:
        resolved(*argv, **environ)
    assert "\n" not in str(caught.value)
    return caught.value


def test_defaults():
    assert PrefixSharingConfig() == record(None)
    assert PrefixSharingConfig() == record({})
    assert not PrefixSharingConfig().enable_prefix_sharing
    assert (PrefixSharingConfig().min_prefix_len, PrefixSharingConfig().min_group_size) == (1, 2)


def test_raw_forms():
    assert record(True).enable_prefix_sharing
    assert not record(False).enable_prefix_sharing
    fields = SimpleNamespace(enable_prefix_sharing=True, min_prefix_len=4, _private="ignored")
    assert record(fields) == enabled(min_prefix_len=4)
    nested = {"enable_prefix_sharing": True, "min_prefix_len": 4, "min_group_size": 3}
    assert (record(nested).min_prefix_len, record(nested).min_group_size) == (4, 3)


@pytest.mark.parametrize("raw", ["yes", 3, 1.5, ["trie"], int])
def test_raw_of_another_type_is_a_type_error(raw):
    with pytest.raises(TypeError, match="wanted null, true, false or a mapping"):
        record(raw)


@pytest.mark.parametrize("key", ["enabled", "min_prefix_length", "detectors", "x"])
def test_an_unknown_key_is_a_type_error(key):
    with pytest.raises(TypeError, match=f"{key}: unknown key") as caught:
        record({key: True})
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize("text", ["1", "true", "YES", " on ", "y", "True"])
def test_environment_switches_on(text):
    assert record(None, ENABLE_PREFIX_SHARING=text).enable_prefix_sharing


@pytest.mark.parametrize("text", ["0", "false", "No", "off", "n", ""])
def test_environment_switches_off(text):
    assert not record(None, ENABLE_PREFIX_SHARING=text).enable_prefix_sharing


def test_environment_text_is_checked_and_an_explicit_value_wins():
    with pytest.raises(PrefixSharingConfigError) as caught:
        record(None, ENABLE_PREFIX_SHARING="maybe")
    assert str(caught.value) == ENVIRONMENT_ERROR
    assert isinstance(caught.value, ValueError)
    assert record({"min_prefix_len": 2}, ENABLE_PREFIX_SHARING="1").enable_prefix_sharing
    for text in ("0", "maybe"):
        assert record({"enable_prefix_sharing": True}, ENABLE_PREFIX_SHARING=text)
    assert not record(
        {"enable_prefix_sharing": False}, ENABLE_PREFIX_SHARING="1"
    ).enable_prefix_sharing


BAD_VALUES = [
    ({"detector": "prompt"}, "detector"),
    ({"backend": "flash"}, "Unknown backend 'flash'"),
    ({"boundary_strategy": "boundary_token"}, "boundary_strategy"),
    ({"boundary_strategy": "strict_suffix"}, "boundary_strategy"),
    ({"min_prefix_len": 0}, "min_prefix_len"),
    ({"min_prefix_len": "3"}, "min_prefix_len"),
    ({"min_group_size": 1}, "min_group_size"),
]
BAD_MODELS = [
    ({}, {"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size=0"),
    ({}, {"pipeline_parallel_size": 0}, "pipeline_model_parallel_size=0"),
    ({}, {"context_parallel_size": 2}, "context_parallel_size=2"),
    ({}, {"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size=2"),
    ({}, {"num_layers_per_virtual_pipeline_stage": 8}, "num_layers_per_virtual_pipeline_stage=8"),
    ({}, {"apply_rope_fusion": True}, "apply_rope_fusion=True"),
    ({}, {"fused_single_qkv_rope": True}, "fused_single_qkv_rope=True"),
    ({"model_type": "vlm"}, {}, "model_type=vlm"),
    ({"integrate_mode": "verl_fsdp"}, {}, "integrate_mode"),
]


@pytest.mark.parametrize(("values", "text"), BAD_VALUES)
def test_bad_values(values, text):
    with pytest.raises(PrefixSharingConfigError, match=text):
        enabled(**values).validate()
    with pytest.raises(PrefixSharingConfigError, match=text):
        enabled(**values).validate_for_engine(True, "verl_megatron_actor")
    record({"enable_prefix_sharing": False, **values}).validate()  # no check at all


@pytest.mark.parametrize(("values", "model", "text"), BAD_MODELS)
def test_bad_models(values, model, text):
    for form in (model, SimpleNamespace(**model)):
        with pytest.raises(PrefixSharingConfigError, match=text):
            enabled(**values).validate(form)
        record({"enable_prefix_sharing": False, **values}).validate(form)


def test_disabled_skips_every_check():
    everything = {key: value for values, _ in BAD_VALUES for key, value in values.items()}
    layout = {key: value for _, model, _ in BAD_MODELS for key, value in model.items()}
    off = record({**everything, "enable_prefix_sharing": False})
    off.validate(layout)
    off.validate_for_engine(False, "anything")


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_pipeline_tensor_and_sequence_parallel_layouts_pass(stages, ranks):
    enabled().validate(
        {
            "pipeline_model_parallel_size": stages,
            "tensor_model_parallel_size": ranks,
            "sequence_parallel": ranks > 1,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
        }
    )


def test_supported_values_of_the_record():
    enabled(supported_cp_size=2).validate({"context_parallel_size": 2})
    with pytest.raises(PrefixSharingConfigError, match="context_parallel_size=1"):
        enabled(supported_cp_size=2).validate({})
    enabled(supported_rope_fusion=True, supported_fused_qkv_rope=True).validate(
        {"apply_rope_fusion": True, "fused_single_qkv_rope": True}
    )
    for backend in ("torch_ref", "flash_atten_gpu", "flash_atten_npu", "flash_atten_npu_tnd"):
        enabled(backend=backend).validate()
    for backend in ("reference", "aten", "auto"):
        enabled(backend=backend).validate()
    enabled(detector="trie_online").validate()


def test_banyans_own_engine_lifts_the_checks_of_the_model():
    own = enabled(integrate_mode="banyan")
    own.validate({"context_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2})
    own.validate({"apply_rope_fusion": True, "num_layers_per_virtual_pipeline_stage": 2})
    with pytest.raises(PrefixSharingConfigError, match="pipeline_model_parallel_size=0"):
        own.validate({"pipeline_model_parallel_size": 0})


def test_the_engine_form_wants_the_packed_layout():
    enabled().validate_for_engine(True, "verl_megatron_actor")
    with pytest.raises(PrefixSharingConfigError, match="use_remove_padding=False"):
        enabled().validate_for_engine(False, "verl_megatron_actor")


def test_the_engine_form_is_read_from_mappings_and_objects():
    raw = {"enable_prefix_sharing": True}
    assert read_override({"override_transformer_config": {"prefix_sharing_config": raw}}) == raw
    node = SimpleNamespace(override_transformer_config=SimpleNamespace(prefix_sharing_config=raw))
    assert read_override(node) == raw
    assert read_override({"prefix_sharing_config": raw}) == raw
    assert read_override({"override_transformer_config": {}, "prefix_sharing_config": raw}) is None
    assert read_override({}) is None
    assert read_override(None) is None


@pytest.mark.parametrize(
    "place",
    [
        RECORD,
        f"{OVERRIDE}.prefix_sharing_config",
        f"{ACTOR}.megatron.prefix_sharing_config",
        f"{ACTOR}.fsdp_config.prefix_sharing_config",
    ],
)
def test_every_place_is_read(place):
    config = resolved(f"+{place}.enable_prefix_sharing=true", f"+{place}.min_prefix_len=8")
    assert config[MODE] == "on"
    assert config["actor_rollout_ref.sharing.min_prefix_len"] == 8
    assert config[OBSERVE] == "summary"
    assert resolved(f"+{place}=true")[MODE] == "on"
    assert resolved(f"+{place}=false")[MODE] == "off"
    assert resolved(f"+{place}=null")[MODE] == "auto"
    mapping = "{enable_prefix_sharing: true, min_group_size: 3}"
    assert resolved(f"+{place}={mapping}")["actor_rollout_ref.sharing.min_group_size"] == 3
    assert isinstance(error_of(f"+{place}=text"), PrefixSharingTypeError)
    assert "enabled: unknown key" in str(error_of(f"+{place}.enabled=true"))


def test_the_override_node_goes_before_the_engine_node():
    argv = [
        f"+{ACTOR}.megatron.prefix_sharing_config.enable_prefix_sharing=false",
        f"+{OVERRIDE}.prefix_sharing_config.enable_prefix_sharing=true",
    ]
    assert resolved(*argv)[MODE] == "on"
    # An override node without the record leaves none, and that is said.
    config = resolved(argv[0], f"+{OVERRIDE}.use_flash_attn=true")
    assert config[MODE] == "auto"
    assert any("not read" in note and "belongs there" in note for note in config.notes)
    both = resolved(f"+{RECORD}=true", f"+{OVERRIDE}.prefix_sharing_config=false")
    assert both[MODE] == "on"
    assert any(f"not read, {RECORD} is given" in note for note in both.notes)


@pytest.mark.parametrize(("values", "text"), BAD_VALUES)
def test_bad_values_end_a_command_in_one_line(values, text):
    ((key, value),) = values.items()
    error = error_of(f"+{RECORD}.{key}={value!r}", ENABLE_PREFIX_SHARING="1")
    assert isinstance(error, ValueError)
    assert text in str(error)
    assert str(error).startswith(RECORD)
    assert resolved(f"+{RECORD}.{key}={value!r}", ENABLE_PREFIX_SHARING="0")[MODE] == "off"


def test_the_models_checks_apply_where_the_record_asks_for_verls_integration():
    fused = f"+{OVERRIDE}.apply_rope_fusion=true"
    assert resolved(fused, f"+{RECORD}=true")[MODE] == "on"
    error = error_of(
        fused,
        f"+{RECORD}.enable_prefix_sharing=true",
        f"+{RECORD}.integrate_mode=verl_megatron_actor",
    )
    assert "apply_rope_fusion=True" in str(error)


def test_the_switch_and_its_variable():
    assert resolved()[MODE] == "auto"
    assert resolved()[OBSERVE] == "off"
    assert resolved(ENABLE_PREFIX_SHARING="1")[MODE] == "on"
    assert resolved(ENABLE_PREFIX_SHARING=" No ")[MODE] == "off"
    assert resolved(f"{MODE}=on", ENABLE_PREFIX_SHARING="0")[MODE] == "off"
    assert resolved(f"{MODE}=off", ENABLE_PREFIX_SHARING="1")[MODE] == "off"
    assert (
        resolved(f"+{RECORD}.enable_prefix_sharing=true", ENABLE_PREFIX_SHARING="0")[MODE] == "on"
    )
    assert str(error_of(ENABLE_PREFIX_SHARING="maybe")) == ENVIRONMENT_ERROR


def test_the_backend_and_its_variable():
    assert resolved(f"+{RECORD}.backend=aten")["banyan.kernels"] == "aten"
    assert resolved(f"+{RECORD}.backend=flash_atten_gpu")["banyan.kernels"] == "native"
    assert resolved(PREFIX_SHARING_BACKEND="reference")["banyan.kernels"] == "aten"
    explicit = resolved(f"+{RECORD}.backend=auto", PREFIX_SHARING_BACKEND="aten")
    assert explicit["banyan.kernels"] == "native"
    error = error_of(PREFIX_SHARING_BACKEND="cuda")
    assert str(error).startswith("PREFIX_SHARING_BACKEND: Unknown backend 'cuda'")


def test_the_level_of_the_log():
    assert resolved(PREFIX_SHARING_OBSERVE=" Layer ")[OBSERVE] == "layer"
    assert resolved(ENABLE_PREFIX_SHARING="1")[OBSERVE] == "summary"
    assert resolved(ENABLE_PREFIX_SHARING="0")[OBSERVE] == "summary"
    assert resolved(f"{OBSERVE}=debug", PREFIX_SHARING_OBSERVE="layer")[OBSERVE] == "debug"
    assert resolved(f"{OBSERVE}=off", ENABLE_PREFIX_SHARING="1")[OBSERVE] == "off"
    assert "PREFIX_SHARING_OBSERVE must be one of" in str(error_of(PREFIX_SHARING_OBSERVE="all"))
    assert "sharing.observe: wanted one of off, summary" in str(error_of(f"{OBSERVE}=all"))


def test_yamls_bare_off_is_a_name(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\nactor_rollout_ref:\n"
        "  sharing: {mode: off, observe: off}\n"
    )
    config = resolve(BASE, "mine", tmp_path, environ={"ENABLE_PREFIX_SHARING": "1"})
    assert (config[MODE], config[OBSERVE]) == ("off", "off")


@pytest.mark.parametrize(
    "name",
    [
        "PREFIX_SHARING_ASYNC_PREFETCH",
        "PREFIX_SHARING_DIAG_DUMP",
        "PREFIX_SHARING_DIAG_SKIP_RESTORE",
        "PROFILE_OUTPUT_DIR",
        "USE_FIXED_ROLLOUT",
        "USE_SYNTHETIC_PREFIX",
    ],
)
def test_variables_without_a_reader_are_said_once(name):
    notes = [note for note in resolved(**{name: "x"}).notes if note.startswith(f"{name}=x: ")]
    assert len(notes) == 1
    assert not any(name in note for note in resolved().notes)


def test_planning_without_shared_prefixes():
    config = resolved(ENABLE_PREFIX_SHARING="1", PREFIX_SHARING_FORCE_ZERO_PREFIX="1")
    assert config[MODE] == "off"
    assert any("plans without shared prefixes" in note for note in config.notes)
    assert resolved(ENABLE_PREFIX_SHARING="1", PREFIX_SHARING_FORCE_ZERO_PREFIX="0")[MODE] == "on"


def test_the_precision_switch_verifies_the_first_update():
    assert resolved()["actor_rollout_ref.sharing.verify"] == "off"
    config = resolved(f"+{RECORD}.validate_precision=true")
    assert config["actor_rollout_ref.sharing.verify"] == "first"
    assert any("from validate_precision" in note for note in config.notes)


def test_the_detector_of_the_view():
    config = resolved(f"+{RECORD}.detector=trie_online")
    assert config["actor_rollout_ref.sharing.detector"] == "trie_online"
