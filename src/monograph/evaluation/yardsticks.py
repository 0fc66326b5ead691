"""Compute baselines for a trained model: bits per byte that simple, well-known methods reach on a
held-out text.

`accepted_line_counts` is another measure, for models of Python code: it counts the lines of a sampled text
that Python's own tokenizer accepts.

A gram is a few consecutive bytes, packed into a uint64. A gram's context is all its bytes but the last.
The first byte is the highest of the uint64, so that grams of one context are adjacent once grams are
sorted.

Shape suffixes: H held-out positions, Q distinct held-out grams, G distinct grams of the train text.
"""

import gzip
import io
import lzma
import tokenize
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from monograph.data.progress import ProgressCallback

Grams = NDArray[np.uint64]


def yardsticks(
    train_bytes: bytes, held_out_bytes: bytes, progress: ProgressCallback | None = None
) -> dict[str, float]:
    """Return the held-out text's bits per byte by four methods, by name, usually the worst first.

        "trigram"   add-one byte trigram, counted on the train text
        "gzip -9"   size of the compressed held-out text. A compressor adapts to the held-out text
                    while it reads it, but does not know the train text
        "order 6"   interpolated modified Kneser-Ney byte model with up to 6 bytes of context,
                    counted on the train text
        "xz -9"     as "gzip -9"

    10 MB of train text take about 3 s and 0.6 GB; both grow with the text.

    Args:
        train_bytes: the train text, all files concatenated, so that contexts reach across the ends
            of files.
        held_out_bytes: the held-out text, all files concatenated; not empty.
        progress: called with ("yardsticks", methods done, 4).
    """

    def report(done: int) -> None:
        if progress is not None:
            progress("yardsticks", done, 4)

    report(0)
    trigram = trigram_bits_per_byte(train_bytes, held_out_bytes)
    report(1)
    gzip_bits = 8 * len(gzip.compress(held_out_bytes, compresslevel=9)) / len(held_out_bytes)
    report(2)
    xz_bits = 8 * len(lzma.compress(held_out_bytes, preset=9)) / len(held_out_bytes)
    report(3)
    order_6 = kneser_ney_bits_per_byte(train_bytes, held_out_bytes, order=6)
    report(4)
    return {"trigram": trigram, "gzip -9": gzip_bits, "order 6": order_6, "xz -9": xz_bits}


def trigram_bits_per_byte(train_bytes: bytes, held_out_bytes: bytes) -> float:
    """Return the held-out text's bits per byte by an add-one trigram.

        p(c | ab) = (n(abc) + 1) / (n(ab) + 256),    n(ab) = sum over c of n(abc)

    n are counts in the train text. The first two bytes have no context of two bytes, and count 8
    bits each.
    """
    train = _as_array(train_bytes)
    held_out = _as_array(held_out_bytes)
    # 256³ counters take 64 MB and one pass over the text, which is faster than sorting the grams.
    train_grams = _grams(train, 3).astype(np.int64)
    counts_abc = np.bincount(train_grams, minlength=1 << 24).astype(np.int32)
    counts_ab = counts_abc.reshape(1 << 16, 256).sum(axis=1)
    grams_H = _grams(held_out, 3).astype(np.int64)
    probability_H = (counts_abc[grams_H] + 1) / (counts_ab[grams_H >> 8] + 256)
    bits = 8 * min(2, len(held_out)) - float(np.log2(probability_H).sum())
    return bits / len(held_out)


