"""A model with experts: processes that share samples, and weights, give what one process gives."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from banyan.log.jsonl import by_step, read
from processes import run, small_run, torchrun
from shell_files import write_tiny_moe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
MAIN = ("-m", "banyan.trainer.main_ppo")
OVERRIDE = "actor_rollout_ref.actor.megatron.override_transformer_config"
STAGES = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"
TENSOR = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
PARTS = "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size"
EXPERTS = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
ROLLOUT = (
    "actor_rollout_ref.rollout.expert_parallel_size=2",
    "actor_rollout_ref.rollout.data_parallel_size=2",
)
COMPARED = (
    "actor/loss",
    "actor/grad_norm",
    "actor/moe_load_balance",
    "actor/moe_load_max",
    "actor/moe_z",
    "actor/moe_aux_loss",
    "critic/score/mean",
)


def arguments(tmp_path, num_layers: int = 2) -> list[str]:
    model = write_tiny_moe(tmp_path / "tiny", num_layers)
    return [
        *small_run(tmp_path, model, use_kl_loss="false", total_training_steps="2"),
        f"{OVERRIDE}.moe_aux_loss_coeff=0.05",
        f"{OVERRIDE}.moe_z_loss_coeff=0.01",
    ]


def check(tmp_path, given: list[str], commands: dict[str, list[str]]) -> None:
    """Two steps under each command are those of one process; `dealt` exchanges rows of experts."""
    found = {}
    for name, command in {"one": [sys.executable, *MAIN, *given], **commands}.items():
        done = run([*command, f"trainer.default_local_dir={tmp_path / name}"])
        assert done.returncode == 0, done.stdout
        found[name] = by_step(read(tmp_path / name / "metrics.jsonl"))
    for step in (1, 2):
        for metric in COMPARED:
            wanted = found["one"][step][metric]
            for name in commands:
                got = found[name][step][metric]
                assert got == pytest.approx(wanted, rel=1e-3, abs=1e-5), (name, step, metric)
        assert found["one"][step]["actor/grad_norm"] > 0
        assert found["one"][step]["actor/moe_aux_loss"] > 0
        assert found["dealt"][step]["comm/ep/all_to_all_bytes"] > 0


def test_a_run_over_two_processes_equals_one(tmp_path):
    (tmp_path / "tiny").mkdir()
    given = arguments(tmp_path)
    commands = {
        "data": torchrun(2, *MAIN, *given, *ROLLOUT),
        "fsdp": torchrun(2, *MAIN, *given, "actor_rollout_ref.actor.strategy=fsdp"),
        "dealt": torchrun(2, *MAIN, *given, f"{EXPERTS}=2"),
    }
    check(tmp_path, given, commands)
    sent = by_step(read(tmp_path / "data" / "metrics.jsonl"))[1]
    assert sent["comm/rollout_ep/all_to_all_bytes"] > 0


@pytest.mark.slow
def test_a_run_over_two_pipelines_that_share_experts_equals_one(tmp_path):
    (tmp_path / "tiny").mkdir()
    given = arguments(tmp_path, num_layers=4)
    dealt = torchrun(4, *MAIN, *given, f"{EXPERTS}=2", f"{STAGES}=2")
    check(tmp_path, given, {"dealt": dealt})


@pytest.mark.slow
def test_a_run_with_whole_experts_beside_tensor_parallel_equals_one(tmp_path):
    (tmp_path / "tiny").mkdir()
    given = arguments(tmp_path)
    dealt = torchrun(2, *MAIN, *given, f"{TENSOR}=2", f"{EXPERTS}=2", f"{PARTS}=1")
    check(tmp_path, given, {"dealt": dealt})
