"""Choose the tokens of a conversation to train on: those that the model has to generate after a
prompt at inference.

For the assistant's turn i, let P_i be the chat before it, rendered with a generation prompt, and
R_i the chat up to and with the turn. The trained text is R_i without its beginning P_i, up to and
including the first token that stops inference. This holds for any template; if it does not, the
conversation is refused, and nothing is guessed from markers or from lengths.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monograph.data.conversations import Conversation
from monograph.data.records import Unusable
from monograph.errors import InputRefused
from monograph.text.chat import marker_for, rendered, require_system, template_of
from monograph.text.messages import Unread, for_template, unread_notes
from monograph.text.template import AT_ONCE, ChatTemplate, Message, Unspeakable
from monograph.text.tokenizer import Tokenizer

# The date that templates see, so that a conversation has the same tokens on every day. The
# templates of the Llama 3 family fall back to this date.
TEMPLATE_DATE = "2024-07-26"
_SHOWN_CHARS = 40  # of each of two texts that a message shows where they differ
_OPEN, _CLOSE = "\ue000", "\ue001"  # put around the text that a template tags as the assistant's


class Row(NamedTuple):
    """A stretch of text to train on.

    Attributes:
        ids: the ids of its tokens, up to the last trained one.
        spans: (begin, end) of the trained tokens, in order.
    """

    ids: list[int]
    spans: tuple[tuple[int, int], ...]


class Answering(NamedTuple):
    """The options that decide the rows of conversations, together with the tokenizer and its
    template.

    Attributes:
        every: whether to train on every answer; otherwise on the last one alone.
        truncate: whether to leave out whole turns at the front of a row that is too long; otherwise
            it is refused.
        longest: largest number of inputs in a row.
    """

    every: bool
    truncate: bool
    longest: int


class Answers:
    """A converter of conversations to rows, for one tokenizer and its template.

    Attributes:
        stops: ids that stop inference: the tokenizer's end of text and those of
            generation_config.json.
        counts: the number of "answers", and how many of them are "truncated" (turns before it were
            left out), "parted" (a token spans the end of the prompt) and "untagged" (the template's
            own tags mark other text); and what `for_template` counts.
        untagged: a description of the first untagged answer.

    Raises:
        InputRefused: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, how: Answering) -> None:
        self._tokenizer, self._how = tokenizer, how
        self._plain = template_of(tokenizer).on(TEMPLATE_DATE)
        with_tools = template_of(tokenizer, tools=[])
        self._with_tools = (
            self._plain if with_tools.source == self._plain.source else with_tools.on(TEMPLATE_DATE)
        )
        self.stops = stops_of(tokenizer)
        self.counts: Counter[str] = Counter()
        self.untagged = ""
        self._names = {index: name for name, index in tokenizer.special.items()}
        self._encoder = _Encoder(tokenizer)

    def rows(self, conversation: Conversation) -> list[Row]:
        """Return the rows of a conversation; each answer is trained on in exactly one row.

        An answer's row is its prompt and the answer. If the next answer's row begins with this row,
        the two become one row. So most templates give one row per conversation, and a template that
        rewrites earlier turns as the chat goes on (Qwen 3 removes thoughts) gives one row per
        answer.

        Raises:
            Unusable: the template refuses the messages or does not read a key of theirs, or one
                answer alone is too long.
            InputRefused: the template changes the text before an answer once the answer is there,
                or writes no stop token after an answer.
        """
        answers = conversation.answers if self._how.every else conversation.answers[-1:]
        template = self._template(conversation)
        variables = conversation.template_variables
        try:
            messages = for_template(template, conversation.messages, self.counts, **variables)
        except (Unread, Unspeakable) as refused:
            raise _unusable(refused) from None
        conversation = conversation._replace(messages=messages)
        marker = marker_for(self._tokenizer, template, conversation)
        rows: list[Row] = []
        begin = _lead(conversation.messages)
        for number, answer in enumerate(answers):
            if number % (AT_ONCE // 2) == 0:
                self._expect(conversation, answers[number : number + AT_ONCE // 2], begin)
            row, begin = self._fitting(conversation, answer, begin, marker)
            # Compare up to the answer only: in a chat that repeats itself the answer may lie inside
            # the last row, but that is another, earlier answer.
            if rows and row.ids[: row.spans[0][0]][: len(rows[-1].ids)] == rows[-1].ids:
                row = Row(row.ids, rows.pop().spans + row.spans)
            rows.append(row)
        return rows

    def notes(self, skipped: Mapping[str, int], first_bad: str) -> tuple[str, ...]:
        """Return notes for the user on all conversations so far, including {reason: count} of the
        `skipped` ones.
        """
        counts = self.counts
        lines = skipped_notes(skipped, first_bad)
        if counts["truncated"]:
            lines.append(
                f"turns were left out before {counts['truncated']:,} of {counts['answers']:,} answers to fit"
            )
        lines += unread_notes(counts)
        if self._plain.reads_the_date or self._with_tools.reads_the_date:
            lines.append(
                f"the chat template reads the date; in all of these conversations it is {TEMPLATE_DATE}"
            )
        if counts["untagged"]:
            share = f"{counts['untagged']:,} of {counts['answers']:,} answers"
            lines.append(
                f"the template's own generation tags differ in {share}; the first: {self.untagged}"
            )
        return tuple(lines)

    def _template(self, conversation: Conversation) -> ChatTemplate:
        return self._with_tools if conversation.tools else self._plain

    def _expect(self, conversation: Conversation, answers: Sequence[int], begin: int) -> None:
        """Render the chats of these answers, each without and with the answer, in advance and
        together.

        This assumes that no further turns are left out; other renderings are made singly when they
        are needed.
        """
        messages = conversation.messages
        kept = messages[: _lead(messages)]
        ends = ((answer + whole, not whole) for answer in answers for whole in (False, True))
        chats = (([*kept, *messages[begin:end]], prompt) for end, prompt in ends)
        self._template(conversation).expect(chats, **conversation.template_variables)

    def _fitting(
        self, conversation: Conversation, answer: int, begin: int, marker: str
    ) -> tuple[Row, int]:
        """Return the row of one answer, with as many turns before it as fit, and the index of the
        first of them.
        """
        messages = conversation.messages
        lead = _lead(messages)
        questions = [
            number for number in range(begin + 1, answer) if messages[number]["role"] == "user"
        ]
        for first in [begin, *(questions if self._how.truncate else [])]:
            kept = conversation._replace(messages=[*messages[:lead], *messages[first : answer + 1]])
            row = self._row(kept, marker)
            if len(row.ids) - 1 <= self._how.longest:
                self.counts.update(answers=1, truncated=int(first > lead))
                return row, first
        what = f"messages[{answer}], an answer, with " + (
            "the least" if self._how.truncate else "all"
        )
        remedy = "" if self._how.truncate else ", or cut conversations with data.too_long=truncate"
        raise Unusable(
            "too long",
            f"{what} that has to stand before it takes {len(row.ids) - 1:,} tokens, more "
            f"than data.sequence_length = {self._how.longest}; raise it{remedy}",
        )

    def _row(self, conversation: Conversation, marker: str) -> Row:
        """Return the row of the last message of a conversation."""
        messages, variables = conversation.messages, conversation.template_variables
        template = self._template(conversation)
        try:
            prompt, whole = (
                rendered(template, self._tokenizer, part, marker, asks, **variables)
                for part, asks in ((messages[:-1], True), (messages, False))
            )
            require_system(prompt.replace(marker, ""), messages[:-1])
        except Unspeakable as refused:
            raise _unusable(refused) from None
        if not whole.startswith(prompt):
            raise InputRefused(_parting(prompt, whole, marker))
        before = self._encoder.ids(prompt, marker)
        all_ids = self._encoder.ids(whole, marker)
        after = all_ids[len(before) :]
        if all_ids[: len(before)] != before:
            # A token spans the end of the prompt. At inference the prompt is encoded alone, so the
            # answer is, too.
            self.counts["parted"] += 1
            after = self._tokenizer.encode_rendered(whole[len(prompt) :], marker, inside=True)
        end = next((number for number, index in enumerate(after, 1) if index in self.stops), None)
        if not after:
            raise InputRefused(
                "the chat template leaves the answer out: with it or without, it writes the same"
            )
        if end is None:
            raise InputRefused(self._without_stop(whole[len(prompt) :].replace(marker, "")))
        if not before:
            raise InputRefused(
                "the chat template writes nothing before an answer: its first token has no input"
            )
        if template.tags_answers and not marker:
            self._compare_tags(
                template.tagged(messages, (_OPEN, _CLOSE), **variables), prompt, after[:end]
            )
        return Row(before + after[:end], ((len(before), len(before) + end),))

    def _without_stop(self, ending: str) -> str:
        names = ", ".join(repr(self._names.get(stop, str(stop))) for stop in sorted(self.stops))
        ends = [index for _, _, index in self._tokenizer.controls(ending)]
        remedy = (
            f"; if {self._names[ends[0]]!r} ends a turn, add its id {ends[0]} there" if ends else ""
        )
        return (
            f"the model would never learn to stop: no token of generation_config.json's eos_token_id and no end of "
            f"text ({names}) is in what the chat template writes for an answer, which ends with "
            f"{ending[-_SHOWN_CHARS:]!r}{remedy}"
        )

    def _compare_tags(self, marked: str, prompt: str, trained: Sequence[int]) -> None:
        _, *parts = marked.split(_OPEN)
        inside = ""
        at = marked.index(_OPEN) if parts else 0
        for part in parts:
            tagged, _, rest = part.partition(_CLOSE)
            inside += tagged[max(0, len(prompt) - at) :]
            at += len(tagged) + len(rest)
        ours = self._shown(trained)
        if inside != ours:
            self.counts["untagged"] += 1
            self.untagged = self.untagged or f"trained {_ends(ours)!r}, tagged {_ends(inside)!r}"

    def _shown(self, ids: Sequence[int]) -> str:
        pieces = self._tokenizer.pieces
        text = b"".join(
            self._names[index].encode() if index in self._names else pieces[index] for index in ids
        )
        return text.decode("utf-8", "replace")


class _Encoder:
    """An encoder of rendered chats that reuses the last chat's ids, up to a special token, where
    two chats agree.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._ids = list[int]()
        # Characters and ids up to and including each special token.
        self._ends: list[tuple[int, int]] = []

    def ids(self, text: str, marker: str) -> list[int]:
        """Return the ids of a rendered chat, the same as those of `Tokenizer.encode_rendered`."""
        encode = self._tokenizer.encode_between
        at, count = next(
            (end for end in reversed(self._ends) if text.startswith(self._text[: end[0]])), (0, 0)
        )
        ids = self._ids[:count]
        ends = [end for end in self._ends if end[1] <= count]
        shared = at
        for start, end, index in self._tokenizer.controls(text[shared:]):
            ids += [*encode(text[at : shared + start].replace(marker, ""), ids), index]
            at = shared + end
            ends.append((at, len(ids)))
        ids += encode(text[at:].replace(marker, ""), ids)
        self._text = text
        self._ids = ids
        self._ends = ends
        return list(ids)


def skipped_notes(skipped: Mapping[str, int], first_bad: str) -> list[str]:
    """Return a note for the user on the conversations that were skipped, if some were."""
    if not skipped:
        return []
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
    return [f"skipped conversations: {reasons}; the first: {first_bad}"]


def stops_of(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that stop inference: the tokenizer's end of text and those of
    generation_config.json.
    """
    return frozenset({tokenizer.eos_id, *tokenizer.config.stops})


def _unusable(refused: InputRefused) -> Unusable:
    reason = (
        "a key that no template reads"
        if isinstance(refused, Unread)
        else "refused by the chat template"
    )
    return Unusable(reason, str(refused))


def _lead(messages: Sequence[Message]) -> int:
    """Return how many messages at the front are never left out: 1 with a system message, else 0."""
    return int(messages[0]["role"] == "system")


def _parting(prompt: str, whole: str, marker: str) -> str:
    """Return the reason to refuse a conversation that does not begin with an answer's prompt."""
    prompt = prompt.replace(marker, "")
    whole = whole.replace(marker, "")
    at = len(os.path.commonprefix([prompt, whole]))
    begin = max(0, at - _SHOWN_CHARS // 2)
    asked, written = prompt[begin : at + _SHOWN_CHARS], whole[begin : at + _SHOWN_CHARS]
    return (
        f"the chat template writes the chat before an answer in another way once the answer is there: the prompt has "
        f"{asked!r} where the conversation has {written!r}; a model trained on it would not be asked so"
    )


def _ends(text: str) -> str:
    return (
        text if len(text) <= 2 * _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...{text[-_SHOWN_CHARS:]}"
    )