def kneser_ney_bits_per_byte(train_bytes: bytes, held_out_bytes: bytes, order: int) -> float:
    """Return the held-out text's bits per byte by an interpolated modified Kneser-Ney model.

        p_k(c | h) = (a(hc) - D(a(hc))) / sum_x a(hx)  +  g(h) · p_{k-1}(c | h')
        g(h)       = sum_x D(a(hx)) / sum_x a(hx)
        p_{-1}     = 1 / 256

    h is the last k bytes before c, and h' the last k - 1. At the highest order a(hc) is the count
    of hc in the train text, at lower orders the number of distinct bytes that precede hc there. If
    the train text does not contain h, p_k = p_{k-1}. A position with fewer than k bytes before it
    uses a lower order.

    The discounts of an order, with n_i the number of grams whose a is i:

        Y    = n_1 / (n_1 + 2·n_2)
        D(i) = i - (i+1)·Y·n_{i+1}/n_i      for i = 1, 2, 3; D(3) also for all a > 3

    If that is undefined or not inside (0, i), D(i) = (n_1 + 1) / (n_1 + 2·n_2 + 2), so that no byte
    has probability 0. Source: Chen and Goodman 1998, "An Empirical Study of Smoothing Techniques
    for Language Modeling", section 3.

    Args:
        train_bytes: the train text.
        held_out_bytes: the held-out text.
        order: maximum of bytes of context, at most 7.
    """
    train = _as_array(train_bytes)
    held_out = _as_array(held_out_bytes)
    probability_H = np.full(len(held_out), 1 / 256)
    for table in _tables(train, min(order, len(train) - 1)):
        if table.order >= len(held_out):
            break
        # The first positions have fewer bytes before them than this order's context.
        grams_H = _grams(held_out, table.order + 1)
        probability_H[table.order :] = table.probabilities(grams_H, probability_H[table.order :])
    return -float(np.log2(probability_H).sum()) / len(held_out)


