"""The same work by other programs, each in the environment that `make peers` made for it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from banyan.errors import UserError

# peer -> (environment under build/peers, script, further arguments)
PEERS = {
    "transformers_update": ("transformers", "transformers_update.py", ["--repeats", "2"]),
    "transformers_sequence": ("transformers", "transformers_sequence.py", ["--repeats", "1"]),
    "transformers_generate": ("transformers", "transformers_generate.py", ["--repeats", "1"]),
    "trl_step": ("trl", "trl_step.py", ["--repeats", "1"]),
    "vllm": ("vllm", "vllm_rollout.py", []),
    "transformers": ("transformers", "transformers_rollout.py", []),
    "llama_cpp": ("llama_cpp", "llama_rollout.py", []),
}


def find_root() -> Path:
    """The repository: the working directory, or where this package stands in its source tree."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (folder / "benchmarks" / "peers" / "common.py").is_file():
            return folder
    raise UserError(
        "--peers: wanted banyan's repository as working directory, for benchmarks/peers"
    )


def environment_of(name: str) -> Path:
    return find_root() / "build" / "peers" / PEERS[name][0]


def is_there(name: str) -> bool:
    """Whether the peer's environment has been made."""
    return (environment_of(name) / ".installed").is_file()


def check(names: list[str]) -> None:
    """Raises UserError unless the environments of all of `names` are there."""
    for name in names:
        if not is_there(name):
            raise UserError(
                f"--peers: wanted {environment_of(name)}, which is missing; run `make peers`"
            )


def measure(
    name: str, model: Path, work_file: Path, folder: Path, repeats: int | None = None
) -> dict[str, Any]:
    """Runs one peer to its end and returns its result file.

    Args:
        repeats: Timed runs; None: those that the peer's entry names.
    """
    root = find_root()
    environment, script, arguments = PEERS[name]
    result_file = folder / f"{name}.json"
    command = [
        str(root / "build" / "peers" / environment / "bin" / "python"),
        str(root / "benchmarks" / "peers" / script),
        *("--model", str(model.resolve()), "--work", str(work_file), "--json", str(result_file)),
        *arguments,
        *([] if repeats is None else ["--repeats", str(repeats)]),
    ]
    run(command, folder / f"{name}.log")
    return json.loads(result_file.read_text(encoding="utf-8"))


def run(command: list[str], log: Path, keep_path: bool = False) -> None:
    """Runs a child; its output goes to `log`, and into the error if it fails.

    Args:
        keep_path: Keep PYTHONPATH: the child is banyan. A peer must not see this one's packages.
    """
    env = {k: v for k, v in os.environ.items() if keep_path or k != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env).returncode
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"[bench] {' '.join(command[:2])} ended with {code}:\n{tail}")
