"""Read pairs of answers, a chosen and a rejected one, and arrange them in rows.

A row holds both answers of a pair, each after the prompt. So both are always in the same micro-batch,
which is some rows of an update. Several pairs share a row. Each answer with its prompt is a separate
*document* of the row: attention does not reach from one document to another, and each begins at position 0.

For the loss kto, records have single answers that are labelled good or bad. Such an answer gets a second
one to make a pair: the answer of another record, to another prompt, is put after the prompt of the
labelled answer.

Shape suffixes: D pairs, P = 2 D answers, R rows, T positions of a row.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from monograph.data.completions import completed_row
from monograph.data.conversations import (
    Conversation,
    first_chat_only_key,
    read_conversation,
    require_copy,
)
from monograph.data.corpus import Corpus, stats_of
from monograph.data.forms import (
    CHAT_KEYS,
    CHOSEN,
    COMPLETION,
    DEFAULT_SETTINGS,
    IGNORE_KEY,
    LABEL,
    MESSAGES,
    PROMPT,
    REJECTED,
    RecordKeys,
    RecordKind,
    RecordSettings,
)
from monograph.data.kinds import kind_of_records
from monograph.data.loss_mask import AnswerOptions, ConversationConverter, MaskedRow
from monograph.data.messages import is_trained_on
from monograph.data.options import ReadingOptions
from monograph.data.pack import Int64
from monograph.data.progress import ProgressCallback
from monograph.data.records import JSON_TYPES, Fault, Unusable, checked_text, list_names, quote
from monograph.data.rows import IGNORE, Rows
from monograph.data.sources import source_paths
from monograph.data.spelled import SpecialTokenSpellings, text_values
from monograph.data.store import Side
from monograph.errors import InputRefused
from monograph.rl.prompts import JsonRecord, model_tokenizer, read_items
from monograph.text.chat import require_variables_read
from monograph.text.tokenizer import Tokenizer

# The values of a label. The keys True and False also match 1 and 0.
_LABELS = {True: 1, "true": 1, "True": 1, False: -1, "false": -1, "False": -1}


class Pair(NamedTuple):
    """Two answers to one prompt, or a single labelled answer.

    Attributes:
        text: the prompt's text, or the JSON of a chat's messages.
        chosen: the tokens of the prompt and of the better answer; its spans are the answer's
            tokens. A labelled answer is here, too, whether it is good or bad.
        rejected: the same for the other answer; for a labelled answer, the answer to another
            prompt.
        bytes: UTF-8 bytes of the record's answers.
        is_chat: whether the answers are messages of chats.
        label: 1 for a good answer, -1 for a bad one, 0 for a pair.
    """

    text: str
    chosen: MaskedRow
    rejected: MaskedRow
    bytes: int
    is_chat: bool
    label: int = 0


class PairRows(Rows):
    """Rows that hold whole pairs.

    For the base class a pair is one document. `window`, which returns rows, splits it into two
    documents, one for each answer.

    Attributes:
        answers: the number of answers of all rows.
        labels: int64 [answers], each answer's label; 0 if it has none.
        max_row_answers: the maximum number of answers of a row.
        has_chats: whether the answers are messages of chats.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        name: str,
        tokenizer: Tokenizer,
        sequence_length: int,
        first: int,
    ):
        """Arrange pairs.

        Args:
            pairs: the pairs, each of at most `sequence_length` + 1 tokens in its two rows.
            name: the source's name.
            tokenizer: the tokenizer of the pairs' tokens.
            sequence_length: T.
            first: the number of the first answer. The answers of a run are numbered from 1: first
                those to train on, and then the held-out ones.
        """
        self._chosen_lengths_D = np.array([len(pair.chosen.ids) for pair in pairs], dtype=np.int64)
        self.answers = 2 * len(pairs)
        self._first_number = first
        self.has_chats = any(pair.is_chat for pair in pairs)
        self.labels = np.array(
            [label for pair in pairs for label in (pair.label, 0)], dtype=np.int64
        )
        super().__init__(_side(pairs, name), tokenizer, sequence_length, packed=True)
        self.max_row_answers = 2 * int(np.diff(self._plan.offsets).max(initial=0))

    def window(self, indices_R: Int64) -> dict[str, Int64]:
        """Return the rows with these indices; the two answers of a pair are two documents.

        Returns:
            the entries of `Rows.window`, and
            answers: int64 [R, T], an answer's number at its first target, 0 elsewhere.
        """
        window = super().window(indices_R)
        pair_RT = self.document_indices(indices_R)
        is_filled_RT = pair_RT >= 0
        # For each position, the number of tokens of the prompt and the chosen answer of its pair. After
        # this many positions of the pair, the prompt begins again, with the rejected answer after it.
        # Padding has the pair -1. It gets the length of the last pair, which is not used.
        chosen_length_RT = np.zeros_like(pair_RT)
        if len(self._chosen_lengths_D):
            chosen_length_RT = self._chosen_lengths_D[pair_RT]
        is_rejected_RT = is_filled_RT & (window["positions"] >= chosen_length_RT)
        window["positions"] = window["positions"] - np.where(is_rejected_RT, chosen_length_RT, 0)
        # Pair s of a row, counted from 1, gets the segments 2 s - 1 and 2 s.
        window["segments"] = np.where(is_filled_RT, 2 * window["segments"] - 1 + is_rejected_RT, 0)
        # An answer's number is put at its first target, the one that does not follow a target of the same
        # answer.
        is_target_RT = window["targets"] != IGNORE
        follows_target_RT = np.zeros_like(is_target_RT)
        is_same_answer = window["segments"][:, 1:] == window["segments"][:, :-1]
        follows_target_RT[:, 1:] = is_target_RT[:, :-1] & is_same_answer
        is_first_target_RT = is_target_RT & ~follows_target_RT
        number_RT = self._first_number + 2 * pair_RT + is_rejected_RT
        return window | {"answers": np.where(is_first_target_RT, number_RT, 0)}

    def _piece_visits(self) -> NDArray[np.float64]:
        """Return how often an epoch visits an answer of n tokens with its prompt, for each n."""
        # An epoch visits each pair once, as one piece of a row, and with it each of its answers.
        rejected_lengths_D = np.diff(self._side.starts) - 1 - self._chosen_lengths_D
        lengths_P = np.concatenate([self._chosen_lengths_D, rejected_lengths_D])
        return np.bincount(lengths_P, minlength=self.sequence_length + 1).astype(np.float64)

    def empty(self, count: int) -> dict[str, Int64]:
        """Return `count` rows of padding, with the entries of `window`."""
        return super().empty(count) | {
            "answers": np.zeros((count, self.sequence_length), dtype=np.int64)
        }


