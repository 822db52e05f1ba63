"""The keys of `banyan sft` and `banyan dpo`: verl's SFT names, each honoured, equivalent or refused."""

from __future__ import annotations

import csv
import re

import pytest
from banyan.config import schema, table
from banyan.config.arguments import is_known
from banyan.config.resolve import resolve
from banyan.config.table import _load
from banyan.errors import UserError
from shell_files import ROOT

VERL_KEYS = ROOT.parent / "shared" / "specs" / "verl_keys.tsv"
BASE = ["data.train_files=rows.jsonl", "model.path=models/any"]
# Own keys stand under these nodes; the data keys are verl's older ones (prompt_key, response_key) and its RL trainer's.
OWN = ("banyan.", "sharing.", "preference.", "data.", "trainer.val_before_train")


def all_keys_of_verl() -> list[dict[str, str]]:
    with VERL_KEYS.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))


def verl_keys() -> list[dict[str, str]]:
    return [row for row in all_keys_of_verl() if "sft" in row["trainers"].split(",")]


def keys_of_its_other_engine() -> set[str]:
    """engine=megatron has the keys of an actor's Megatron node."""
    node = "actor_rollout_ref.actor.megatron."
    names = {row["key"] for row in all_keys_of_verl()} | set(schema.honoured("ppo"))
    return {name.replace(node, "engine.") for name in names if name.startswith(node)}


def core_keys() -> set[str]:
    """Keys of finetune_config.h and of the structs it takes from config.h."""
    folder = ROOT / "src/banyan/core"
    structs = {
        name: set(re.findall(r"^  [\w:<>]+\s+(\w+);", body, re.MULTILINE))
        for file in ("finetune_config.h", "config.h")
        for name, body in re.findall(
            r"struct (\w+) \{[^\n]*\n(.*?)\n\};", (folder / file).read_text(), re.DOTALL
        )
    }
    override = "engine.override_transformer_config"
    nodes = {
        "FinetuneDataConfig": "data",
        "PreferenceConfig": "preference",
        "FinetuneTrainerConfig": "trainer",
        "ModelConfig": "model",
        "OptimConfig": "optim",
        "FsdpConfig": "engine",
        "MegatronConfig": "engine",
        "StagesConfig": override,
        "RecomputeConfig": override,
    }
    keys = {f"{node}.{field}" for name, node in nodes.items() for field in structs[name]}
    keys -= {"engine.recompute"}  # a struct of its own
    text = (folder / "finetune_config.h").read_text()
    # Of SharingConfig what every trainer reads; the rest are switches of reinforcement learning.
    reader = (ROOT / "src/banyan/train/config_json.cpp").read_text().split("void read_sharing(")[1]
    shared = set(re.findall(r'node\.read\("(\w+)"', reader.split("\n}")[0]))
    keys |= {f"sharing.{field}" for field in shared}
    return keys | set(re.findall(r"// ((?:engine|banyan|sharing)\.\w+)", text))


def test_every_core_field_has_a_key_and_every_core_key_a_field():
    declared = {name for name, key in schema.honoured("dpo").items() if key.reader == "core"}
    assert core_keys() == declared


def test_a_key_is_honoured_or_in_the_table_never_both():
    for trainer in ("sft", "dpo"):
        assert not set(schema.honoured(trainer)) & set(table.entries(trainer))


def test_dpo_has_every_key_of_sft_and_its_own():
    sft, dpo = schema.honoured("sft"), schema.honoured("dpo")
    assert set(sft) < set(dpo)
    assert dpo["preference.objective"].default == "dpo"
    assert (sft["optim.lr"].default, dpo["optim.lr"].default) == (1e-5, 1e-6)


@pytest.mark.skipif(
    not VERL_KEYS.is_file(), reason="verl_keys.tsv is not at hand (../shared/specs)"
)
def test_every_sft_key_of_verl_is_known_and_none_is_invented():
    rows = verl_keys()
    assert len(rows) > 200
    known = set(schema.honoured("sft")) | set(table.entries("sft"))
    names = {row["key"] for row in rows}
    assert names - known == set()
    assert all(is_known(name, "sft") for name in names)
    names |= keys_of_its_other_engine()
    assert set(table.entries("sft")) <= names
    assert all(name.startswith(OWN) for name in set(schema.honoured("dpo")) - names)


@pytest.mark.skipif(
    not VERL_KEYS.is_file(), reason="verl_keys.tsv is not at hand (../shared/specs)"
)
def test_verls_own_defaults_are_never_refused():
    for row in verl_keys():
        entry = table.entries("sft").get(row["key"])
        plain = not any(mark in row["default"] for mark in ("${", "<", ": "))
        if entry and entry.state == "refused" and plain:
            assert entry.is_default(_load(row["default"])), row


def test_a_command_written_for_verl_resolves():
    config = resolve(
        [
            *BASE,
            "data.messages_key=chat",
            "data.train_batch_size=32",
            "data.micro_batch_size_per_gpu=4",
            "data.pad_mode=no_padding",
            "data.enable_thinking_default=none",
            "optim.lr=2e-5",
            "optim.warmup_style=cosine",
            "+optim.grad_clip=0.5",
            "engine=fsdp",
            "engine.fsdp_size=-1",
            "engine.use_torch_compile=true",
            "engine.ulysses_sequence_parallel_size=1",
            "model.use_remove_padding=true",
            "model.enable_gradient_checkpointing=true",
            "trainer.n_gpus_per_node=1",
            "trainer.max_ckpt_to_keep=2",
            "sharing.mode=false",  # how YAML reads a bare off
        ],
        "sft_trainer",
        trainer="sft",
    )
    assert config["data.messages_key"] == "chat"
    assert config["sharing.mode"] == "off"
    assert config["optim.lr_scheduler_type"] == "cosine"
    assert config["optim.clip_grad"] == 0.5
    assert config["data.enable_thinking_default"] is None
    said = "\n".join(config.notes)
    assert "optim.grad_clip: older name of optim.clip_grad" in said
    assert "engine.use_torch_compile=true: equivalent" in said


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("optim.lrr=1", "optim.lrr: unknown key; the nearest known key is optim.lr"),
        ("actor_rollout_ref.actor.optim.lr=1", "unknown key; the nearest known key is optim.lr"),
        ("model.lora_rank=8", "model.lora_rank: wanted 0, got 8: adapters are not built yet"),
        ("data.pad_mode=right", "data.pad_mode: wanted no_padding, got right"),
        ("optim.optimizer=Adagrad", "AdamW"),
        ("data.max_length=1", "data.max_length: wanted a whole number >= 2, got 1"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path: wanted a folder"),
        ("preference.beta=1", "preference.beta: unknown key"),
    ],
)
def test_wrong_keys_and_values_are_named(argument, text):
    with pytest.raises(UserError) as error:
        resolve([*BASE, argument], "sft_trainer", trainer="sft")
    assert text in str(error.value)


def test_dpo_checks_its_own_keys():
    config = resolve([*BASE, "preference.objective=ipo"], "dpo_trainer", trainer="dpo")
    assert config["preference.objective"] == "ipo"
    assert config["trainer.default_local_dir"] == "checkpoints/banyan/dpo"
    with pytest.raises(
        UserError, match=r"preference.objective: wanted one of dpo, ipo, reward_model"
    ):
        resolve([*BASE, "preference.objective=kto"], "dpo_trainer", trainer="dpo")
    with pytest.raises(UserError, match=r"banyan.data.each_turn: wanted false"):
        resolve([*BASE, "banyan.data.each_turn=true"], "dpo_trainer", trainer="dpo")
