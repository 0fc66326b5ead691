"""Declare the forms of training records: the keys that a record of each form needs and may have,
and what they do.

Keys are never dropped in silence. A key is obeyed, or it is metadata, which changes nothing and is
counted, or it is refused by its name. docs/make_records.py writes the tables of the pages from
these declarations.
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
SHARED = "conversations"
PROMPT = "prompt"
COMPLETION = "completion"
CHOSEN = "chosen"
REJECTED = "rejected"
LABEL = "label"
SYSTEM = "system"
TOOLS = "tools"
DOCUMENTS = "documents"
VARIABLES = "chat_template_kwargs"
FUNCTIONS = "functions"
# Of a prompt to reward: what a teacher reads in place of the prompt.
TEACHER_PROMPT = "teacher_prompt"
# If data.text_key is one of these, it asks for conversations under this key.
CONVERSATION_TEXT_KEYS = (MESSAGES, SHARED, PROMPT)


class Kind(Enum):
    """What a record is trained as; the value names several of them in a message."""

    TEXTS = "texts"
    CONVERSATIONS = "conversations"
    PAIRS = "pairs of answers"
    LABELLED = "labelled answers"
    PROMPTS = "prompts to reward"


@dataclass(frozen=True, eq=False)
class Form:
    """A way to write a record of one kind.

    Attributes:
        kind: what the record is.
        needs: the keys by which the form is recognised, each with what stands under it.
        may: further keys that are obeyed, each with what it does.
        setting: the setting that asks for this form where a record could have another form, too.
    """

    kind: Kind
    needs: Mapping[str, str]
    may: Mapping[str, str]
    setting: str

    def knows(self, key: str) -> bool:
        """Return whether a record of this form may have a key."""
        return key in self.needs or key in self.may


# What every chat may have beside its messages.
CHAT_KEYS = {
    SYSTEM: "a text: the system message before all others, which must not have one",
    TOOLS: "an array, or a text with its JSON: given to the chat template",
    DOCUMENTS: "an array, or a text with its JSON: given to the chat template",
    VARIABLES: "an object, or a text with its JSON: further variables of the chat template, such as `enable_thinking`",
}
_COPY = {
    PROMPT: "a copy of a user's message, or of the first messages: compared with them, and not trained on"
}
_BEFORE_ANSWERS = {
    PROMPT: "the text, or the list of messages, before the answer; beside whole chats a copy of a user's"
}
MESSAGES_FORM = Form(
    Kind.CONVERSATIONS,
    {MESSAGES: 'a list of `{"role", "content"}`: the messages of the assistant are trained on'},
    CHAT_KEYS | _COPY,
    "data.text_key=messages",
)
SHARED_FORM = Form(
    Kind.CONVERSATIONS,
    {SHARED: 'the same, or a list of `{"from", "value"}`'},
    CHAT_KEYS | _COPY,
    "data.text_key=conversations",
)
COMPLETED_FORM = Form(
    Kind.CONVERSATIONS,
    {
        PROMPT: "a text or a list of messages",
        COMPLETION: "a text or a list of messages, which is trained on",
    },
    CHAT_KEYS,
    "data.text_key=prompt",
)
PAIR_FORM = Form(
    Kind.PAIRS,
    {
        CHOSEN: "the better answer: a text, a list of messages, or a whole chat",
        REJECTED: "the worse answer, in the same form",
    },
    _BEFORE_ANSWERS | CHAT_KEYS,
    "prefer.loss=dpo",
)
LABELLED_FORM = Form(
    Kind.LABELLED,
    {
        COMPLETION: "the answer: a text, a list of messages, or a whole chat",
        LABEL: 'true, 1 or "true" of a good answer, false, 0 or "false" of a bad one',
    },
    _BEFORE_ANSWERS | CHAT_KEYS,
    "prefer.loss=kto",
)
PROMPT_FORM = Form(
    Kind.PROMPTS,
    {PROMPT: "a text, or a list of messages; `data.text_key` names another key"},
    CHAT_KEYS
    | {
        TEACHER_PROMPT: "what a teacher reads in place of the prompt; any other reward just gets it"
    },
    "rl.reward",
)
FORMS = (MESSAGES_FORM, SHARED_FORM, COMPLETED_FORM, PAIR_FORM, LABELLED_FORM)

# What datasets say about a record, which has no bearing on what is trained.
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
# What to do about keys that mean something elsewhere.
REMEDIES = {
    FUNCTIONS: f"write them under {TOOLS!r}, each as {{'type': 'function', 'function': ...}}",
    "system_prompt": f"call it {SYSTEM!r}",
    "system_message": f"call it {SYSTEM!r}",
    "template_kwargs": f"call it {VARIABLES!r}",
}


class RecordSettings(NamedTuple):
    """What the settings say about records.

    Attributes:
        text_key: data.text_key; None if it was not given.
        ignored: data.ignore_keys, the keys that records may have and that are left out.
    """

    text_key: str | None = None
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text_key: str | None, ignored: str | Sequence[str] | None) -> "RecordSettings":
        """Return the same, of the values of both settings."""
        names = [ignored] if isinstance(ignored, str) else ignored or ()
        return cls(text_key, frozenset(names))

    @property
    def ignored_training_keys(self) -> list[str]:
        """Return the ignored keys that would say what is trained; any other one could be named
        later, too.
        """
        return sorted(key for key in self.ignored if _is_known(key))

    def given(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a record that have a value and are not ignored."""
        return {
            key: value
            for key, value in record.items()
            if value is not None and key not in self.ignored
        }