def _side(pairs: Sequence[Pair], name: str) -> Side:
    """Return a side whose documents are the pairs.

    A document is the chosen answer after its prompt, and then the rejected one after its prompt.
    """
    tokens = list[int]()
    starts = [0]
    spans = list[int]()
    for pair in pairs:
        for row in (pair.chosen, pair.rejected):
            spans += [len(tokens) + edge for span in row.spans for edge in span]
            tokens += row.ids
        starts.append(len(tokens))

    def array(values: Iterable[int]) -> NDArray[np.int64]:
        return np.array([*values], dtype=np.int64)

    return Side(
        tokens=array(tokens),
        starts=array(starts),
        records=array(range(1, len(pairs) + 1)),
        bytes=sum(pair.bytes for pair in pairs),
        files=(name,),
        first_documents=array((0, len(pairs))),
        answers=array(spans),
    )


def loss_for(
    source: str | Sequence[str],
    record_settings: RecordSettings = DEFAULT_SETTINGS,
    skip_bad: bool = False,
) -> str | None:
    """Return the default loss for a source, by the kind of its records.

    Returns:
        "dpo" for pairs, "kto" for labelled answers, None for anything else.

    Raises:
        InputRefused, UsageError: see `kind_of_records`; or there is no source.
    """
    kind = kind_of_records(source_paths(source), record_settings, skip_bad)
    if kind is RecordKind.PAIRS:
        return "dpo"
    return "kto" if kind is RecordKind.LABELLED else None


