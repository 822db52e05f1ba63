"""Exceptions whose text is all that a user needs: the command line prints it without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A wrong key, value, file or row that the user can correct. Exit code 2."""


class RunError(Exception):
    """A run that could not go on, such as one whose reward function failed too often. Exit code 1."""


def core_text(error: BaseException) -> str:
    """The message of an error of the core, without the C++ frames that LibTorch may append."""
    return str(error).split("\nException raised from")[0].rstrip()
