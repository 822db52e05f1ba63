"""Sampling with llama.cpp: every prompt n times, exactly as many tokens as asked, bf16 weights.

The loop that its own batched example runs: each prompt is computed once, its cache is given to the
n sequences of its group, then every step decodes one token of each sequence.
"""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import llama_cpp as llama
import llama_gguf
from common import Rollout, parser, read_rollouts, time_rollout, write_result

_BATCH = 2048  # tokens of one call


class Generator:
    """One model; a context per rollout."""

    def __init__(self, path: Path, threads: int, unified: bool) -> None:
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(
            str(path).encode(), llama.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"[bench] llama.cpp does not load {path}")
        self._threads = threads
        self._unified = unified

    def prepare(self, rollout: Rollout) -> None:
        """A context that holds every sequence of the rollout."""
        longest = max(map(len, rollout.prompts)) + rollout.response_length
        params = llama.llama_context_default_params()
        params.n_seq_max = rollout.num_sequences
        params.n_ctx = rollout.num_sequences * (-(-longest // 256) * 256)
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = self._unified
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("[bench] llama.cpp does not make a context")
        self._batch = llama.llama_batch_init(_BATCH, 0, 1)
        self._sampler = llama.llama_sampler_init_dist(1)
        self._rollout = rollout

    def release(self) -> None:
        llama.llama_sampler_free(self._sampler)
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)

    def generate(self, new_tokens: int) -> None:
        memory = llama.llama_get_memory(self._context)
        llama.llama_memory_clear(memory, True)
        n = self._rollout.group_size
        tokens, positions = [], []
        for group, prompt in enumerate(self._rollout.prompts):
            first = group * n
            entries = [(token, i, first) for i, token in enumerate(prompt)]
            self._decode(entries, len(prompt) - 1)
            for sibling in range(n):
                tokens.append(self._sample(len(prompt) - 1))
                positions.append(len(prompt))
                if sibling > 0:
                    llama.llama_memory_seq_cp(memory, first, first + sibling, -1, -1)
        for _ in range(new_tokens - 1):
            rows = range(len(tokens))
            self._decode([(tokens[i], positions[i], i) for i in rows], None)
            tokens = [self._sample(i) for i in rows]
            positions = [position + 1 for position in positions]

    def _decode(self, entries: list[tuple[int, int, int]], drawn: int | None) -> None:
        """Runs (token, position, sequence) entries; logits of entry `drawn`, or of all."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = drawn is None or i == drawn
        code = llama.llama_decode(self._context, batch)
        if code != 0:
            raise ValueError(f"[bench] llama_decode ended with {code}")

    def _sample(self, row: int) -> int:
        return llama.llama_sampler_sample(self._sampler, self._context, row)


def main() -> None:
    args_parser = parser(__doc__)
    args_parser.add_argument("--unified", action="store_true", help="one cache for all sequences")
    args = args_parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        llama_gguf.write(Path(args.model), path)
        generator = Generator(path, threads, args.unified)
        for name, rollout in read_rollouts(args.work).items():
            generator.prepare(rollout)
            generator.generate(4)  # not timed
            found[name] = time_rollout(
                rollout, args.repeats, lambda r=rollout: generator.generate(r.response_length)
            )
            generator.release()
    write_result(
        args.json,
        rollouts=found,
        version=version("llama-cpp-python"),
        weights="bf16",
        threads=threads,
    )


if __name__ == "__main__":
    main()
