"""The table of rollout parameters: one test per row, and what a mapping means written out by hand."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml
from banyan.config import rollout_table, schema, table, types
from banyan.config.resolve import resolve
from banyan.config.rollout_table import for_server, for_training, from_flags, parse_size, rows
from banyan.errors import UserError
from shell_files import ROOT
from test_config import BASE

ROLLOUT, ENGINE = "actor_rollout_ref.rollout", "banyan.engine"
E, S = "engine", "server"
# name, as somebody writes it -> (dialect, value, what it is for the engine or the server, key and value in training)
MEANINGS = {
    "model": ("vllm", "dir", (S, "model", "dir"), None),
    "model_path": ("sglang", "dir", (S, "model", "dir"), None),
    "served_model_name": ("vllm", "a", (S, "served_model_name", ["a"]), None),
    "dtype": ("vllm", "float", (S, "dtype", "float32"), (f"{ROLLOUT}.dtype", "float32")),
    "load_format": (
        "vllm",
        "dummy",
        (S, "load_format", "dummy"),
        (f"{ROLLOUT}.load_format", "dummy"),
    ),
    "allow_dummy": ("banyan", True, (S, "allow_dummy", True), None),
    "skip_tokenizer_init": ("sglang", True, (S, "skip_tokenizer_init", True), None),
    "chat_template": ("vllm", "t.jinja", (S, "chat_template", "t.jinja"), None),
    "tool_call_parser": ("sglang", "hermes", (S, "tool_call_parser", "hermes"), None),
    "generation_config": ("vllm", "vllm", (S, "generation_config", "vllm"), None),
    "sampling_defaults": ("sglang", "openai", (S, "generation_config", "vllm"), None),
    "weight_version": ("sglang", "v7", (S, "weight_version", "v7"), None),
    "gpu_memory_utilization": (
        "vllm",
        0.7,
        (E, "memory_share", 0.7),
        (f"{ROLLOUT}.gpu_memory_utilization", 0.7),
    ),
    "kv_cache_memory_bytes": (
        "vllm",
        "2G",
        (E, "kv_bytes", 2 * 2**30),
        (f"{ENGINE}.kv_cache_memory_bytes", 2 * 2**30),
    ),
    "mem_fraction_static": (
        "sglang",
        0.6,
        (E, "mem_fraction_static", 0.6),
        (f"{ENGINE}.mem_fraction_static", 0.6),
    ),
    "host_kv_bytes": (
        "banyan",
        1 << 30,
        (E, "host_kv_bytes", 1 << 30),
        (f"{ENGINE}.host_kv_bytes", 1 << 30),
    ),
    "enable_prefix_caching": (
        "vllm",
        False,
        (E, "share_prefix", False),
        (f"{ROLLOUT}.enable_prefix_caching", False),
    ),
    "disable_radix_cache": (
        "sglang",
        True,
        (E, "share_prefix", False),
        (f"{ROLLOUT}.enable_prefix_caching", False),
    ),
    "enable_sleep_mode": (
        "vllm",
        False,
        (S, "enable_sleep_mode", False),
        (f"{ROLLOUT}.enable_sleep_mode", False),
    ),
    "enable_weights_cpu_backup": ("sglang", False, (S, "release_level", 2), None),
    "max_model_len": (
        "vllm",
        "1k",
        (E, "max_model_len", 1000),
        (f"{ROLLOUT}.max_model_len", 1000),
    ),
    "context_length": (
        "sglang",
        -1,
        (E, "max_model_len", 0),
        (f"{ROLLOUT}.max_model_len", None),
    ),
    "max_seq_len": (
        "trtllm",
        4096,
        (E, "max_model_len", 4096),
        (f"{ROLLOUT}.max_model_len", 4096),
    ),
    "max_num_seqs": ("vllm", 64, (E, "max_num_seqs", 64), (f"{ROLLOUT}.max_num_seqs", 64)),
    "max_running_requests": (
        "sglang",
        64,
        (E, "max_num_seqs", 64),
        (f"{ROLLOUT}.max_num_seqs", 64),
    ),
    "max_batch_size": ("trtllm", 64, (E, "max_num_seqs", 64), (f"{ROLLOUT}.max_num_seqs", 64)),
    "max_num_batched_tokens": (
        "vllm",
        "4K",
        (E, "max_num_batched_tokens", 4096),
        (f"{ROLLOUT}.max_num_batched_tokens", 4096),
    ),
    "max_num_tokens": (
        "trtllm",
        4096,
        (E, "max_num_batched_tokens", 4096),
        (f"{ROLLOUT}.max_num_batched_tokens", 4096),
    ),
    "chunked_prefill_size": (
        "sglang",
        1024,
        (E, "max_num_batched_tokens", 1024),
        (f"{ROLLOUT}.max_num_batched_tokens", 1024),
    ),
    "max_prefill_tokens": (
        "sglang",
        16384,
        (E, "max_num_batched_tokens", 16384),
        (f"{ROLLOUT}.max_num_batched_tokens", 16384),
    ),
    "enable_chunked_prefill": (
        "vllm",
        False,
        (E, "enable_chunked_prefill", False),
        (f"{ROLLOUT}.enable_chunked_prefill", False),
    ),
    "long_prefill_token_threshold": (
        "vllm",
        100,
        (E, "long_prefill_token_threshold", 100),
        (f"{ENGINE}.long_prefill_token_threshold", 100),
    ),
    "prefill_schedule_interval": (
        "vllm",
        4,
        (E, "prefill_schedule_interval", 4),
        (f"{ENGINE}.prefill_schedule_interval", 4),
    ),
    "watermark": ("vllm", 0.1, (E, "watermark", 0.1), (f"{ENGINE}.watermark", 0.1)),
    "schedule_conservativeness": (
        "sglang",
        1.3,
        (E, "schedule_conservativeness", 1.3),
        (f"{ENGINE}.schedule_conservativeness", 1.3),
    ),
    "scheduling_policy": (
        "vllm",
        "priority",
        (E, "policy", "priority"),
        (f"{ROLLOUT}.scheduling_policy", "priority"),
    ),
    "schedule_policy": (
        "sglang",
        "lpm",
        (E, "policy", "group"),
        (f"{ROLLOUT}.scheduling_policy", "group"),
    ),
    "max_num_queued_reqs": ("vllm", 9, (E, "max_num_queued_reqs", 9), None),
    "max_queued_requests": ("sglang", 9, (E, "max_num_queued_reqs", 9), None),
    "max_num_queued_tokens": ("vllm", "10k", (E, "max_num_queued_tokens", 10000), None),
    "grouped_attention": (
        "banyan",
        False,
        (E, "grouped_attention", False),
        (f"{ENGINE}.grouped_attention", False),
    ),
    "seed": ("vllm", 7, (S, "seed", 7), (f"{ROLLOUT}.seed", 7)),
    "random_seed": ("sglang", 7, (S, "seed", 7), (f"{ROLLOUT}.seed", 7)),
    "logprobs_mode": (
        "vllm",
        "processed_logprobs",
        (S, "logprobs_mode", "processed_logprobs"),
        (f"{ROLLOUT}.logprobs_mode", "processed_logprobs"),
    ),
    "max_logprobs": ("vllm", -1, (S, "max_logprobs", -1), None),
    "return_sampling_mask": ("vllm", True, (S, "return_sampling_mask", True), None),
    "stream_interval": ("sglang", 8, (S, "stream_interval", 8), None),
    "disable_log_stats": ("vllm", True, (S, "disable_log_stats", True), None),
    "log_level": ("sglang", "debug", (S, "log_level", "debug"), None),
    "log_level_http": ("sglang", "error", (S, "log_level_http", "error"), None),
    "uvicorn_log_level": ("vllm", "error", (S, "log_level_http", "error"), None),
}
SAMPLES = {"bool": True, "int": 3, "float": 0.5, "str": "some", "strs": ["some"], "any": {"a": 1}}
# Rows that convert into nothing or into a line.
BY_HAND = {
    "block_size",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
}


def sample(row) -> object:
    """A value of the row's type that is not its default."""
    spec = row.type.split(" ")[0]
    if spec == "one":
        choices = types.parse(row.type).choices
        return next(choice for choice in choices if choice != row.default)
    value = SAMPLES[spec]
    return (not row.default) if spec == "bool" and row.default is not None else value


