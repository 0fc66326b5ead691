"""What changes logits before any filter: a bias for ids, a minimum of tokens, penalties for what was written before.

Shapes: B rows, V vocabulary, M ids of a row that are listed, padded with -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monograph.decode.sampling import Sampling

# Inductor vectorises int32 on a CPU and not int16, which made every loop beside the counts a scalar one.
COUNTS = torch.int32


def add_at(logits_BV: Tensor, ids_BM: Tensor, values_BM: Tensor) -> Tensor:
    """logits[b, ids[b, m]] + values[b, m]; an id of -1 adds nothing. -inf forbids the id."""
    listed_BM = ids_BM >= 0
    return logits_BV.scatter_add(-1, torch.where(listed_BM, ids_BM, 0), torch.where(listed_BM, values_BM, 0.0))


def forbid_until(logits_BV: Tensor, ids_BM: Tensor, generated_B1: Tensor, least_B1: Tensor) -> Tensor:
    """-inf at the listed ids while fewer than `least` tokens were drawn."""
    early_BM = (generated_B1 < least_B1).expand_as(ids_BM)
    return add_at(logits_BV, ids_BM, torch.where(early_BM, -torch.inf, torch.zeros_like(ids_BM, dtype=torch.float32)))


def repetition(logits_BV: Tensor, seen_BV: Tensor, penalty_B1: Tensor) -> Tensor:
    """Logits x / r if x > 0 else x r, for ids that were seen (Keskar et al. 2019, CTRL; transformers, llama.cpp)."""
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1), logits_BV)


def counted(logits_BV: Tensor, counts_BV: Tensor, frequency_B1: Tensor, presence_B1: Tensor) -> Tensor:
    """Logits x - count f - (count > 0) p: the frequency and presence penalties of OpenAI's API."""
    return logits_BV - counts_BV.float() * frequency_B1 - torch.where(counts_BV > 0, presence_B1, 0.0)


def first_counts(sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int) -> Tensor:
    """A row's counts before its first draw, [V] int32: zero, or with the scope "all" those of the prompt."""
    if sampling.penalty_scope == "output":
        return torch.zeros(vocabulary, dtype=COUNTS)
    return torch.bincount(torch.tensor(prompt_ids, dtype=torch.int64), minlength=vocabulary).to(COUNTS)


def count_drawn(counts_BV: Tensor, token_B: Tensor, running_B: Tensor) -> None:
    """Add the drawn tokens of the rows that run to the counts, in place."""
    counts_BV.scatter_add_(-1, token_B[:, None], running_B[:, None].to(counts_BV.dtype))
