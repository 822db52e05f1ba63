"""The clients of both dialects against `banyan serve` itself: its HTTP service, over an engine with scripted tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from banyan.drivers.http import Address
from banyan.serve.server import Listen
from fake_engine import logprob
from serve_running import running
from test_drivers import BOTH, DIALECTS, FAST, generator_for, run

pytest_plugins = ["serve_plugin"]
TOKEN, KEY = "a-token-for-the-tests", "a-key-for-the-tests"


def made(server, dialect, tmp_path, **options):
    """A connected generator; control routes stand on a socket of their own, with a key of their own."""
    generator = generator_for([server], dialect, tmp_path, tolerance=None, **options)
    address = Address(server.url, FAST, KEY)
    control = Address(server.admin_url, FAST, TOKEN)
    generator._servers = [DIALECTS[dialect](address, control, generator.said.append)]
    generator.connect()
    return generator


@pytest.fixture
def served(served_model):
    listen = Listen(port=0, keys=(KEY,), admin_port=0, admin_token=TOKEN)
    with running(served_model, listen) as found:
        yield found


@BOTH
def test_tokens_come_with_their_log_probabilities(dialect, served, tmp_path):
    generator = made(served, dialect, tmp_path)
    assert any(line.endswith("model tiny") and ": banyan " in line for line in generator.said)
    eos = served.chat.encode("<|im_end|>")
    found, stats = run(generator, prompts=[(11, 12, 13), (14, 15)], n=2, eos_ids=eos, max_tokens=64)
    wanted = [*served.chat.encode(served.answer), *eos]
    for trajectory in found.values():
        assert trajectory["response"] == wanted
        assert trajectory["finish"] == "stop"
        raw = [logprob(token, place) for place, token in enumerate(wanted)]
        # vLLM's dialect carries the law that was drawn from and its kept mass; SGLang's, what the server shows.
        law = [value / 2 - 0.25 for value in raw] if dialect == "vllm" else raw
        assert trajectory["rollout_log_probs"] == pytest.approx(law)
    assert stats["response_tokens"] == 4 * len(wanted)
    seeds = {request["params"]["seed"] for request in served.engine.requests}
    assert len(seeds) == 4
    generator.close()


def test_both_laws_come_with_truncation(served, tmp_path):
    generator = made(served, "vllm", tmp_path)
    found, _ = run(generator, top_p=0.9, max_tokens=5)
    one = found[0, 1]
    assert one["rollout_log_probs"] == pytest.approx([v - 0.25 for v in one["sampled_log_probs"]])
    generator.close()


@BOTH
def test_weights_are_handed_over_on_the_control_socket(dialect, served, tmp_path):
    generator = made(served, dialect, tmp_path)
    generator.weights_changed(3)
    calls = [call[0] for call in served.engine.calls]
    assert calls.index("pause") < calls.index("update_weights_from_disk") < calls.index("resume")
    update = next(call for call in served.engine.calls if call[0] == "update_weights_from_disk")
    assert Path(update[1]).is_dir()
    assert served.engine.version == "3"
    spans = run(generator, max_tokens=3)[0][0, 0]["weight_spans"]
    assert spans == [{"epoch": 3, "version": "3", "start": 0, "end": 3}]
    assert len(run(generator, max_tokens=3)[0]) == 2
    generator.close()
