"""Reward workers under hostile functions: `reliability.md` R7 and R8, and the ordinary cases."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from banyan.errors import UserError
from banyan.reward.manager import RewardManager
from banyan.reward.result import from_answer

TIMEOUT_S = 1.0

HOSTILE = """
import asyncio, ctypes, math, os, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    deed = extra_info.get("deed")
    print("noise on standard output")
    if deed == "busy":
        while True: pass
    if deed == "sleep": time.sleep(100)
    if deed == "gil": ctypes.PyDLL(None).sleep(100)
    if deed == "exit": os._exit(3)
    if deed == "sys_exit": sys.exit(5)
    if deed == "segfault": ctypes.string_at(0)
    if deed == "raise": raise KeyError("no such key")
    if deed == "none": return None
    if deed == "nan": return float("nan")
    if deed == "inf": return {"score": float("inf")}
    if deed == "text": return "1.0"
    if deed == "list": return [1.0]
    if deed == "no_score": return {"acc": 1.0}
    if deed == "object": return object()
    if deed == "huge": return {"score": 1.0, "text": "x" * 100_000}
    if deed == "memory": return len(bytearray(10 << 30))
    if deed == "file":
        with open(extra_info["path"], "wb") as f:
            f.seek(10 << 30)
            f.write(b"x")
    if deed == "close_wire":
        os.closerange(3, 64)
        return 1.0
    if deed == "fork_and_exit":
        if os.fork() == 0: time.sleep(100)
        os._exit(0)
    if deed == "child":
        import subprocess
        child = subprocess.Popen(["sleep", "100"])
        open(extra_info["path"], "w").write(str(child.pid))
        time.sleep(100)
    if deed == "pid": return {"score": 1.0, "pid": os.getpid(), "torch": "torch" in sys.modules}
    if deed == "dict": return {"score": True, "acc": 0.5, "pred": "seven", "skip": None}
    return float(solution_str) + bonus

async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return float(ground_truth)
"""


def tree(path: Path | None = None, workers: int = 2, **changes: object) -> dict:
    custom = {"path": str(path) if path else None, "name": changes.pop("name", "compute_score")}
    custom["reward_kwargs"] = changes.pop("reward_kwargs", None)
    limits = {"timeout_s": changes.pop("timeout_s", TIMEOUT_S), "memory_limit_mb": 2048}
    reward = {"num_workers": workers, "custom_reward_function": custom}
    reward["reward_manager"] = {"name": changes.pop("manager", "naive")}
    return {"reward": {**reward, **changes}, "banyan": {"reward": limits}}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    return path


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def children() -> set[int]:
    """Process ids of this process's children, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = int(stat.parent.name), stat.read_text().rsplit(")", 1)[1]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(rest.split()[1]) == os.getpid():
            found.add(pid)
    return found


@pytest.mark.parametrize(
    ("deed", "status", "reason"),
    [
        ("busy", "timeout", "no answer within 1 s"),
        ("sleep", "timeout", "no answer within 1 s"),
        ("gil", "timeout", "no answer within 1 s"),
        ("exit", "killed", "exit code 3"),
        ("segfault", "killed", "SIGSEGV"),
        ("close_wire", "killed", "worker died"),
        ("fork_and_exit", "killed", "exit code 0"),
        ("sys_exit", "error", "SystemExit: 5 (hostile.py:"),
        ("raise", "error", "KeyError: 'no such key' (hostile.py:"),
        ("memory", "error", "MemoryError"),
        ("file", "error", "File too large"),
        ("none", "invalid", "got None"),
        ("nan", "invalid", "got nan"),
        ("inf", "invalid", "got inf"),
        ("text", "invalid", "got a text"),
        ("list", "invalid", "got [1.0]"),
        ("no_score", "invalid", "without"),
        ("object", "invalid", "got object"),
        ("huge", "invalid", "bytes"),
    ],
)
def test_one_bad_call_costs_one_sample(
    hostile: Path, tmp_path: Path, deed: str, status: str, reason: str
) -> None:
    before = children()
    with RewardManager(tree(hostile)) as rewards:
        extra = {"deed": deed, "path": str(tmp_path / "out")}
        rewards.submit("bad", "any", "1", None, extra)
        for i in range(20):
            rewards.submit(i, "any", str(i), None, {})
        start = time.monotonic()
        while 0 not in rewards._pool._results:  # the bad call's result
            time.sleep(0.01)
        assert time.monotonic() - start < TIMEOUT_S + 1.0
        results = dict(rewards.poll())
        bad = results.pop("bad")
        assert (bad.failed, bad.status) == (True, status), bad
        assert bad.reason.startswith(status + ": ")
        assert reason in bad.reason
        assert {key: result.value for key, result in results.items()} == {
            i: float(i) for i in range(20)
        }
        rewards.submit("after", "any", "7", None, {})  # the pool is whole again
        assert rewards.poll()[0][1].value == 7.0
        assert rewards.statuses() == {"ok": 21, status: 1}
    assert children() <= before  # nothing left, zombies included


