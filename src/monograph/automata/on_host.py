"""Constraints that need a stack: the host follows them token by token, with the package llguidance.

An automaton in the decode graph has a fixed number of states, so it cannot follow a recursive grammar, a
recursive schema or an object whose members may have any names. llguidance can, on the host: for each text
it says which tokens may come next. Before each step, the decoder writes this into the graph's tables of
automata: each such text has an automaton with one state and two classes of tokens, those that may come next
and the others (`HostText`). So the graph stays the same, but the host must read each token before it can
start the next step.

llguidance is an optional package, an extra of this one; `require_llguidance` says how it is installed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from monograph.automata.calls import Calls
from monograph.automata.expression import single
from monograph.automata.gbnf import parse_grammar
from monograph.automata.host_calls import calls_rules
from monograph.automata.lark import lark_text
from monograph.automata.rules import ROOT, InOrder, Json, OneCharacter, RuleText, Symbol
from monograph.automata.tokens import Automaton
from monograph.errors import InputRefused
from monograph.extras import command_for

# The kinds of constraints (`monograph.automata.KINDS`) that the host can follow.
HOST_KINDS = ("json_schema", "grammar")
_START = "start of the text"
# The extra of this package that installs llguidance, and the requirement that an error names if this
# package's metadata cannot be read.
_EXTRA = "grammar"
_LIBRARY = "llguidance>=1.9"
# Maximum states of the lexer for one text. llguidance's own limit is higher, and could take 500 MB.
_MAX_LEXER_STATES = 20_000
# Maximum rules of a grammar. A chain of 1,500 rules, each of which uses the next, overflows llguidance's stack.
_MAX_RULES = 500


class Matcher(Protocol):
    """What is used of llguidance's `LLMatcher`, which follows one text."""

    def compute_bitmask(self) -> bytes:
        """Return a bit for each token, the lowest first: whether it may come next."""

    def consume_token(self, token: int) -> bool:
        """Read a token."""

    def is_stopped(self) -> bool:
        """Return whether the matcher has failed, or only an end token may follow."""

    def is_error(self) -> bool:
        """Return whether the matcher has failed."""

    def get_error(self) -> str:
        """Return why it has failed."""

    def deep_copy(self) -> Self:
        """Return a matcher that follows another text from here."""


def has_llguidance() -> bool:
    """Return whether the package is installed."""
    return find_spec("llguidance") is not None


def require_llguidance(refusal: InputRefused) -> None:
    """Require the package.

    Args:
        refusal: why no automaton follows the constraint.

    Raises:
        InputRefused: it is not installed. The message has the refusal and the command that installs it.
    """
    if not has_llguidance():
        raise InputRefused(
            f"{refusal}; llguidance follows more, on the host: {command_for(_EXTRA, _LIBRARY)}"
        )


def lark_of(kind: str, value: Any, lead: bytes = b"") -> str:
    """Return a constraint as a grammar in the form of Lark.

    Args:
        kind: "json_schema" or "grammar".
        value: the schema as an object, or the grammar as a text in GBNF.
        lead: bytes that come before the text and are not part of it.

    Raises:
        InputRefused: the text is not a grammar, or has too many rules.
    """
    rules: Mapping[str, Symbol] = {ROOT: Json(value)}
    if kind == "grammar":
        rules = parse_grammar(value).rules
        if len(rules) > _MAX_RULES:
            raise InputRefused(f"{len(rules):,} rules; llguidance follows at most {_MAX_RULES:,}")
    characters = tuple(OneCharacter(single(ord(letter))) for letter in lead.decode())
    start = InOrder((*characters, RuleText(ROOT)))
    return lark_text({_START: start, **rules}, _START)


def lark_of_calls(calls: Calls, pieces: Sequence[bytes]) -> str:
    """Return the constraint of `monograph.automata.call_constraint` in the form of Lark.

    Raises:
        InputRefused: the frame needs an automaton.
    """
    special_ids = [token for token, piece in enumerate(pieces) if not piece]
    return lark_text(calls_rules(calls, special_ids), ROOT)


