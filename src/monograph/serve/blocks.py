"""An answer as a list of blocks, each of which is a text or a call of a tool.

/v1/responses and /v1/messages answer with such a list. In a stream, a block begins, grows and ends before
the next one begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from monograph.serve.answers import ScoredToken, TextPiece, new_call_id
from monograph.text.call_reader import CallPiece


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        index: its number in the answer.
        name: the tool that is called; None: the block is a text.
        call_id: the id of the call.
        text: the text, or the call's arguments, as far as they are written.
        entries: the entries of the text's tokens, if the answer has log-probabilities.
    """

    index: int
    name: str | None = None
    call_id: str = field(default_factory=new_call_id)
    text: str = ""
    entries: list[ScoredToken] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        """Whether the block is a call."""
        return self.name is not None


class Step(NamedTuple):
    """What happens to a block of a stream.

    Attributes:
        kind: "begin", "grow" or "end".
        block: the block, after the step.
        text: what the block's text has grown by.
        entries: what its entries have grown by.
    """

    kind: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""
    entries: Sequence[ScoredToken] = ()


class BlockBuilder:
    """Makes the blocks of one answer from its pieces.

    Attributes:
        blocks: the blocks so far; the last one may be unfinished.
        finish: how the answer has ended: "stop", "length", or None if it has not.
        stopped_by: the stop string that has ended it; "" if none has.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish: Literal["stop", "length"] | None = None
        self.stopped_by = ""

    @property
    def has_calls(self) -> bool:
        """Whether there is a call."""
        return any(block.is_call for block in self.blocks)

    def add(self, piece: TextPiece) -> list[Step]:
        """Add a piece; return what happens to the blocks. After the last piece, every block has ended."""
        steps: list[Step] = []
        if piece.entries:  # an answer with log-probabilities has no calls
            steps += [*self._begin_text(), self._grow(piece.text, piece.entries)]
        else:
            for part in piece.parts:
                steps += self._add_part(part)
        if piece.finish is not None:
            self.finish = piece.finish
            self.stopped_by = piece.stopped_by
            if not self.blocks:  # an answer without a token is an empty text
                steps += self._begin_text()
            steps.append(Step("end", self.blocks[-1]))
        return steps

    def _add_part(self, part: str | CallPiece) -> list[Step]:
        if isinstance(part, str):
            return [*self._begin_text(), self._grow(part)] if part else []
        steps: list[Step] = []
        if part.name is not None:
            steps += self._begin(Block(len(self.blocks), part.name))
        if part.arguments:
            steps.append(self._grow(part.arguments))
        return steps

    def _begin_text(self) -> list[Step]:
        """Return the steps that begin a text, unless the last block is one."""
        if self.blocks and not self.blocks[-1].is_call:
            return []
        return self._begin(Block(len(self.blocks)))

    def _begin(self, block: Block) -> list[Step]:
        steps = [Step("end", self.blocks[-1])] if self.blocks else []
        self.blocks.append(block)
        return [*steps, Step("begin", block)]

    def _grow(self, text: str, entries: Sequence[ScoredToken] = ()) -> Step:
        block = self.blocks[-1]
        block.text += text
        block.entries += entries
        return Step("grow", block, text, entries)