def test_hangs_do_not_slow_the_others(hostile: Path) -> None:
    def seconds(num_hanging: int) -> float:
        with RewardManager(tree(hostile, workers=4)) as rewards:
            for i in range(num_hanging):
                rewards.submit(("hang", i), "any", "1", None, {"deed": "sleep"})
            rewards.submit("warm", "any", "1", None, {})
            for i in range(300):
                rewards.submit(i, "any", "1", None, {})
            start = time.monotonic()
            done = 0
            while done < 301:  # results of the others arrive while the hangs still hang
                time.sleep(0.005)
                done = sum(r.status == "ok" for _, r in list(rewards._pool._results.values()))
                assert time.monotonic() - start < 20
            elapsed = time.monotonic() - start
            assert [r.status for _, r in rewards.poll()].count("timeout") == num_hanging
        return elapsed

    seconds(0)
    assert seconds(2) < 0.9 * TIMEOUT_S  # the hanging ones are still within their limit


def test_time_limit_ends_the_whole_process_group(hostile: Path, tmp_path: Path) -> None:
    mark = tmp_path / "child.pid"
    with RewardManager(tree(hostile)) as rewards:
        rewards.submit("x", "any", "1", None, {"deed": "child", "path": str(mark)})
        assert rewards.poll()[0][1].status == "timeout"
        child = int(mark.read_text())
        deadline = time.monotonic() + 2
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_running(child)


def test_a_dead_idle_worker_is_replaced(hostile: Path) -> None:
    with RewardManager(tree(hostile, workers=1)) as rewards:
        (pid,) = rewards._pool.pids()
        os.kill(pid, 9)
        while rewards._pool.pids() == [pid]:
            time.sleep(0.01)
        rewards.submit("x", "any", "3", None, {})
        assert rewards.poll()[0][1].value == 3.0
        assert pid not in children()


def test_workers_die_with_the_trainer(hostile: Path, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = (
        "import sys, time\n"
        "from banyan.reward.manager import RewardManager\n"
        f"rewards = RewardManager({tree(hostile, timeout_s=100)!r})\n"
        "rewards.submit('x', 'any', '1', None, {'deed': 'busy'})\n"
        "time.sleep(0.3)\n"
        f"open({str(mark)!r}, 'w').write(' '.join(map(str, rewards._pool.pids())))\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", script], env=env, timeout=30)
    assert done.returncode == -9
    pids = list(map(int, mark.read_text().split()))
    deadline = time.monotonic() + 3
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pids
    assert not any(map(is_running, pids))


def test_workers_do_not_load_torch(hostile: Path) -> None:
    with RewardManager(tree(hostile)) as rewards:
        rewards.submit("x", "any", "1", None, {"deed": "pid"})
        result = rewards.poll()[0][1]
        assert result.extra["torch"] == 0.0
        assert result.extra["pid"] != os.getpid()


def test_mapping_and_number(hostile: Path) -> None:
    with RewardManager(tree(hostile, reward_kwargs={"bonus": 0.25})) as rewards:
        rewards.submit("mapping", "any", "1", None, {"deed": "dict"})
        rewards.submit("number", "any", "2", None, {})
        (key, mapping), (_, number) = rewards.poll()
        assert key == "mapping"
        assert rewards.poll() == []
        assert (mapping.value, mapping.extra, mapping.text) == (
            1.0,
            {"acc": 0.5},
            {"pred": "seven"},
        )
        assert (number.value, number.extra) == (2.25, {"acc": 2.25})


def test_async_function(hostile: Path) -> None:
    with RewardManager(tree(hostile, name="later")) as rewards:
        rewards.submit("x", "any", "1", 0.75, {})
        assert rewards.poll()[0][1].value == 0.75


