"""Data sets, tokenizers and chat templates."""