class _Table(NamedTuple):
    """One order of the model: its sorted distinct (order + 1)-grams, with running sums of counts
    and discounts.

    Attributes:
        order: bytes of context.
        grams_G: the grams, sorted.
        discounted_G: a - D(a) of each gram; `kneser_ney_bits_per_byte` defines a and D.
        count_sums: running sums of a, G + 1 entries, the first 0.
        discount_sums: running sums of D(a), G + 1 entries, the first 0.
    """

    order: int
    grams_G: Grams
    discounted_G: NDArray[np.float64]
    count_sums: NDArray[np.int64]
    discount_sums: NDArray[np.float64]

    @classmethod
    def from_counts(cls, order: int, grams_G: Grams, counts_G: NDArray[np.int64]) -> Self:
        """Return the table of an order, from its sorted distinct grams and the a of each."""
        discounts_G = _discounts(counts_G)[np.minimum(counts_G, 3)]
        return cls(
            order=order,
            grams_G=grams_G,
            discounted_G=counts_G - discounts_G,
            count_sums=np.concatenate([[0], np.cumsum(counts_G)]),
            discount_sums=np.concatenate([[0.0], np.cumsum(discounts_G)]),
        )

    def probabilities(
        self, grams_H: Grams, lower_order_H: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return p_k of each gram's last byte, see `kneser_ney_bits_per_byte`.

        Args:
            grams_H: the grams.
            lower_order_H: p_{k-1} of their last bytes.
        """
        # Each distinct gram is looked up once; the gram at a position is grams_Q[index_H].
        grams_Q, index_H = np.unique(grams_H, return_inverse=True)
        nearest_Q = np.minimum(np.searchsorted(self.grams_G, grams_Q), len(self.grams_G) - 1)
        is_known_Q = self.grams_G[nearest_Q] == grams_Q
        discounted_Q = np.where(is_known_Q, self.discounted_G[nearest_Q], 0.0)
        # All grams hx of one context h are adjacent, so sums over x are differences of running
        # sums. The last byte x of a gram is its lowest 8 bits, from 0 to 255.
        first_of_context_Q = grams_Q & ~np.uint64(255)
        last_of_context_Q = first_of_context_Q | np.uint64(255)
        start_Q = np.searchsorted(self.grams_G, first_of_context_Q)
        end_Q = np.searchsorted(self.grams_G, last_of_context_Q, side="right")
        count_Q = self.count_sums[end_Q] - self.count_sums[start_Q]
        discount_Q = self.discount_sums[end_Q] - self.discount_sums[start_Q]
        context_is_known_Q = count_Q > 0
        count_Q = np.where(context_is_known_Q, count_Q, 1)
        discounted_Q /= count_Q
        lower_weight_Q = np.where(context_is_known_Q, discount_Q / count_Q, 1.0)  # g(h)
        return discounted_Q[index_H] + lower_weight_Q[index_H] * lower_order_H


def _tables(train: NDArray[np.uint8], order: int) -> list[_Table]:
    """Return the tables of orders 0 to `order`.

    Only the longest grams have to be collected from the text and sorted. A shorter gram is the tail of
    a gram that is one byte longer, except for the first gram of the text. So the distinct grams of a
    length follow from the distinct grams that are one byte longer, and so does the number of distinct
    bytes that precede each of them.
    """
    if order < 0:
        return []
    grams_G, counts_G = np.unique(_grams(train, order + 1), return_counts=True)
    tables = [_Table.from_counts(order, grams_G, counts_G)]
    for shorter in reversed(range(order)):
        tail_mask = np.uint64((1 << 8 * (shorter + 1)) - 1)
        tails_G, preceding_G = np.unique(grams_G & tail_mask, return_counts=True)
        tables.append(_Table.from_counts(shorter, tails_G, preceding_G))
        # The first gram of the text is the tail of no gram, so it may be missing.
        first_gram = _grams(train[: shorter + 1], shorter + 1)
        grams_G = np.union1d(tails_G, first_gram)
    return tables[::-1]  # the lowest order first


def _discounts(counts_G: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return D(0) to D(3) of one order, see `kneser_ney_bits_per_byte`."""
    # n_0 to n_4; larger counts are not needed.
    n = np.bincount(np.minimum(counts_G, 5), minlength=6)[:5].astype(np.float64)
    substitute = (n[1] + 1) / (n[1] + 2 * n[2] + 2)
    y = n[1] / (n[1] + 2 * n[2]) if n[1] else 0.0
    discounts = np.zeros(4)
    for i in (1, 2, 3):
        estimate = 0.0  # outside of (0, i)
        if n[i]:
            estimate = i - (i + 1) * y * n[i + 1] / n[i]
        discounts[i] = estimate if 0 < estimate < i else substitute
    return discounts


def _grams(text: NDArray[np.uint8], length: int) -> Grams:
    """Return all runs of `length` bytes as grams, in order of position."""
    runs = max(0, len(text) - length + 1)
    grams = np.zeros(runs, np.uint64)
    for start in range(length):
        grams <<= np.uint64(8)
        grams |= text[start : start + runs]
    return grams


def _as_array(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8)


# The errors that `tokenize` reports for a valid line that ends inside a bracket or a triple-quoted
# string.
_OPEN_END_ERRORS = (
    "EOF in multi-line statement",
    "unexpected EOF in multi-line statement",
    "EOF in multi-line string",
)


def accepted_line_counts(text: str) -> tuple[int, int]:
    """Return how many lines of a text `tokenize` accepts, and how many lines there are.

    Empty lines do not count. The first and the last line are left out, as they may be cut off. Each
    line is checked alone, without indentation. A line that opens a bracket or a triple-quoted
    string is accepted.
    """
    lines = [line.strip() for line in text.split("\n")[1:-1]]
    lines = [line for line in lines if line]
    return sum(_is_accepted(line) for line in lines), len(lines)


def _is_accepted(line: str) -> bool:
    """Return whether `tokenize` accepts a line; see `accepted_line_counts`."""
    try:
        tokens = tokenize.generate_tokens(io.StringIO(line + "\n").readline)
        return all(token.type != tokenize.ERRORTOKEN for token in tokens)
    except tokenize.TokenError as error:
        return str(error.args[0]).startswith(_OPEN_END_ERRORS)
    except SyntaxError:
        return False