DEFAULT_SETTINGS = RecordSettings()
IGNORE_KEY = "name it in data.ignore_keys to train without it"


def forms_of(keys: Iterable[str], asked: RecordSettings) -> list[Form]:
    """Return the forms that a record with these keys has: those that a setting asks for, or else
    all of them.
    """
    return _forms_of(frozenset(keys), asked)


@lru_cache(maxsize=256)  # most records of a file have the same keys
def _forms_of(keys: frozenset[str], asked: RecordSettings) -> list[Form]:
    text_key = asked.text_key or TEXT
    forms = [form for form in FORMS if all(key in keys for key in form.needs)]
    if LABELLED_FORM in forms:  # the same keys and one more
        forms = [form for form in forms if form is not COMPLETED_FORM]
    if text_key in CONVERSATION_TEXT_KEYS:
        preferred = [form for form in forms if form.setting == f"data.text_key={text_key}"]
        text_there = text_key in keys and not forms
    else:
        preferred = []
        text_there = text_key in keys
    text_form = Form(Kind.TEXTS, {text_key: "the text"}, {}, f"data.text_key={text_key}")
    if text_there:
        forms = [text_form, *forms]
        preferred = [text_form] if asked.text_key is not None else preferred
    return preferred or forms


def needed_keys(form: Form) -> str:
    """Return the keys by which a form is recognised, for a message."""
    return " and ".join(quote(key) for key in form.needs)


class RecordKeys:
    """The keys of the records of one kind, as they are read.

    Attributes:
        asked: what the settings say about the records.
        counts: in how many records each ignored key was.
    """

    def __init__(self, kind: Kind, asked: RecordSettings, is_chosen: bool) -> None:
        """Begin to read.

        Args:
            kind: what the records are: conversations, pairs or labelled answers.
            asked: what the settings say about them.
            is_chosen: whether a setting asks for this kind, so that keys of other kinds are
                ignored, and counted.
        """
        self.asked = asked
        self.counts: Counter[str] = Counter()
        self._forms = [form for form in FORMS if form.kind is kind]
        self._is_chosen = is_chosen

    def is_read(self, key: str) -> bool:
        """Return whether a key may say what is trained."""
        return key not in self.asked.ignored and _is_known(key)

    def is_ignored(self, key: str) -> bool:
        """Return whether a key is ignored wherever it stands."""
        return key in self.asked.ignored or key in METADATA

    def unknown_column(self, column: str, columns: Sequence[str]) -> InputRefused:
        """Return the error for a table with these columns, one of which is unknown and has a value."""
        there = [form for form in self._forms if all(key in columns for key in form.needs)]
        return _unknown(column, [*there, *self._forms][0])

    def read(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a record that say what is trained, without nulls.

        A record that lacks a key which it needs is returned as it is.

        Raises:
            Unusable: the record is no conversation, where it should be, or could be two.
            InputRefused: a key is unknown.
        """
        given = self.asked.given(record)
        form = self._form_of(given)
        if any(key not in given for key in form.needs):  # whoever reads it says which
            return given
        aside = self._aside(given)
        kept = {}
        for key, value in given.items():
            if form.knows(key):
                kept[key] = value
            elif key not in METADATA and key not in aside and value not in EMPTY_VALUES:
                raise _unknown(key, form)
        if len(kept) < len(record):
            self.counts.update(
                key for key, value in record.items() if value is not None and key not in kept
            )
        return kept

    def notes(self) -> tuple[str, ...]:
        """Return a line for the user about the keys that were ignored, or none."""
        if not self.counts:
            return ()
        counts = ", ".join(f"{quote(key)} in {count:,}" for key, count in self.counts.most_common())
        return (f"ignored keys, which change nothing, by the number of their records: {counts}",)

    def _form_of(self, given: Mapping[str, Any]) -> Form:
        if len(self._forms) == 1:
            return self._forms[0]
        found = forms_of(given, self.asked)
        there = [form for form in found if form in self._forms]
        if len(there) > 1:
            raise Unusable("two forms", f"could be read in two ways: {describe_choices(there)}")
        if found and not there:
            other = f"is one of {found[0].kind.value} by {needed_keys(found[0])}"
            raise Unusable(
                "another kind", f"{other}, and those before are {self._forms[0].kind.value}"
            )
        if not there:
            needs = f"{MESSAGES}, {SHARED}, {PROMPT} and {COMPLETION}"
            raise Unusable("no conversation", f"has none of the keys {needs}")
        return there[0]

    def _aside(self, given: Mapping[str, Any]) -> set[str]:
        """Return the keys of the other forms that a record has, where a setting chose between them."""
        if not self._is_chosen:
            return set()
        there = forms_of(given, DEFAULT_SETTINGS)
        return {key for form in there for key in form.needs}


def _is_known(key: str) -> bool:
    return key == TEXT or any(form.knows(key) for form in (*FORMS, PROMPT_FORM))


def describe_choices(forms: Sequence[Form]) -> str:
    """Return what a record of several forms could be, and how to choose, for a message."""
    readings = " or ".join(f"as one of {form.kind.value} by {needed_keys(form)}" for form in forms)
    settings = " or ".join(form.setting for form in forms)
    return f"{readings}; choose by {settings}, or name the keys to leave out in data.ignore_keys"


def _unknown(key: str, form: Form) -> InputRefused:
    remedy = REMEDIES.get(key, "remove it")
    return InputRefused(
        f"unknown key {quote(key)} beside {needed_keys(form)}; {remedy}, or {IGNORE_KEY}"
    )
