"""Exceptions whose text is all that a user needs: the command line prints it without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A wrong key, value, file or row that the user can correct. Exit code 2."""


class RunError(Exception):
    """A run that could not go on, such as one whose reward function failed too often. Exit code 1."""