def read_pairs(
    reading: ReadingOptions, *, labelled: bool = False, progress: ProgressCallback | None = None
) -> Corpus:
    """Read, tokenise and pack pairs, from JSON lines or tables.

    A record has "chosen" and "rejected":
    - Both are texts, and "prompt" is the text before them, or is missing.
    - Both are lists of messages, and "prompt" is a list of the messages before them. Without
      "prompt", both are whole chats, which differ only in their last message. The tokenizer's chat
      template renders them, and the answer is what it writes for the last message.

    With `labelled` a record has "completion", in the same forms, and "label", true or false.

    Args:
        reading: how they are read; rows are always packed. Pairs with equal prompts are held out
            together.
        labelled: whether records have single answers.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: a record is bad, or a pair is too long for a row; see also `read_items`.
        UsageError: the tokenizer would have to be trained, or a source has a weight.
    """
    tokenizer = model_tokenizer(reading, "prefer.loss")
    length = int(reading.sequence_length)
    # The converter is made when the first chat is read, because it needs a chat template. If all
    # answers are texts, none is needed.
    chat_answers: ConversationConverter | None = None
    # The keys under which a record has its answers.
    keys = (COMPLETION,) if labelled else (CHOSEN, REJECTED)
    record_settings = RecordSettings.of(None, reading.ignore_keys)
    kind = RecordKind.LABELLED if labelled else RecordKind.PAIRS
    record_keys = RecordKeys(kind, record_settings, is_kind_set=True)
    spellings = SpecialTokenSpellings(tokenizer)
    # The places of records whose answers begin with the prompt.
    repeating = list[str]()

    def chat_row(conversation: Conversation) -> MaskedRow:
        """Return the row of a chat's last answer."""
        nonlocal chat_answers
        if chat_answers is None:
            options = AnswerOptions(every=False, truncate=False, max_inputs=length)
            chat_answers = ConversationConverter(tokenizer, options)
        require_variables_read(tokenizer, conversation.template_variables)
        [row] = chat_answers.rows(conversation)
        return row

    def read_pair(where: str, record: JsonRecord) -> Pair | Fault:
        """Return the pair of a record, or the record's fault."""
        try:
            is_chat = _are_chats(record, keys)
            read_answer: _ReadAnswer = functools.partial(_answer_of_text, tokenizer)
            if is_chat:
                read_answer = functools.partial(_answer_of_chat, chat_row)
            make_pair = _labelled_pair if labelled else _pair
            pair = make_pair(record, read_answer, is_chat)
        except Unusable as unusable:
            return unusable.fault
        except InputRefused as refused:
            raise InputRefused(f"{where}: {refused}") from None
        if not is_chat:
            spellings.count(where, text_values(record, PROMPT, *keys))
            prompt = record.get(PROMPT)
            if prompt and all(record[key].startswith(prompt) for key in keys):
                repeating.append(where)
        inputs = len(pair.chosen.ids) + len(pair.rejected.ids) - 1
        if inputs <= length:
            return pair
        texts = "the two answers, each after its prompt,"
        if labelled:
            texts = "the answer and its prompt twice"
        return Fault(
            "too long",
            f"{texts} take {inputs} tokens, more than data.sequence_length = {length}: raise it",
        )

    needed_keys = (COMPLETION, LABEL) if labelled else keys
    needs = " and ".join(map(repr, needed_keys))
    pairs = read_items(
        reading, read_pair, f"prefer.loss needs records with {needs}", progress, record_keys
    )
    train_pairs = pairs.train
    held_out_pairs = pairs.held_out
    if labelled:
        pair_up = functools.partial(
            _with_others,
            others=pairs.train,
            length=length,
            skipped=pairs.skipped,
            refuse=not reading.skips_bad,
        )
        train_pairs = pair_up(pairs.train)
        held_out_pairs = pair_up(pairs.held_out)
        if not train_pairs:
            raise InputRefused(
                f"{pairs.sources.name}: no answer has room beside one to another prompt: give more"
            )
    # Everything on which the rows depend.
    identity = [
        pairs.sources.sha256,
        tokenizer.hash,
        length,
        reading.held_out,
        reading.bad_records,
        keys[0],  # tells pairs from labelled answers
    ]
    if record_settings.ignored_training_keys:
        identity.append(record_settings.ignored_training_keys)
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    name = pairs.sources.name
    train = PairRows(train_pairs, name, tokenizer, length, first=1)
    held_out = PairRows(held_out_pairs, name, tokenizer, length, first=1 + train.answers)
    stats = stats_of(len(pairs.sources.files), pairs.skipped, train, held_out)
    chat_notes = chat_answers.notes({}, "") if chat_answers is not None else ()
    notes = (*record_keys.notes(), *chat_notes, *spellings.notes(), *_repeating_note(repeating))
    return Corpus(
        name,
        tokenizer,
        train,
        held_out,
        fingerprint=fingerprint,
        stats=stats,
        notes=notes,
        folder=Path(),
    )


def _repeating_note(places: Sequence[str]) -> tuple[str, ...]:
    """Return a line for the user on records whose answers begin with their prompt; () if none do.

    Args:
        places: the places of these records.
    """
    if not places:
        return ()
    found = f"answers begin with their prompt in records: {len(places):,}, the first {places[0]}"
    return (f"{found}; the prompt is then trained on a second time: leave it out of the answers",)


