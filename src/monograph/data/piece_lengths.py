"""Describe how long the pieces of documents in a run's rows are.

A token attends only to tokens of its own piece, so these lengths decide how much attention there is to
compute.

Shape suffixes: P pieces, L lengths from 0 to the longest one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PieceLengths(NamedTuple):
    """How many pieces of each length an epoch visits.

    A piece is at most a row of consecutive tokens of one document (`monograph.data.pack`).

    Attributes:
        lengths: the lengths that occur, in ascending order.
        visits: for each of them, the number of visits to pieces of that length.
    """

    lengths: tuple[int, ...]
    visits: tuple[float, ...]

    @classmethod
    def of_whole_rows(cls, sequence_length: int) -> "PieceLengths":
        """Return the lengths for rows that hold one piece each and are full."""
        return cls((sequence_length,), (1.0,))

    @classmethod
    def of_pieces(cls, lengths_P: NDArray[np.int64]) -> "PieceLengths":
        """Return the lengths of these pieces, each of which is visited once."""
        return cls.of_counts(np.bincount(lengths_P).astype(np.float64))

    @classmethod
    def of_counts(cls, counts_L: NDArray[np.float64]) -> "PieceLengths":
        """Return the lengths for `counts_L[n]` visits to pieces of n tokens."""
        lengths = np.flatnonzero(counts_L)
        return cls(tuple(lengths.tolist()), tuple(counts_L[lengths].tolist()))

    def visible_positions(self, window: int | None = None) -> float:
        """Return the mean number of positions that a token attends to.

        A token attends to its own position and to those before it in its piece. The mean is

            sum over pieces of n tokens of (1 + 2 + ... + n) / sum over pieces of n,

        where each term 1, 2 ... n is at most `window`. Padding is not counted. Without pieces the
        mean is 0.

        Args:
            window: the positions that a token may attend to; None: all.
        """
        lengths = np.array(self.lengths, dtype=np.float64)
        visits = np.array(self.visits, dtype=np.float64)
        # The first tokens of a piece, as many as the window has positions, attend to 1, 2, 3 ... positions. Each
        # later token attends to a full window.
        within = lengths if window is None else np.minimum(lengths, window)
        pairs = within * (within + 1) / 2 + (lengths - within) * within
        tokens = float(visits @ lengths)
        return float(visits @ pairs) / tokens if tokens else 0.0
