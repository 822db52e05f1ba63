"""Makes the context of a served model: tokenizer, engine, names, defaults of its generation_config.json."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from banyan.data.chat import Chat
from banyan.errors import UserError
from banyan.serve import tools
from banyan.serve.context import Context
from banyan.serve.engine_client import EngineClient
from banyan.serve.field_kinds import Shape
from banyan.serve.ids_only import IdsOnly
from banyan.serve.limits import Limits
from banyan.serve.metrics import Metrics
from banyan.serve.text_stream import TokenText

_log = logging.getLogger("banyan.serve")
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
}


@dataclass(frozen=True)
class Served:
    """How a model is shown; the engine's own options are apart."""

    names: tuple[str, ...] = ()  # none: the directory's name
    generation_config: str = "auto"  # auto, vllm (neutral), or a directory
    tool_format: str = "auto"
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = 20
    trust_chat_template: bool = False
    return_sampling_mask: bool = False
    stream_interval: int = 1
    release_level: int | None = 2  # None: no sleeping
    log_stats: bool = False
    seeds: random.Random = field(default_factory=random.SystemRandom)
    limits: Limits = field(default_factory=Limits)


def read_chat(directory: Path, template: str | Path | None, text: bool = True) -> Any:
    """The tokenizer and template of a model; `template`: a file; `text`: false for ids only. Raises UserError."""
    if not text:
        return IdsOnly(directory)
    if template is None:
        return Chat(directory)
    try:
        return Chat(directory, Path(template).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template: {template}: {error}") from error


def grammars(chat: Any, vocab: int) -> Any:
    """The compiler of structured output; None without a tokenizer."""
    if chat.tokenizer is None:
        return None
    from banyan.serve.structured import Grammars

    return Grammars(TokenText(chat.tokenizer, vocab).for_stops())


def start_calls(server: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Control calls that bring the engine into the state that the parameters ask for."""
    calls: list[tuple[Any, ...]] = [("set_weight_version", server["weight_version"])]
    if server["load_format"] == "dummy" and not server["allow_dummy"]:
        # Weights that are not to be used: nothing is generated before the first update.
        calls += [("sleep", 2, "abort", 60.0), ("wake", ["weights", "kv_cache"])]
    return calls


def context(
    engine: Any, chat: Any, vocab: int, max_model_len: int, served: Served, grammars: Any
) -> Context:
    """`engine`: the binding's, not started; `chat`: of `read_chat`; `vocab`: ids of the model."""
    tokens = TokenText(chat.tokenizer, vocab)
    names = list(served.names) or [chat.directory.resolve().name]
    metrics = Metrics(names[0])
    shape = Shape(
        served.limits,
        vocab,
        max_model_len,
        served.max_logprobs,
        sampling_defaults(chat.directory, served.generation_config),
        served.trust_chat_template,
        served.return_sampling_mask,
    )
    if shape.defaults:
        _log.warning("sampling defaults of the model: %s", shape.defaults)
    form = served.tool_format
    return Context(
        engine=EngineClient(engine, metrics),
        chat=chat,
        tokens=tokens,
        names=names,
        shape=shape,
        limits=served.limits,
        eos_ids=chat.stop_ids(),
        grammars=grammars,
        tool_format=_detected(chat) if form == "auto" else form,
        metrics=metrics,
        logprobs_mode=served.logprobs_mode,
        model_directory=str(chat.directory),
        settings={"sampling_defaults": shape.defaults, "served_model_name": names},
        seeds=served.seeds,
        stream_interval=served.stream_interval,
        release_level=served.release_level,
        log_stats=served.log_stats,
    )


def sampling_defaults(directory: Path, source: str) -> dict[str, float]:
    """Sampling parameters of generation_config.json, where `source` asks for them. Raises UserError."""
    if source == "vllm":
        return {}
    path = (directory if source == "auto" else Path(source)) / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: wanted JSON: {error}") from error
    found = {}
    for name, (low, high) in _RANGES.items():
        value = config.get(name)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise UserError(f"{path}: {name}: wanted a number in [{low}, {high}], got {value!r}")
        found[name] = value
    return found


def _detected(chat: Any) -> str:
    try:
        return tools.detect(chat.template_text())
    except UserError:
        return "none"
