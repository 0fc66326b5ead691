"""Models that see every token of a long text, and what a full pass says of each step of decoding
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batches import tiny_llama
from monograph.decode.generator import Generator
from monograph.decode.request import Event, Request
from monograph.laws.comparisons import LawComparison, log_probabilities_agree
from monograph.model.llama import Llama


def far_sighted(dtype: torch.dtype = torch.float64, factor: float = 4.0, **sizes: Any) -> Llama:
    """A tiny model whose layers add much more of what they attend to than an untrained one's."""
    model = tiny_llama(dtype, **sizes).eval()
    for layer in model.model.layers:
        mixing = next(
            part for name, part in layer.named_children() if name in ("self_attn", "linear_attn")
        )
        for module in mixing.modules():
            if isinstance(module, nn.Linear):
                module.weight.data *= factor
    return model


@torch.no_grad()
def log_probabilities(model: Llama, ids: Sequence[int]) -> Tensor:
    """What the full pass gives for the token after each of a text's, [T, V] in fp64."""
    hidden_TD = model(torch.tensor([list(ids)], device=model.lm_head.weight.device))[0]
    return model.logits(hidden_TD).double().log_softmax(-1)


@torch.no_grad()
def seen_at(model: Llama, ids: Sequence[int], places: Sequence[int]) -> list[float]:
    """How far the last token's log-probabilities move, at most, if the token at a place is another
    one.
    """
    others = torch.tensor([list(ids)] * (1 + len(places)), device=model.lm_head.weight.device)
    for row, place in enumerate(places, 1):
        others[row, place] = (others[row, place] + 1) % model.config.vocab_size
    last_BV = model.logits(model(others)[:, -1]).double().log_softmax(-1)
    return (last_BV[1:] - last_BV[0]).abs().amax(-1).tolist()


def decoded(machine: Generator, requests: Sequence[Request]) -> dict[int, list[Event]]:
    """The events of each request, by its place, once all have ended."""
    found = {machine.submit(request): list[Event]() for request in requests}
    for event in machine.run():
        found[event.number].append(event)
    return dict(enumerate(found.values()))


def reported_is_full(model: Llama, request: Request, events: Sequence[Event]) -> LawComparison:
    """Compare the log-probabilities of all ids at every step with the full pass's over what was
    written (law 8 compares logits in float64 more closely).
    """
    ids = [token for event in events for token in event.token_ids]
    reports = [report for event in events for report in event.logprobs]
    assert events[-1].finish == "length" and len(reports) == len(ids) > 0
    full_TV = log_probabilities(model, [*request.prompt_ids, *ids[:-1]])[
        len(request.prompt_ids) - 1 :
    ].cpu()
    found_TV = torch.full_like(full_TV, torch.nan)
    for step, report in enumerate(reports):
        tokens, values = zip(*report.likeliest, strict=True)
        found_TV[step, list(tokens)] = torch.tensor(values, dtype=torch.float64)
    return log_probabilities_agree(found_TV, full_TV)
