"""The form that all answers of a run have: a regular expression or a schema, compiled for the
tokenizer's tokens.

Only tokens after which an answer can still get the form are drawn, and learned from. A token is
drawn from the softmax over the allowed tokens alone, and its log-probability is that of this
distribution wherever it is computed: drawn, in the loss, of a reference or a teacher. So a token
    that had no alternative has the log-probability 0, and no gradient.

Shapes: C positions, S states, V tokens.
"""

import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from monograph.automata import constraint
from monograph.decode.arena import Arena, allowed
from monograph.errors import InputRefused
from monograph.rl.prompts import Prompts
from monograph.rl.rewards import FormName

_MOST_MASKS = 1 << 28  # bytes of the masks of all states


class AnswerForm:
    """A form over a tokenizer's tokens.

    Attributes:
        automaton: what decoding follows.
    """

    def __init__(
        self, name: FormName, prompts: Prompts, ends: Collection[int], device: torch.device
    ) -> None:
        """Compile a form.

        Args:
            name: the form.
            prompts: the prompts, after which the tokenizer may begin every text with a space.
            ends: tokens that end an answer.
            device: where the loss follows it.

        Raises:
            InputRefused: it cannot be used with these tokens or prompts.
        """
        tokenizer = prompts.tokenizer
        leads = {tokenizer.lead(prompt.ids) for prompt in (*prompts.train, *prompts.held_out)}
        if len(leads) > 1:
            raise InputRefused(
                f"{prompts.name}: the tokenizer begins answers with a space after some prompts, and after others not: "
                "answers cannot have a form"
            )
        self.automaton = constraint(name.kind, name.value, tokenizer.pieces, ends, leads.pop())
        tables = Arena.holding([self.automaton], tokenizer.vocab_size, device)
        start = tables.take(self.automaton)
        assert start is not None
        self._start = start
        self.allowed: Callable[[Tensor], Tensor] = functools.partial(allowed, tables)
        states = len(tables.row_S)
        # A state with counters has many masks.
        if (
            not self.automaton.has_counters and states * tokenizer.vocab_size <= _MOST_MASKS
        ):  # to compute a mask takes more memory than to look it up
            each = [
                allowed(tables, torch.tensor([state], device=device)) for state in range(states)
            ]
            self.allowed = functools.partial(_looked_up, torch.cat(each))

    def states(self, token_ids: Sequence[int]) -> list[int]:
        """Return the state before each of an answer's tokens, as `allowed` takes it; 0 allows every
        token.
        """
        state = 0
        found = list[int]()
        for token in token_ids:
            found.append(self._start + state)
            state = self.automaton.after(state, token)
        return found


def _looked_up(masks_SV: Tensor, state_C: Tensor) -> Tensor:
    return masks_SV[state_C]
