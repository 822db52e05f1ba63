"""From the configuration of a run to its generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from banyan.config.resolve import Resolved
from banyan.drivers.generator import Options, ServerGenerator
from banyan.drivers.http import Address, Limits
from banyan.drivers.probe import Probe
from banyan.drivers.server import Server
from banyan.drivers.sglang import SglangServer
from banyan.drivers.vllm import VllmServer
from banyan.drivers.weights import WeightFolders
from banyan.errors import UserError

_ROLLOUT = "actor_rollout_ref.rollout"
_OWN = "banyan.rollout"
_DIALECTS = {"vllm": VllmServer, "sglang": SglangServer}


@contextmanager
def generator(config: Resolved, say: Callable[[str], None]) -> Iterator[ServerGenerator]:
    """The servers of rollout.server_urls, met and ready. Raises UserError and ServerError."""
    made = make(config, say)
    try:
        made.connect()
        yield made
    finally:
        made.close()


def make(config: Resolved, say: Callable[[str], None]) -> ServerGenerator:
    """The generator, not yet connected."""
    name = config[f"{_ROLLOUT}.name"]
    raw = config[f"{_ROLLOUT}.logprobs_mode"] == "raw_logprobs"
    folder = config[f"{_OWN}.weights_dir"]
    root = Path(folder) if folder else Path(config["trainer.default_local_dir"]) / "rollout_weights"
    sleeps = config[f"{_ROLLOUT}.enable_sleep_mode"] and config[f"{_ROLLOUT}.free_cache_engine"]
    return ServerGenerator(
        servers(config, say),
        Options(
            reports_cut_law=name == "vllm" and not raw,
            starts_with_sync=config[f"{_ROLLOUT}.load_format"] == "dummy",
            colocated=config[f"{_OWN}.colocated"] and sleeps,
            max_num_seqs=config[f"{_ROLLOUT}.max_num_seqs"],
            total_tokens=config["data.max_prompt_length"] + config[f"{_ROLLOUT}.response_length"],
        ),
        WeightFolders(
            root,
            config["actor_rollout_ref.model.path"],
            "fp32" if config[f"{_ROLLOUT}.dtype"] == "float32" else "bf16",
        ),
        Probe(config[f"{_OWN}.probe_tolerance"], say),
        say,
    )


def servers(config: Resolved, say: Callable[[str], None]) -> list[Server]:
    limits = Limits(
        timeout=config[f"{_ROLLOUT}.server.timeout"],
        request_timeout=config[f"{_OWN}.request_timeout"],
        max_attempts=config[f"{_ROLLOUT}.server.max_attempts"],
        retry_delay=config[f"{_ROLLOUT}.server.retry_delay"],
        max_connections=config[f"{_ROLLOUT}.server.max_connections"],
        max_start_wait_time=config[f"{_ROLLOUT}.server.max_start_wait_time"],
    )
    key = _key(config, f"{_OWN}.api_key_file")
    token = _key(config, f"{_OWN}.admin_token_file") or key
    urls = config[f"{_ROLLOUT}.server_urls"]
    found: list[Server] = []
    for url, admin in zip(urls, config[f"{_OWN}.admin_urls"] or urls, strict=True):
        address = Address(url, limits, key)
        same = admin == url and token == key
        control = address if same else Address(admin, limits, token)
        found.append(_DIALECTS[config[f"{_ROLLOUT}.name"]](address, control, say))
    return found


def _key(config: Resolved, name: str) -> str | None:
    file = config[name]
    if not file:
        return None
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"{name}: wanted a readable file, got {file}: {error.strerror}") from error
    if not text or "\n" in text:
        raise UserError(
            f"{name}: wanted a file with one line, the key; got {len(text.split())} words"
        )
    return text
