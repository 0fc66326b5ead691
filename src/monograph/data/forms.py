"""Declare the forms of training records: the keys that each form needs and may have, and what they
do.

A record is a line of a .jsonl file or a row of a table. Its *kind* says what it is trained as
(`RecordKind`). A *form* is one way to write a record of a kind, and is recognised by its keys (`Form`).

No key is dropped silently. A key of a record is one of these:

- *obeyed*, because it belongs to the record's form;
- *ignored*: it changes nothing, and is counted, so that the user is told. This happens to metadata
  (`METADATA`), to a key in data.ignore_keys, to a key whose value is empty, and, if a setting chose
  the kind, to the needed keys of other forms that the record matches;
- *unknown*: any other key causes an error that names it.

docs/make_records.py writes the tables of the pages from these declarations.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from monograph.data.records import EMPTY_VALUES, Unusable, quote
from monograph.errors import InputRefused

TEXT = "text"
MESSAGES = "messages"
CONVERSATIONS = "conversations"
PROMPT = "prompt"
COMPLETION = "completion"
CHOSEN = "chosen"
REJECTED = "rejected"
LABEL = "label"
SYSTEM = "system"
TOOLS = "tools"
DOCUMENTS = "documents"
TEMPLATE_VARIABLES = "chat_template_kwargs"
FUNCTIONS = "functions"
# A key of records of `RecordKind.PROMPTS`. If the reward comes from a teacher model, the teacher reads
# this text instead of the prompt.
TEACHER_PROMPT = "teacher_prompt"
# If the setting data.text_key is one of these, records are conversations, and it says in which
# form. Otherwise it names the key of a plain text.
CONVERSATION_TEXT_KEYS = (MESSAGES, CONVERSATIONS, PROMPT)


class RecordKind(Enum):
    """What a record is trained as. Each value is the noun phrase that error messages use."""

    TEXTS = "texts"
    CONVERSATIONS = "conversations"
    PAIRS = "pairs of answers"
    LABELLED = "labelled answers"
    PROMPTS = "prompts to reward"


@dataclass(frozen=True, eq=False)
class Form:
    """A way to write a record of one kind.

    Attributes:
        kind: what the record is trained as.
        needs: {key: description of its value} of the keys by which the form is recognised.
        optional: {key: what it does} of further keys that are obeyed.
        setting: the setting that chooses this form for records that could also have another form.
    """

    kind: RecordKind
    needs: Mapping[str, str]
    optional: Mapping[str, str]
    setting: str

    def knows(self, key: str) -> bool:
        """Return whether a key of a record of this form is obeyed."""
        return key in self.needs or key in self.optional


# The keys that every chat may have in addition to its messages.
CHAT_KEYS = {
    SYSTEM: "a text: the system message before all others, which must not have one",
    TOOLS: "an array, or a text with its JSON: given to the chat template",
    DOCUMENTS: "an array, or a text with its JSON: given to the chat template",
    TEMPLATE_VARIABLES: "an object, or a text with its JSON: further variables of the chat template, "
    "such as `enable_thinking`",
}
# Datasets such as ultrachat_200k repeat a user's message under "prompt". A prompt that differs from
# the messages is refused (`conversations.require_copy`), because its text would not be trained on.
_PROMPT_COPY = {
    PROMPT: "a copy of a user's message, or of the first messages; not trained on, and refused if it differs"
}
_PROMPT_OF_ANSWERS = {
    PROMPT: "the text, or the list of messages, before the answer; if the answers are whole chats: "
    "a copy of one of the user's messages"
}
MESSAGES_FORM = Form(
    RecordKind.CONVERSATIONS,
    {MESSAGES: 'a list of `{"role", "content"}`: the messages of the assistant are trained on'},
    CHAT_KEYS | _PROMPT_COPY,
    "data.text_key=messages",
)
SHAREGPT_FORM = Form(
    RecordKind.CONVERSATIONS,
    {CONVERSATIONS: 'a list of `{"role", "content"}` or of `{"from", "value"}`'},
    CHAT_KEYS | _PROMPT_COPY,
    "data.text_key=conversations",
)
COMPLETED_FORM = Form(
    RecordKind.CONVERSATIONS,
    {
        PROMPT: "a text or a list of messages",
        COMPLETION: "a text or a list of messages, which is trained on",
    },
    CHAT_KEYS,
    "data.text_key=prompt",
)
PAIR_FORM = Form(
    RecordKind.PAIRS,
    {
        CHOSEN: "the better answer: a text, a list of messages, or a whole chat",
        REJECTED: "the worse answer, in the same form",
    },
    _PROMPT_OF_ANSWERS | CHAT_KEYS,
    "prefer.loss=dpo",
)
LABELLED_FORM = Form(
    RecordKind.LABELLED,
    {
        COMPLETION: "the answer: a text, a list of messages, or a whole chat",
        LABEL: 'true, 1 or "true" of a good answer, false, 0 or "false" of a bad one',
    },
    _PROMPT_OF_ANSWERS | CHAT_KEYS,
    "prefer.loss=kto",
)
PROMPT_FORM = Form(
    RecordKind.PROMPTS,
    {PROMPT: "a text, or a list of messages; `data.text_key` names another key"},
    CHAT_KEYS
    | {
        TEACHER_PROMPT: "what a teacher reads instead of the prompt; a reward of another kind finds it in the record"
    },
    "rl.reward",
)
# All forms except PROMPT_FORM, which is never recognised by its keys: only rl.reward asks for it.
FORMS = (MESSAGES_FORM, SHAREGPT_FORM, COMPLETED_FORM, PAIR_FORM, LABELLED_FORM)

# Keys with which datasets describe a record. They change nothing in what is trained.
METADATA = frozenset(
    "id idx index _id __index_level_0__ uuid uid guid hash sha256 row_id sample_id example_id prompt_id question_id "
    "message_id conversation_id conversation_hash session_id parent_id user_id author annotator annotator_id "
    "source sources src dataset dataset_name data_source origin subset config split partition version "
    "category categories topic topics subject domain task task_id task_name task_type type tag tags difficulty "
    "meta metadata extra extra_info info license url urls link title lang language locale country "
    "date time timestamp created created_at updated_at model model_name generator generation_model "
    "chosen_model rejected_model score scores rating ratings quality chosen_score rejected_score score_chosen "
    "score_rejected chosen_rating rejected_rating score_diff length num_tokens n_tokens token_count num_turns n_turns "
    "turn turns redacted toxic moderation openai_moderation comment comments note notes".split()
)
# Keys that other programs obey and Monograph refuses, with what to do instead.
REMEDIES = {
    FUNCTIONS: f"write them under {TOOLS!r}, each as {{'type': 'function', 'function': ...}}",
    "system_prompt": f"call it {SYSTEM!r}",
    "system_message": f"call it {SYSTEM!r}",
    "template_kwargs": f"call it {TEMPLATE_VARIABLES!r}",
}


class RecordSettings(NamedTuple):
    """What the settings say about the keys of records.

    Attributes:
        text_key: data.text_key; None if it was not given.
        ignored_keys: data.ignore_keys, the keys of records that are to be ignored.
    """

    text_key: str | None = None
    ignored_keys: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text_key: str | None, ignore_keys: str | Sequence[str] | None) -> "RecordSettings":
        """Return the settings from the values of data.text_key and data.ignore_keys."""
        keys = [ignore_keys] if isinstance(ignore_keys, str) else ignore_keys or ()
        return cls(text_key, frozenset(keys))

    @property
    def ignored_training_keys(self) -> list[str]:
        """Return the ignored keys that would otherwise say what is trained, sorted.

        If one of these keys is ignored, other tokens are trained. With any other key this is not so. So
        only these keys are part of the hash under which tokens are stored (`monograph.data.store`).
        """
        return sorted(key for key in self.ignored_keys if _is_training_key(key))

    def drop_ignored(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a record without its nulls and without the keys of data.ignore_keys."""
        return {
            key: value
            for key, value in record.items()
            if value is not None and key not in self.ignored_keys
        }


