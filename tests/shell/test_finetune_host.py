"""The host of training on given text: rows in a resumable order, examples as buffers, counts for the core."""

from __future__ import annotations

import json

import pytest
from banyan.config.resolve import resolve
from banyan.errors import UserError
from banyan.log.loggers import RunLog
from banyan.trainer import finetune
from shell_files import write_jsonl

pytest_plugins = ["shell_fixtures"]


@pytest.fixture
def config(tmp_path, model_dir):
    rows = [{"prompt": f"{i}?", "response": str(i)} for i in range(7)]
    return resolve(
        [
            f"data.train_files={write_jsonl(tmp_path / 'rows.jsonl', rows)}",
            f"model.path={model_dir}",
            "data.train_batch_size=3",
            "trainer.logger=[console]",
        ],
        "sft_trainer",
        trainer="sft",
    )


def host_of(config, directory) -> finetune.Host:
    inputs = finetune.load(config, "sft")
    return finetune.Host(config, inputs, RunLog(directory, [], None), lambda: False)


def test_rows_go_on_where_a_saved_state_left_them(config, tmp_path):
    straight = host_of(config, tmp_path / "a")
    batches = [straight.next_rows(3) for _ in range(2)]
    state = straight.save_state()
    later = [straight.next_rows(3) for _ in range(3)]
    resumed = host_of(config, tmp_path / "b")
    resumed.load_state(state)
    assert [resumed.next_rows(3) for _ in range(3)] == later
    assert not set(batches[0]) & set(batches[1])
    assert json.loads(state)["steps_given"] == 2


def test_examples_are_buffers_of_tokens_and_masks(config, tmp_path):
    host = host_of(config, tmp_path / "a")
    assert not host.has_started
    [[(tokens, scored)]] = host.examples([2], False)
    assert host.has_started
    assert memoryview(tokens).itemsize == 4
    assert len(tokens) == len(scored)
    assert sum(scored) == 2  # the digit and the token that ends the turn


def test_too_few_rows_for_a_batch_are_said(config):
    config.tree["data"]["train_batch_size"] = 8
    with pytest.raises(UserError, match=r"data.train_batch_size: wanted at most 7"):
        finetune.load(config, "sft")


def test_the_core_gets_counts_of_rows(config):
    tree = json.loads(finetune.core_config(config, finetune.load(config, "sft")))
    assert tree["_shell"] == {"num_train_rows": 7, "num_val_rows": 0, "features": {}}
