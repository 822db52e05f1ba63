"""The clients of vLLM and SGLang servers against a scripted one: what is asked, and what is done about every answer."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from banyan.drivers.generator import Options, ServerGenerator
from banyan.drivers.http import Address, Limits, ServerError
from banyan.drivers.probe import Probe
from banyan.drivers.responses import seed_of
from banyan.drivers.sglang import SglangServer
from banyan.drivers.vllm import VllmServer
from banyan.drivers.weights import WeightFolders
from scripted_server import (
    BAD_JSON,
    BLACK_HOLE,
    CUT,
    Answered,
    Partial,
    ScriptedServer,
    busy,
    toy_law,
    toy_logprob,
)

DIALECTS = {"vllm": VllmServer, "sglang": SglangServer}
ROUTES = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
BOTH = pytest.mark.parametrize("dialect", ["vllm", "sglang"])
FAST = Limits(timeout=2.0, request_timeout=3.0, retry_delay=0.05, max_start_wait_time=1.0)
PARAMS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_tokens": 6,
    "eos_ids": [2],
    "ignore_eos": False,
    "seed": 42,
    "step": 3,
}


def save(directory, config_from, dtype):
    """Stands for the actor's weights."""
    Path(directory).mkdir()
    (Path(directory) / "saved.txt").write_text(f"{config_from} {dtype}")


def toy_score(tokens, temperature):
    return [toy_logprob(token) for token in tokens[1:]]


def generator_for(
    servers, dialect, tmp_path, limits=FAST, tolerance=0.1, score=toy_score, **options
):
    said: list[str] = []
    addresses = [Address(server.url, limits) for server in servers]
    made = ServerGenerator(
        [DIALECTS[dialect](address, address, said.append) for address in addresses],
        Options(reports_cut_law=dialect == "vllm", **options),
        WeightFolders(tmp_path / "weights", "model", "bf16"),
        Probe(tolerance, said.append),
        said.append,
    )
    made.said = said
    made.attach(save, score)
    return made


@pytest.fixture
def meet(tmp_path):
    """Makes connected generators and closes them."""
    made = []

    def make(servers, dialect, **options):
        servers = servers if isinstance(servers, list) else [servers]
        found = generator_for(servers, dialect, tmp_path, **options)
        made.append(found)
        found.connect()
        return found

    yield make
    for item in made:
        item.close()


def run(generator, prompts=((11, 12, 13),), n=2, stop=lambda: False, **params):
    """(trajectories by (row, index), stats)."""
    found = {}
    rows = [{"row": row, "tokens": list(tokens), "n": n} for row, tokens in enumerate(prompts)]

    def finished(trajectory):
        found[trajectory["row"], trajectory["index"]] = trajectory

    stats = generator.generate(rows, {**PARAMS, **params}, finished, stop)
    return found, stats


# --- generation ------------------------------------------------------------------------------------------------


@BOTH
def test_copies_are_requests_with_seeds_of_their_own(dialect, meet):
    with ScriptedServer(dialect) as server:
        generator = meet(server, dialect, tolerance=None)
        found, stats = run(generator, prompts=[(11, 12, 13), (14, 15)], n=3)
        assert sorted(found) == [(row, index) for row in range(2) for index in range(3)]
        seed = seed_of(42, 3, 1, 2, 0)
        kept = seed if dialect == "vllm" else seed & 0x7FFFFFFF
        ids, logprobs = toy_law([14, 15], 6, kept, "")
        one = found[1, 2]
        assert one["prompt"] == [14, 15]
        assert one["response"] == ids
        assert one["rollout_log_probs"] == logprobs
        assert one["finish"] == "length"
        assert "sampled_log_probs" not in one
        assert stats["logical_prompt_tokens"] == 15
        assert stats["response_tokens"] == 36
        bodies = [b for b in server.asked(ROUTES[dialect]) if "warm" not in str(b.get("rid"))]
        seeds = {
            b["sampling_params"].get("seed", b["sampling_params"].get("sampling_seed"))
            for b in bodies
        }
        assert len(bodies) == len(seeds) == 6
        sent = bodies[0]["sampling_params"]
        assert sent["stop_token_ids"] == [2]
        # Defaults of the server's generation_config must not show through.
        assert {"temperature", "top_p", "top_k", "repetition_penalty"} <= set(sent)


