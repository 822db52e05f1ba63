"""Every key that the documents for Ascend name, odd spellings included: it is honoured, equivalent or refused with its
reason, and nothing is silently ignored.
"""

from __future__ import annotations

import re

import pytest
from banyan.config import schema, spellings, table
from banyan.config.arguments import is_known
from banyan.config.resolve import resolve
from banyan.errors import UserError
from shell_files import ROOT
from test_config import BASE

ASCEND = ROOT.parent / "shared" / "specs" / "ascend.md"
A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
M = f"{A}.megatron"
O = f"{M}.override_transformer_config"  # noqa: E741  the letter of the documents
F = f"{A}.fsdp_config"
SHORT = {"A": A, "R": R, "M": M, "O": O, "F": F}
VLLM = f"{R}.engine_kwargs.vllm"
SGLANG = f"{R}.engine_kwargs.sglang"

HONOURED = [
    ("actor_rollout_ref.model.path", "model"),
    ("actor_rollout_ref.model.trust_remote_code", "true"),
    (f"{R}.gpu_memory_utilization", "0.6"),
    (f"{R}.enable_chunked_prefill", "true"),
    (f"{R}.max_model_len", "2048"),
    (f"{R}.max_num_seqs", "1024"),
    (f"{R}.max_num_batched_tokens", "16384"),
    (f"{R}.enable_prefix_caching", "true"),
    (f"{R}.n", "8"),
    (f"{R}.name", "vllm"),
    (f"{R}.name", "sglang"),
    (f"{R}.free_cache_engine", "true"),
    (f"{R}.tensor_model_parallel_size", "4"),
    (f"{R}.data_parallel_size", "2"),
    (f"{R}.expert_parallel_size", "8"),
    (f"{R}.load_format", "safetensors"),
    (f"{A}.strategy", "megatron"),
    (f"{F}.param_offload", "true"),
    (f"{F}.optimizer_offload", "true"),
    (f"{F}.forward_prefetch", "true"),
    (f"{F}.fsdp_size", "8"),
    (f"{F}.reshard_after_forward", "false"),
    (f"{M}.param_offload", "true"),
    (f"{M}.optimizer_offload", "true"),
    (f"{M}.tensor_model_parallel_size", "2"),
    (f"{M}.sequence_parallel", "true"),
    (f"{M}.context_parallel_size", "2"),
    (f"{A}.ulysses_sequence_parallel_size", "2"),
    (f"{M}.pipeline_model_parallel_size", "2"),
    (f"{M}.expert_model_parallel_size", "2"),
    (f"{M}.expert_tensor_parallel_size", "1"),
    (f"{M}.virtual_pipeline_model_parallel_size", "2"),
    (f"{O}.num_layers_in_first_pipeline_stage", "3"),
    (f"{O}.num_layers_in_last_pipeline_stage", "3"),
    (f"{O}.account_for_loss_in_pipeline_split", "true"),
    (f"{O}.account_for_embedding_in_pipeline_split", "true"),
    (f"{O}.recompute_granularity", "full"),
    (f"{O}.recompute_method", "uniform"),
    (f"{O}.recompute_num_layers", "1"),
    (f"{O}.moe_router_dtype", "fp64"),
    (f"{O}.moe_aux_loss_coeff", "0.01"),
    (f"{O}.moe_z_loss_coeff", "0.001"),
    ("data.shuffle", "false"),
    ("trainer.device", "npu"),
    (f"{A}.prefix_sharing_config.backend", "flash_atten_npu"),
]
EQUIVALENT = [
    ("trainer.n_gpus_per_node", "16"),
    (f"{A}.use_torch_compile", "false"),
    (f"{A}.checkpoint.strict", "false"),
    (f"{A}.entropy_from_logits_with_chunking", "true"),
    (f"{A}.entropy_from_logits_chunk_size", "1024"),
    (f"{F}.use_orig_params", "true"),
    (f"{F}.entropy_checkpointing", "true"),
    (f"{F}.forward_only", "true"),
    ("actor_rollout_ref.model.use_remove_padding", "true"),
    ("actor_rollout_ref.model.use_fused_kernels", "false"),
    (f"{M}.use_mbridge", "true"),
    (f"{M}.vanilla_mbridge", "true"),
    ("actor_rollout_ref.model.megatron.vanilla_mbridge", "false"),
    (f"{M}.use_remove_padding", "true"),
    ("actor_rollout_ref.ref.megatron.use_remove_padding", "true"),
    (f"{M}.use_distributed_optimizer", "true"),
    (f"{O}.sequence_parallel", "true"),
    (f"{O}.use_distributed_optimizer", "true"),
    (f"{O}.deallocate_pipeline_outputs", "true"),
    (f"{O}.persist_layer_norm", "true"),
    (f"{O}.moe_grouped_gemm", "true"),
    (f"{O}.use_flash_attn", "true"),
    (f"{O}.apply_rope_fusion", "true"),
    (f"{O}.use_fused_rotary_pos_emb", "true"),
    (f"{O}.use_fused_swiglu", "true"),
    (f"{O}.use_fused_rmsnorm", "true"),
    (f"{O}.use_fused_moe_token_permute_and_unpermute", "true"),
    (f"{O}.fused_permute_unpermute", "true"),
    (f"{O}.use_ascend_mc2", "true"),
    (f"{O}.moe_token_dispatcher_type", "alltoall"),
    (f"{O}.attention_backend", "auto"),
    (f"{O}.use_naive_l2norm", "true"),
    (f"{O}.use_triton_gdn", "true"),
    (f"{O}.use_ascend_gdn", "true"),
    (f"{R}.enforce_eager", "true"),
    (f"{R}.disable_log_stats", "false"),
    (f"{R}.skip_tokenizer_init", "true"),
    (f"{R}.checkpoint_engine.update_weights_bucket_megabytes", "4096"),
]
# engine_kwargs: (key, value, what is said); read with the engine's name
ENGINE = [
    (f"{VLLM}.compilation_config.cudagraph_mode", "FULL_DECODE_ONLY", "neither compiled"),
    (f"{VLLM}.compilation_config.cudagraph_capture_sizes", "[8,16]", "neither compiled"),
    (f"{VLLM}.additional_config.enable_cpu_binding", "true", "platform plug-in"),
    (f"{VLLM}.async_scheduling", "true", "next pass is planned"),
    (f"{VLLM}.mm_processor_cache_gb", "0", "text only"),
    (f"{SGLANG}.attention_backend", "ascend", "chosen by the device"),
    (f"{SGLANG}.deepep_mode", "auto", "go by all_to_all"),
    (f"{SGLANG}.moe_a2a_backend", "deepep", "go by all_to_all"),
    (f"{SGLANG}.enable_dp_attention", "true", "one process"),
    (f"{SGLANG}.chunked_prefill_size", "-1", None),
]
# (key, a value that banyan cannot give, a value that it takes)
REFUSED = [
    (f"{A}.router_replay.mode", "R2", "disabled"),
    (f"{R}.enable_rollout_routing_replay", "true", "false"),
    (f"{R}.quantization", "fp8", "null"),
    (f"{O}.context_parallel_algo", "hybrid_cp_algo", "kvallgather_cp_algo"),
    ("actor_rollout_ref.sharing.cp", "subtree", "allgather"),
    (f"{M}.use_dist_checkpointing", "true", "false"),
    (f"{M}.dist_checkpointing_path", "folder", "null"),
    (f"{O}.position_embedding_type", "learned_absolute", "rope"),
    (f"{O}.swiglu", "false", "true"),
    (f"{O}.normalization", "LayerNorm", "RMSNorm"),
    (f"{A}.profiler.tool_config.npu.level", "level1", "level0"),
    (f"{A}.profiler.tool_config.npu.level", "1", "0"),
]

