"""One step of decoding: the model, the sampler and the stop rules as one graph that reads and writes `State` alone.

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
from monograph.decode.penalties import forget
from monograph.decode.state import State, Status
from monograph.model.llama import Llama


class DecodeStep:
    """A model with its rows' state, cache and automata; calling it draws one token in every running row."""

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
            cache: keys and values of as many rows.
            chain: the sampler's stages.
            knobs: their values for each row.
            tables: the automata that the rows' states point into; None: no row has one.
            vocabulary: V, the tokenizer's; a model may have more entries, which stand for no text.
        """
        self.model, self.state, self.cache = model, state, cache
        self.chain, self.knobs, self.tables, self.vocabulary = chain, knobs, tables, vocabulary

    @torch.no_grad()
    def __call__(self, blocks: int, truncation: Truncation) -> None:
        """Draw, looking at the first `blocks` of the cache, which must hold the position of every running row."""
        state = self.state
        tokens_B1, positions_B1 = state.token_B[:, None], state.position_B[:, None]
        hidden_B1D = self.model(tokens_B1, positions=positions_B1, cache=self.cache.first(blocks))
        logits_BV = self.model.logits(hidden_B1D[:, 0])[:, : self.vocabulary]
        rows = Rows(
            seed_B=state.seed_B,
            position_B=state.position_B + 1,  # of the token that is drawn, not of the one that is read
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
        # Plain numbers: Dynamo does not take an IntEnum for one.
        running, stop, length = Status.RUNNING.value, Status.STOP.value, Status.LENGTH.value
        running_B = state.status_B == running
        # Every row is computed, and `where` drops the result of a resting one: the host decides nothing in the graph.
        moved_B = running_B & (drawn.status_B == OK)
        state.token_B.copy_(torch.where(moved_B, drawn.token_B, state.token_B))
        ended_B = (state.token_B[:, None] == state.stop_ids_BM).any(-1)
        if self.tables is not None:
            for states_B in (state.constraint_B, state.stopping_B):
                states_B.copy_(torch.where(moved_B, advance(self.tables, states_B, state.token_B), states_B))
            ended_B |= stopped(self.tables, state.stopping_B) | stopped(self.tables, state.constraint_B)
        full_B = state.generated_B + 1 >= state.limit_B
        # A stop at the last token that may be drawn is a stop.
        after_B = torch.where(ended_B, stop, torch.where(full_B, length, running))
        # NAN, DEAD, OVERFLOW (from 1) are NOT_FINITE, NOTHING_ALLOWED, UNDECIDED, which follow one another alike.
        failed_B = drawn.status_B + (Status.NOT_FINITE.value - 1)
        status_B = torch.where(moved_B, after_B, torch.where(running_B, failed_B, state.status_B))
        state.write(moved_B, status_B)
        # After `write`, which has counted the new token and moved the window on.
        if "last_n" in self.chain.stages:
            assert state.counts_BV is not None and state.past is not None
            history_BT, place = state.past.history_BT, (state.position_B, state.generated_B)
            forget(state.counts_BV, state.prompt_BV, history_BT, *place, moved_B, self.knobs)
        if "mirostat" in self.chain.stages:
            assert drawn.logprobs is not None
            surprise_B = drawn.logprobs.chosen_B * (-1 / math.log(2))
            change_B = self.knobs["mirostat_eta"] * (surprise_B - self.knobs["mirostat_tau"])
            state.mu_B.copy_(torch.where(moved_B, state.mu_B - change_B, state.mu_B))