def try_lark(lark: str, size: int) -> str:
    """Return why llguidance refuses a grammar in the form of Lark; an empty text if it accepts it.

    The vocabulary of the trial is the 256 bytes, and a special token for each other id below `size`. There is at
    least one special token, and the last one ends a text.

    The call may end the process: a grammar that is nested too deep overflows llguidance's stack.
    """
    single_bytes = [bytes([byte]) for byte in range(256)]
    special_count = max(1, size - len(single_bytes))
    pieces = [*single_bytes, *[b""] * special_count]
    vocabulary = HostVocabulary(pieces, end_ids=[len(pieces) - 1])
    return _fault(vocabulary.matcher(lark))


def _fault(matcher: Matcher) -> str:
    """Return the first line of why a matcher has failed; an empty text if it has not."""
    if not matcher.is_error():
        return ""
    first_line, _, _ = matcher.get_error().strip().partition("\n")
    return first_line


class HostVocabulary:
    """The tokens of a model, as llguidance reads them.

    Attributes:
        size: the number of tokens.
    """

    def __init__(self, pieces: Sequence[bytes], end_ids: Collection[int]) -> None:
        """Prepare the tokens, which takes about a second for 100,000 of them.

        Args:
            pieces: the bytes of each token, empty for special tokens (`Tokenizer.pieces`).
            end_ids: the tokens that end a text.
        """
        llguidance = import_module("llguidance")
        ends = sorted(end_ids)
        self.size = len(pieces)
        tokens = _Tokens(pieces, ends[0])
        wrapper = import_module("llguidance._tokenizer").TokenizerWrapper(tokens)
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.size, eos_token=ends)
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES)
        self._matcher_type = llguidance.LLMatcher

    def matcher(self, lark: str) -> Matcher:
        """Return a matcher for a grammar in the form of Lark; the matcher may have failed."""
        grammar = self._matcher_type.grammar_from_lark(lark)
        matcher: Matcher = self._matcher_type(
            self._tokenizer, grammar, log_level=0, limits=self._limits
        )
        return matcher


class _Tokens:
    """What llguidance asks of a tokenizer; the names are its own."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], end_id: int) -> None:
        self.eos_token_id = end_id
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self.tokens = [piece or b"<%d>" % token for token, piece in enumerate(pieces)]

    def __call__(self, text: bytes) -> list[int]:
        """Return no ids.

        llguidance would use them to write a text that is the only one that can follow. The option `no_forcing`
        of `monograph.automata.lark` switches this off.
        """
        return []


@dataclass(frozen=True, eq=False)
class HostText(Automaton):
    """The constraint of one text, as an automaton whose classes the host writes before each step.

    Its one state allows the tokens of class 0, and forbids those of class 1.

    Attributes:
        matcher: follows the text.
    """

    matcher: Matcher = field(kw_only=True)

    def write_classes(self) -> NDArray[np.int16]:
        """Return the class of each token now: 0 if it may come next, and else 1."""
        size = len(self.class_V)
        if self.matcher.is_error():
            # The matcher gave up, because the text needs more than llguidance's limits allow. Then no token
            # may come next.
            self.class_V.fill(1)
            return self.class_V
        mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        is_allowed_V = np.unpackbits(mask, count=size, bitorder="little")
        np.subtract(1, is_allowed_V, out=self.class_V)
        return self.class_V

    def take(self, token: int) -> bool:
        """Read a token; return whether the text is over, because only an end token could follow."""
        self.matcher.consume_token(token)
        return bool(self.matcher.is_stopped() and not self.matcher.is_error())


class HostConstraint:
    """A constraint that the host follows, for any number of texts."""

    def __init__(self, lark: str, vocabulary: HostVocabulary, refusal: InputRefused) -> None:
        """Compile a grammar.

        Args:
            lark: the grammar (`lark_of`, `lark_of_calls`).
            vocabulary: the model's tokens.
            refusal: why no automaton follows it, for an error.

        Raises:
            InputRefused: llguidance cannot follow it either.
        """
        self._vocabulary = vocabulary
        self._matcher = vocabulary.matcher(lark)
        fault = _fault(self._matcher)
        if fault:
            raise InputRefused(f"{refusal}; llguidance: {fault}")

    def begin(self) -> HostText:
        """Return the constraint of a new text."""
        return HostText(
            "the constraint",
            next_SC=np.array([[0, -1]], dtype=np.int16),
            class_V=np.zeros(self._vocabulary.size, dtype=np.int16),
            stops_S=np.zeros(1, dtype=np.bool_),
            effect_SC=np.zeros((1, 2), dtype=np.int16),
            matcher=self._matcher.deep_copy(),
        )
