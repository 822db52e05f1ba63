"""Arguments to a resolved tree: what is taken as verl takes it, and the one line that every mistake gets."""

from __future__ import annotations

import pytest
from banyan.config import types
from banyan.config.resolve import defaults, resolve
from banyan.errors import UserError

BASE = [
    "actor_rollout_ref.model.path=model",
    "data.train_files=train.parquet",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=5",
]


def error_of(*argv: str, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        resolve([*BASE, *argv], environ=kwargs.pop("environ", {}), **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tree_of(*argv: str, **kwargs):
    return resolve([*BASE, *argv], environ=kwargs.pop("environ", {}), **kwargs)


def test_a_published_command_of_verl_runs_unchanged():
    config = tree_of(
        "data.val_files=test.parquet",
        "data.train_batch_size=1024",
        "data.max_response_length=1024",
        "data.filter_overlong_prompts=True",
        "data.truncation='error'",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "algorithm.use_kl_in_reward=False",
        "trainer.critic_warmup=0",
        'trainer.logger=["console","wandb"]',
        "trainer.project_name=verl_grpo_example_gsm8k",
        "trainer.n_gpus_per_node=8",
        "trainer.nnodes=1",
        "trainer.save_freq=20",
        "trainer.test_freq=5",
        "trainer.total_epochs=15",
    )
    assert config["actor_rollout_ref.actor.optim.lr"] == 1e-6
    assert config["actor_rollout_ref.rollout.response_length"] == 1024
    assert config["actor_rollout_ref.model.enable_gradient_checkpointing"] is True
    assert config["actor_rollout_ref.actor.fsdp_config.param_offload"] is False
    assert config["actor_rollout_ref.ref.fsdp_config.param_offload"] is True
    said = "\n".join(config.notes)
    assert "actor_rollout_ref.rollout.name=vllm" in said
    reasons = [note.split(": equivalent, ")[1] for note in config.notes if ": equivalent, " in note]
    assert len(reasons) == len(set(reasons)) > 1  # one line for all keys of one reason


def test_a_plus_before_any_honoured_key_sets_it():
    from banyan.config import schema
    from banyan.config.arguments import normalise

    for name in schema.honoured():
        assert normalise([f"+{name}=1"]).overrides == [f"++{name}=1"], name


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_all_prefixes_set_a_known_key(prefix):
    assert tree_of(f"{prefix}data.seed=7")["data.seed"] == 7
    assert tree_of(f"{prefix}actor_rollout_ref.actor.use_torch_compile=False").notes


def test_a_removed_key_becomes_null_where_it_may():
    assert tree_of("data.seed=3", "~data.seed")["data.seed"] is None
    assert error_of("~data.train_batch_size").startswith(
        "data.train_batch_size: wanted a whole number >= 1, got null"
    )
    assert tree_of("~actor_rollout_ref.actor.use_torch_compile").notes == []


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (
            "actor_rollout_ref.rollout.temprature=1",
            "nearest known key is actor_rollout_ref.rollout.temperature",
        ),
        ("+actor_rollout_ref.actor.optim.learning_rat=1", "unknown key"),
        ("trainer.total_epoch=3", "nearest known key is trainer.total_epochs"),
        ("algorithm.norm_adv_by_std_in_grop=true", "algorithm.norm_adv_by_std_in_grpo"),
        ("data.train_file=x", "data.train_files"),
        ("actor_rollout_ref.actor.optim.lr=fast", "optim.lr: wanted a number >= 0, got fast"),
        ("actor_rollout_ref.actor.optim.lr=-1", "wanted a number >= 0, got -1"),
        (
            "actor_rollout_ref.actor.optim.betas=[0.9]",
            "wanted a list of 2 numbers in [0, 1), got [0.9]",
        ),
        ("data.train_batch_size=1.5", "data.train_batch_size: wanted a whole number >= 1, got 1.5"),
        ("data.shuffle=maybe", "data.shuffle: wanted true or false, got maybe"),
        ("trainer.save_freq=0", "wanted a whole number >= -1 other than 0, got 0"),
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "wanted one of token-mean, token-sum"),
        ("algorithm.adv_estimator=ga", "or FILE.py:FUNCTION, got ga"),
        ("actor_rollout_ref.actor.kl_loss_type=k1", "expected gradient is zero (T7)"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspoo", "wanted one of vanilla, dppo_tv"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode", "bypass_mode=true (T35)"),
        ("trainer=3", "it is a section"),
        (
            "actor_rollout_ref.rollout.pipeline_model_parallel_size=2",
            "wanted 1, got 2: this way of splitting a model is not built yet",
        ),
        ("critic.cliprange_value=0", "critic.cliprange_value: wanted a number > 0, got 0"),
        ("critic.model.lora_rank=8", "critic.model.lora_rank: wanted 0, got 8"),
        ("algorithm.kl_penalty=full", "algorithm.kl_penalty: wanted one of kl, k1"),
        ("algorithm.kl_ctrl.type=steady", "wanted one of fixed, adaptive, got steady"),
        ("algorithm.gamma=1.5", "algorithm.gamma: wanted a number in [0, 1], got 1.5"),
        ("algorithm.rollout_correction.loss_type=reinforce", "bypass_mode only replaces"),
        ("algorithm.rollout_correction.rollout_is=step", "wanted one of token, sequence or null"),
        ("actor_rollout_ref.model.lora_rank=8", "wanted 0, got 8"),
        ("data.train_files=${oc.env:HOME}", "resolvers are not evaluated"),
        ("data.seed=1,2", "wanted one value, got the sweep"),
        ("data.prompt_key=[", "cannot read '['"),
        ("nonsense", "wanted key=value"),
        ("+recipe=no_such_recipe", "Could not find 'recipe/no_such_recipe'"),
        ("data.train_files=[]", "wanted a file or a list of files"),
        ("actor_rollout_ref.rollout.n=1", "the advantage of a group of one is always 0 (T20)"),
        ("actor_rollout_ref.rollout.do_sample=false", "a greedy group is n equal samples"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "all samples would be equal (T5)"),
        (
            "actor_rollout_ref.rollout.max_model_len=100",
            "wanted >= prompt and response together (1024), got 100",
        ),
        (
            "actor_rollout_ref.rollout.prompt_length=100",
            "wanted data.max_prompt_length (512), got 100",
        ),
        (
            "trainer.resume_mode=resume_path",
            "trainer.resume_from_path: wanted a folder global_step_N",
        ),
        (
            "data.train_batch_size=300",
            "ppo_mini_batch_size: wanted a divisor of data.train_batch_size (300), got 256",
        ),
    ],
)
def test_a_mistake_gets_one_line(argument, text):
    assert text in error_of(argument)