def test_a_vllm_without_the_ids_route_completes(meet):
    with ScriptedServer("vllm", missing=["/inference/v1/generate"]) as server:
        generator = meet(server, "vllm", tolerance=None)
        found, stats = run(generator)
        body = server.asked("/v1/completions")[0]
        assert body["return_token_ids"]
        assert body["return_tokens_as_token_ids"]
        assert body["logprobs"] == 0
        assert body["model"] == "served"
        assert found[0, 0]["response"] == toy_law([11, 12, 13], 6, body["seed"], "")[0]
        assert stats["computed_prompt_tokens"] == 2 * (3 - 2)  # two of three were cached


def test_a_vllm_that_forbids_the_ids_route_completes_and_says_so(meet):
    with ScriptedServer("vllm") as server:
        generator = meet(server, "vllm", tolerance=None)
        server.faults["/inference/v1/generate"] = [Answered(403), Answered(403)]
        assert len(run(generator)[0]) == 2
        assert any("/v1/completions generates" in line for line in generator.said)


def test_an_older_sglang_is_found_under_its_older_routes(meet):
    with ScriptedServer("sglang", missing=["/ready"]) as server:
        assert len(run(meet(server, "sglang", tolerance=None))[0]) == 2
        assert ("GET", "/health", None) in server.calls


@pytest.mark.parametrize(("policy", "warms"), [("fcfs", 2), ("lpm", 0)])
def test_sglang_prefills_a_prompt_once_whatever_its_policy(policy, warms, meet):
    with ScriptedServer("sglang", policy=policy) as server:
        run(meet(server, "sglang", tolerance=None), prompts=[(5, 6), (7, 8)])
        bodies = server.asked("/generate")
        empty = [b for b in bodies if b["sampling_params"]["max_new_tokens"] == 0]
        assert len(empty) == warms


def test_truncation_keeps_the_two_laws_apart(meet):
    with ScriptedServer("vllm") as server:
        found, _ = run(meet(server, "vllm", tolerance=None), top_p=0.9)
        assert found[0, 0]["sampled_log_probs"] == found[0, 0]["rollout_log_probs"]
    with ScriptedServer("sglang") as server:  # its log-probabilities are those before the cut
        found, _ = run(meet(server, "sglang", tolerance=None), top_p=0.9)
        assert "sampled_log_probs" not in found[0, 0]


