"""Turns model files of other programs into Hugging Face model directories."""

from banyan.convert.convert import ConvertError, cache_dir, convert

__all__ = ["ConvertError", "cache_dir", "convert"]
