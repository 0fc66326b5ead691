"""What a row remembers, by its definitions: logits after bias, penalties and DRY, brute force."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from monograph.decode.sampling import Sampling


def edited(
    logits_V: Tensor,
    options: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    breakers: Collection[int] = (),
) -> Tensor:
    """Logits after bias, penalties and DRY, [V]."""
    x, text = logits_V.clone(), [*prompt, *output]
    for token, bias in options.logit_bias.items():
        x[token] += bias
    first = max(0, len(text) - options.penalty_last_n) if options.penalty_last_n >= 0 else 0
    for token in set(text[first:]):
        x[token] = (
            x[token] / options.repetition_penalty
            if x[token] > 0
            else x[token] * options.repetition_penalty
        )
    counted = text[first:] if options.penalty_scope == "all" else text[max(first, len(prompt)) :]
    for token in set(counted):
        x[token] -= counted.count(token) * options.frequency_penalty + options.presence_penalty
    for token, length in repetitions(_last(text, options.dry_penalty_last_n), breakers).items():
        if options.dry_multiplier and length >= options.dry_allowed_length:
            power = options.dry_base ** (length - options.dry_allowed_length)
            x[token] -= min(options.dry_multiplier * power, torch.finfo(torch.float32).max)
    return x


def _last(text: list[int], n: int) -> list[int]:
    return text if n < 0 else text[max(0, len(text) - n) :]


def repetitions(text: list[int], breakers: Collection[int]) -> dict[int, int]:
    """By the token that would go on with it: the longest end of the text that stands before an
    earlier such token.
    """
    found: dict[int, int] = {}
    for place in range(1, len(text)):
        length = 0
        while length < place and text[place - 1 - length] == text[-1 - length] not in breakers:
            length += 1
        if text[place] not in breakers:
            found[text[place]] = max(length, found.get(text[place], 0))
    return found
