"""Turns model files of other programs into Hugging Face model directories."""

from banyan.convert.convert import cache_dir, convert
from banyan.convert.errors import ConvertError

__all__ = ["ConvertError", "cache_dir", "convert"]
