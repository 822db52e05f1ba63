"""Where the numbers of a run go: console, metrics.jsonl, TensorBoard."""
