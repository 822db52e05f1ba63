"""The token trie for people who train in PyTorch: `pack` samples, run any model on the unique tokens, `unpack`.

A packed trie holds every unique token of a batch once, depth first: the ancestors of a token are its context, the
subtree of token u is the packed range [u, tout[u]). The letters of shapes: T unique tokens, S samples, N segments,
R head rows, X edges, U scored logical tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from banyan import extension

__all__ = ["Edges", "PackedTrie", "pack"]


class Edges(NamedTuple):
    """Where log-probabilities live: one head row per token with a scored child, one edge per distinct scored child.

    Shapes:
        source: [R] int64, packed token of each head row, ascending.
        row_offsets: [R + 1] int32; edges of row r are [row_offsets[r], row_offsets[r + 1]).
        token: [X] int32, the child's token id.
        logical_edge, logical_row: [U] int64, edge and row of each scored token, sample by sample.
        logical_sample, logical_position: [U] int64, its sample and its index there.
        counts: scored tokens of each sample.
    """

    source: torch.Tensor
    row_offsets: torch.Tensor
    token: torch.Tensor
    logical_edge: torch.Tensor
    logical_row: torch.Tensor
    logical_sample: torch.Tensor
    logical_position: torch.Tensor
    counts: list[int]


class PackedTrie:
    """What `pack` returns. Immutable; tensors are on the CPU.

    Attributes:
        tokens, positions: [T] int64: what the model reads. `input_ids` and `position_ids` are the same as [1, T].
        parent, depth, tout: [T] int32: packed index of the parent (-1 at a root), number of ancestors, end of the
            subtree.
        segments: [N, 6] int32, rows of (begin, end, tout, parent, num_samples, depth).
        lengths: tokens of each sample.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        arrays = core.arrays()
        self.tokens: torch.Tensor = arrays["tokens"]
        self.positions: torch.Tensor = arrays["positions"]
        self.parent: torch.Tensor = arrays["parent"]
        self.depth: torch.Tensor = arrays["depth"]
        self.tout: torch.Tensor = arrays["tout"]
        self.segments: torch.Tensor = arrays["segments"]
        self.lengths: list[int] = arrays["lengths"]
        self.num_pairs: int = arrays["num_pairs"]
        self._paths: torch.Tensor = arrays["paths"]

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_unique(self) -> int:
        """T: tokens that are computed."""
        return len(self.tokens)

    @property
    def num_logical(self) -> int:
        """Tokens of all samples."""
        return len(self._paths)

    @property
    def num_segments(self) -> int:
        return len(self.segments)

    @property
    def input_ids(self) -> torch.Tensor:
        return self.tokens[None]

    @property
    def position_ids(self) -> torch.Tensor:
        return self.positions[None]

    @cached_property
    def edges(self) -> Edges:
        return Edges(**self._core.edge_arrays())

    @cached_property
    def _path_list(self) -> tuple[torch.Tensor, ...]:
        return self._paths.split(self.lengths)

    def path(self, sample: int) -> torch.Tensor:
        """Packed indices of the sample's tokens, first to last: [length] int64."""
        if not -self.num_samples <= sample < self.num_samples:
            raise IndexError(f"[trie] sample: wanted one of {self.num_samples}, got {sample}")
        return self._path_list[sample]

    def unpack(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values per unique token [T, ...] (or [1, T, ...]) -> per sample [length, ...]. Differentiable."""
        values = self.rows(values, "unpack")
        return values.index_select(0, self._paths.to(values.device)).split(self.lengths)

    def split(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values per scored token [U, ...], as edge_logprob gives them -> per sample."""
        wanted = sum(self.edges.counts)
        if values.dim() == 0 or len(values) != wanted:
            raise ValueError(f"[split] values: wanted [{wanted}, ...], got {list(values.shape)}")
        return values.split(self.edges.counts)

    def rows(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """[T, ...] or [1, T, ...] as [T, ...]. Raises ValueError for another shape."""
        if values.dim() > 1 and values.shape[0] == 1 and values.shape[1] == self.num_unique:
            return values[0]
        if values.dim() == 0 or values.shape[0] != self.num_unique:
            shape = list(values.shape)
            raise ValueError(f"[{what}] values: wanted [{self.num_unique}, ...], got {shape}")
        return values

    def __repr__(self) -> str:
        ratio = self.num_logical / self.num_unique
        return (
            f"PackedTrie({self.num_samples} samples, {self.num_logical} tokens, {self.num_unique} unique, "
            f"{ratio:.2f}x, {self.num_segments} segments)"
        )


def pack(
    samples: Iterable[Sequence[int]],
    *,
    positions: Iterable[Sequence[int]] | None = None,
    scored: Iterable[Sequence[int]] | None = None,
    share: bool = True,
    min_prefix_len: int = 1,
    min_group_size: int = 2,
) -> PackedTrie:
    """Merges samples that begin alike. O(tokens); the layout does not depend on the order of the samples.

    Args:
        samples: Token ids of each sample, without padding: lists, or one-dimensional tensors or arrays.
        positions: Position ids of each sample; 0, 1, 2, ... if left out. Tokens merge only where these agree too.
        scored: For each token of each sample, whether its log-probability is wanted (a loss mask); all if left out.
            The first token of a sample has nothing that predicts it and is never scored.
        share: False: nothing is merged; the same code on one row of separate samples.
        min_prefix_len: Leading tokens that two samples must have in common to be merged at all.
        min_group_size: Samples that must pass through a token for it to be shared.

    Raises:
        ValueError: No samples, an empty one, lengths that differ, a negative id (padding).
        TypeError: Something that is not a list of integers.
    """
    core = extension.load()
    ids = _int_lists(samples, "samples")
    lengths = [len(row) for row in ids]
    places = _like_samples(positions, "positions", lengths)
    masks = _like_samples(scored, "scored", lengths)
    wanted = [[bool(bit) for bit in row] for row in masks]
    return PackedTrie(core.PackedTrie(ids, places, wanted, share, min_prefix_len, min_group_size))


def _int_lists(rows: Iterable[Any], what: str) -> list[list[int]]:
    """Lists of the integers in lists, tensors or arrays. Raises TypeError naming the row."""
    out = []
    for index, row in enumerate(rows):
        values = row.tolist() if hasattr(row, "tolist") else row
        if not isinstance(values, (list, tuple)) or not all(isinstance(v, int) for v in values):
            raise TypeError(
                f"[trie] {what}: wanted a list of integers for sample {index}, got {_kind(values)}"
            )
        if any(not -(2**31) <= v < 2**31 for v in values):
            raise ValueError(f"[trie] {what}: wanted 32-bit integers for sample {index}")
        out.append(list(values))
    return out


def _like_samples(rows: Iterable[Any] | None, what: str, lengths: list[int]) -> list[list[int]]:
    """Integer lists of the samples' lengths, or nothing. Raises ValueError naming the sample."""
    if rows is None:
        return []
    out = _int_lists(rows, what)
    if len(out) != len(lengths):
        raise ValueError(f"[trie] {what}: wanted one per sample ({len(lengths)}), got {len(out)}")
    for index, (row, length) in enumerate(zip(out, lengths, strict=True)):
        if len(row) != length:
            raise ValueError(f"[trie] sample {index} {what}: wanted {length}, got {len(row)}")
    return out


def _kind(values: Any) -> str:
    odd = (
        next((v for v in values if not isinstance(v, int)), None) if type(values) is list else None
    )
    return f"a list with {odd!r}" if odd is not None else f"{type(values).__name__} {values!r:.40}"
