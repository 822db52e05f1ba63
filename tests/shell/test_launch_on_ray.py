"""`banyan launch --ray`: who gets which rank, how many there are, and what is refused; without a cluster."""

from __future__ import annotations

import sys

import pytest
from banyan.cli.main import main
from banyan.launch import environment, on_ray
from banyan.launch.on_ray import Seat


def test_ranks_of_one_machine_are_neighbours_and_meet_at_the_first():
    seats = [Seat("b", "10.0.0.2", 7), Seat("a", "10.0.0.1", 8), Seat("b", "10.0.0.2", 9)]
    found = [environment.find(each) for each in on_ray.environments(seats, "cpu")]
    assert [place.rank for place in found] == [0, 2, 1]
    assert [place.local_rank for place in found] == [0, 0, 1]
    assert [place.local_size for place in found] == [2, 1, 2]
    assert {(place.world_size, place.host, place.port) for place in found} == {(3, "10.0.0.2", 7)}


def test_ranks_of_one_machine_see_the_devices_of_all_of_them_in_their_order():
    seats = [
        Seat("a", "h", 1, ["3"]),
        Seat("b", "i", 1, ["0"]),
        Seat("a", "h", 2, ["1"]),
    ]
    for device, name in (("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")):
        given = on_ray.environments(seats, device)
        assert [each[name] for each in given] == ["3,1", "0", "3,1"]
        own = [each[name].split(",")[int(each["LOCAL_RANK"])] for each in given]
        assert own == ["3", "0", "1"]


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (["train"], 1),
        (["train", "trainer.n_gpus_per_node=4"], 4),
        (["train", "trainer.nnodes=2", "--share", "on", "+trainer.n_gpus_per_node=4"], 8),
        (["sft", "trainer.n_gpus_per_node=4", "trainer.n_gpus_per_node=2"], 2),
        (["train", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.nnodes=2"], 6),
        (
            [
                "train",
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=3",
            ],
            4,
        ),
    ],
)
def test_the_number_of_ranks_is_that_of_the_commands_keys(monkeypatch, command, wanted):
    calls = []
    monkeypatch.setattr(on_ray, "run", lambda *given: calls.append(given) or 3)
    assert main(["launch", "--ray", "auto", "--cpus-per-rank", "2", "--", *command]) == 3
    assert calls[0][:5] == ("auto", command, wanted, 2, "cpu")
    assert main(["launch", "--ray", "auto", "--ranks", "5", *command, "trainer.device=npu"]) == 3
    assert calls[1][2] == 5
    assert calls[1][4] == "npu"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "after --: wanted one of train, sft, dpo, reward-model, got nothing"),
        (["--", "trian"], "got 'trian'; did you mean train?"),
        (["--", "serve"], "got 'serve'"),
        (["--ranks", "0", "--", "train"], "--ranks: wanted a number >= 1, got 0"),
        (["--", "train", "trainer.nnodes=two"], "trainer.nnodes: wanted a number >= 1, got 'two'"),
        (["--", "train", "trainer.device=tpu"], "wanted one of cpu, cuda, npu, got 'tpu'"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, text):
    assert main(["launch", "--ray", "local", *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert len(err.splitlines()) == 1


def test_without_ray_the_package_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["launch", "--ray", "local", "--", "train"]) == 2
    assert "wanted the package ray, which is not installed" in capsys.readouterr().err