def dialect_of(row) -> str:
    return row.of[0]


@pytest.mark.parametrize("name", [name for name, row in rows().items() if row.effect == "ignore"])
def test_what_has_no_effect_is_said_once(name):
    row = rows()[name]
    settings = for_server({name: sample(row)}, dialect_of(row))
    assert len(settings.notes) == 1
    assert settings.notes[0].startswith(f"{name}=")
    assert settings.notes[0].endswith(f"no effect, {row.meaning}")
    plain = for_server({})
    assert (settings.engine, settings.server) == (plain.engine, plain.server)
    assert for_training({name: sample(row)}, dialect_of(row))[0] == {}


@pytest.mark.parametrize("name", [name for name, row in rows().items() if row.effect == "reject"])
def test_what_is_refused_says_why_and_may_have_its_default(name):
    row = rows()[name]
    with pytest.raises(UserError) as caught:
        for_server({name: sample(row)}, dialect_of(row), "--")
    shown = rollout_table._show
    assert str(caught.value) == (
        f"--{name}: wanted {shown(row.default)}, got {shown(sample(row))}: {row.meaning}"
    )
    assert for_server({name: row.default}, dialect_of(row)).notes == []


@pytest.mark.parametrize("name", MEANINGS)
def test_what_a_name_means(name):
    dialect, value, (part, option, expected), training = MEANINGS[name]
    settings = for_server({name: value}, dialect)
    found = settings.engine if part == "engine" else settings.server
    assert found[option] == expected
    assert type(found[option]) is type(expected)
    assert settings.notes == []
    plain = for_server({})
    others = [
        key
        for key in (*plain.engine, *plain.server)
        if {**plain.engine, **plain.server}[key] != {**settings.engine, **settings.server}[key]
    ]
    assert others in ([option], [])  # [] where the value is the default
    tree, notes = for_training({name: value}, dialect)
    if training is None:
        assert tree == {}
        assert notes[0].endswith("a server's option, without effect here")
    else:
        assert tree == dict([training])
        key = schema.honoured()[training[0]]
        types.check(key.spec, training[1])


