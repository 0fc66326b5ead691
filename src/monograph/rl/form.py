"""The form that all answers of a run must have: a regular expression or a schema, compiled for the
tokenizer's tokens.

A token is allowed if the answer can still be completed to the form after it. An automaton says which
tokens are allowed in each of its states, and each token takes it to the next state. Tokens are sampled
from the softmax over the allowed tokens.
The sampler, the loss, the reference and a teacher all compute log-probabilities of this distribution.
So if only one token is allowed, it has the log-probability 0 and no gradient.

Shapes: C positions, S states, V tokens.
"""

import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from monograph.automata import constraint
from monograph.decode.automaton_tables import AutomatonTables, allowed_tokens
from monograph.errors import InputRefused
from monograph.rl.prompts import Prompts
from monograph.rl.rewards import FormName

# Up to this size, in bytes, the masks of all states are computed once and looked up.
_MAX_MASK_BYTES = 1 << 28


class AnswerForm:
    """A form over a tokenizer's tokens.

    Attributes:
        automaton: the automaton that decoding follows.
        allowed: returns the masks of the allowed tokens, bool [C, V], in the states [C].
    """

    def __init__(
        self, name: FormName, prompts: Prompts, end_ids: Collection[int], device: torch.device
    ) -> None:
        """Compile a form.

        Args:
            name: the regular expression or the schema.
            prompts: the prompts. The tokenizer may insert a space between a prompt and its answer.
            end_ids: the ids that end an answer.
            device: the device of the loss.

        Raises:
            InputRefused: the form cannot be used with these tokens or prompts.
        """
        tokenizer = prompts.tokenizer
        inserted_spaces = {
            tokenizer.inserted_space(prompt.ids) for prompt in (*prompts.train, *prompts.held_out)
        }
        if len(inserted_spaces) > 1:
            raise InputRefused(
                f"{prompts.name}: the tokenizer begins answers with a space after some prompts but not after others, "
                "so answers cannot have a form"
            )
        self.automaton = constraint(
            name.kind, name.value, tokenizer.pieces, end_ids, inserted_spaces.pop()
        )
        tables = AutomatonTables.with_room_for([self.automaton], tokenizer.vocab_size, device)
        # The automaton numbers its states from 0. In the tables its state 0 has the number `first_state`.
        first_state = tables.acquire(self.automaton)
        assert first_state is not None
        self._first_state = first_state
        self.allowed: Callable[[Tensor], Tensor] = functools.partial(allowed_tokens, tables)
        states = len(tables.first_cell_S)
        # If the masks of all states fit in memory, they are computed here and looked up later, which
        # takes less memory in the loss than computing them. In an automaton with counters, the mask of a
        # state also depends on the counters, so it cannot be looked up by the state.
        fits_in_memory = states * tokenizer.vocab_size <= _MAX_MASK_BYTES
        if fits_in_memory and not self.automaton.has_counters:
            masks = [
                allowed_tokens(tables, torch.tensor([state], device=device))
                for state in range(states)
            ]
            self.allowed = functools.partial(_look_up, torch.cat(masks))

    def states(self, token_ids: Sequence[int]) -> list[int]:
        """Return the automaton's state before each of an answer's tokens, as a number for `allowed`.

        The numbers do not begin with 0, because state 0 of `allowed` is one that allows every token.
        """
        state = 0
        states = list[int]()
        for token in token_ids:
            states.append(self._first_state + state)
            state = self.automaton.after(state, token)
        return states


def _look_up(masks_SV: Tensor, state_C: Tensor) -> Tensor:
    """Return the masks of the allowed tokens in these states, [C, V]."""
    return masks_SV[state_C]