def test_printed_text_goes_to_the_log(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "reward.log"
    with RewardManager(tree(hostile), log_path=log) as rewards:
        rewards.submit("x", "any", "1", None, {})
        rewards.poll()
    assert "noise on standard output" in log.read_text()
    monkeypatch.setattr("banyan.reward.manager._MAX_LOG_BYTES", 100)
    with RewardManager(tree(hostile, workers=1), log_path=log) as rewards:
        for i in range(40):
            rewards.submit(i, "any", "1", None, {})
        rewards.poll()
        assert log.stat().st_size == 0


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def other(): pass", "compute_score", "wanted a function compute_score"),
        ("import no_such_module", "compute_score", "ModuleNotFoundError"),
        ("def compute_score(:", "compute_score", "SyntaxError"),
        ("raise SystemExit(1)", "compute_score", "SystemExit"),
        ("import os; os._exit(4)", "compute_score", "exit code 4"),
    ],
)
def test_a_file_that_does_not_load_stops_at_once(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    before = children()
    with pytest.raises(UserError, match=r"\[reward\]") as caught:
        RewardManager(tree(path, name=name))
    assert message in str(caught.value)
    assert children() <= before


def test_missing_file_and_unknown_manager(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        RewardManager(tree(tmp_path / "none.py"))
    with pytest.raises(UserError, match="wanted one of naive, gdpo, dapo, got prime"):
        RewardManager(tree(manager="prime"))


def test_large_jobs_and_odd_text(hostile: Path) -> None:
    with RewardManager(tree(hostile)) as rewards:
        rewards.submit("big", "any", "1", "x" * (3 << 20), {"note": "naïve \ud800 漢字"})
        assert rewards.poll()[0][1].value == 1.0
        with pytest.raises(UserError, match="no JSON form"):
            rewards.submit("x", "any", "1", object(), {})


def test_dapo_penalty(hostile: Path) -> None:
    buffer = {"enable": True, "len": 20, "penalty_factor": 0.5, "log": True}
    kwargs = {"max_resp_len": 100, "overlong_buffer_cfg": buffer}
    with RewardManager(tree(hostile, manager="dapo", reward_kwargs=None)) as rewards:
        rewards.submit("x", "any", "1", None, {}, num_tokens=100)
        assert rewards.poll()[0][1].value == 1.0  # not enabled
    config = tree(hostile, manager="dapo")
    config["reward"]["reward_kwargs"] = kwargs
    with RewardManager(config) as rewards:
        for num_tokens in (80, 90, 100):
            rewards.submit(num_tokens, "any", "1", None, {}, num_tokens=num_tokens)
        got = {key: (r.value, r.extra["overlong"]) for key, r in rewards.poll()}
        assert got == {80: (1.0, 0.0), 90: (0.75, 1.0), 100: (0.5, 1.0)}
        with pytest.raises(UserError, match="number of tokens"):
            rewards.submit("x", "any", "1", None, {})
    kwargs["max_resp_len"] = 10
    with pytest.raises(UserError, match=r"overlong_buffer_cfg\.len"):
        RewardManager(config)


def test_numbers_of_a_reward_model_come_back_beside_scores(hostile: Path) -> None:
    config = tree(hostile, manager="dapo")
    config["reward"]["reward_kwargs"] = {
        "max_resp_len": 100,
        "overlong_buffer_cfg": {"enable": True, "len": 20, "penalty_factor": 0.5},
    }
    with RewardManager(config) as rewards:
        rewards.submit("scored", "any", "1", None, {}, num_tokens=10)
        for key, number in (("long", 2.0), ("odd", float("nan")), ("empty", None)):
            rewards.submit_number(key, number, num_tokens=100)
        results = dict(rewards.poll())
        assert list(results) == ["scored", "long", "odd", "empty"]
        assert results["long"].value == 1.5  # 2 and the penalty of the whole buffer
        assert results["odd"].failed
        assert results["empty"].failed
        assert rewards.poll() == []


def test_check_data_sources(hostile: Path) -> None:
    with RewardManager(tree()) as rewards:
        rewards.check_data_sources({"openai/gsm8k", "banyan/arithmetic"})
        with pytest.raises(UserError, match=r"wanted one of .*openai/gsm8k"):
            rewards.check_data_sources({"my/data"})
        rewards.submit("x", "my/data", "1", "1", {})
        assert "custom_reward_function" in rewards.poll()[0][1].reason
    with RewardManager(tree(hostile)) as rewards:
        rewards.check_data_sources({"my/data"})


def test_an_answer_is_checked_in_the_trainer() -> None:
    assert from_answer(10**400).status == "invalid"
    assert from_answer({"score": "1"}).status == "invalid"
    assert from_answer({"score": 2, "acc": 1, "bad": float("nan")}).extra == {"acc": 1.0}
    assert from_answer(-1.5).value == -1.5


def test_the_guide_is_true(tmp_path: Path) -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "guides" / "your_own_reward.md"
    tags, flexible = (block.split("```")[0] for block in guide.read_text().split("```python\n")[1:])
    path = tmp_path / "my_reward.py"
    path.write_text(tags)
    with RewardManager(tree(path)) as rewards:
        for text in ("<answer> 4 </answer>", "<answer>5</answer>", "4"):
            rewards.submit(text, "my/data", text, "4", {})
        assert [result.value for _, result in rewards.poll()] == [1.0, 0.1, 0.0]
    path.write_text(flexible)
    with RewardManager(tree(path)) as rewards:
        rewards.submit("x", "my/data", "It is 1,000.", "1000", {})
        assert rewards.poll()[0][1].value == 1.0
