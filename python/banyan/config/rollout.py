"""What generates in a training run: `rollout.name`, `rollout.server_urls` and `rollout.engine_kwargs`.

Without addresses the engine of this process generates, and the engine_kwargs of `rollout.name` are read as that engine
means them (rollout_table.py): they win over the keys of `rollout`, as in verl. With addresses, servers of vLLM or
SGLang generate with the options that they were started with.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from banyan.config import rollout_table
from banyan.errors import UserError

ROLLOUT = "actor_rollout_ref.rollout"
_OWN = "banyan.rollout"
_WORDS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
_SERVERS = ("vllm", "sglang")


def apply(values: dict[str, Any]) -> list[str]:
    """Carries the engine's parameters into `values` (key -> value); returns lines to say. Raises UserError."""
    name = values[f"{ROLLOUT}.name"]
    urls = values[f"{ROLLOUT}.server_urls"] = _addresses(values, f"{ROLLOUT}.server_urls")
    notes = _check_unread(values, name, bool(urls))
    if urls:
        _check_servers(values, name, urls)
        return notes
    if name in _WORDS:
        notes.append(
            f"{ROLLOUT}.name={name}: the engine of this process generates, since no {ROLLOUT}.server_urls are given; "
            f"engine_kwargs.{name} are read as {_WORDS[name]} means them"
        )
    elif name == "hf":
        notes.append(f"{ROLLOUT}.name=hf: the engine of this process generates")
    if name in rollout_table.DIALECTS:
        where = f"{ROLLOUT}.engine_kwargs.{name}"
        tree, lines = rollout_table.for_training(
            values[where], name, f"{where}.", values["trainer.device"]
        )
        values |= tree
        notes += lines
    return notes


def _check_unread(values: dict[str, Any], name: str, has_servers: bool) -> list[str]:
    """Names in the engine_kwargs that nobody reads are checked all the same."""
    notes = []
    for engine in rollout_table.DIALECTS:
        where = f"{ROLLOUT}.engine_kwargs.{engine}"
        if not values[where] or (engine == name and not has_servers):
            continue
        rollout_table.check_names(values[where], engine, f"{where}.")
        why = (
            "the servers run with the options that they were started with"
            if engine == name
            else f"{ROLLOUT}.name={name}"
        )
        notes.append(f"{where}: not read, {why}")
    return notes


def _addresses(values: dict[str, Any], key: str) -> list[str]:
    urls = [url.rstrip("/") for url in values[key]]
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise UserError(f"{key}: wanted addresses such as http://host:8000, got {url!r}")
    if len(set(urls)) < len(urls):
        raise UserError(f"{key}: wanted each address once, got {', '.join(urls)}")
    return urls


def _check_servers(values: dict[str, Any], name: str, urls: list[str]) -> None:
    if name not in _SERVERS:
        raise UserError(
            f"{ROLLOUT}.name: wanted vllm or sglang with {ROLLOUT}.server_urls (banyan serve speaks both), got {name}"
        )
    admin = values[f"{_OWN}.admin_urls"] = _addresses(values, f"{_OWN}.admin_urls")
    if admin and len(admin) != len(urls):
        raise UserError(
            f"{_OWN}.admin_urls: wanted one per server ({len(urls)}) or none, got {len(admin)}"
        )
    if not values[f"{ROLLOUT}.calculate_log_probs"]:
        raise UserError(
            f"{ROLLOUT}.calculate_log_probs: wanted true with {ROLLOUT}.server_urls, got false: "
            "training compares the server's log-probabilities with its own"
        )
    _check_law(values, name)


def _check_law(values: dict[str, Any], name: str) -> None:
    """The law whose log-probabilities a server reports must be one that training can use."""
    raw = values[f"{ROLLOUT}.logprobs_mode"] == "raw_logprobs"
    plain = (
        values[f"{ROLLOUT}.temperature"] == 1.0 and values[f"{ROLLOUT}.repetition_penalty"] == 1.0
    )
    if name == "vllm" and raw and not plain:
        raise UserError(
            f"{ROLLOUT}.logprobs_mode: wanted processed_logprobs with a temperature or a repetition_penalty other than "
            "1, got raw_logprobs: training needs log-probabilities at the temperature; start vLLM with "
            "--logprobs-mode processed_logprobs"
        )
    correction = "algorithm.rollout_correction"
    cuts = values[f"{ROLLOUT}.top_p"] < 1.0 or values[f"{ROLLOUT}.top_k"] > 0
    reports_cut_law = name == "vllm" and not raw
    if cuts and reports_cut_law and values[f"{correction}.bypass_mode"]:
        raise UserError(
            f"{correction}.bypass_mode: wanted false with top_p or top_k on a vLLM server, got true: its processed "
            "log-probabilities are those of the truncated law"
        )
    corrects = values[f"{correction}.rollout_is"] or values[f"{correction}.rollout_rs"]
    if cuts and not reports_cut_law and corrects:
        raise UserError(
            f"{correction}: wanted no rollout_is and rollout_rs with top_p or top_k on this server: it does not "
            "report the truncated law that it samples from"
        )