DEFAULT_SETTINGS = RecordSettings()
# The end of error messages about a key.
IGNORE_KEY = "name it in data.ignore_keys to train without it"


def forms_of(keys: Iterable[str], record_settings: RecordSettings) -> list[Form]:
    """Return the forms that a record with these keys may have.

    These are all forms whose needed keys are there, and the form of texts if there is a text. If the
    user's data.text_key selects one of these forms, only that one is returned.
    """
    return _forms_of(frozenset(keys), record_settings)


@lru_cache(maxsize=256)  # Most records of a file have the same keys.
def _forms_of(keys: frozenset[str], record_settings: RecordSettings) -> list[Form]:
    text_key = record_settings.text_key or TEXT
    forms = [form for form in FORMS if all(key in keys for key in form.needs)]
    if LABELLED_FORM in forms:
        # A labelled record may also have the keys of a prompt with its completion. The labelled
        # form is meant, because the other one would drop the label.
        forms = [form for form in forms if form is not COMPLETED_FORM]
    setting = f"data.text_key={text_key}"
    if forms and text_key in CONVERSATION_TEXT_KEYS:
        selected = [form for form in forms if form.setting == setting]
        return selected or forms
    # A record without any form may still have a text under data.text_key, even if that is a key of
    # conversations: a record with nothing but a "prompt", for example.
    if text_key not in keys:
        return forms
    text_form = Form(RecordKind.TEXTS, {text_key: "the text"}, {}, setting)
    # A key that the user gave selects the text. The default key does not, because a record with
    # "text" and "messages", for example, could be meant as either.
    return [text_form] if record_settings.text_key is not None else [text_form, *forms]


