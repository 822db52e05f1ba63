"""The parameters of a rollout engine: names of vLLM, SGLang and TensorRT-LLM -> banyan's options.

rollout_table.tsv holds one row per parameter, with its effect. `banyan serve` reads its options through
`for_server`, a training run reads `rollout.engine_kwargs` through `for_training`; nothing else knows these names.

    settings = for_server({"mem_fraction_static": 0.6, "max_running_requests": 64}, "sglang")
    core.Engine(model, settings.engine); settings.server["served_model_name"]; settings.effective; settings.notes

An entry that is None is dropped, of two names of one parameter the last counts, and an unknown name is an error with
the nearest known one. No row may be silent: what has no effect is said once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from banyan.config import table, types
from banyan.errors import UserError

ENGINES = ("vllm", "sglang", "trtllm")
DIALECTS = (*ENGINES, "banyan")  # banyan: every name of the table
PAGE_TOKENS = 64  # a page of the pool is a tile of the path grid
_TREE = {"rollout": "actor_rollout_ref.rollout", "engine": "banyan.engine"}
_SIZE = re.compile(r"^(?P<number>-?\d+(?:\.\d+)?)(?P<unit>[kmgtKMGT])?$")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Attention kernels of devices that are none of these.
_FOREIGN_KERNELS = {"ascend": "npu", "intel_xpu": "xpu", "aiter": "rocm", "wave": "rocm"}


@dataclass(frozen=True)
class Row:
    """One parameter."""

    name: str
    of: tuple[str, ...]  # engines that know it by this name
    aliases: tuple[tuple[str, str], ...]  # (engine, other name)
    type: str
    default: Any
    theirs: str  # default of the engine it comes from
    effect: str  # honoured | map | ignore | reject
    sets: str  # engine:FIELD | serve:NAME | -
    train: str  # rollout.KEY | engine.KEY | -
    meaning: str

    def tree_key(self) -> str | None:
        """The key that it sets in the tree of a training run."""
        if self.train == "-":
            return None
        node, _, leaf = self.train.partition(".")
        return f"{_TREE[node]}.{leaf}"


@dataclass(frozen=True)
class Settings:
    """What `banyan serve` runs with."""

    engine: dict[str, Any]  # options of core.Engine
    server: dict[str, Any]  # what the shell of the server reads
    effective: dict[str, Any]  # every parameter by its name in the table, for /server_info
    notes: list[str] = field(default_factory=list)  # said once


@cache
def rows() -> dict[str, Row]:
    """All rows by name, in the order of the file."""
    text = resources.files("banyan.config").joinpath("rollout_table.tsv").read_text("utf-8")
    found: dict[str, Row] = {}
    for line in text.splitlines():
        if line.startswith(("#", "name\t")):
            continue
        name, of, aliases, kind, default, theirs, effect, sets, train, meaning = line.split("\t")
        pairs = [alias.split(":") for alias in aliases.split() if alias != "-"]
        found[name] = Row(
            name=name,
            of=tuple(of.split(",")),
            aliases=tuple((engine, alias) for engine, alias in pairs),
            type=kind,
            default=None if default == "-" else yaml.safe_load(default),
            theirs=theirs,
            effect=effect,
            sets=sets,
            train=train,
            meaning=meaning,
        )
    return found


def names(dialect: str) -> dict[str, Row]:
    """Every name that a dialect knows, with its row."""
    known: dict[str, Row] = {}
    for row in rows().values():
        if dialect in ("banyan", *row.of):
            known[row.name] = row
        for engine, alias in row.aliases:
            if dialect in ("banyan", engine):
                known[alias] = row
    return known


def for_server(
    options: Mapping[str, Any], dialect: str = "banyan", where: str = "", device: str = "cpu"
) -> Settings:
    """Options of a server, defaults filled in.

    Args:
        options: names of the dialect (dashes count as underscores) and their values.
        dialect: vllm, sglang, trtllm, or banyan for any name of the table.
        where: put before a name in messages ("--", "engine_kwargs.vllm.").
        device: cpu, cuda or npu, for names of kernels.

    Raises:
        UserError: an unknown name, a wrong value, or a refused one.
    """
    values, notes = _read(options, dialect, where, device)
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    effective: dict[str, Any] = {}
    for row in rows().values():
        if row.sets == "-":
            continue
        value = values.get(row.name, row.default)
        kind, _, option = row.sets.partition(":")
        options_of_kind = engine if kind == "engine" else server
        if option in options_of_kind:
            continue  # a name that only converts, after the one that it converts to
        effective[row.name] = value
        options_of_kind[option] = _option(row.name, value)
    return Settings(engine, server, effective, notes)


def for_training(
    options: Mapping[str, Any], dialect: str, where: str = "", device: str = "cpu"
) -> tuple[dict[str, Any], list[str]]:
    """Options of a training run's engine: (key of the tree -> value, lines to say). Raises UserError."""
    values, notes = _read(options, dialect, where, device)
    tree: dict[str, Any] = {}
    for name, value in values.items():
        key = rows()[name].tree_key()
        if key is None:
            notes.append(f"{where}{name}={_show(value)}: a server's option, without effect here")
        else:
            tree[key] = None if name == "max_model_len" and value == -1 else value
    return tree, notes