def test_a_key_without_default_is_asked_for():
    with pytest.raises(
        UserError, match=r"data.train_files: wanted a file or a list of files, got nothing"
    ):
        resolve([], environ={})


def test_a_refused_key_may_carry_verls_default():
    config = tree_of(
        "actor_rollout_ref.rollout.pipeline_model_parallel_size=1", "critic.optim.lr=1e-5"
    )
    assert config.notes == []


def test_free_form_nodes_take_anything_below_them():
    config = tree_of(
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.any_option=1",
    )
    assert config["data.apply_chat_template_kwargs"] == {"enable_thinking": False}
    assert len(config.notes) == 1


def test_targets_are_carried_as_data():
    notes = tree_of("actor_rollout_ref.actor._target_=os.system").notes
    assert len(notes) == 1
    assert "never instantiates" in notes[0]


def test_recipes_set_keys_and_arguments_win():
    config = resolve(
        [
            "actor_rollout_ref.model.path=model",
            "data.train_batch_size=16",
            "+recipe=smollm2_arithmetic",
        ],
        environ={},
    )
    assert config["data.train_batch_size"] == 16
    assert config["actor_rollout_ref.rollout.n"] == 8


def test_a_mini_batch_larger_than_the_batch_is_one_mini_batch():
    config = tree_of("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    assert config["actor_rollout_ref.actor.ppo_mini_batch_size"] == 8
    said = [note for note in config.notes if "is one mini-batch" in note]
    assert len(said) == 1
    assert said[0].startswith("actor_rollout_ref.actor.ppo_mini_batch_size=16")


def test_older_homes_of_keys_are_moved():
    config = tree_of("custom_reward_function.path=r.py", "custom_reward_function.name=f")
    assert config["reward.custom_reward_function.path"] == "r.py"
    assert config["reward.custom_reward_function.name"] == "f"


def test_own_yaml_files_build_on_the_shipped_ones(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\ndata:\n  train_files: a.jsonl\nactor_rollout_ref:\n"
        "  model: {path: model}\n  rollout: {n: 4}\nalgorithm: {adv_estimator: grpo}\n"
    )
    config = resolve(["data.seed=1"], "mine", tmp_path, environ={})
    assert config["data.train_files"] == ["a.jsonl"]
    assert config["actor_rollout_ref.rollout.n"] == 4
    (tmp_path / "typo.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\ndata:\n  sead: 1\n"
    )
    with pytest.raises(
        UserError, match=r"data\.sead: unknown key; the nearest known key is data\.seed"
    ):
        resolve(BASE, "typo", tmp_path, environ={})
    (tmp_path / "text.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\ndata:\n  prompt_key: ${oc.env:HOME}\n"
    )
    with pytest.raises(UserError, match=r"data\.prompt_key: .*resolvers are not evaluated"):
        resolve(BASE, "text", tmp_path, environ={})


def test_verls_second_entry_point_keeps_the_end_of_long_prompts():
    second = resolve(BASE, "ppo_megatron_trainer", environ={})
    assert second["data.truncation"] == "left"
    assert second.tree == tree_of("data.truncation=left").tree
    explicit = resolve([*BASE, "data.truncation=error"], "ppo_megatron_trainer", environ={})
    assert explicit.tree == tree_of().tree


def test_defaults_hold_every_key_and_null_where_one_must_be_given():
    tree = defaults()
    assert tree["data"]["train_files"] is None
    assert tree["actor_rollout_ref"]["rollout"]["response_length"] == 512


def test_types_convert_and_refuse():
    assert types.check(types.parse("float >= 0"), 1) == 1.0
    assert types.check(types.parse("int|null >= 1"), None) is None
    assert types.check(types.parse("files"), "~x") == ["~x"]
    assert types.check(types.parse("str"), 12) == "12"
    assert types.check(types.parse("strs"), "console") == ["console"]
    for spec, value in [
        ("int", True),
        ("float in (0, 1)", 1.0),
        ("floats", 1.0),
        ("map", []),
        ("bool", 1),
    ]:
        with pytest.raises(ValueError):  # noqa: PT011  the text is what is wanted
            types.check(types.parse(spec), value)
    with pytest.raises(ValueError, match="unknown type"):
        types.parse("number")


def test_recompute_takes_the_names_of_verls_first_megatron_files():
    override = "actor_rollout_ref.actor.megatron.override_transformer_config"
    config = tree_of(
        "+actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_granularity=full",
        "+actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_method=block",
        "+critic.model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers=2",
    )
    assert config[f"{override}.recompute_granularity"] == "full"
    assert config[f"{override}.recompute_method"] == "block"
    assert config["critic.megatron.override_transformer_config.recompute_num_layers"] == 2
    assert "wanted one of full, selective or null, got half" in error_of(
        f"+{override}.recompute_granularity=half"
    )