def _are_chats(record: JsonRecord, keys: Sequence[str]) -> bool:
    """Return whether the answers under these keys are lists of messages; otherwise they are texts.

    Raises:
        Unusable: they are neither, or the record lacks a key, or they are equal.
    """
    for key in keys:
        if key not in record:
            hint = ""
            if key == CHOSEN and LABEL in record:
                hint = "; such a record is for prefer.loss = kto"
            elif key == COMPLETION and REJECTED in record:
                hint = "; such a record is for prefer.loss = dpo"
            raise Unusable(
                "no pair", f"has no key {quote(key)}; its keys are {list_names(list(record))}{hint}"
            )
        if not isinstance(record[key], str | list):
            raise Unusable(
                "no pair",
                f"{quote(key)} is {JSON_TYPES[type(record[key])]}, not a text or a list of messages",
            )
    first, last = record[keys[0]], record[keys[-1]]
    both = " and ".join(map(quote, keys))
    if type(first) is not type(last):
        raise Unusable("no pair", f"{both} are not both texts or both lists of messages")
    if len(keys) > 1 and first == last:
        raise Unusable("equal answers", f"{both} are equal: nothing is preferred")
    return isinstance(first, list)


def _prompt_length(row: MaskedRow) -> int:
    """Return the number of tokens before the first token of the answer."""
    first_begin, _ = row.spans[0]
    return first_begin


class _Answer(NamedTuple):
    """An answer of a record.

    Attributes:
        prompt: the prompt's text, or the JSON of its messages.
        row: the tokens of prompt and answer.
        bytes: UTF-8 bytes of the answer.
    """

    prompt: str
    row: MaskedRow
    bytes: int


# A function that reads the answer under a key of a record.
_ReadAnswer = Callable[[JsonRecord, str], _Answer]


def _answer_of_text(tokenizer: Tokenizer, record: JsonRecord, key: str) -> _Answer:
    """Return the answer under a key of a record whose answers are texts."""
    prompt_value = record.get(PROMPT, "")
    if isinstance(prompt_value, list):
        message = f"{quote(PROMPT)} is a list of messages, but the answers are texts: give lists of messages"
        raise Unusable("no pair", message)
    chat_key = first_chat_only_key(record)
    if chat_key is not None:
        raise InputRefused(
            f"{quote(chat_key)} is for chats, and the answers are texts: remove it, or {IGNORE_KEY}"
        )
    prompt = checked_text(prompt_value, PROMPT)
    answer = checked_text(record[key], key)
    if not answer:
        raise Unusable("empty answer", f"{quote(key)} is empty")
    return _Answer(prompt, completed_row(tokenizer, prompt, answer), len(answer.encode()))


def _answer_of_chat(
    chat_row: Callable[[Conversation], MaskedRow], record: JsonRecord, key: str
) -> _Answer:
    """Return the answer under a key of a record whose answers are lists of messages.

    Args:
        chat_row: returns the row of a chat's last answer.
        record: the record.
        key: the key.
    """
    prompt = record.get(PROMPT)
    # If the prompt is a text or missing, the answers are whole chats.
    messages_before = prompt if isinstance(prompt, list) else []
    chat_keys = {name: value for name, value in record.items() if name in CHAT_KEYS}
    conversation = read_conversation({MESSAGES: [*messages_before, *record[key]], **chat_keys})
    if isinstance(prompt, str):
        require_copy(prompt, conversation.messages)
    *prompt_messages, last = conversation.messages
    if last["role"] != "assistant":
        raise Unusable(
            "no answer", f"{quote(key)} ends with a message of {last['role']}, not of an assistant"
        )
    if not is_trained_on(last):
        raise Unusable(
            "no answer",
            f"{quote(key)} ends with a message of the weight 0: nothing of it would be learned",
        )
    return _Answer(
        prompt=json.dumps(prompt_messages, ensure_ascii=False),
        row=chat_row(conversation),
        bytes=len(last.get("content", "").encode()),
    )


def _pair(record: JsonRecord, read_answer: _ReadAnswer, is_chat: bool) -> Pair:
    """Return the pair of a record.

    Raises:
        Unusable: the answers have different prompts, or their tokens are equal.
    """
    chosen = read_answer(record, CHOSEN)
    rejected = read_answer(record, REJECTED)
    chosen_prompt_ids = chosen.row.ids[: _prompt_length(chosen.row)]
    rejected_prompt_ids = rejected.row.ids[: _prompt_length(rejected.row)]
    if chosen.prompt != rejected.prompt or chosen_prompt_ids != rejected_prompt_ids:
        raise Unusable(
            "differing prompts",
            f"{quote(CHOSEN)} and {quote(REJECTED)} differ before their last message",
        )
    if chosen.row.ids == rejected.row.ids:
        maker = "chat template" if is_chat else "tokenizer"
        both = f"{quote(CHOSEN)} and {quote(REJECTED)}"
        raise Unusable(
            "equal answers",
            f"the {maker} makes both answers, {both}, the same text: nothing is preferred",
        )
    size_bytes = chosen.bytes + rejected.bytes
    return Pair(chosen.prompt, chosen.row, rejected.row, size_bytes, is_chat)


