"""banyan._C.Engine: what the shell hands over, what comes back, and that nothing of it holds the interpreter."""

from __future__ import annotations

import select
import threading
import time

import pytest

from banyan import extension

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def core():
    return extension.load()


@pytest.fixture(scope="module")
def model(core, tmp_path_factory):
    from shell_files import write_tiny_llama

    return core.Model.load(str(write_tiny_llama(tmp_path_factory.mktemp("binding"))))


@pytest.fixture
def engine(core, model):
    """The passes wait once some tokens wait for the reader: while a test does not read, nothing ends by itself."""
    options = {"kv_bytes": 2**24, "max_undrained_bytes": 1024}
    engine = core.Engine(
        model, options, [bytes([65 + i % 26]) for i in range(model.shape["vocab"])]
    )
    engine.start()
    yield engine
    engine.stop(10.0)


def read(engine, count, seconds=60.0):
    """Events until `count` responses have ended, joined by (request, index)."""
    found, ended, end = {}, 0, time.monotonic() + seconds
    while ended < count and time.monotonic() < end:
        select.select([engine.event_fd()], [], [], 0.1)
        for event in engine.drain():
            one = found.setdefault((event["request"], event["index"]), {"tokens": [], "raw": []})
            one["tokens"] += event["tokens"]
            one["raw"] += event["raw"]
            assert len(event["raw"]) == len(event["processed"]) == len(event["tokens"])
            one |= {k: v for k, v in event.items() if k not in ("tokens", "raw")}
            ended += event["finished"]
    assert ended == count
    return found


def request(**params):
    return {"prompt": PROMPT, "params": {"max_tokens": 6, "seed": 3, **params}}


def test_every_field_goes_in_and_every_column_comes_out(core, engine):
    name = engine.submit(
        {
            "id": "mine",
            "prompt": PROMPT,
            "n": 2,
            "row": -1,
            "first_index": 0,
            "original_prompt": 0,
            "priority": 1,
            "cache_salt": "s",
            "source": "tests",
            "group_id": "g",
            "params": {
                "temperature": 0.8,
                "top_p": 0.95,
                "top_k": 40,
                "top_k_ties": True,
                "min_p": 0.01,
                "repetition_penalty": 1.1,
                "presence_penalty": 0.1,
                "frequency_penalty": 0.1,
                "logit_bias": {7: 1.5, 8: -200.0},
                "bad_words": [[9, 10], [11]],
                "allowed_token_ids": [],
                "grammar": None,
                "max_tokens": 5,
                "min_tokens": 5,
                "eos_ids": [1],
                "stop_token_ids": [2],
                "stop": ["never", b"\xff\xfe"],
                "ignore_eos": False,
                "repetition_detection": {"max_pattern": 4, "min_pattern": 1, "min_count": 50},
                "seed": -1,
                "step": 0,
                "top_logprobs": 2,
                "logprob_token_ids": [3],
                "prompt_logprobs": 1,
                "return_sampling_mask": True,
                "processed_logprobs": False,
            },
        }
    )
    assert name == "mine"
    found = read(engine, 2)
    assert sorted(found) == [("mine", 0), ("mine", 1)]
    one = found["mine", 0]
    assert len(one["tokens"]) == 5
    assert one["finish"] == "length"
    assert one["stop_token"] is None
    assert one["stop_string"] is None
    assert one["error"] == ""
    assert one["prompt_tokens"] == len(PROMPT)
    assert one["spans"] == [{"epoch": 0, "version": "default", "start": 0, "end": 5}]
    assert len(one["prompt_logprobs"]) == len(PROMPT)
    assert one["prompt_logprobs"][0] == []
    token, logprob, rank = one["top"][-1][0]
    assert token == one["tokens"][-1]
    assert logprob <= 0.0
    assert rank >= 1
    assert token in one["sampling_mask"][-1]


def test_a_request_error_says_what_to_do(core, engine, model):
    def refused(**entries):
        with pytest.raises(core.RequestError) as caught:
            engine.submit({**request(), **entries})
        return caught.value

    error = refused(params={"temprature": 1.0})
    assert (error.code, error.param) == (400, "temprature")
    assert error.message == str(error)
    assert "the nearest is temperature" in error.message
    assert refused(promt=[1]).param == "promt"
    assert refused(prompt=[10**6]).code == 400
    assert refused(prompt="text").param == "prompt"
    assert refused(params={"max_tokens": 2**40}).param == "max_tokens"
    assert refused(params={"logit_bias": {"a": 1}}).param == "logit_bias"
    assert isinstance(error, ValueError)
    engine.pause("abort", 5.0)
    error = refused()
    assert error.code == 503
    assert error.retry_after > 0
    engine.resume()
    engine.submit(request())
    read(engine, 1)
    with pytest.raises(core.RequestError, match="wanted abort, wait, keep or retract"):
        engine.pause("stop", 1.0)
    with pytest.raises(
        ValueError, match="unknown engine option 'max_seqs'; the nearest is max_num_seqs"
    ):
        core.Engine(model, {"max_seqs": 3})


def test_an_abort_a_sleep_and_an_update(core, engine, model, tmp_path):
    engine.submit({**request(max_tokens=400), "id": "long"})
    assert engine.abort(["long", "nobody"]) == 1
    assert read(engine, 1)["long", 0]["finish"] == "abort"
    sums = engine.weight_checksums()
    assert set(sums) == set(model.params())
    assert all(len(value) == 64 for value in sums.values())
    assert engine.sleep(1, "keep", 5.0) >= 0
    assert engine.stats()["state"] == "asleep"
    assert engine.wake(["weights"]) == ["kv_cache"]
    assert engine.wake([]) == []
    engine.set_weight_version("seven")
    engine.submit({**request(), "id": "one"})
    assert read(engine, 1)["one", 0]["spans"][0]["version"] == "seven"
    with pytest.raises(core.RequestError) as caught:
        engine.update_weights_from_disk(str(tmp_path), "eight", False, 5.0)
    assert caught.value.code == 400
    stats = engine.stats()
    assert stats["state"] == "running"
    assert stats["weight_version"] == "seven"
    assert stats["counters"]["generation_tokens"] >= 6
    assert stats["seconds"]["forward"] > 0
    engine.reset_prefix_cache(True)


def test_waiting_calls_let_other_threads_run(engine):
    engine.submit({**request(max_tokens=900, ignore_eos=True), "id": "long"})
    failures = []

    def wait():
        try:
            engine.pause("wait", 60.0)
        except ValueError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while engine.stats()["state"] != "pausing" and waiting.is_alive():
        time.sleep(0.001)
    engine.resume()
    waiting.join()
    assert [failure.code for failure in failures] == [409]
    engine.abort([])
    read(engine, 1)