@BOTH
def test_aborts_return_partials_and_the_rest_gets_the_rest_of_the_budget(dialect, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        generator = meet(server, dialect, tolerance=None)
        server.faults["tokens"] = [Partial(4), Partial(0)]
        found, _ = run(generator, n=1)
        first, *_, last = server.asked(ROUTES[dialect])
        assert len(server.asked(ROUTES[dialect])) == 3
        key, budget = (
            ("token_ids", "max_tokens") if dialect == "vllm" else ("input_ids", "max_new_tokens")
        )
        assert last[key] == [*first[key], *found[0, 0]["response"][:4]]
        assert last["sampling_params"][budget] == 2
        assert len(found[0, 0]["response"]) == 6
        assert found[0, 0]["rollout_log_probs"] == [toy_logprob(t) for t in found[0, 0]["response"]]
        assert found[0, 0]["finish"] == "length"


def whole(version, epoch, end=6):
    return [{"epoch": epoch, "version": version, "start": 0, "end": end}]


@BOTH
def test_tokens_carry_the_version_of_their_weights(dialect, meet):
    """Over the parts of a response too; nothing is said where the server says nothing."""
    with ScriptedServer(dialect, policy="lpm") as server:
        generator = meet(server, dialect, tolerance=None)
        assert run(generator)[0][0, 1]["weight_spans"] == whole("default", 0)
        generator.weights_changed(0)
        generator.weights_changed(5)
        server.faults["tokens"] = [Partial(4), Partial(0)]
        assert run(generator, n=1)[0][0, 0]["weight_spans"] == whole("5", 5)
    with ScriptedServer("vllm", spans=False) as server:
        found, _ = run(meet(server, "vllm", tolerance=None))
        assert "weight_spans" not in found[0, 0]


def test_spans_of_several_weights(meet):
    """As a server gives them whose weights changed under a frozen request."""
    from banyan.drivers.responses import Response
    from banyan.drivers.server import Answer, Span, spans

    parts = [{"version": 1, "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}]
    response = Response(0, 0)
    for _ in range(2):
        response.add(Answer([7, 8, 9], [0.0] * 3, "abort", spans=spans("", parts, 3)))
    response.add(Answer([7], [0.0], "stop", spans=spans("", "b", 1)))
    assert response.spans == [Span("1", 0, 2), Span("b", 2, 3), Span("1", 3, 5), Span("b", 5, 7)]
    assert spans("", None, 3) == spans("", [], 3) == spans("", "b", 0) == []
    for wrong in (parts[:1], parts[1:], [{}], ["b"], [*parts, parts[0]]):
        with pytest.raises(ServerError, match="weight_versions"):
            spans("", wrong, 3)
    with ScriptedServer("vllm") as server:
        generator = meet(server, "vllm", tolerance=None)
        generator.weights_changed(0)
        generator.weights_changed(1)
        server.state["label"] = "another"
        with pytest.raises(ServerError, match="wanted tokens of weights 1, got some of another"):
            run(generator)


def test_a_continuation_counts_what_was_there(meet):
    with ScriptedServer("vllm") as server:
        generator = meet(server, "vllm", tolerance=None)
        row = {"row": 4, "tokens": [11, 12, 13, 20, 21], "n": 1}
        row |= {"first_index": 2, "original_prompt": 3}
        found = []
        generator.generate([row], PARAMS, found.append, lambda: False)
        (body,) = server.asked("/inference/v1/generate")
        assert body["token_ids"] == row["tokens"]
        assert body["sampling_params"]["max_tokens"] == 4
        assert body["sampling_params"]["seed"] == seed_of(42, 3, 4, 2, 2)
        (one,) = found
        assert (one["row"], one["index"], len(one["response"])) == (4, 2, 4)
        assert one["prompt"] == row["tokens"]


@BOTH
def test_stopping_aborts_and_brings_back_what_there_is(dialect, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        limits = Limits(timeout=0.3, request_timeout=30.0, retry_delay=0.05)
        generator = meet(server, dialect, tolerance=None, limits=limits)
        server.faults[ROUTES[dialect]] = [BLACK_HOLE]
        asked = time.monotonic()
        found, _ = run(generator, n=2, stop=lambda: time.monotonic() > asked + 0.3)
        assert time.monotonic() - asked < 5
        assert sorted(t["finish"] for t in found.values()) == ["abort", "length"]
        route = {"vllm": "/abort_requests", "sglang": "/abort_request"}[dialect]
        assert server.asked(route)


def test_an_error_of_who_asks_to_stop_ends_the_call_at_once(meet):
    with ScriptedServer("vllm") as server:
        limits = Limits(timeout=5.0, request_timeout=30.0)
        generator = meet(server, "vllm", tolerance=None, limits=limits)
        server.faults[ROUTES["vllm"]] = [BLACK_HOLE] * 2
        asked = time.monotonic()

        def stop():
            if time.monotonic() > asked + 0.5:
                raise KeyError("the host")
            return False

        with pytest.raises(KeyError, match="the host"):
            run(generator, n=2, stop=stop)
        assert time.monotonic() - asked < 5


def test_prompts_go_where_least_is_running_and_waiting(meet):
    with ScriptedServer("vllm") as one, ScriptedServer("vllm") as two:
        one.state["load"] = 50  # somebody else's
        generator = meet([one, two], "vllm", tolerance=None)
        run(generator, prompts=[(i, i) for i in range(3, 23)], n=1)
        assert len(two.asked("/inference/v1/generate")) > len(one.asked("/inference/v1/generate"))
        one.state["load"] = 0
        before = [len(s.asked("/inference/v1/generate")) for s in (one, two)]
        run(generator, prompts=[(i, i) for i in range(3, 23)], n=1)
        after = [len(s.asked("/inference/v1/generate")) for s in (one, two)]
        assert after[0] - before[0] > 0


def test_no_more_run_on_a_server_than_it_may(meet):
    running, most = [0], [0]

    def law(prompt, budget, seed, name):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        running[0] -= 1
        return toy_law(prompt, budget, seed, name)

    with ScriptedServer("vllm", law=law) as server:
        generator = meet(server, "vllm", tolerance=None, max_num_seqs=4)
        run(generator, prompts=[(i, i) for i in range(3, 13)], n=2)
        assert 1 < most[0] <= 4


# --- faults ----------------------------------------------------------------------------------------------------


@BOTH
def test_a_busy_server_is_asked_again(dialect, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        generator = meet(server, dialect, tolerance=None)
        server.faults[ROUTES[dialect]] = [busy(), busy(0.01), busy()]
        assert len(run(generator, n=1)[0]) == 1
        assert len(server.asked(ROUTES[dialect])) == 4


def test_a_server_that_stays_busy_ends_at_the_deadline(meet):
    with ScriptedServer("vllm") as server:
        generator = meet(server, "vllm", tolerance=None)
        server.faults["/inference/v1/generate"] = [busy()] * 1000
        start = time.monotonic()
        with pytest.raises(ServerError, match=r"wanted an answer within 3 s, got 503: paused"):
            run(generator, n=1)
        assert 2.5 < time.monotonic() - start < 6


@BOTH
@pytest.mark.parametrize("fault", [Answered(500), CUT])
def test_a_broken_answer_is_asked_for_again(dialect, fault, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        generator = meet(server, dialect, tolerance=None)
        server.faults[ROUTES[dialect]] = [fault, fault]
        assert len(run(generator, n=1)[0]) == 1
        server.faults[ROUTES[dialect]] = [fault] * 3
        with pytest.raises(ServerError, match="after 3 tries"):
            run(generator, n=1)


def test_what_ends_after_a_round_that_failed_reaches_nobody(tmp_path):
    """The core's function to give responses to is gone by then; the call is still there when the generator closes."""
    answering = threading.Event()

    def law(prompt, budget, seed, name):
        answering.wait(30)
        return toy_law(prompt, budget, seed, name)

    with ScriptedServer("vllm", law=law) as server:
        generator = generator_for([server], "vllm", tmp_path, tolerance=None)
        generator.connect()
        server.faults[ROUTES["vllm"]] = [Answered(400, '{"error": {"message": "no"}}')]
        found = []
        with pytest.raises(ServerError, match="got 400: no"):
            generator.generate(
                [{"row": 0, "tokens": [11, 12, 13], "n": 2}], PARAMS, found.append, lambda: False
            )
        answering.set()
        generator._runner.run(asyncio.sleep(0.3))
        generator.close()
    assert found == []


@BOTH
def test_what_is_refused_is_never_asked_again(dialect, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        generator = meet(server, dialect, tolerance=None)
        server.faults[ROUTES[dialect]] = [Answered(400, '{"error": {"message": "id 7: unknown"}}')]
        with pytest.raises(ServerError, match=r"wanted 200, got 400: id 7: unknown"):
            run(generator, n=1)
        assert len(server.asked(ROUTES[dialect])) == 1


@BOTH
def test_a_black_hole_ends_at_the_deadline(dialect, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        limits = Limits(timeout=1.0, request_timeout=0.5, retry_delay=0.05)
        generator = meet(server, dialect, tolerance=None, limits=limits)
        server.faults[ROUTES[dialect]] = [BLACK_HOLE] * 4
        start = time.monotonic()
        with pytest.raises(ServerError, match=rf"{ROUTES[dialect]}: wanted an answer within 0.5 s"):
            run(generator, n=2)
        assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("dialect", "text", "said"),
    [
        ("vllm", BAD_JSON.text, "wanted JSON, got"),
        ("vllm", '{"choices": []}', "choices: wanted 1, got 0"),
        ("vllm", '{"choices": [{"token_ids": [1]}]}', "logprobs: wanted dict, got None"),
        (
            "vllm",
            '{"choices": [{"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"content": '
            '[{"token_id": 1, "logprob": -1.0}, {"token_id": 9, "logprob": -1.0}]}}]}',
            "wanted log-probabilities of the returned ids",
        ),
        (
            "vllm",
            '{"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": {"content": '
            '[{"token": "Hello", "logprob": -1.0}]}}]}',
            "wanted tokens as token_id:N, got 'Hello'",
        ),
        ("sglang", "[]", "body: wanted dict"),
        ("sglang", '{"output_ids": [1], "meta_info": {}}', "output_token_logprobs: wanted list"),
        (
            "sglang",
            '{"output_ids": [1], "meta_info": {"output_token_logprobs": [[-1.0, 2, null]]}}',
            "wanted log-probabilities of the returned ids",
        ),
        (
            "sglang",
            '{"output_ids": [1], "meta_info": {"output_token_logprobs": [["x", 1]], '
            '"finish_reason": {"type": "stop"}}}',
            "wanted int or float, got 'x'",
        ),
        (
            "sglang",
            '{"output_ids": [], "meta_info": {"output_token_logprobs": [], '
            '"finish_reason": {"type": "stop"}}}',
            "wanted at least one token",
        ),
    ],
)
def test_a_malformed_answer_is_shown(dialect, text, said, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        generator = meet(server, dialect, tolerance=None)
        server.faults[ROUTES[dialect]] = [Answered(200, text)]
        with pytest.raises(ServerError) as caught:
            run(generator, n=1)
        assert said in str(caught.value)
        assert server.url in str(caught.value)


# --- who answers -----------------------------------------------------------------------------------------------


def test_nobody_there_is_said_at_the_start(tmp_path):
    class Nobody:
        url = "http://127.0.0.1:9"

    generator = generator_for([Nobody], "vllm", tmp_path)
    with pytest.raises(
        ServerError, match=r"wanted it ready within 1 s \(rollout.server.max_start_wait_time\)"
    ):
        generator.connect()
    assert any("waiting for it" in line for line in generator.said)
    generator.close()


def test_a_server_that_is_still_loading_is_waited_for(meet):
    with ScriptedServer("vllm") as server:
        server.faults["/health"] = [busy(), busy()]
        generator = meet(server, "vllm")
        assert any("vLLM 0.33.0, model served" in line for line in generator.said)


@pytest.mark.parametrize(("there", "asked"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_the_other_dialect_is_named(there, asked, tmp_path):
    with ScriptedServer(there) as server:
        generator = generator_for([server], asked, tmp_path)
        with pytest.raises(ServerError, match=rf"rollout.name={asked}"):
            generator.connect()
        generator.close()


def test_a_context_that_is_too_short_is_said_at_the_start(tmp_path):
    with ScriptedServer("vllm", max_model_len=512) as server:
        generator = generator_for([server], "vllm", tmp_path, total_tokens=1024)
        with pytest.raises(ServerError, match=r"\(1024 tokens\), got max_model_len 512"):
            generator.connect()
        generator.close()


def test_a_wrong_key_is_said_with_its_setting(tmp_path):
    with ScriptedServer("vllm", key="right") as server:
        generator = generator_for([server], "vllm", tmp_path)
        with pytest.raises(ServerError, match=r"401: Unauthorized \(banyan.rollout.api_key_file\)"):
            generator.connect()
        generator.close()


# --- weights ---------------------------------------------------------------------------------------------------


@BOTH
def test_each_version_is_loaded_from_a_fresh_folder(dialect, meet, tmp_path):
    loaded = []

    def load(directory):
        loaded.append(directory)
        assert (Path(directory) / "saved.txt").read_text() == "model bf16"

    with ScriptedServer(dialect, load=load) as server:
        generator = meet(server, dialect)
        for version in (0, 1, 1):
            generator.weights_changed(version)
            run(generator, n=1)
        assert len(set(loaded)) == 3
        assert [Path(folder).is_dir() for folder in loaded] == [False, False, True]
        assert server.state["label"] == "1"
        assert not server.state["paused"]
    generator.detach()
    assert len(list((tmp_path / "weights").iterdir())) == 1


ORDER = {
    "vllm": [
        "/pause?mode=wait",
        "/collective_rpc",
        "/update_weight_version",
        "/reset_prefix_cache?reset_running_requests=true",
        "/resume",
    ],
    "sglang": [
        "/pause_generation",
        "/update_weights_from_disk",
        "/flush_cache?timeout=60",
        "/continue_generation",
    ],
}


@BOTH
def test_an_update_pauses_loads_drops_the_cache_and_resumes_once(dialect, meet):
    with ScriptedServer(dialect) as server:
        generator = meet(server, dialect)
        generator.weights_changed(1)
        assert server.order() == ORDER[dialect]


@BOTH
def test_a_load_that_fails_is_an_error_and_the_server_goes_on(dialect, meet):
    path = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[dialect]
    with ScriptedServer(dialect) as server:
        generator = meet(server, dialect)
        server.faults[path] = [Answered(400, '{"success": false, "message": "shapes differ"}')]
        with pytest.raises(ServerError, match="shapes differ"):
            generator.weights_changed(1)
        assert len(server.asked(path)) == 1
        assert not server.state["paused"]


def test_sglang_is_flushed_again_while_it_is_busy(meet):
    with ScriptedServer("sglang") as server:
        generator = meet(server, "sglang")
        server.faults["/flush_cache"] = [Answered(400, "busy"), Answered(400, "busy")]
        generator.weights_changed(1)
        assert len(server.asked("/flush_cache")) == 3


def test_vllm_is_asked_until_the_cache_is_dropped(meet):
    with ScriptedServer("vllm") as server:
        generator = meet(server, "vllm")
        server.faults["/reset_prefix_cache"] = [Answered(200, '{"success": false}')]
        generator.weights_changed(1)
        assert len(server.asked("/reset_prefix_cache")) == 2


def test_control_routes_that_are_missing_name_the_flag(meet):
    with ScriptedServer("vllm", missing=["/pause", "/collective_rpc"]) as server:
        generator = meet(server, "vllm")
        with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
            generator.weights_changed(1)


@BOTH
def test_a_server_that_keeps_its_old_label_is_refused(dialect, meet):
    with ScriptedServer(dialect, follows_labels=False) as server:
        generator = meet(server, dialect)
        with pytest.raises(ServerError, match="wanted weight_version 1, got default"):
            generator.weights_changed(1)


@BOTH
def test_tokens_of_an_older_version_are_refused(dialect, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        generator = meet(server, dialect, tolerance=None)
        generator.weights_changed(2)
        server.state["label"] = "1"
        with pytest.raises(ServerError, match="wanted tokens of weights 2, got some of 1"):
            run(generator)


@BOTH
def test_the_probe_tells_wrong_weights(dialect, meet):
    def garbage(prompt, budget, seed, name):
        ids, _ = toy_law(prompt, budget, seed, name)
        return ids, [-9.0] * len(ids)

    with ScriptedServer(dialect) as server:
        generator = meet(server, dialect)
        generator.weights_changed(1)
        assert len(run(generator)[0]) == 2
        assert any("differ from the trainer's by 0.0000" in line for line in generator.said)
        server.law = garbage
        generator.weights_changed(2)
        with pytest.raises(
            ServerError, match=r"probe of weights 2: wanted .* within 0.1 .* got 8\.\d+"
        ):
            run(generator)


def test_the_probe_tells_a_server_that_missed_a_small_update(meet):
    shift = [0.0]

    def score(tokens, temperature):
        return [toy_logprob(token) + shift[0] for token in tokens[1:]]

    def law(prompt, budget, seed, name):  # greedy, as far as seeds go
        return toy_law(prompt, budget, 0, name)

    with ScriptedServer("vllm", law=law) as server:
        generator = meet(server, "vllm", score=score)
        generator.weights_changed(1)
        run(generator)
        shift[0] = 1e-5
        generator.weights_changed(2)
        with pytest.raises(ServerError, match="exactly those from before the update"):
            run(generator)


def test_the_servers_own_weights_are_kept_where_they_were_loaded(meet):
    with ScriptedServer("vllm") as server:
        generator = meet(server, "vllm", starts_with_sync=False)
        generator.weights_changed(0)
        run(generator)
        assert not server.asked("/collective_rpc")
        generator.weights_changed(1)
        assert len(server.asked("/collective_rpc")) == 1


@BOTH
def test_colocated_servers_sleep_between_and_wake_in_order(dialect, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        generator = meet(server, dialect, colocated=True)
        generator.weights_changed(0)
        run(generator)
        assert server.state["asleep"] == {"weights", "kv_cache"}
        before = len(server.calls)
        generator.weights_changed(1)
        paths = [path for _, path, _ in server.calls[before:]]
        wakes = [i for i, path in enumerate(paths) if "wake" in path or "resume_memory" in path]
        load = next(i for i, path in enumerate(paths) if "rpc" in path or "from_disk" in path)
        assert wakes[0] < load < wakes[1]
        run(generator)  # awake: generates and sleeps again
        found, _ = run(generator)  # asleep, with the same weights: woken and loaded again
        assert len(found) == 2


@BOTH
def test_a_sleep_that_kept_the_weights_is_ended_as_a_whole(dialect, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        generator = meet(server, dialect, colocated=True, starts_with_sync=False)
        generator.weights_changed(0)
        for _ in range(2):
            assert len(run(generator)[0]) == 2
            assert "kv_cache" in server.state["asleep"]


@BOTH
def test_a_server_that_was_left_asleep_is_woken_by_the_hand_over(dialect, meet):
    with ScriptedServer(dialect, policy="lpm") as server:
        server.state["asleep"] = {"weights", "kv_cache"}
        generator = meet(server, dialect)
        generator.weights_changed(5)
        assert server.state["asleep"] == set()
        assert not server.asked("/pause")
        assert not server.asked("/pause_generation")
        assert len(run(generator)[0]) == 2


def test_seeds_differ_in_everything_that_they_are_keyed_by():
    base = (42, 3, 5, 1, 0)
    others = [tuple(v + (i == place) for i, v in enumerate(base)) for place in range(5)]
    seeds = {seed_of(*key) for key in [base, *others]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(0, 0, -1, -1, 0) >= 0