def check_names(options: Mapping[str, Any], dialect: str, where: str = "") -> None:
    """Raises UserError for the first name that the dialect does not have."""
    known = names(dialect)
    for name in options:
        if name.replace("-", "_") not in known:
            raise UserError(_unknown(name, dialect, where))


def from_flags(arguments: list[str], dialect: str = "banyan") -> dict[str, Any]:
    """`--max-num-seqs 64 --no-enable-prefix-caching --page-size=16` as a mapping. Raises UserError."""
    options: dict[str, Any] = {}
    known = names(dialect)
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise UserError(f"{flag}: wanted an option that begins with --")
        name, equals, value = flag[2:].replace("-", "_", flag.count("-")).partition("=")
        if equals:
            value = flag.partition("=")[2]
        negated = name.startswith("no_") and name[3:] in known
        row = known.get(name[3:] if negated else name)
        if row is None:
            raise UserError(_unknown(name, dialect, "--"))
        if negated:
            options[name[3:]] = False
        elif equals or (rest and not rest[0].startswith("--")):
            options[name] = _from_text(row, value if equals else rest.pop(0))
        elif row.type == "bool":
            options[name] = True
        else:
            raise UserError(f"--{name.replace('_', '-')}: wanted a value, got nothing")
    return options


def parse_size(value: Any) -> Any:
    """1k = 1000, 1K = 1024, 2.5m = 2500000; anything else as it is."""
    match = _SIZE.match(value) if isinstance(value, str) else None
    if not match:
        return value
    number, unit = match["number"], match["unit"]
    if unit in _BINARY and "." not in number:
        return int(number) * _BINARY[unit]
    if unit in _BINARY:
        return value  # 2.5K: half a kibibyte is nobody's size
    scaled = float(number) * _DECIMAL.get(unit or "", 1)
    return int(scaled) if scaled == int(scaled) else scaled


# --- reading ---------------------------------------------------------------------------------------------------


def _read(
    options: Mapping[str, Any], dialect: str, where: str, device: str
) -> tuple[dict[str, Any], list[str]]:
    """Checked values by the table's names, and what is to be said."""
    if dialect not in DIALECTS:
        raise UserError(f"dialect: wanted one of {', '.join(DIALECTS)}, got {dialect}")
    check_names(options, dialect, where)
    known = names(dialect)
    values: dict[str, Any] = {}
    notes: list[str] = []
    silent: dict[str, list[str]] = {}
    passes: list[int] = []  # bounds of a pass in SGLang's two names
    for given, value in options.items():
        name = given.replace("-", "_")
        row = known[name]
        if value is None:
            continue
        value = _checked(row, value, f"{where}{name}")
        if row.effect == "ignore":
            silent.setdefault(row.meaning, []).append(f"{where}{name}={_show(value)}")
        elif row.effect == "honoured":
            values[row.name] = value
        elif row.effect == "map":
            mapped = _mapped(row, value, f"{where}{name}", device, notes)
            if row.name in ("chunked_prefill_size", "max_prefill_tokens"):
                passes += [v for key, v in mapped.items() if key == "max_num_batched_tokens"]
            values |= mapped
    if passes:
        values["max_num_batched_tokens"] = min(passes)
    notes += [f"{', '.join(given)}: no effect, {why}" for why, given in silent.items()]
    return values, notes


