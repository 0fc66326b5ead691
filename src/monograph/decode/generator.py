"""The host's side of generation: prompts in, text out, one token of every row at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from monograph.data.tokenizer import Tokenizer
from monograph.decode.cache import KVCache
from monograph.decode.sample import Sampling, row_generators, sample
from monograph.errors import InputRefused
from monograph.model.llama import Llama


@dataclass(frozen=True)
class Completion:
    """What the model wrote after a prompt.

    Attributes:
        text: without the prompt and without the stop string.
        token_ids: the drawn ids, an end-of-text id included.
        finish_reason: "stop" at an end-of-text token or a stop string, "length" at max_tokens or the context's end.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]

    def __str__(self) -> str:
        """The text."""
        return self.text


@dataclass
class _Row:
    ids: list[int]
    text: str = ""
    finish: Literal["stop", "length"] | None = None


def generate(
    model: Llama,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling | None = None,
    *,
    max_tokens: int = 128,
    stop: Sequence[str] = (),
    n: int = 1,
    on_text: Callable[[str], None] | None = None,
) -> Iterator[Completion]:
    """Continue each prompt `n` times.

    Args:
        model: the language model; it is put into evaluation mode.
        tokenizer: its tokenizer.
        prompts: texts to go on from; an empty one starts a document.
        sampling: how tokens are chosen.
        max_tokens: most tokens to write after a prompt.
        stop: strings at which a text ends.
        n: continuations per prompt, with the draws of rows 0 .. n - 1.
        on_text: called with every new piece of the first continuation's text as it comes.

    Yields:
        Prompt by prompt, its n completions.

    Raises:
        InputRefused: a prompt that leaves no room in the model's context.
    """
    for prompt in prompts:
        yield from _continue(
            model, tokenizer, prompt, sampling or Sampling(), max_tokens=max_tokens, stop=stop, n=n, on_text=on_text
        )


@torch.no_grad()
def _continue(
    model: Llama,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    *,
    max_tokens: int,
    stop: Sequence[str],
    n: int,
    on_text: Callable[[str], None] | None,
) -> Iterator[Completion]:
    ids, context = prompt_ids(model, tokenizer, prompt), model.config.max_position_embeddings
    model.eval()
    weight = model.lm_head.weight
    cache = KVCache(model.config, n, min(context, len(ids) + max_tokens), weight.dtype, weight.device)
    generators, rows = row_generators(sampling, n), [_Row([]) for _ in range(n)]
    tokens_BT = torch.tensor([ids] * n, device=weight.device)
    positions_BT = torch.arange(len(ids), device=weight.device).expand(n, -1)
    for _ in range(cache.keys_LBKSE.shape[3] - len(ids)):
        hidden_BTD = model(tokens_BT, positions=positions_BT, cache=cache)
        # A model may have more entries than its tokenizer has tokens; the rest stand for no text.
        logits_BV = model.logits(hidden_BTD[:, -1])[:, : tokenizer.vocab_size]
        drawn_B = sample(logits_BV, sampling, generators)
        for index, (row, token) in enumerate(zip(rows, drawn_B.tolist(), strict=True)):
            _take(row, token, tokenizer, stop, on_text if index == 0 else None)
        if all(row.finish for row in rows):
            break
        tokens_BT, positions_BT = drawn_B[:, None], positions_BT[:, -1:] + 1
    for row in rows:
        yield Completion(row.text, row.ids, row.finish or "length")


def prompt_ids(model: Llama, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's ids after the one that begins a document.

    Raises:
        InputRefused: they leave no room in the model's context.
    """
    ids, context = [tokenizer.bos_id, *tokenizer.encode(prompt)], model.config.max_position_embeddings
    if len(ids) >= context:
        raise InputRefused(
            f"the prompt has {len(ids)} tokens, but the model's context is {context}: shorten it to below {context}"
        )
    return ids


def _take(
    row: _Row, token: int, tokenizer: Tokenizer, stop: Sequence[str], on_text: Callable[[str], None] | None
) -> None:
    """Add a drawn token to a row that is not finished."""
    if row.finish:
        return
    row.ids.append(token)
    if token == tokenizer.eos_id:
        row.finish = "stop"
        return
    text = tokenizer.decode(row.ids)
    cut = min((at for s in stop if (at := text.find(s)) >= 0), default=None)
    if cut is not None:
        text, row.finish = text[:cut], "stop"
    # A character may be spread over several tokens; until it is whole it decodes to U+FFFD.
    whole = text if row.finish else text.rstrip("\ufffd")
    if on_text is not None and len(whole) > len(row.text):
        on_text(whole[len(row.text) :])
    if len(whole) >= len(row.text) or row.finish:
        row.text = whole
