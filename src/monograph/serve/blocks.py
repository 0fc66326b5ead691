"""An answer as a list of blocks, each of which is a text, a call of a tool, or thoughts.

/v1/responses and /v1/messages answer with such a list. In a stream, each block begins, grows and ends before
the next one begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from monograph.serve.answers import ScoredToken, TextPiece, new_call_id
from monograph.text.call_reader import CallPiece, Thought

BlockKind = Literal["text", "call", "thoughts"]


@dataclass
class AnswerBlock:
    """A part of an answer.

    Attributes:
        index: its number in the answer.
        kind: what it is.
        name: the tool that a call calls; "" for other blocks.
        call_id: the id of a call.
        text: the text, the thoughts, or the call's arguments, as far as they are written.
        entries: the log-probabilities of a text's tokens, if the answer has them.
    """

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = field(default_factory=new_call_id)
    text: str = ""
    entries: list[ScoredToken] = field(default_factory=list)


class BlockStep(NamedTuple):
    """What happens to a block of a stream.

    Attributes:
        kind: "begin", "grow" or "end".
        block: the block, after the step.
        text: what the block's text has grown by.
        entries: what its entries have grown by.
    """

    kind: Literal["begin", "grow", "end"]
    block: AnswerBlock
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
        self.blocks: list[AnswerBlock] = []
        self.finish: Literal["stop", "length"] | None = None
        self.stopped_by = ""
        # Entries that are in no block yet. Only blocks of text have entries. So, as in a chat's answer, a
        # text also gets the entries of tokens before it, such as those of thoughts.
        self._entries: list[ScoredToken] = []

    @property
    def has_calls(self) -> bool:
        """Whether there is a call."""
        return any(block.kind == "call" for block in self.blocks)

    def add(self, piece: TextPiece) -> list[BlockStep]:
        """Add a piece; return what happens to the blocks. After the last piece, every block has ended."""
        steps: list[BlockStep] = []
        for part in piece.parts:
            steps += self._add_part(part)
        # An answer in which nothing was written gets an empty text.
        if piece.finish is not None and not self.blocks:
            steps += self._begin_unless_open("text")
        self._entries += piece.entries
        if self._entries and self.blocks and self.blocks[-1].kind == "text":
            # If the last step adds new text, the entries become a part of this step.
            text = ""
            if steps and steps[-1].kind == "grow":
                text = steps.pop().text
            self.blocks[-1].entries += self._entries
            steps.append(BlockStep("grow", self.blocks[-1], text, self._entries))
            self._entries = []
        if piece.finish is not None:
            self.finish = piece.finish
            self.stopped_by = piece.stopped_by
            steps.append(BlockStep("end", self.blocks[-1]))
        return steps

    def _add_part(self, part: str | CallPiece | Thought) -> list[BlockStep]:
        """Add a part of a piece to the last block, or to a new one; return the steps."""
        steps: list[BlockStep] = []
        if isinstance(part, CallPiece):
            if part.name is not None:
                steps += self._begin(AnswerBlock(len(self.blocks), "call", part.name))
            text = part.arguments
        elif isinstance(part, Thought):
            steps += self._begin_unless_open("thoughts")
            text = part.text
        else:
            text = part
            if text:
                steps += self._begin_unless_open("text")
        if text:
            steps.append(self._grow(text))
        return steps

    def _begin_unless_open(self, kind: BlockKind) -> list[BlockStep]:
        """Return the steps that begin a block, if the last one is of another kind."""
        if self.blocks and self.blocks[-1].kind == kind:
            return []
        return self._begin(AnswerBlock(len(self.blocks), kind))

    def _begin(self, block: AnswerBlock) -> list[BlockStep]:
        """End the last block, if there is one, and begin this block; return the steps."""
        steps = [BlockStep("end", self.blocks[-1])] if self.blocks else []
        self.blocks.append(block)
        return [*steps, BlockStep("begin", block)]

    def _grow(self, text: str) -> BlockStep:
        """Add text to the last block; return the step."""
        block = self.blocks[-1]
        block.text += text
        return BlockStep("grow", block, text)
