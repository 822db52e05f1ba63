"""Users' complaints about rollout engines (specification of the rollout, section 12): one test each, named after it.

Most are a matter of the engine and stand beside it; the table in docs/guides/rollout.md says where, and what is
deferred because it needs parts that banyan lacks: a mixture of experts, an NPU, several ranks.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from rollout_live import write_model

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "rollout.md"
CASES = """
wake_order_no_double_weights resume_needs_free_memory release_returns_after_free
sleep2_refuses_until_sync sleep_frees_something no_stale_prefix_after_update
update_under_load_never_asserts pause_is_collective double_resume_noop pause_gates_submission
disk_update_resumes group_init_times_out kept_mass_corrects_ratio lr0_logprob_gap_constant
seed_ignores_batchmates seed_broadcast_uncorrelated abort_returns_partials resume_budget_reduced
ids_never_retokenised reload_reads_disk_again every_id_has_logprob added_stop_token_known
stop_string_mid_token npu_sleep_level_probe layout_transform_once derived_caches_refresh
prefix_identity_not_refcount
""".split()


def test_every_complaint_stands_in_the_guide_with_a_test_that_exists() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.+) \|$", GUIDE.read_text(), re.MULTILINE)
    covered = dict(rows)
    assert list(covered) == CASES
    for case, where in covered.items():
        if where.startswith("deferred: "):
            continue
        found = re.fullmatch(r"`([\w/.]+)::([\w.]+)`", where)
        assert found, f"{case}: wanted `file::test` or `deferred: why`, got {where}"
        file, name = found.groups()
        suite, _, test = name.rpartition(".")
        assert test == (case if suite else f"test_{case}")
        wanted = f"TEST({suite}, {test})" if suite else f"def {name}("
        assert wanted in (ROOT / file).read_text(), f"{case}: {file} has no test {name}"


@pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None, reason="the extension banyan._C is not built"
)
def test_ids_never_retokenised(tmp_path: Path) -> None:
    """Ids that no tokenizer would write side by side come back as they were sent and drawn."""
    from banyan import extension

    core = extension.load()
    model = core.Model.load(str(write_model(tmp_path / "model")))
    prompt = [300 - 1, 299, 40, 40, 41, 256, 65, 257] * 3
    found = []
    rows = [{"row": 0, "tokens": prompt, "n": 2}]
    params = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
    core.Engine(model).generate(rows, params, found.append)
    for trajectory in found:
        assert list(trajectory["prompt"]) == prompt
        second = []
        turn = prompt + list(trajectory["response"]) + [50, 51]
        core.Engine(model).generate([{"row": 1, "tokens": turn, "n": 1}], params, second.append)
        assert list(second[0]["prompt"])[: len(prompt) + 6] == prompt + list(trajectory["response"])
