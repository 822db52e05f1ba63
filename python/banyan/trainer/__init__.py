"""The training run as the shell sees it: inputs, host, entry point."""
