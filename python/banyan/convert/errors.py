"""What a conversion refuses."""

from __future__ import annotations

from banyan.errors import UserError


class ConvertError(UserError):
    """A source that cannot be converted; the text says what was wanted and what came."""
