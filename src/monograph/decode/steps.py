"""The steps of several chains over the same rows, of which each block of steps takes one."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from monograph.decode.candidates import Truncation
from monograph.decode.knobs import Chain, joint
from monograph.graph.replay import WARM_UP, Recorder, Replays

Step = Callable[..., None]


class Steps:
    """A step for each chain, made when it is first used, and captured if there is a recorder.

    Attributes:
        chains: the chains that are given; the last one covers every request.
        replays: the calls and captures of all steps.
        of: a function that returns the step of a chain.
        chosen: a function that returns the chain for a block of requests, given their smallest chains as a frozenset.
    """

    def __init__(
        self, chains: Sequence[Chain], made: Callable[[Chain], Step], recorder: Recorder | None, few: bool
    ) -> None:
        """Take the chains.

        Args:
            chains: see the class.
            made: a function that makes the step of a chain.
            recorder: a recorder that captures steps, or None.
            few: whether to make steps for these chains alone, as each takes time; otherwise for any that is asked for.
        """
        self.chains, self.replays = tuple(chains), Replays(self._call, recorder)
        self._few, self.of, self.chosen = few, functools.cache(made), functools.cache(self._chosen)

    def _chosen(self, least: frozenset[Chain]) -> Chain:
        smallest = joint(least, self.chains[-1])
        return next(c for c in self.chains if c.covers(smallest)) if self._few else smallest

    def warm_up(self, sizes: Sequence[int], begin: Callable[[], None]) -> None:
        """Capture every variant of a step that reads so many blocks; `begin` is called before each."""
        truncations: tuple[Truncation, ...] = ("window", "search")
        if self.replays.captures:
            for variant in itertools.product(self.chains, sizes, truncations, (False, True)):
                begin()
                self.replays.run(WARM_UP, *variant)

    def _call(self, chain: Chain, *variant: Any) -> None:
        self.of(chain)(*variant)
