"""Declare the forms of training records: the keys that each form needs and may have, and what they
do.

A record is a line of a .jsonl file or a row of a table. Its *kind* says what it is trained as
(`RecordKind`). A *form* is one way to write a record of a kind, and is recognised by its keys (`RecordForm`).

No key is dropped silently. A key of a record is one of these:

- *obeyed*, because it belongs to the record's form.
- *ignored*. It changes nothing, and is counted, so that the user is told. Ignored are metadata
  (`METADATA`), the keys in data.ignore_keys, and keys whose value is empty. If the user has chosen the
  kind by a setting, the keys by which the record also has another form are ignored, too. For example,
  if prefer.loss=dpo chose pairs of answers, a record with "chosen" and "rejected" may also have
  "messages", which is then ignored.
- *unknown*, which is any other key. It causes an error that names it.

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
# The needed keys that distinguish the forms of conversations. If the setting data.text_key has one of
# these values, it chooses the form of conversations with that key (`forms_of` has the exact rule).
CONVERSATION_TEXT_KEYS = (MESSAGES, CONVERSATIONS, PROMPT)


class RecordKind(Enum):
    """What a record is trained as. Each value is the noun phrase that error messages use."""

    TEXTS = "texts"
    CONVERSATIONS = "conversations"
    PAIRS = "pairs of answers"
    LABELLED = "labelled answers"
    PROMPTS = "prompts to reward"


@dataclass(frozen=True, eq=False)
class RecordForm:
    """A way to write a record of one kind.

    Attributes:
        kind: what the record is trained as.
        needs: {key: description of its value} of the keys by which the form is recognised.
        optional: {key: what it does} of further keys that are obeyed.
        setting: the setting that chooses this form for records that could also have another form,
            as KEY=VALUE, such as "data.text_key=messages". For PROMPT_FORM it is the key alone.
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
    SYSTEM: "a text: the system message; the messages must then not begin with one",
    TOOLS: "an array, or a text with its JSON: given to the chat template",
    DOCUMENTS: "an array, or a text with its JSON: given to the chat template",
    TEMPLATE_VARIABLES: "an object, or a text with its JSON: further variables of the chat template, "
    "such as `enable_thinking`",
}
# "prompt" in a record whose messages are a whole chat. Datasets such as ultrachat_200k repeat a user's
# message there. A prompt that differs from the messages is refused (`conversations.require_copy`),
# because its text would not be trained on.
_PROMPT_BESIDE_CHAT = {
    PROMPT: "a copy of a user's message, or of the first messages; not trained on, and refused if it differs"
}
# "prompt" in a record of answers. An answer may be a whole chat, and the prompt is a copy in that case.
_PROMPT_BEFORE_ANSWERS = {
    PROMPT: "the text, or the list of messages, before the answer. If an answer is a whole chat, it "
    "contains the prompt: then a copy of one of the user's messages"
}
MESSAGES_FORM = RecordForm(
    RecordKind.CONVERSATIONS,
    {MESSAGES: 'a list of `{"role", "content"}`: the messages of the assistant are trained on'},
    CHAT_KEYS | _PROMPT_BESIDE_CHAT,
    "data.text_key=messages",
)
SHAREGPT_FORM = RecordForm(
    RecordKind.CONVERSATIONS,
    {CONVERSATIONS: 'a list of `{"role", "content"}` or of `{"from", "value"}`'},
    CHAT_KEYS | _PROMPT_BESIDE_CHAT,
    "data.text_key=conversations",
)
COMPLETED_FORM = RecordForm(
    RecordKind.CONVERSATIONS,
    {
        PROMPT: "a text or a list of messages",
        COMPLETION: "a text or a list of messages, which is trained on",
    },
    CHAT_KEYS,
    "data.text_key=prompt",
)
PAIR_FORM = RecordForm(
    RecordKind.PAIRS,
    {
        CHOSEN: "the better answer: a text, a list of messages, or a whole chat",
        REJECTED: "the worse answer, in the same form",
    },
    _PROMPT_BEFORE_ANSWERS | CHAT_KEYS,
    "prefer.loss=dpo",
)
LABELLED_FORM = RecordForm(
    RecordKind.LABELLED,
    {
        COMPLETION: "the answer: a text, a list of messages, or a whole chat",
        LABEL: 'true, 1 or "true" of a good answer, false, 0 or "false" of a bad one',
    },
    _PROMPT_BEFORE_ANSWERS | CHAT_KEYS,
    "prefer.loss=kto",
)
PROMPT_FORM = RecordForm(
    RecordKind.PROMPTS,
    {PROMPT: "a text, or a list of messages; `data.text_key` may name another key for it"},
    CHAT_KEYS
    | {
        TEACHER_PROMPT: "what a teacher model reads instead of the prompt; rewards without a teacher get it "
        "as part of the record"
    },
    "rl.reward",
)
# All forms except PROMPT_FORM, which is never recognised by its keys: all records have that form if
# rl.reward is set, and none has it otherwise.
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
        """Return the keys of data.ignore_keys that are obeyed in some form of record, sorted.

        Ignoring one of these keys may change which tokens are trained. Ignoring any other key does not. So
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


def forms_of(keys: Iterable[str], record_settings: RecordSettings) -> list[RecordForm]:
    """Return the forms that a record with these keys may have.

    Without data.text_key, these are all forms whose needed keys the record has, and the form of texts
    if the record has the key "text". The user may choose by data.text_key:

    - "messages", "conversations" or "prompt" (`CONVERSATION_TEXT_KEYS`) chooses the form of
      conversations with that key. A record that has only other forms keeps all of them. A record that
      has no form, but has that key, is a plain text.
    - Any other key that the record has chooses the plain text under that key.
    """
    return _forms_of(frozenset(keys), record_settings)


@lru_cache(maxsize=256)  # Most records of a file have the same keys.
def _forms_of(keys: frozenset[str], record_settings: RecordSettings) -> list[RecordForm]:
    """Return what `forms_of` returns."""
    text_key = record_settings.text_key or TEXT
    forms = [form for form in FORMS if all(key in keys for key in form.needs)]
    if LABELLED_FORM in forms:
        # A labelled record may also have the keys of a prompt with its completion. The labelled
        # form is meant, because the other one would drop the label.
        forms = [form for form in forms if form is not COMPLETED_FORM]
    setting = f"data.text_key={text_key}"
    if forms and text_key in CONVERSATION_TEXT_KEYS:
        # At most one form has this setting: MESSAGES_FORM, SHAREGPT_FORM or COMPLETED_FORM.
        selected = [form for form in forms if form.setting == setting]
        if selected:
            return selected
        # The record does not have the form that the user asked for. The caller decides what follows.
        return forms
    # `text_key` may be a key of conversations here, if the record has no form. For example, a record that
    # has only a "prompt" is a text if data.text_key=prompt.
    if text_key not in keys:
        return forms
    text_form = RecordForm(RecordKind.TEXTS, {text_key: "the text"}, {}, setting)
    if record_settings.text_key is not None:
        return [text_form]
    # The default key "text" does not choose the text, because a record with "text" and "messages",
    # for example, could be meant as either.
    return [text_form, *forms]


def needed_keys(form: RecordForm) -> str:
    """Return the keys by which a form is recognised, as a phrase for an error message."""
    return " and ".join(quote(key) for key in form.needs)


class RecordKeys:
    """A filter of the keys of records: each key is obeyed, or ignored and counted, or refused.

    All records are of one kind: conversations, pairs or labelled answers.

    Attributes:
        record_settings: what the settings say about the keys.
        counts: {key: number of records in which it was ignored}.
    """

    def __init__(
        self, kind: RecordKind, record_settings: RecordSettings, is_kind_set: bool
    ) -> None:
        """Begin with no counts.

        Args:
            kind: what the records are.
            record_settings: what the settings say about the keys.
            is_kind_set: whether the user chose this kind by a setting. If so, the keys by which a
                record also has another form are ignored and counted. Otherwise they are refused.
        """
        self.record_settings = record_settings
        self.counts: Counter[str] = Counter()
        self._forms = [form for form in FORMS if form.kind is kind]
        self._is_kind_set = is_kind_set

    def is_read(self, key: str) -> bool:
        """Return whether a table's column with this name must be read, because some form obeys this key."""
        return key not in self.record_settings.ignored_keys and _is_training_key(key)

    def is_ignored(self, key: str) -> bool:
        """Return whether a key is ignored in records of every form, whatever its value."""
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

        Keys with the value null are left out, and not counted. If a needed key is missing, the record
        is returned with all keys but those of data.ignore_keys, and nothing is counted.

        Raises:
            Unusable: the record is not of this kind, or it could have two forms. The caller may skip
                the record, since the others may be good.
            InputRefused: a key is unknown. This ends the reading, since probably all records have the
                key.
        """
        kept = self.record_settings.drop_ignored(record)
        form = self._form_of(kept)
        if any(key not in kept for key in form.needs):
            # The code that reads this form's values has a better message about the missing key.
            return kept
        ignorable_form_keys = self._ignorable_form_keys(kept)
        obeyed = {}
        for key, value in kept.items():
            if form.knows(key):
                obeyed[key] = value
                continue
            is_ignored = key in METADATA or key in ignorable_form_keys or value in EMPTY_VALUES
            if not is_ignored:
                raise _unknown_key_error(key, form)
        # Most records have only obeyed keys. Then there is nothing to count, and this loop is saved.
        if len(obeyed) < len(record):
            # The loop is over `record`, because `kept` lacks the keys of data.ignore_keys, which are counted, too.
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

    def _form_of(self, record: Mapping[str, Any]) -> RecordForm:
        """Return the form of a record.

        If the kind has only one form, it is that form, even if needed keys are missing.

        Raises:
            Unusable: the kind has several forms, and the record has none of them, or several.
        """
        if len(self._forms) == 1:
            return self._forms[0]
        # From here on the kind is conversations, the only kind in FORMS that has several forms.
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

    def _ignorable_form_keys(self, record: Mapping[str, Any]) -> set[str]:
        """Return the needed keys of each form that a record has.

        The record's own form obeys some of these keys, and the caller may ignore the others. If no setting
        chose the kind, it must not ignore them, and the set is empty.
        """
        if not self._is_kind_set:
            return set()
        # With the user's settings, `forms_of` may leave only the form that they choose.
        forms = forms_of(record, DEFAULT_SETTINGS)
        return {key for form in forms for key in form.needs}


def _is_training_key(key: str) -> bool:
    """Return whether a key is obeyed in some form of record, so that it says what is trained."""
    return key == TEXT or any(form.knows(key) for form in (*FORMS, PROMPT_FORM))


def describe_choices(forms: Sequence[RecordForm]) -> str:
    """Return the end of an error message about a record that could have any of these forms.

    It says what the record could be read as, and how to choose.
    """
    readings = " or ".join(f"as one of {form.kind.value} by {needed_keys(form)}" for form in forms)
    choices = " or ".join(form.setting for form in forms)
    return f"{readings}; choose by {choices}, or name the keys to leave out in data.ignore_keys"


def _unknown_key_error(key: str, form: RecordForm) -> InputRefused:
    """Return the error for a key that records of a form do not know."""
    remedy = REMEDIES.get(key, "remove it")
    return InputRefused(
        f"unknown key {quote(key)} beside {needed_keys(form)}; {remedy}, or {IGNORE_KEY}"
    )