def _checked(row: Row, value: Any, name: str) -> Any:
    """The value in its type; a refused row takes its default only."""
    kind = row.type
    if row.effect == "reject":
        if not table.same(value, _show(row.default)):
            raise UserError(
                f"{name}: wanted {_show(row.default)}, got {_show(value)}: {row.meaning}"
            )
        return value
    if kind == "any":
        return value
    if kind.startswith("size"):
        kind, value = kind.replace("size", "int", 1), parse_size(value)
    spec = types.parse(kind)
    try:
        return types.check(spec, value)
    except ValueError as error:
        raise UserError(f"{name}: wanted {error}, got {_show(value)}") from error


def _mapped(row: Row, value: Any, name: str, device: str, notes: list[str]) -> dict[str, Any]:
    """Values of other rows (or this one) that a converted value stands for."""
    if row.name.endswith("attention_backend"):
        owner = _FOREIGN_KERNELS.get(value)
        if owner not in (None, device):
            raise UserError(f"{name}: wanted kernels of {device}, got {value}, which are {owner}'s")
        notes.append(f"{name}={value}: no effect, kernels are chosen by the device")
        return {}
    if row.name == "block_size":
        if value != PAGE_TOKENS:
            how = "raised to" if value < PAGE_TOKENS else "taken as"
            notes.append(f"{name}={value}: {how} {PAGE_TOKENS}, the tokens of a KV page here")
        return {}
    try:
        return _MAPS[row.name](value)
    except ValueError as error:
        raise UserError(f"{name}: wanted {error}, got {_show(value)}") from error


def _dtype(value: str) -> dict[str, Any]:
    if value in ("float16", "half"):
        raise ValueError("bfloat16 or float32 (float16 has no kernels here)")
    return {"dtype": {"auto": "bfloat16", "float": "float32"}.get(value, value)}


def _chunk(value: int) -> dict[str, Any]:
    return {"enable_chunked_prefill": False} if value == -1 else {"max_num_batched_tokens": value}


def _length(value: int) -> dict[str, Any]:
    if value in (0, 1):
        raise ValueError("at least 2 tokens, or -1 for the model's limit")
    return {"max_model_len": value}


_MAPS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "dtype": _dtype,
    "sampling_defaults": lambda value: {
        "generation_config": {"model": "auto", "openai": "vllm"}[value]
    },
    "mem_fraction_static": lambda value: {"mem_fraction_static": value},
    "disable_radix_cache": lambda value: {"enable_prefix_caching": not value},
    "enable_weights_cpu_backup": lambda value: {"enable_weights_cpu_backup": value},
    "max_model_len": _length,
    "chunked_prefill_size": _chunk,
    "max_prefill_tokens": lambda value: {"max_num_batched_tokens": value},
    "schedule_policy": lambda value: {"scheduling_policy": {"fcfs": "fcfs", "lpm": "group"}[value]},
}


def _option(name: str, value: Any) -> Any:
    """A parameter's value as the option that it sets takes it."""
    if name == "max_model_len":
        return 0 if value == -1 else value
    if name == "enable_weights_cpu_backup":
        return 1 if value else 2
    return value


def _unknown(name: str, dialect: str, where: str) -> str:
    """The line for a name that the dialect does not have."""
    elsewhere = names("banyan").get(name)
    if elsewhere is not None:
        theirs = next((n for n, row in names(dialect).items() if row is elsewhere), None)
        hint = f"; that is another engine's name of {theirs}" if theirs else "; another engine's"
        return f"{where}{name}: unknown to {dialect}{hint}"
    near = difflib.get_close_matches(name, names(dialect), n=1, cutoff=0.6)
    hint = f"; the nearest known name is {near[0]}" if near else ""
    return f"{where}{name}: unknown parameter of {dialect}{hint} (docs/guides/rollout_parameters.md lists all)"


def _from_text(row: Row, text: str) -> Any:
    """A flag's text as a value; texts stay texts."""
    if row.type in ("str", "strs") or row.type.startswith(("one of", "size")):
        return text.split(",") if row.type == "strs" else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _show(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
