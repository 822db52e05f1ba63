"""The one exception for mistakes that a user can correct."""

from __future__ import annotations


class UserError(Exception):
    """A wrong key, value, file or row. The command line prints its text alone and exits with 2."""
