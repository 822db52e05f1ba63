"""The order of the training rows: shuffled anew in every epoch, the last incomplete batch dropped, resumable.

The order of epoch e is a function of (seed, e) alone, so a position is two numbers.
"""

from __future__ import annotations

import random

from banyan.errors import UserError


class Loader:
    """Hands out row indices batch by batch, epoch after epoch."""

    def __init__(self, num_rows: int, shuffle: bool, seed: int) -> None:
        self._num_rows = num_rows
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0
        self.position = 0
        self._order = self._order_of(0)

    def next(self, count: int) -> list[int]:
        """The next `count` rows of one epoch; starts the next epoch where fewer are left."""
        if count > self._num_rows:
            raise UserError(
                f"data.train_batch_size: wanted at most {self._num_rows} (usable rows), got {count}"
            )
        if self.position + count > self._num_rows:
            self.seek(self.epoch + 1, 0)
        rows = self._order[self.position : self.position + count]
        self.position += count
        return rows

    def seek(self, epoch: int, position: int) -> None:
        """Goes to a position that `epoch` and `position` held before."""
        self.epoch = epoch
        self.position = position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._num_rows))
        if self._shuffle:
            random.Random(f"banyan rows {self._seed} {epoch}").shuffle(order)
        return order
