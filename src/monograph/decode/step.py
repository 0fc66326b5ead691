"""One step of decoding: the model, the sampler and the stop rules as one graph over preallocated tensors.

    hidden = model(token, position, cache)      logits = head(hidden)        allowed = automaton's mask
    token' = draw(chain(logits, allowed))       status' = stop rules         ring line = token' + status' * 2^24

The same function runs eagerly, compiled and replayed as a CUDA graph. The host reads nothing here.

Shape suffixes: B rows, V vocabulary, M stop ids, D hidden size; 1 broadcasts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from monograph.decode.automata import Tables, advance, allowed, stopped
from monograph.decode.cache import KVCache
from monograph.decode.candidates import Truncation
from monograph.decode.chain import OK, Drawn, Rows, log_probabilities, sample
from monograph.decode.knobs import Chain
from monograph.decode.state import State, Status
from monograph.model.llama import Llama


class DecodeStep:
    """A model with the state, the cache and the automata of its rows; a call draws one token in every running row."""

    def __init__(
        self,
        model: Llama,
        state: State,
        cache: KVCache,
        chain: Chain,
        knobs: dict[str, Tensor],
        tables: Tables | None,
        vocabulary: int,
    ) -> None:
        """Take the parts, which are shared and not copied.

        Args:
            model: the language model, in evaluation mode.
            state: the state of the rows.
            cache: keys and values of the rows.
            chain: the sampler's stages.
            knobs: the options that the stages read, for each row (`new_knobs`).
            tables: the automata of all rows; None: no row has one.
            vocabulary: V, the size of the tokenizer's vocabulary; a model's may be larger, by ids that no text has.
        """
        self.model, self.state, self.cache = model, state, cache
        self.chain, self.knobs, self.tables, self.vocabulary = chain, knobs, tables, vocabulary

    @torch.no_grad()
    def __call__(self, blocks: int, truncation: Truncation) -> None:
        """Draw one token; see `sample` for `truncation`.

        Attention reads the first `blocks` blocks of the cache, which must hold the position of every running row.
        """
        state = self.state
        tokens_B1, positions_B1 = state.token_B[:, None], state.position_B[:, None]
        hidden_B1D = self.model(tokens_B1, positions=positions_B1, cache=self.cache.first(blocks))
        logits_BV = self.model.logits(hidden_B1D[:, 0])[:, : self.vocabulary]
        rows = Rows(
            seed_B=state.seed_B,
            position_B=state.position_B + 1,  # the position of the token to be drawn, one after the token that is read
            generated_B=state.generated_B,
            knobs=self.knobs,
            counts_BV=state.counts_BV,
            prompt_BV=state.prompt_BV,
            past=state.past,
            mu_B=state.mu_B if "mirostat" in self.chain.stages else None,
        )
        allowed_BV = None if self.tables is None else allowed(self.tables, state.constraint_B)
        drawn = sample(logits_BV, rows, allowed_BV, self.chain, truncation)
        if self.chain.logprobs is not None and drawn.logprobs is not None:
            state.report(log_probabilities(logits_BV, drawn.token_B, self.chain.logprobs), drawn.logprobs)
        self._advance(drawn)

    def _advance(self, drawn: Drawn) -> None:
        """Apply the stop rules after a draw; rows that are not running stay as they are."""
        state = self.state
        # Plain ints, since Dynamo does not treat an IntEnum as a number.
        running, stop, length = Status.RUNNING.value, Status.STOP.value, Status.LENGTH.value
        running_B = state.status_B == running
        # All rows are computed, and `where` drops the results of those that do not run: the host decides nothing.
        moved_B = running_B & (drawn.status_B == OK)
        state.token_B.copy_(torch.where(moved_B, drawn.token_B, state.token_B))
        ended_B = (state.token_B[:, None] == state.stop_ids_BM).any(-1)
        if self.tables is not None:
            for states_B in (state.constraint_B, state.stopping_B):
                states_B.copy_(torch.where(moved_B, advance(self.tables, states_B, state.token_B), states_B))
            ended_B |= stopped(self.tables, state.stopping_B) | stopped(self.tables, state.constraint_B)
        full_B = state.generated_B + 1 >= state.limit_B
        # A row that stops at the last token that it may draw has the status STOP.
        after_B = torch.where(ended_B, stop, torch.where(full_B, length, running))
        # NAN, DEAD, OVERFLOW (from 1) become NOT_FINITE, NOTHING_ALLOWED, UNDECIDED, which have the same order.
        failed_B = drawn.status_B + (Status.NOT_FINITE.value - 1)
        status_B = torch.where(moved_B, after_B, torch.where(running_B, failed_B, state.status_B))
        state.write(moved_B, status_B)
        # This comes after `write`, which has counted the new token and moved the position, and so the window.
        if "last_n" in self.chain.stages:
            state.forget(moved_B, self.knobs)
        if "mirostat" in self.chain.stages:
            assert drawn.logprobs is not None
            surprise_B = drawn.logprobs.chosen_B * (-1 / math.log(2))
            change_B = self.knobs["mirostat_eta"] * (surprise_B - self.knobs["mirostat_tau"])
            state.mu_B.copy_(torch.where(moved_B, state.mu_B - change_B, state.mu_B))