def _labelled_pair(record: JsonRecord, read_answer: _ReadAnswer, is_chat: bool) -> Pair:
    """Return an answer with its label, as a pair that `_with_others` will complete."""
    label = record.get(LABEL)
    if not isinstance(label, bool | int | float | str) or label not in _LABELS:
        if LABEL not in record:
            problem = f"is missing; its keys are {list_names(list(record))}"
        elif isinstance(label, str):
            problem = f"is {quote(label)}"
        elif isinstance(label, int | float):
            problem = f"is {label:g}"
        else:
            problem = f"is {JSON_TYPES[type(label)]}"
        raise Unusable("no label", f"expected true or false under {quote(LABEL)}, which {problem}")
    answer = read_answer(record, COMPLETION)
    # Until the other answer is known, the prompt and one token stand for it, which is the least room
    # that it can take in a row.
    prompt_and_token = MaskedRow(answer.row.ids[: _prompt_length(answer.row) + 1], ())
    return Pair(answer.prompt, answer.row, prompt_and_token, answer.bytes, is_chat, _LABELS[label])


def _with_others(
    pairs: Sequence[Pair],
    *,
    others: Sequence[Pair],
    length: int,
    skipped: dict[str, int],
    refuse: bool,
) -> list[Pair]:
    """Return labelled answers, each paired with one of `others` to another prompt.

    The other answer must fit into a row together with the labelled one. Consecutive answers to the
    same prompt get different other answers, if there are enough.

    Args:
        pairs: the labelled answers.
        others: the labelled answers to choose from.
        length: T.
        skipped: counts the labelled answers that no other answer fits.
        refuse: whether such an answer is an error, instead of being left out and counted.

    Raises:
        InputRefused: `refuse` is set, and no other answer fits.
    """
    paired = []
    prompt_lengths = [_prompt_length(other.chosen) for other in others]
    answer_lengths = [
        len(other.chosen.ids) - prompt_length
        for other, prompt_length in zip(others, prompt_lengths, strict=True)
    ]
    next_prompts = _next_prompts(others)
    # The number of pairs directly before this one that have the same prompt.
    repeats = 0
    for number, pair in enumerate(pairs):
        is_repeat = number > 0 and pairs[number - 1].text == pair.text
        repeats = repeats + 1 if is_repeat else 0
        prompt_length = _prompt_length(pair.chosen)
        # The number of tokens that the other answer may have. All tokens of the pair, with the prompt
        # twice, are at most T + 1.
        room = length + 1 - len(pair.chosen.ids) - prompt_length
        # All others are tried in order. The search begins at the next record with another prompt,
        # and one record later for each repeat.
        first = next_prompts[number % len(others)] + repeats
        index = None
        for offset in range(len(others)):
            candidate = (first + offset) % len(others)
            if answer_lengths[candidate] <= room and others[candidate].text != pair.text:
                index = candidate
                break
        if index is None and refuse:
            raise InputRefused(
                "prefer.loss = kto compares an answer with those to other prompts, and none has room beside that to "
                f"{pair.text!r:.60}: give records of more prompts, raise data.sequence_length = {length}, or set "
                "data.bad_records = skip"
            )
        if index is None:
            reason = "no other answer has room"
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        # The other answer is put after this pair's prompt, and its spans move with it.
        other = others[index].chosen
        ids = pair.chosen.ids[:prompt_length] + other.ids[prompt_lengths[index] :]
        shift = prompt_length - prompt_lengths[index]
        spans = tuple((begin + shift, end + shift) for begin, end in other.spans)
        paired.append(pair._replace(rejected=MaskedRow(ids, spans)))
    return paired


def _next_prompts(pairs: Sequence[Pair]) -> list[int]:
    """Return for each pair the index of the next pair with another prompt, or 0 if there is none."""
    next_prompts = [0] * len(pairs)
    for index in range(len(pairs) - 2, -1, -1):
        has_other_prompt = pairs[index + 1].text != pairs[index].text
        next_prompts[index] = index + 1 if has_other_prompt else next_prompts[index + 1]
    return next_prompts