def needed_keys(form: Form) -> str:
    """Return the keys by which a form is recognised, as a phrase for an error message."""
    return " and ".join(quote(key) for key in form.needs)


class RecordKeys:
    """A filter of the keys of records: each key is obeyed, or ignored and counted, or refused.

    All records are of one kind.

    Attributes:
        record_settings: what the settings say about the keys.
        counts: {key: number of records in which it was ignored}.
    """

    def __init__(
        self, kind: RecordKind, record_settings: RecordSettings, is_kind_set: bool
    ) -> None:
        """Begin with no counts.

        Args:
            kind: what the records are: conversations, pairs or labelled answers.
            record_settings: what the settings say about the keys.
            is_kind_set: whether a setting asks for this kind. If so, the keys of other kinds are
                ignored and counted; otherwise they are refused.
        """
        self.record_settings = record_settings
        self.counts: Counter[str] = Counter()
        self._forms = [form for form in FORMS if form.kind is kind]
        self._is_kind_set = is_kind_set

    def is_read(self, key: str) -> bool:
        """Return whether a table's column with this name must be read: it may say what is trained."""
        return key not in self.record_settings.ignored_keys and _is_training_key(key)

    def is_ignored(self, key: str) -> bool:
        """Return whether a key is ignored in records of every form."""
        return key in self.record_settings.ignored_keys or key in METADATA

    def unknown_column_error(self, column: str, columns: Sequence[str]) -> InputRefused:
        """Return the error for an unknown column of a table.

        Args:
            column: the unknown column.
            columns: all columns of the table.
        """
        matching = [form for form in self._forms if all(key in columns for key in form.needs)]
        form = matching[0] if matching else self._forms[0]
        return _unknown_key_error(column, form)

    def read(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Count the ignored keys of a record, and return the record with the obeyed keys alone.

        Keys with the value null are left out. If a needed key is missing, the record is returned
        with all of its keys, and nothing is counted.

        Raises:
            Unusable: the record is not of this kind, or it could have two forms.
            InputRefused: a key is unknown, and none of the exceptions in the module's docstring
                applies.
        """
        kept = self.record_settings.drop_ignored(record)
        form = self._form_of(kept)
        if any(key not in kept for key in form.needs):
            # The code that reads this form's values has a better message about the missing key.
            return kept
        other_forms_keys = self._keys_of_other_forms(kept)
        obeyed = {}
        for key, value in kept.items():
            if form.knows(key):
                obeyed[key] = value
                continue
            is_ignored = key in METADATA or key in other_forms_keys or value in EMPTY_VALUES
            if not is_ignored:
                raise _unknown_key_error(key, form)
        # The keys are counted in `record`, because `kept` lacks those of data.ignore_keys. If all keys
        # are obeyed, both have the same length, and the time to count is saved.
        if len(obeyed) < len(record):
            self.counts.update(
                key for key, value in record.items() if value is not None and key not in obeyed
            )
        return obeyed

    def notes(self) -> tuple[str, ...]:
        """Return one line for the user about the ignored keys; () if there were none."""
        if not self.counts:
            return ()
        counts = ", ".join(f"{quote(key)} in {count:,}" for key, count in self.counts.most_common())
        return (f"ignored keys, which change nothing, by the number of their records: {counts}",)

    def _form_of(self, record: Mapping[str, Any]) -> Form:
        """Return the form of a record.

        If the kind has only one form, it is that form, even if needed keys are missing.

        Raises:
            Unusable: the kind has several forms, and the record has none of them, or several.
        """
        if len(self._forms) == 1:
            return self._forms[0]
        forms = forms_of(record, self.record_settings)
        of_this_kind = [form for form in forms if form in self._forms]
        if len(of_this_kind) > 1:
            raise Unusable(
                "two forms", f"could be read in two ways: {describe_choices(of_this_kind)}"
            )
        if forms and not of_this_kind:
            raise Unusable(
                "another kind",
                f"is one of {forms[0].kind.value} by {needed_keys(forms[0])}, but the earlier records are "
                f"{self._forms[0].kind.value}",
            )
        if not of_this_kind:
            needs = f"{MESSAGES}, {CONVERSATIONS}, {PROMPT} and {COMPLETION}"
            raise Unusable("no conversation", f"has none of the keys {needs}")
        return of_this_kind[0]

    def _keys_of_other_forms(self, record: Mapping[str, Any]) -> set[str]:
        """Return the needed keys of all forms that the record matches, if a setting chose the kind.

        These keys are ignored. If no setting chose the kind, none is ignored, and the set is empty.
        """
        if not self._is_kind_set:
            return set()
        # The default settings are given, because the user's settings may select a single form, and all
        # forms that the record matches are needed here.
        forms = forms_of(record, DEFAULT_SETTINGS)
        return {key for form in forms for key in form.needs}


def _is_training_key(key: str) -> bool:
    """Return whether a key says what is trained in some form of record."""
    return key == TEXT or any(form.knows(key) for form in (*FORMS, PROMPT_FORM))


def describe_choices(forms: Sequence[Form]) -> str:
    """Return the end of an error message about a record that could have any of these forms.

    It says what the record could be read as, and how to choose.
    """
    readings = " or ".join(f"as one of {form.kind.value} by {needed_keys(form)}" for form in forms)
    choices = " or ".join(form.setting for form in forms)
    return f"{readings}; choose by {choices}, or name the keys to leave out in data.ignore_keys"


def _unknown_key_error(key: str, form: Form) -> InputRefused:
    remedy = REMEDIES.get(key, "remove it")
    return InputRefused(
        f"unknown key {quote(key)} beside {needed_keys(form)}; {remedy}, or {IGNORE_KEY}"
    )
