"""Constraints of requests that no automaton can follow.

The library llguidance follows them on the host, token by token (`monograph.automata.on_host`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from monograph.automata import Calls
from monograph.automata.gbnf import parse_grammar
from monograph.automata.on_host import (
    HOST_KINDS,
    HostConstraint,
    HostVocabulary,
    lark_of,
    lark_of_calls,
    require_llguidance,
)
from monograph.errors import InputRefused
from monograph.serve.compiling import ConstraintCompiler

MAX_CACHED = 64


class HostConstraints:
    """Makes constraints for one vocabulary, and caches those that were used last.

    All methods are called in one event loop. Grammars are compiled in another thread, one at a time.
    """

    def __init__(
        self,
        compiler: ConstraintCompiler,
        pieces: Sequence[bytes],
        stop_ids: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        """Remember the vocabulary.

        Args:
            compiler: tries grammars in a process of its own.
            pieces: the bytes of each token, empty for special tokens (`Tokenizer.pieces`).
            stop_ids: the tokens that end a text.
            say: prints a line.
        """
        self._compiler = compiler
        self._pieces = pieces
        self._stop_ids = stop_ids
        self._say = say
        self._vocabulary: HostVocabulary | None = None
        self._cache: OrderedDict[str, HostConstraint] = OrderedDict()
        self._lock = asyncio.Lock()

    async def constraint(
        self, refusal: InputRefused, kind: str, value: Any, lead: bytes
    ) -> HostConstraint:
        """Return a constraint.

        Args:
            refusal: why no automaton follows it.
            kind: one of `monograph.automata.KINDS`.
            value: see `monograph.automata.on_host.lark_of`.
            lead: bytes that come before the text and are not part of it.

        Raises:
            InputRefused: the host cannot follow it either.
            Busy, RuntimeError: see `ConstraintCompiler.constraint`.
        """
        if kind not in HOST_KINDS:
            raise refusal
        if kind == "grammar":
            # A text that is not a grammar is refused as such, whether llguidance is installed or not.
            await asyncio.to_thread(parse_grammar, value)
        require_llguidance(refusal)
        return await self._followed(await asyncio.to_thread(lark_of, kind, value, lead), refusal)

    async def calls(self, refusal: InputRefused, calls: Calls) -> HostConstraint:
        """Return the constraint of answers with calls; see `constraint`."""
        require_llguidance(refusal)
        return await self._followed(lark_of_calls(calls, self._pieces), refusal)

    async def _followed(self, lark: str, refusal: InputRefused) -> HostConstraint:
        """Return the constraint for a grammar in the form of Lark, from the cache if it is there."""
        async with self._lock:
            if lark not in self._cache:
                # A hostile grammar could end the process, so the compiler's process tries it first.
                fault = await self._compiler.try_on_host(lark)
                if fault:
                    raise InputRefused(f"{refusal}; llguidance: {fault}")
                self._cache[lark] = await asyncio.to_thread(
                    lambda: HostConstraint(lark, self._tokens(), refusal)
                )
            self._cache.move_to_end(lark)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
            return self._cache[lark]

    def _tokens(self) -> HostVocabulary:
        """Return the vocabulary. It is prepared for the first constraint, which takes about a second."""
        if self._vocabulary is None:
            self._vocabulary = HostVocabulary(self._pieces, self._stop_ids)
            self._say(
                "a request has a constraint that no automaton can follow: llguidance follows it on the host, "
                "token by token. While such a text is written, all other texts wait for it at each token"
            )
        return self._vocabulary