def test_every_row_and_every_name_is_tested():
    effects = {row.effect for row in rows().values()}
    assert effects == {"honoured", "map", "ignore", "reject"}
    by_meaning = {name for name, row in rows().items() if row.effect in ("honoured", "map")}
    assert by_meaning - set(MEANINGS) == BY_HAND
    spelled = {alias for row in rows().values() for _, alias in row.aliases if row.sets != "-"}
    assert spelled <= set(MEANINGS)


@pytest.mark.parametrize(("size", "said"), [(1, "raised to"), (16, "raised to"), (128, "taken as")])
def test_a_page_has_64_tokens(size, said):
    for name, dialect in (("block_size", "vllm"), ("page_size", "sglang")):
        settings = for_server({name: size}, dialect)
        assert settings.notes == [f"{name}={size}: {said} 64, the tokens of a KV page here"]
    assert for_server({"page_size": 64}, "sglang").notes == []


@pytest.mark.parametrize("prefix", ["", "prefill_", "decode_"])
def test_kernels_are_chosen_by_the_device(prefix):
    name = f"{prefix}attention_backend"
    assert "chosen by the device" in for_server({name: "fa3"}, "sglang").notes[0]
    with pytest.raises(UserError, match="wanted kernels of cpu, got ascend, which are npu's"):
        for_server({name: "ascend"}, "sglang")
    assert for_server({name: "ascend"}, "sglang", device="npu").notes


def test_the_smaller_of_sglangs_two_bounds_holds():
    both = {"chunked_prefill_size": 4096, "max_prefill_tokens": 16384}
    assert for_server(both, "sglang").engine["max_num_batched_tokens"] == 4096
    whole = {"chunked_prefill_size": -1, "max_prefill_tokens": 8192}
    engine = for_server(whole, "sglang").engine
    assert engine["enable_chunked_prefill"] is False
    assert engine["max_num_batched_tokens"] == 8192


def test_the_two_shares_of_the_memory_mean_different_things():
    vllm = for_server({"gpu_memory_utilization": 0.6}, "vllm").engine
    sglang = for_server({"mem_fraction_static": 0.6}, "sglang").engine
    assert (vllm["memory_share"], vllm["mem_fraction_static"]) == (0.6, 0)
    assert (sglang["memory_share"], sglang["mem_fraction_static"]) == (0.5, 0.6)
    with pytest.raises(UserError, match=r"wanted a number in \(0, 1\), got 1"):
        for_server({"mem_fraction_static": 1}, "sglang")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1k", 1000), ("1K", 1024), ("2M", 2 * 2**20), ("2.5m", 2500000), ("-1", -1), (17, 17)],
)
def test_sizes_have_suffixes(text, size):
    assert parse_size(text) == size


