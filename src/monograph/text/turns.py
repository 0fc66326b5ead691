"""Continue a chat in tokens: what a chat template writes between an answer and the next one.

A model that has answered goes on in a chat from the ids that it sampled. Rendering the whole chat again
would encode the answers from their texts, which may give other ids than those that were sampled. So
only what comes after the answer is rendered and encoded: the end of the turn, the new messages, and
the beginning of the next answer.

The result equals the rendering of the whole chat only if the template repeats earlier answers as they were
written. A template that does not do this is refused, such as one that leaves out earlier thoughts.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from monograph.text.chat import marker_for, rendered, template_of
from monograph.text.messages import for_template
from monograph.text.template import Message, TemplateRefusal
from monograph.text.tokenizer import Tokenizer

# A text that stands for an answer, so that the text around the answer can be found. If a template knows
# thoughts, it must also repeat those, so thoughts are put before the text.
_ANSWER = "It is an answer."
_END_OF_THOUGHTS = "</think>\n\n"
_THOUGHTS = f"<think>\nIt is a thought.\n{_END_OF_THOUGHTS}"


class ChatTurns:
    """A chat that grows by answers in ids and by messages in texts.

    Attributes:
        ids: the ids of the prompt: the first messages, and the beginning of an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        stop_ids: Collection[int],
    ) -> None:
        """Begin with messages that an answer follows.

        Args:
            tokenizer: the tokenizer, with the chat template.
            messages: the first messages.
            variables: other variables of the template.
            stop_ids: the ids that end an answer.

        Raises:
            InputRefused: see `monograph.text.chat.chat_ids`.
        """
        self._tokenizer = tokenizer
        self._template = template_of(tokenizer, variables.get("tools"))
        self._variables = dict(variables)
        self._stop_ids = stop_ids
        # The messages so far. In the place of each of the model's answers there is a text that stands for it.
        self._messages = list(messages)
        marker = self._marker(self._messages)
        self.ids = tokenizer.encode_rendered(self._render(self._messages, marker), marker)

    def ids_after(self, answer_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the ids that follow an answer: its end, messages, and the beginning of the next answer.

        Args:
            answer_ids: the ids of the answer, as they were sampled. If the last one ends an answer, the
                template's own end is left out: the first id, if it ends an answer, too.
            messages: the messages after it, at least one.

        Raises:
            TemplateRefusal: the template does not repeat earlier answers as they were written.
            InputRefused: the template refuses the messages.
        """
        answer = self._stand_in()
        grown = [*self._messages, {"role": "assistant", "content": answer}, *messages]
        marker = self._marker(grown)
        before = self._render(self._messages, marker)
        text = self._render(grown, marker)
        # Space before the answer, if the template writes some, is a part of what is sampled.
        after_before = text.removeprefix(before).lstrip()
        if not text.startswith(before) or not after_before.startswith(answer):
            raise TemplateRefusal(
                "the model's chat template does not repeat earlier answers as they were written (it may leave out "
                "thoughts), so what is learned in one turn would not be what is read in the next: take a model whose "
                "template repeats them, or episodes of one turn"
            )
        self._messages = grown
        text_after = after_before.removeprefix(answer)
        ids = self._tokenizer.encode_rendered(text_after, marker, inside=True)
        has_end = bool(answer_ids) and answer_ids[-1] in self._stop_ids
        if has_end and ids and ids[0] in self._stop_ids:
            return ids[1:]
        return ids

    def _stand_in(self) -> str:
        """Return the text that stands for an answer; with thoughts, if the template knows them."""
        if _END_OF_THOUGHTS.strip() not in self._template.source:
            return _ANSWER
        # If the beginning of an answer already has thoughts, such as empty ones, the answer has none.
        if self._render(self._messages, "").endswith(_END_OF_THOUGHTS):
            return _ANSWER
        return _THOUGHTS + _ANSWER

    def _marker(self, messages: Sequence[Message]) -> str:
        """Return the marker for messages; see `monograph.text.chat.marker_for`."""
        template_messages = for_template(self._template, messages, **self._variables)
        return marker_for(self._tokenizer, self._template, [template_messages, self._variables])

    def _render(self, messages: Sequence[Message], marker: str) -> str:
        """Return messages as text, with the beginning of an answer after them."""
        template_messages = for_template(self._template, messages, **self._variables)
        return rendered(
            self._template,
            self._tokenizer,
            template_messages,
            marker,
            add_generation_prompt=True,
            **self._variables,
        )


class TextTurns:
    """A text that grows by answers in ids and by further texts.

    Attributes:
        ids: the ids of the prompt: bos, and the first text.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        """Begin with a text that an answer follows."""
        self._tokenizer = tokenizer
        self.ids = [tokenizer.bos_id, *tokenizer.encode(text)]

    def ids_after(self, answer_ids: Sequence[int], text: str) -> list[int]:
        """Return the ids of the text that follows an answer."""
        return self._tokenizer.encode_between(text, answer_ids) if text else []
