"""Choose the tokens of a conversation to train on: those that the model has to generate at
inference.

An *answer* is a message of the assistant. For answer i, let P_i be the text of the messages before it,
rendered with a generation prompt, and R_i the text of the messages up to and including it. R_i must begin
with P_i. The text to train on is the rest of R_i, up to and including the first token that stops inference.

If a template gives an R_i that does not begin with P_i, the conversation is refused. Nothing is guessed
from special tokens or from lengths.

A *turn* is a user's message and all messages before the next message of a user.

If a message has the letters of a special token as plain text, a *marker* is put between these
letters, so that they stay plain text (`monograph.text.chat`). The marker is a character that the
chat does not have, or "" if no message has such letters.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monograph.data.conversations import Conversation
from monograph.data.records import Unusable
from monograph.errors import InputRefused
from monograph.text.chat import marker_for, rendered, require_system, template_of
from monograph.text.messages import UnreadKey, for_template, unread_notes
from monograph.text.template import MAX_BATCH, ChatTemplate, Message, TemplateRefusal
from monograph.text.tokenizer import Tokenizer

# The date that templates read, so that a conversation has the same tokens on every day. It is the
# default date of the templates of the Llama 3 family.
TEMPLATE_DATE = "2024-07-26"
_SHOWN_CHARS = 40  # the length of a text that an error message shows
# Some templates tag the assistant's text ({% generation %}). These two characters, of Unicode's private
# use, are put before and after tagged text in the rendered chat.
_TAG_BEGIN = "\ue000"
_TAG_END = "\ue001"


class MaskedRow(NamedTuple):
    """The tokens of a conversation, or of some of its turns, and which of them are trained on.

    Attributes:
        ids: the ids of the tokens, up to the last trained token.
        spans: (begin, end) of each stretch of trained tokens, in order.
    """

    ids: list[int]
    spans: tuple[tuple[int, int], ...]


class AnswerOptions(NamedTuple):
    """The options that decide the rows of conversations.

    Attributes:
        every: whether to train on every answer; otherwise only on the last one.
        truncate: whether the first turns of a row that is too long are left out; otherwise such a
            row is refused.
        max_inputs: the maximum number of inputs in a row.
    """

    every: bool
    truncate: bool
    max_inputs: int


class ConversationConverter:
    """A converter of conversations to rows, for one tokenizer and its template.

    Attributes:
        stops: the ids that stop inference (`configured_stop_ids`).
        counts: the number of "answers", and how many of them are "truncated" (turns before the answer
            were left out), "split" (the answer is encoded apart from its prompt, because otherwise a
            token would begin in the prompt and end in the answer) and "untagged" (the template's own
            tags mark another text as the assistant's). `for_template` adds its own counts.
        first_untagged: a description of the first untagged answer; "" if there is none.

    Raises:
        InputRefused: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, answer_options: AnswerOptions) -> None:
        self._tokenizer = tokenizer
        self._options = answer_options
        self._template_without_tools = template_of(tokenizer).with_date(TEMPLATE_DATE)
        template_with_tools = template_of(tokenizer, tools=[])
        if template_with_tools.source == self._template_without_tools.source:
            # Most models have one template for chats with and without tools.
            self._template_with_tools = self._template_without_tools
        else:
            self._template_with_tools = template_with_tools.with_date(TEMPLATE_DATE)
        self.stops = configured_stop_ids(tokenizer)
        self.counts: Counter[str] = Counter()
        self.first_untagged = ""
        self._special_names = {token_id: name for name, token_id in tokenizer.special.items()}
        self._encoder = _Encoder(tokenizer)

    def rows(self, conversation: Conversation) -> list[MaskedRow]:
        """Return the rows of a conversation. Each answer is trained on in exactly one row.

        At first each answer has a row of its own: the answer's prompt, and the answer. If the prompt of
        the next answer begins with all tokens of this row, the two rows are merged. So most templates
        give one row per conversation. Some templates rewrite earlier turns when the chat continues,
        and give one row per answer. The template of Qwen 3, for example, removes earlier thoughts.

        Raises:
            Unusable: the template refuses the messages, or does not read one of their keys, or an
                answer is too long.
            InputRefused: the template changes the text before an answer once the answer is there,
                or it writes no stop token after an answer.
        """
        answer_indices = conversation.answer_indices
        if not self._options.every:
            answer_indices = answer_indices[-1:]
        template = self._template(conversation)
        variables = conversation.template_variables
        try:
            messages = for_template(template, conversation.messages, self.counts, **variables)
        except (UnreadKey, TemplateRefusal) as error:
            raise _unusable(error) from None
        conversation = conversation._replace(messages=messages)
        marker = marker_for(self._tokenizer, template, conversation)
        rows: list[MaskedRow] = []
        # The index of the first message, after the system message, that is in the row.
        begin = _system_count(conversation.messages)
        # Chats are rendered in batches. Each answer needs two renderings: without and with the answer.
        batch_answers = MAX_BATCH // 2
        for number, answer in enumerate(answer_indices):
            if number % batch_answers == 0:
                next_answers = answer_indices[number : number + batch_answers]
                self._render_ahead(conversation, next_answers, begin)
            row, begin = self._fit_row(conversation, answer, begin, marker)
            if rows:
                # The rows are merged if this answer's prompt begins with all tokens of the last row.
                # Only the prompt is compared, not the answer: in a chat that repeats itself, the
                # answer may be equal to the end of the last row, which is an earlier answer.
                answer_begin = row.spans[0][0]
                prompt_ids = row.ids[:answer_begin]
                last_ids = rows[-1].ids
                if prompt_ids[: len(last_ids)] == last_ids:
                    last_row = rows.pop()
                    row = MaskedRow(row.ids, last_row.spans + row.spans)
            rows.append(row)
        return rows

    def notes(self, skipped: Mapping[str, int], first_bad: str) -> tuple[str, ...]:
        """Return notes for the user on all conversations so far.

        Args:
            skipped: {reason: number of conversations that were skipped}.
            first_bad: the place and the fault of the first skipped conversation.
        """
        counts = self.counts
        lines = skipped_notes(skipped, first_bad)
        if counts["truncated"]:
            lines.append(
                f"turns were left out before {counts['truncated']:,} of {counts['answers']:,} answers to fit"
            )
        lines += unread_notes(counts)
        templates = (self._template_without_tools, self._template_with_tools)
        if any(template.reads_the_date for template in templates):
            lines.append(
                f"the chat template reads the date; in all of these conversations it is {TEMPLATE_DATE}"
            )
        if counts["untagged"]:
            share = f"{counts['untagged']:,} of {counts['answers']:,} answers"
            lines.append(
                f"the template's own generation tags differ in {share}; the first: {self.first_untagged}"
            )
        return tuple(lines)

    def _template(self, conversation: Conversation) -> ChatTemplate:
        """Return the template for a conversation, which may have tools."""
        return self._template_with_tools if conversation.tools else self._template_without_tools

    def _render_ahead(
        self, conversation: Conversation, answer_indices: Sequence[int], begin: int
    ) -> None:
        """Render the chats of several answers together, each without and with the answer.

        If `_fit_row` has to leave out turns, it needs further chats. These are rendered one by one
        when they are needed.
        """
        messages = conversation.messages
        system = messages[: _system_count(messages)]
        chats = []  # (messages, whether a generation prompt follows)
        for answer in answer_indices:
            chats.append(([*system, *messages[begin:answer]], True))
            chats.append(([*system, *messages[begin : answer + 1]], False))
        self._template(conversation).render_ahead(chats, **conversation.template_variables)

    def _fit_row(
        self, conversation: Conversation, answer: int, begin: int, marker: str
    ) -> tuple[MaskedRow, int]:
        """Return the row of an answer with as many earlier turns as fit.

        Args:
            conversation: the conversation.
            answer: index of the answer's message.
            begin: index of the first message, after the system message, in the row of the previous
                answer. Turns that are left out before that answer are left out before this one, too.
            marker: the marker of the conversation, or "".

        Returns:
            The row.
            The index of its first message after the system message.

        Raises:
            Unusable: the row is too long.
        """
        messages = conversation.messages
        system_count = _system_count(messages)
        possible_begins = [begin]
        # All messages before a user's message may be left out.
        if self._options.truncate:
            possible_begins += [
                index for index in range(begin + 1, answer) if messages[index]["role"] == "user"
            ]
        for first in possible_begins:
            kept_messages = [*messages[:system_count], *messages[first : answer + 1]]
            row = self._last_row(conversation._replace(messages=kept_messages), marker)
            inputs = len(row.ids) - 1
            if inputs <= self._options.max_inputs:
                is_truncated = first > system_count
                self.counts.update(answers=1, truncated=int(is_truncated))
                return row, first
        if self._options.truncate:
            kept_turns = "the least"
            remedy = ""
        else:
            kept_turns = "all"
            remedy = ", or cut conversations with data.too_long=truncate"
        raise Unusable(
            "too long",
            f"messages[{answer}], an answer, with {kept_turns} that has to stand before it takes {inputs:,} tokens, "
            f"more than data.sequence_length = {self._options.max_inputs}; raise it{remedy}",
        )

    def _last_row(self, conversation: Conversation, marker: str) -> MaskedRow:
        """Return the row of the last message of a conversation, which is an answer.

        Raises:
            Unusable, InputRefused: as in `rows`.
        """
        messages = conversation.messages
        variables = conversation.template_variables
        template = self._template(conversation)
        try:
            prompt = rendered(
                template,
                self._tokenizer,
                messages[:-1],
                marker,
                add_generation_prompt=True,
                **variables,
            )
            chat = rendered(template, self._tokenizer, messages, marker, **variables)
            # Without a marker, this replaces "" by "", which changes nothing.
            require_system(prompt.replace(marker, ""), messages[:-1])
        except TemplateRefusal as error:
            raise _unusable(error) from None
        if not chat.startswith(prompt):
            raise InputRefused(_changed_prompt_fault(prompt, chat, marker))
        answer_text = chat[len(prompt) :]
        prompt_ids = self._encoder.ids(prompt, marker)
        chat_ids = self._encoder.ids(chat, marker)
        answer_ids = chat_ids[len(prompt_ids) :]
        if chat_ids[: len(prompt_ids)] != prompt_ids:
            # A token spans the end of the prompt. At inference the prompt is encoded alone, so the
            # answer is encoded alone as well.
            self.counts["split"] += 1
            answer_ids = self._tokenizer.encode_rendered(answer_text, marker, inside=True)
        if not answer_ids:
            raise InputRefused(
                "the chat template leaves the answer out: with it or without, it writes the same"
            )
        stop_indices = [index for index, token in enumerate(answer_ids) if token in self.stops]
        if not stop_indices:
            raise InputRefused(self._no_stop_fault(answer_text.replace(marker, "")))
        if not prompt_ids:
            raise InputRefused(
                "the chat template writes nothing before an answer: its first token has no input"
            )
        trained_ids = answer_ids[: stop_indices[0] + 1]
        # `tagged` renders the chat without markers. So offsets in the tagged chat and in the prompt agree only
        # if the prompt has no markers either.
        if template.tags_answers and not marker:
            tagged_chat = template.tagged(messages, (_TAG_BEGIN, _TAG_END), **variables)
            self._compare_tags(tagged_chat, prompt, trained_ids)
        ids = prompt_ids + trained_ids
        return MaskedRow(ids, ((len(prompt_ids), len(ids)),))

    def _no_stop_fault(self, answer_text: str) -> str:
        """Return the reason to refuse an answer without a stop token.

        Args:
            answer_text: the text that the template writes for the answer.
        """
        names = ", ".join(
            repr(self._special_names.get(stop, str(stop))) for stop in sorted(self.stops)
        )
        special_ids = [token for _, _, token in self._tokenizer.special_tokens_in(answer_text)]
        remedy = ""
        if special_ids:
            first = special_ids[0]
            remedy = f"; if {self._special_names[first]!r} ends a turn, add its id {first} there"
        return (
            f"the model would never learn to stop: no token of generation_config.json's eos_token_id and no end of "
            f"text ({names}) is in what the chat template writes for an answer, which ends with "
            f"{answer_text[-_SHOWN_CHARS:]!r}{remedy}"
        )

    def _compare_tags(self, tagged_chat: str, prompt: str, trained_ids: Sequence[int]) -> None:
        """Count an answer whose text in the template's own tags differs from the trained text.

        Args:
            tagged_chat: the rendered chat with `_TAG_BEGIN` and `_TAG_END` around tagged text.
            prompt: the chat before the answer; tagged text in it belongs to earlier answers.
            trained_ids: the ids of the trained text.
        """
        before_tags, *parts = tagged_chat.split(_TAG_BEGIN)
        tagged_in_answer = ""
        # The index at which the next tagged text begins in the chat without tags.
        offset = len(before_tags)
        for part in parts:
            tagged, _, untagged = part.partition(_TAG_END)
            # Only what is after the prompt belongs to this answer.
            tagged_in_answer += tagged[max(0, len(prompt) - offset) :]
            offset += len(tagged) + len(untagged)
        trained = self._decode(trained_ids)
        if tagged_in_answer != trained:
            self.counts["untagged"] += 1
            self.first_untagged = self.first_untagged or (
                f"trained {_shorten(trained)!r}, tagged {_shorten(tagged_in_answer)!r}"
            )

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens by their names."""
        names = self._special_names
        pieces = self._tokenizer.pieces
        text = b"".join(names[token].encode() if token in names else pieces[token] for token in ids)
        return text.decode("utf-8", "replace")


class _Encoder:
    """An encoder of rendered chats, which reuses ids of the last chat.

    Successive chats mostly begin with the same text. Of this common text, the ids up to the last special
    token are reused, because text after a special token does not change the tokens before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._ids = list[int]()
        # (number of characters, number of ids) of the last chat up to and including each special
        # token.
        self._special_ends: list[tuple[int, int]] = []

    def ids(self, text: str, marker: str) -> list[int]:
        """Return the ids of a rendered chat, the same as those of `Tokenizer.encode_rendered`."""
        encode = self._tokenizer.encode_between
        shared_chars = 0
        shared_ids = 0
        for chars, ids_so_far in reversed(self._special_ends):
            if text.startswith(self._text[:chars]):
                shared_chars = chars
                shared_ids = ids_so_far
                break
        ids = self._ids[:shared_ids]
        special_ends = [end for end in self._special_ends if end[1] <= shared_ids]
        encoded_chars = shared_chars  # the number of characters whose ids are in `ids`
        for start, end, special_id in self._tokenizer.special_tokens_in(text[shared_chars:]):
            text_before = text[encoded_chars : shared_chars + start].replace(marker, "")
            ids += encode(text_before, ids)
            ids.append(special_id)
            encoded_chars = shared_chars + end
            special_ends.append((encoded_chars, len(ids)))
        ids += encode(text[encoded_chars:].replace(marker, ""), ids)
        self._text = text
        self._ids = ids
        self._special_ends = special_ends
        return list(ids)