# Other places of a size, and the one of a role that is read.
PLACES = [
    (f"{O}.context_parallel_size", "megatron.context_parallel_size"),
    (f"{A}.context_parallel_size", "megatron.context_parallel_size"),
    (f"{F}.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size"),
]


def resolved(*argv: str):
    return resolve([*BASE, *argv], "ppo_megatron_trainer", environ={})


def error_of(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        resolved(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("key", "value"), HONOURED)
def test_honoured(key, value):
    stages = f"{M}.pipeline_model_parallel_size"
    needed = [f"{stages}=2"] if "pipeline" in key and key != stages else []
    config = resolved(f"+{key}={value}", *needed)
    if key in schema.honoured():
        assert str(config[key]).lower() == value
    else:  # prefix_sharing_config: said with its home
        assert any(key in note and "actor_rollout_ref.sharing" in note for note in config.notes)


@pytest.mark.parametrize(("key", "value"), EQUIVALENT)
def test_equivalent(key, value):
    notes = [note for note in resolved(f"+{key}={value}").notes if key in note]
    home = spellings.verls(key)
    if home != key:
        assert notes == [f"{key}: verl's key is {home}"]
        notes = [note for note in resolved(f"+{key}={value}").notes if note.startswith(f"{home}=")]
    assert len(notes) == 1
    assert ": equivalent, " in notes[0]
    assert len(notes[0].split(": equivalent, ")[1]) > 10


@pytest.mark.parametrize(("key", "value", "said"), ENGINE)
def test_engine_kwargs(key, value, said):
    engine = "vllm" if key.startswith(VLLM) else "sglang"
    config = resolved(f"+{key}={value}", f"{R}.name={engine}", "trainer.device=npu")
    notes = [note for note in config.notes if ".".join(key.split(".")[:5]) in note]
    if said is None:
        assert config[f"{R}.enable_chunked_prefill"] is False
    else:
        assert len(notes) == 1
        assert "no effect" in notes[0]
        assert said in notes[0]


def test_kernels_of_another_device_are_refused():
    argv = [f"+{SGLANG}.attention_backend=ascend", f"{R}.name=sglang"]
    assert "wanted kernels of cpu, got ascend, which are npu's" in error_of(*argv)


@pytest.mark.parametrize(("key", "wrong", "right"), REFUSED)
def test_refused(key, wrong, right):
    text = error_of(f"+{key}={wrong}")
    assert text.startswith(spellings.verls(key))
    assert re.search(r"wanted .+, got .+: \w+", text), text  # the reason behind the value
    resolved(f"+{key}={right}")


@pytest.mark.parametrize("key", [key for key, _ in EQUIVALENT if key.startswith(O)])
def test_the_reference_takes_the_actors_override_keys(key):
    own = key.replace(A, "actor_rollout_ref.ref")
    value = dict(EQUIVALENT)[key]
    notes = [note for note in resolved(f"+{own}={value}").notes if own in note]
    assert len(notes) == 1
    assert "equivalent" in notes[0]


def test_two_homes_must_agree():
    for key in ("sequence_parallel", "use_distributed_optimizer"):
        resolved(f"+{M}.{key}=true", f"+{O}.{key}=true")
        text = error_of(f"+{M}.{key}=true", f"+{O}.{key}=false")
        assert text == f"{M}.{key} and {O}.{key}: wanted one value, got true and false"
    assert "wanted one value, got 2 and 4" in error_of(
        f"+{M}.context_parallel_size=2", f"+{O}.context_parallel_size=4"
    )
    two = ("fused_permute_unpermute", "use_fused_moe_token_permute_and_unpermute")
    assert "wanted one value" in error_of(f"+{O}.{two[0]}=true", f"+{O}.{two[1]}=false")


@pytest.mark.parametrize(("place", "leaf"), PLACES)
def test_a_size_of_context_parallel_may_stand_in_any_of_its_places(place, leaf):
    homes = [f"{role}.{leaf}" for role in (A, "actor_rollout_ref.ref", "critic")]
    config = resolved(f"+{place}=2")
    assert [config[home] for home in homes] == [2, 2, 2]
    assert f"{place}: read as {homes[0]}" in config.notes
    both = resolved(f"+{place}=2", f"+{homes[0]}=2")
    assert [both[home] for home in homes] == [2, 2, 2]
    assert "wanted one value, got 4 and 2" in error_of(f"+{place}=2", f"+{homes[0]}=4")
    assert resolved(f"+{place}={'false' if place.startswith(A + '.context') else 1}")[homes[0]] == 1


def test_mindspeeds_word_for_heads():
    config = resolved(
        f"+{M}.context_parallel_size=2", f"+{O}.context_parallel_algo=ulysses_cp_algo"
    )
    for role in (A, "actor_rollout_ref.ref", "critic"):
        assert config[f"{role}.megatron.context_parallel_size"] == 1
        assert config[f"{role}.ulysses_sequence_parallel_size"] == 2
    ranges = resolved(
        f"+{M}.context_parallel_size=2", f"+{O}.context_parallel_algo=megatron_cp_algo"
    )
    assert ranges[f"{M}.context_parallel_size"] == 2


def test_flash_attention_cannot_be_off_on_an_npu():
    resolved(f"+{O}.use_flash_attn=false")
    assert "attention there is flash attention" in error_of(
        f"+{O}.use_flash_attn=false", "trainer.device=npu"
    )


def test_an_unknown_override_key_is_an_error_with_the_nearest_name():
    text = error_of(f"+{O}.use_flash_atn=true")
    assert text == f"{O}.use_flash_atn: unknown key; the nearest known key is {O}.use_flash_attn"
    assert "unknown key" in error_of(
        "+actor_rollout_ref.ref.megatron.override_transformer_config.x=1"
    )


def test_an_engine_that_nobody_knows_is_an_error():
    assert "wanted one of banyan, vllm, sglang" in error_of(f"{R}.name=vlm")
    notes = [note for note in resolved(f"{R}.name=vllm").notes if f"{R}.name" in note]
    assert notes == [
        f"{R}.name=vllm: the engine of this process generates, since no {R}.server_urls are given; "
        "engine_kwargs.vllm are read as vLLM means them"
    ]


@pytest.mark.skipif(not ASCEND.is_file(), reason="ascend.md is not at hand (../shared/specs)")
def test_the_lists_above_hold_every_key_of_the_documents():
    text = ASCEND.read_text(encoding="utf-8")
    named = {
        f"{SHORT[node]}.{rest}".rstrip(".")
        for node, rest in re.findall(r"(?<![\w.])\+{0,2}([AROMF])\.([a-zA-Z_][\w.]*)", text)
    }
    named |= {
        key.rstrip(".")
        for key in re.findall(
            r"(?<![\w./])((?:actor_rollout_ref|data|trainer)\.[a-z_][\w.]*)", text
        )
    }
    sections = set(SHORT.values()) | {SGLANG}
    listed = {key for key, *_ in [*HONOURED, *EQUIVALENT, *ENGINE, *REFUSED, *PLACES]}
    assert len(named) > 80
    assert sorted(named - sections - listed) == []
    assert [key for key in sorted(named) if not is_known(key)] == []
    for key, *_ in EQUIVALENT + REFUSED:
        entry = table.find(spellings.verls(key))
        assert entry is not None, key
        assert entry.reason
