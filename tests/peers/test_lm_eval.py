"""lm-eval over HTTP scores SmolLM2 as its own transformers backend does: fp32, a small local task."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from conftest import needs_smollm2
from serving_fixtures import environment, needs, serving

NUM_ROWS = 16
TASK = """task: banyan_sums
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{question}}}}"
{target}
"""
CHOICE = """doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc}
  - {metric: acc_norm}"""
GREEDY = """doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match}"""


def write_task(folder: Path, output_type: str) -> None:
    rng = random.Random(5)
    rows = []
    for _ in range(NUM_ROWS):
        a, b = rng.randrange(1, 10), rng.randrange(1, 10)
        answers = [a + b, a + b + 1, abs(a - b), a + b + 10]
        order = rng.sample(range(4), 4)
        rows.append(
            {
                "question": f"{a} + {b} =",
                "choices": [f" {answers[i]}" for i in order],
                "answer": order.index(0),
                "text": f" {a + b}",
            }
        )
    folder.mkdir()
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = CHOICE if output_type == "multiple_choice" else GREEDY
    task = TASK.format(rows=data, output_type=output_type, target=target)
    (folder / "banyan_sums.yaml").write_text(task)


def score(folder: Path, backend: str, arguments: str) -> dict[str, float]:
    """The metrics of one run of lm-eval."""
    out = folder / backend
    command = [
        *(str(environment("lm_eval") / "bin" / "python"), "-m", "lm_eval", "run"),
        *("--model", backend),
        *("--model_args", arguments, "--tasks", "banyan_sums", "--include_path", str(folder)),
        *("--output_path", str(out), "--batch_size", "1", "--device", "cpu"),
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    env |= {"OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (file,) = out.rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["banyan_sums"]
    return {k: v for k, v in found.items() if k.endswith(",none") and "stderr" not in k}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs("lm_eval")
@needs_smollm2
@pytest.mark.parametrize("output_type", ["multiple_choice", "generate_until"])
def test_the_score_is_that_of_transformers(smollm2: Path, tmp_path: Path, output_type: str) -> None:
    task = tmp_path / "task"
    write_task(task, output_type)
    theirs = score(task, "hf", f"pretrained={smollm2},dtype=float32")
    with serving(smollm2, tmp_path, "--dtype", "float32") as server:
        ours = score(
            task,
            "local-completions",
            f"model={smollm2.name},tokenizer={smollm2},base_url={server.url}/v1/completions,"
            "tokenized_requests=True,num_concurrent=4",
        )
    assert ours == theirs
    assert theirs