def test_values_of_the_wrong_kind_are_refused():
    for options, text in [
        ({"max_model_len": "2.5K"}, "max_model_len: wanted a whole number >= -1, got 2.5K"),
        ({"max_model_len": 0}, "wanted at least 2 tokens, or -1 for the model's limit, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs: wanted a whole number >= 1, got 0"),
        ({"dtype": "float16"}, "dtype: wanted bfloat16 or float32 (float16 has no kernels here)"),
        ({"logprobs_mode": "raw_logits"}, "wanted one of raw_logprobs, processed_logprobs"),
        ({"load_format": "gguf"}, "load_format: wanted one of auto, safetensors, dummy, got gguf"),
        ({"schedule_policy": "random"}, "schedule_policy: wanted one of fcfs, lpm, got random"),
        ({"enable_prefix_caching": 1}, "wanted true or false, got 1"),
    ]:
        with pytest.raises(UserError) as caught:
            for_server(options)
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("dialect", "name", "said"),
    [
        ("vllm", "max_num_seq", "the nearest known name is max_num_seqs"),
        ("sglang", "mem_fraction", "the nearest known name is mem_fraction_static"),
        ("vllm", "page_size", "that is another engine's name of block_size"),
        ("vllm", "mem_fraction_static", "unknown to vllm; another engine's"),
        ("banyan", "grouped_atention", "the nearest known name is grouped_attention"),
        ("trtllm", "max_batchsize", "the nearest known name is max_batch_size"),
        ("vllm", "guided_json", "unknown parameter of vllm"),
        ("sglang", "zzz", "unknown parameter of sglang (docs/guides/rollout_parameters.md"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(dialect, name, said):
    with pytest.raises(UserError) as caught:
        for_server({name: 1}, dialect, "engine_kwargs.")
    assert str(caught.value).startswith(f"engine_kwargs.{name}: unknown")
    assert said in str(caught.value)


def test_the_last_writer_wins_and_null_is_dropped():
    options = {"max_num_seqs": 8, "max_running_requests": 16, "watermark": None}
    settings = for_server(options)
    assert settings.engine["max_num_seqs"] == 16
    assert settings.engine["watermark"] == 0
    assert for_training({"max_num_seqs": None}, "vllm") == ({}, [])


def test_flags_read_as_on_a_command_line():
    options = from_flags(
        "--max-num-seqs 64 --no-enable-prefix-caching --page-size=16 --disable-log-stats "
        "--max-model-len -1 --served-model-name a,b --gpu-memory-utilization 0.3".split()
    )
    assert options == {
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "page_size": 16,
        "disable_log_stats": True,
        "max_model_len": "-1",
        "served_model_name": ["a", "b"],
        "gpu_memory_utilization": 0.3,
    }
    settings = for_server(options)
    assert settings.engine["max_model_len"] == 0
    assert settings.effective["max_model_len"] == -1
    for text, said in [
        ("--max-num-sqs 3", "--max_num_sqs: unknown parameter of banyan; the nearest"),
        ("--max-num-seqs", "--max-num-seqs: wanted a value, got nothing"),
        ("port", "port: wanted an option that begins with --"),
    ]:
        with pytest.raises(UserError) as caught:
            from_flags(text.split())
        assert said in str(caught.value)


def test_effective_values_name_every_parameter_once():
    settings = for_server({"schedule_policy": "fcfs", "mem_fraction_static": 0.5}, "sglang")
    assert settings.effective["scheduling_policy"] == "fcfs"
    assert settings.effective["mem_fraction_static"] == 0.5
    assert "schedule_policy" not in settings.effective
    assert len(settings.effective) == len(settings.engine) + len(settings.server)


def test_the_options_are_those_of_the_engine_with_its_defaults():
    text = (ROOT / "src/banyan/rollout/engine.h").read_text()
    body = text[text.index("struct EngineOptions {") :].split("\n};")[0]
    found = dict(re.findall(r"^  [\w:]+ (\w+) = ([^;]+);", body, re.MULTILINE))
    for inner in ("keep_pool", "max_undrained_bytes"):  # how the engine is used, not parameters
        found.pop(inner)
    options = for_server({}).engine
    assert set(options) == set(found)
    words = {"SchedulingPolicy::kGroup": "group"}
    for name, default in found.items():
        assert table.same(options[name], words.get(default, default)), name


# --- in a training run -----------------------------------------------------------------------------------------


def tree_of(*argv):
    return resolve([*BASE, *argv], environ={})


def error_of(*argv):
    with pytest.raises(UserError) as caught:
        tree_of(*argv)
    return str(caught.value)


def test_engine_kwargs_win_over_the_keys_of_the_rollout():
    config = tree_of(
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.max_num_seqs=32",
        f"+{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=8",
        f"+{ROLLOUT}.engine_kwargs.vllm.watermark=0.2",
        f"+{ROLLOUT}.engine_kwargs.vllm.block_size=16",
    )
    assert config[f"{ROLLOUT}.max_num_seqs"] == 8
    assert config[f"{ENGINE}.watermark"] == 0.2
    where = f"{ROLLOUT}.engine_kwargs.vllm.block_size=16"
    assert any(note.startswith(f"{where}: raised to 64") for note in config.notes)


def test_sglangs_meaning_of_its_names():
    config = tree_of(
        f"{ROLLOUT}.name=sglang",
        f"+{ROLLOUT}.engine_kwargs.sglang.mem_fraction_static=0.8",
        f"+{ROLLOUT}.engine_kwargs.sglang.schedule_policy=lpm",
    )
    assert config[f"{ENGINE}.mem_fraction_static"] == 0.8
    assert config[f"{ROLLOUT}.gpu_memory_utilization"] == 0.5
    assert config[f"{ROLLOUT}.scheduling_policy"] == "group"
    assert any("read as SGLang means them" in note for note in config.notes)


def test_names_that_nobody_reads_are_checked_and_said():
    kwargs = f"+{ROLLOUT}.engine_kwargs.sglang.max_running_requests=8"
    config = tree_of(f"{ROLLOUT}.name=vllm", kwargs)
    assert config[f"{ROLLOUT}.max_num_seqs"] == 256
    assert f"{ROLLOUT}.engine_kwargs.sglang: not read, {ROLLOUT}.name=vllm" in config.notes
    text = error_of(f"+{ROLLOUT}.engine_kwargs.sglang.max_runing_requests=8")
    assert text.startswith(f"{ROLLOUT}.engine_kwargs.sglang.max_runing_requests: unknown")
    assert "nearest known name is max_running_requests" in text


def test_the_engine_of_this_process_takes_every_name():
    config = tree_of(
        f"+{ROLLOUT}.engine_kwargs.banyan.max_running_requests=8",
        f"+{ROLLOUT}.engine_kwargs.banyan.grouped_attention=false",
    )
    assert config[f"{ROLLOUT}.max_num_seqs"] == 8
    assert config[f"{ENGINE}.grouped_attention"] is False


SERVERS = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://a:8000]"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([f"{ROLLOUT}.name=banyan"], "wanted vllm or sglang with actor_rollout_ref.rollout.server"),
        ([f"{ROLLOUT}.server_urls=[localhost:8000]"], "wanted addresses such as http://host:8000"),
        ([f"{ROLLOUT}.server_urls=[http://a,http://a/]"], "wanted each address once"),
        (["banyan.rollout.admin_urls=[http://a,http://b]"], "wanted one per server (1) or none"),
        ([f"{ROLLOUT}.calculate_log_probs=false"], "training compares the server's"),
        (
            [f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.temperature=0.7"],
            "wanted processed_logprobs with a temperature",
        ),
        (
            [f"{ROLLOUT}.top_p=0.9", "algorithm.rollout_correction.bypass_mode=true"],
            "wanted false with top_p or top_k on a vLLM server",
        ),
        (
            [
                f"{ROLLOUT}.name=sglang",
                f"{ROLLOUT}.top_k=20",
                "algorithm.rollout_correction.rollout_is=token",
            ],
            "it does not report the truncated law",
        ),
    ],
)
def test_mistakes_about_servers_get_one_line(argv, text):
    assert text in error_of(*SERVERS, *argv)


def test_servers_run_with_their_own_options():
    config = tree_of(*SERVERS, f"+{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=8")
    assert config[f"{ROLLOUT}.max_num_seqs"] == 256
    assert config[f"{ROLLOUT}.server_urls"] == ["http://a:8000"]
    assert any("options that they were started with" in note for note in config.notes)


def test_config_explain_knows_the_names(capsys):
    from banyan.cli.main import main

    kwargs = f"{ROLLOUT}.engine_kwargs.sglang.max_running_requests"
    assert main(["config", "explain", kwargs, "mem-fraction-static", "kv_cache_dtype"]) == 0
    first, second, third = capsys.readouterr().out.split("\n\n")
    assert f"honoured, sets {ROLLOUT}.max_num_seqs" in first
    assert "SGLang's meaning: weights and KV pages together" in second
    assert "refused unless it is auto" in third
    assert main(["config", "explain", f"{ROLLOUT}.engine_kwargs.vllm.page_size"]) == 2


def test_config_show_prints_the_effective_values(capsys):
    from banyan.cli.main import main

    argv = [f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}.engine_kwargs.sglang.page_size=1"]
    argv.append(f"+{ROLLOUT}.engine_kwargs.sglang.max_running_requests=5")
    assert main(["config", "show", *argv]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["actor_rollout_ref"]["rollout"]["max_num_seqs"] == 5
    assert "page_size=1: raised to 64" in out


def test_the_guide_holds_the_table():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/rollout_parameters.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