def skipped_notes(skipped: Mapping[str, int], first_bad: str) -> list[str]:
    """Return a note for the user on skipped conversations, or nothing if there are none.

    Args:
        skipped: {reason: number of conversations that were skipped}.
        first_bad: the place and the fault of the first of them.
    """
    if not skipped:
        return []
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
    return [f"skipped conversations: {reasons}; the first: {first_bad}"]


def configured_stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that stop inference.

    They are the tokenizer's end of text, and the ids in generation_config.json.
    Unlike `monograph.text.chat.stop_ids`, this leaves out the token that the chat template writes
    after an answer, because this module checks whether that token stops inference.
    """
    return frozenset({tokenizer.eos_id, *tokenizer.config.stops})


def _unusable(error: InputRefused) -> Unusable:
    """Return a template's refusal as the error for a bad record, which may be skipped."""
    if isinstance(error, UnreadKey):
        return Unusable("a key that no template reads", str(error))
    return Unusable("refused by the chat template", str(error))


def _system_count(messages: Sequence[Message]) -> int:
    """Return the number of system messages at the beginning, 0 or 1. Every row has the system message."""
    return int(messages[0]["role"] == "system")


def _changed_prompt_fault(prompt: str, chat: str, marker: str) -> str:
    """Return the reason to refuse a chat that does not begin with the prompt of its last answer."""
    prompt = prompt.replace(marker, "")
    chat = chat.replace(marker, "")
    difference = len(os.path.commonprefix([prompt, chat]))
    shown = slice(max(0, difference - _SHOWN_CHARS // 2), difference + _SHOWN_CHARS)
    return (
        f"the chat template writes the chat before an answer in another way once the answer is there: the prompt has "
        f"{prompt[shown]!r} where the conversation has {chat[shown]!r}; a model trained on it would not be asked so"
    )


def _shorten(text: str) -> str:
    """Return a text without its middle if it is long."""
    if len(text) <= 2 * _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}...{text[-_SHOWN_CHARS:]}"
