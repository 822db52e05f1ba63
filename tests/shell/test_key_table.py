"""YAML, key table, core structs and verl's list of keys, compared in all directions."""

from __future__ import annotations

import csv
import re

import pytest
from banyan.config import schema, table
from banyan.config.arguments import is_known
from shell_files import ROOT

VERL_KEYS = ROOT.parent / "shared" / "specs" / "verl_keys.tsv"
# verl reads these although its YAML files do not hold them.
READ_BY_VERL = {
    "actor_rollout_ref.ref.model.path",
    "reward.reward_kwargs",
    "reward.custom_reward_function.reward_kwargs",
    "custom_reward_function.reward_kwargs",
}
# Servers that generate, and the engine of this process by its own names: verl has no key for either.
OWN = {
    "actor_rollout_ref.rollout.server_urls",
    "actor_rollout_ref.rollout.engine_kwargs.banyan",
    # verl has the node "server"; what is below it stands in its dataclass only.
    *(
        f"actor_rollout_ref.rollout.server.{leaf}"
        for leaf in "timeout max_attempts retry_delay max_connections max_start_wait_time".split()
    ),
    # verl hands what stands in this node to Megatron.
    *(
        f"actor_rollout_ref.actor.megatron.override_transformer_config.{leaf}"
        for leaf in (
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "moe_router_dtype",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "num_layers_per_virtual_pipeline_stage",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
    ),
}
# Fields of config.h whose key is not <node of the struct>.<field name>.
FIELD_KEYS = {
    "ref_model_path": "actor_rollout_ref.ref.model.path",
    "critic_model_path": "critic.model.path",
    "ref_fsdp_param_offload": "actor_rollout_ref.ref.fsdp_config.param_offload",
    "ref_megatron_param_offload": "actor_rollout_ref.ref.megatron.param_offload",
    "ref_tensor_model_parallel_size": "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
    "ref_sequence_parallel": "actor_rollout_ref.ref.megatron.sequence_parallel",
    "ref_context_parallel_size": "actor_rollout_ref.ref.megatron.context_parallel_size",
    "ref_ulysses_sequence_parallel_size": "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "ref_pipeline_model_parallel_size": "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    "ref_virtual_pipeline_model_parallel_size": (
        "actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size"
    ),
    "ref_expert_model_parallel_size": "actor_rollout_ref.ref.megatron.expert_model_parallel_size",
    "ref_expert_tensor_parallel_size": "actor_rollout_ref.ref.megatron.expert_tensor_parallel_size",
    "critic_gradient_checkpointing": "critic.model.enable_gradient_checkpointing",
    "sharing_margin": "actor_rollout_ref.sharing.margin",
    "train_batch_size": "data.train_batch_size",
    "max_prompt_length": "data.max_prompt_length",
    "kernels": "banyan.kernels",
    "offload_dir": "banyan.offload_dir",
    "fsdp_reduce_each_block": "banyan.fsdp_reduce_each_block",
    "ref_strategy": "actor_rollout_ref.ref.strategy",
    "force_old_log_prob": "banyan.force_old_log_prob",
    "partial_rollout": "banyan.partial_rollout",
    "max_nonfinite_steps": "banyan.max_nonfinite_steps",
    "max_failed_frac": "banyan.reward.max_failed_frac",
    "hybrid_engine": "actor_rollout_ref.hybrid_engine",
    "max_off_policy_threshold": "trainer.v1.sampler.max_off_policy_threshold",
}
# Structs that stand under a node of the actor and one of the critic.
OF_TWO_ROLES = {
    "OptimConfig": ("actor_rollout_ref.actor.optim", "critic.optim"),
    "FsdpConfig": ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp"),
    "MegatronConfig": ("actor_rollout_ref.actor.megatron", "critic.megatron"),
    "RecomputeConfig": tuple(
        f"{role}.megatron.override_transformer_config"
        for role in ("actor_rollout_ref.actor", "critic")
    ),
}
FILLED_BY_THE_SHELL = {"num_train_rows", "stop_ids"}
# Fields that are structs of their own.
STRUCTS = {
    "train",
    "validation",
    "optim",
    "policy_loss",
    "kl_ctrl",
    "pf_ppo",
    "filter_groups",
    "rollout_correction",
    "fsdp",
    "megatron",
    "recompute",
    "router",
    "separate_async",
    "stages",
}


def core_keys() -> set[str]:
    """Keys of config.h: struct comments name the node, fields are the leaves."""
    text = (ROOT / "src/banyan/core/config.h").read_text()
    keys: set[str] = set()
    for name, comment, body in re.findall(
        r"struct (\w+) \{(?:\s+// ([^\n]*))?\n(.*?)\n\};", text, re.DOTALL
    ):
        fields = re.findall(r"^  [\w:<>]+\s+(\w+);", body, re.MULTILINE)
        fields = [field for field in fields if field not in FILLED_BY_THE_SHELL]
        node = (comment or "").split(" ")[0].rstrip(",")
        if name == "SamplingConfig":
            nodes = ["actor_rollout_ref.rollout", "actor_rollout_ref.rollout.val_kwargs"]
            keys |= {f"{node}.{field}" for node in nodes for field in fields}
        elif name in OF_TWO_ROLES:
            keys |= {
                f"{node}.{field}"
                for node in OF_TWO_ROLES[name]
                for field in fields
                if field not in STRUCTS
            }
        elif name == "Config":
            keys |= {FIELD_KEYS[field] for field in fields if field in FIELD_KEYS}
        else:
            keys |= {f"{node}.{field}" for field in fields if field not in STRUCTS}
    return keys


def test_every_core_field_has_a_key_and_every_core_key_a_field():
    declared = {name for name, key in schema.honoured().items() if key.reader == "core"}
    assert core_keys() == declared


def test_every_shell_key_has_a_reader():
    sources = [path.read_text() for path in (ROOT / "python/banyan").rglob("*.py")]
    text = "\n".join(sources)
    for name, key in schema.honoured().items():
        if key.reader == "shell":
            leaf = name.rsplit(".", 1)[-1]
            assert re.search(rf"\b{leaf}\b", text) or "_max_samples" in leaf, (
                f"{name} has no reader"
            )


def test_a_key_is_honoured_or_in_the_table_never_both():
    assert not set(schema.honoured()) & set(table.entries())


def test_every_key_of_the_table_has_state_and_reason():
    for entry in table.entries().values():
        assert entry.state in ("equivalent", "refused")
        assert entry.reason
        assert entry.meaning


def test_keys_that_verl_lacks_live_in_their_own_places():
    if VERL_KEYS.is_file():
        verl = {row["key"] for row in read_verl_keys()}
        own = set(schema.honoured()) - verl - READ_BY_VERL - OWN
        own -= {"actor_rollout_ref.actor.policy_loss.dppo_ratio_cap"}  # T2
        assert all(name.startswith(("banyan.", "actor_rollout_ref.sharing.")) for name in own)
    assert schema.honoured()["banyan.kernels"].spec.choices == ("native", "aten")


@pytest.mark.skipif(
    not VERL_KEYS.is_file(), reason="verl_keys.tsv is not at hand (../shared/specs)"
)
def test_every_key_of_verl_is_known():
    rows = read_verl_keys()
    assert len(rows) > 1500
    assert [row["key"] for row in rows if not is_known(row["key"])] == []
    known = set(schema.honoured()) | schema.sections() | set(table.entries())
    assert [row["key"] for row in rows if row["key"] not in known] == []


@pytest.mark.skipif(
    not VERL_KEYS.is_file(), reason="verl_keys.tsv is not at hand (../shared/specs)"
)
def test_verls_own_defaults_are_never_refused():
    from banyan.config.table import _load

    for row in read_verl_keys():
        entry = table.entries().get(row["key"])
        plain = (
            "${" not in row["default"] and "<" not in row["default"] and ": " not in row["default"]
        )
        if entry and entry.state == "refused" and plain:
            assert entry.is_default(_load(row["default"])), row


def test_defaults_compare_as_values():
    entry = table.Entry("k", "refused", "1e-05 | [a, b] | null", "", "")
    assert entry.is_default(1e-5)
    assert entry.is_default(["a", "b"])
    assert entry.is_default(None)
    assert not entry.is_default(2e-5)
    assert not table.Entry("k", "refused", "false", "", "").is_default(True)
    assert not table.Entry("k", "refused", "1", "", "").is_default(True)


def test_a_free_form_node_governs_what_is_below_it():
    assert (
        table.find("actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.anything.deep").state
        == "equivalent"
    )
    assert table.find("actor_rollout_ref.rollout.nowhere.deep") is None


def read_verl_keys() -> list[dict[str, str]]:
    with VERL_KEYS.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
