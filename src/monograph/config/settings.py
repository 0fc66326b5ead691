"""The settings of one run: checked and frozen values, their origins, and their text as TOML.

A key is written with its section, as in "optim.lr". Its type is declared in `monograph.config.keys`, where the
section has a field of the key's name.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from monograph.config import keys
from monograph.config.keys import (
    DEFAULT_MINUTES,
    KEYS,
    SECTIONS,
    WAYS_TO_LEARN,
    Section,
    key_declaration,
)
from monograph.config.renamed import TextsByKey, new_spelling, new_spellings
from monograph.config.slips import meant_value
from monograph.errors import UsageError
from monograph.model.config import TORCH_FILE_SUFFIXES
from monograph.storage.code import code_named
from monograph.terminal import shell_words

# {key: the other key, with its value, that a value of the key implies}: a value of rl.environment
# implies rl.reward = environment.
IMPLIED_CHOICES = {
    key: choice for way in WAYS_TO_LEARN for key, choice in way.implied_choices.items()
}
# The keys whose values may name a function in a Python file.
CODE_KEYS = ("model.init", *(key for way in WAYS_TO_LEARN for key in way.names_code))
# {key that a resumed run may change: its default}
# (`monograph.config.keys.Key.is_changeable_on_resume`). The fingerprint of settings, by which a
# resumed run sees whether they have changed, is computed with the defaults of these keys, whatever
# their values are. One of them, data.ignore_keys, can change the records. A resumed run notices
# that by the fingerprint of the records, which it compares, too.
CHANGEABLE_ON_RESUME = {
    key: key_declaration(key).default
    for key in KEYS
    if key_declaration(key).is_changeable_on_resume
}
# The keys that a run that begins from another run decides anew.
RUN_SPECIFIC_KEYS = frozenset(key for key in KEYS if key_declaration(key).is_run_specific)
# At most one key of each group counts: the one that was given at the highest rank
# (`SourcedValue.rank`).
EXCLUSIVE = (
    ("train.updates", "train.tokens", "train.epochs", "train.minutes"),
    ("model.preset", "model.init"),
    *(group for way in WAYS_TO_LEARN for group in way.exclusive),
)
# {key: the keys that say something about its value}, such as prefer.gamma about prefer.loss.
DEPENDENT_KEYS = keys.dependent_keys()
WaySection = TypeVar("WaySection", bound=Section)


class Settings(BaseModel):
    """All settings of a run, checked.

    `settings.optim.lr` is the value of a key. Sections that belong to one way to learn, such as [rl], are
    not attributes: `settings.section(RlSection).kl` is the value of rl.kl. None means that the key is not
    set, and "auto" that the program chooses a value.

    Attributes:
        way_sections: {name: section} of the sections that belong to one way to learn, such as [rl].
        origins: {key: origin} of each value that was set, such as "run.toml:7",
            "MONOGRAPH_TRAIN_SEED" or "command line".
        written: {key: the value as a person wrote it}, for messages.
        vouched: {value that names a Python file: digest of the file}. Only these files may be run, as
            long as they have this digest (`monograph.run.trust`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: keys.ModelSection = keys.ModelSection()
    data: keys.DataSection = keys.DataSection()
    optim: keys.OptimSection = keys.OptimSection()
    train: keys.TrainSection = keys.TrainSection(minutes=DEFAULT_MINUTES)
    lora: keys.LoraSection = keys.LoraSection()
    way_sections: Mapping[str, Section] = {
        way.section: way.keys() for way in WAYS_TO_LEARN if way.keys
    }
    origins: Mapping[str, str] = Field(default_factory=dict, repr=False)
    written: Mapping[str, str] = Field(default_factory=dict, repr=False)
    vouched: Mapping[str, str] = Field(default_factory=dict, repr=False)

    def section(self, section: type[WaySection]) -> WaySection:
        """Return the values of a section that belongs to one way to learn."""
        return next(values for values in self.way_sections.values() if isinstance(values, section))

    @property
    def programs(self) -> list[str]:
        """Return the values that name a function in a Python file, such as FILE.py:FUNCTION."""
        return programs_in(self.values())

    def vouching(self, digests: Mapping[str, str]) -> "Settings":
        """Return the same settings with more entries of `vouched`."""
        return self.model_copy(update={"vouched": {**self.vouched, **digests}})

    def values(self) -> dict[str, Any]:
        """Return every key's value by the key, in the order of `KEYS`."""
        values: dict[str, Any] = {}
        for name in SECTIONS:
            is_of_way = name in self.way_sections
            section = self.way_sections[name] if is_of_way else getattr(self, name)
            values |= {f"{name}.{key}": value for key, value in section}
        return values

    def quoted(self, key: str) -> str:
        """Return a key as a message quotes it: its origin, its name and its value.

        For example "run.toml:7: train.seed = 3".
        """
        return f"{self.origins.get(key, 'default')}: {key} = {self.as_written(key)}"

    def as_written(self, key: str) -> str:
        """Return a key's value as a person wrote it, or as Python writes it if no person did."""
        return self.written.get(key) or str(self.values()[key])

    def given_values(self) -> dict[str, Any]:
        """Return the values that were set, by key, without defaults."""
        return {key: value for key, value in self.values().items() if key in self.origins}

    def resolve(self, values: Mapping[str, Any], origin: str) -> "Settings":
        """Return the same settings with other values of some keys, for example with the plan's decisions.

        A new value of one key of an exclusive group, such as `train.updates`, unsets the other keys
        of the group.

        Args:
            values: the new values by key.
            origin: the origin of the new values.

        Raises:
            UsageError: a key is unknown, or a value has the wrong type.
        """
        checked = {
            key: checked_value(key, value, origin, from_text=False) for key, value in values.items()
        }
        unset: set[str] = set()
        for group in EXCLUSIVE:
            sets_a_key = not checked.keys().isdisjoint(group)
            if sets_a_key:
                unset |= set(group) - checked.keys()
        kept = {key: value for key, value in self.given_values().items() if key not in unset}
        origins = {key: self.origins[key] for key in kept} | dict.fromkeys(checked, origin)
        written = {
            key: text for key, text in self.written.items() if key in kept and key not in checked
        }
        return build(kept | checked, origins, written).vouching(self.vouched)

    def require_consistent(self) -> None:
        """Refuse values that are valid by themselves but not together.

        Raises:
            UsageError: two values exclude each other; the message names them.
        """
        model = self.model
        data = self.data
        train = self.train
        # Of an existing model, this says whether its head is trained, too.
        sizes = model.sizes().keys() - {"mtp_num_hidden_layers"}
        # A file of weights alone, without a configuration, needs the sizes.
        if model.init and sizes and not model.init.endswith(TORCH_FILE_SUFFIXES):
            key = f"model.{min(sizes)}"  # the message names one of them
            raise UsageError(
                f"{self.origins[key]}: {key} cannot change the model that model.init names; give one or the other"
            )
        if model.init and model.family:
            origin = self.origins["model.family"]
            raise UsageError(
                f"{origin}: model.family is that of a new model, and model.init names a model with its own; give one"
            )
        shape_keys = ("hidden_size", "num_hidden_layers", "num_attention_heads")
        set_keys = [key for key in shape_keys if key in sizes]
        missing = [f"model.{key}" for key in shape_keys if key not in sizes]
        is_new_shape = model.preset == "auto" and model.init is None
        if is_new_shape and set_keys and missing:
            raise UsageError(
                f"model.{set_keys[0]} alone is not a shape: give {', '.join(missing)} too, or a model.preset to change"
            )
        per_update = train.tokens_per_update
        length = data.sequence_length
        if per_update != "auto" and length != "auto" and per_update < length:
            raise UsageError(
                f"train.tokens_per_update = {self.as_written('train.tokens_per_update')} is less than one row of "
                f"data.sequence_length = {self.as_written('data.sequence_length')} tokens; raise one or lower the other"
            )

    def to_toml(self) -> str:
        """Return a TOML text that loads as these settings."""
        return "\n".join(self._lines()) + "\n"

    @property
    def fingerprint(self) -> str:
        """Return the hex SHA-256 of all values, except those of `CHANGEABLE_ON_RESUME`."""
        comparable = self.resolve(CHANGEABLE_ON_RESUME, "fingerprint")
        return hashlib.sha256(comparable.to_toml().encode()).hexdigest()

    def _lines(self) -> Iterator[str]:
        """Yield the lines of `to_toml`."""
        values = self.values()
        if self.model.init is not None:
            # If the file had the default preset, it would be refused: the two keys exclude each other.
            values["model.preset"] = None
        for name, section in SECTIONS.items():
            table = {key: values[f"{name}.{key}"] for key in section.model_fields}
            lines = [
                f"{key} = {toml_of(value)}" for key, value in table.items() if value is not None
            ]
            if lines:
                yield f"[{name}]"
                yield from lines
                yield ""


def programs_in(values: Mapping[str, Any]) -> list[str]:
    """Return the values, among values by key, that name a function in a Python file."""
    codes = [code_named(values.get(key)) for key in CODE_KEYS]
    return [code.value for code in codes if code is not None]


def digest_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the hex SHA-256 of the TOML text of these tables, as `Settings.to_toml` writes it."""
    lines = list[str]()
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {toml_of(value)}" for key, value in table.items()]
        lines.append("")
    text = "\n".join(lines) + "\n"
    return hashlib.sha256(text.encode()).hexdigest()


def toml_of(value: object) -> str:
    """Return a value as TOML text."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, str):
        # A JSON string is a valid TOML string, except that TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def checked_value(
    key: str, value: object, origin: str, *, from_text: bool, written: str = ""
) -> Any:
    """Return a value, converted to its key's type.

    Args:
        key: the key.
        value: the value.
        origin: where it was written, for messages.
        from_text: whether the value may be a text that stands for a number, as in a shell.
        written: the value as a person wrote it, for messages; "" if `value` itself is to be shown.

    Raises:
        UsageError: the key does not take the value; the message names the origin, the key, the
            value and the expected values.
    """
    advice = _new_spelling_advice(key, value, from_text)
    if advice:
        raise UsageError(f"{origin}: {key} = {written or _text_of(value)}: {advice}")
    section, _, name = key.partition(".")
    adapter = _adapter(section, name)
    try:
        # Strict validation refuses a text that stands for a number.
        return adapter.validate_python(value, strict=not from_text)
    except ValidationError:
        text = written or json.dumps(value, ensure_ascii=False, default=str)
        hint = _hint(key, value) if isinstance(value, str) else ""
        raise UsageError(
            f"{origin}: {key} = {text}: expected {key_declaration(key).expected}{hint}"
        ) from None


def _hint(key: str, text: str) -> str:
    """Return what a person perhaps meant by a text that is not a value of a key, as the end of a
    message; "" if that is unknown.
    """
    section, _, name = key.partition(".")
    adapter = _adapter(section, name)
    # The text stands for a value, such as "3" for a number. It was refused only because a TOML file
    # has to give such a value without quotes.
    if _is_valid(adapter, text):
        return " (write it without quotes)"
    return meant_value(key, text, choices(key), lambda candidate: _is_valid(adapter, candidate))


def choices(key: str) -> tuple[str, ...]:
    """Return the words that a key takes, which are the Literal types in its annotation."""
    section, _, name = key.partition(".")
    annotation = SECTIONS[section].model_fields[name].annotation
    is_union = get_origin(annotation) in (Union, UnionType)
    types = get_args(annotation) if is_union else (annotation,)
    literals = [word_type for word_type in types if get_origin(word_type) is Literal]
    return tuple(word for literal in literals for word in get_args(literal))


def translated_values(key: str, value: object) -> dict[str, Any] | None:
    """Return the keys and values that stand for an old spelling of a key's value.

    Returns:
        The values by key; None if the value is not an old spelling (`monograph.config.renamed`).
    """
    new_texts = new_spelling(key, value)
    if not new_texts:
        return None
    origin = f"{key} = {value}"
    return {
        new_key: checked_value(new_key, text, origin, from_text=True)
        for new_key, text in new_texts.items()
    }


def as_typed(texts: Mapping[str, str | list[str]]) -> str:
    """Return keys with their values, which are texts, as a person types them in a shell.

    For example `optim.name=muon optim.state=8bit`.
    """
    return shell_words(*(f"{key}={_shell_text(text)}" for key, text in texts.items()))


def _shell_text(text: str | list[str]) -> str:
    """Return the text of a value, or of a list of values."""
    if isinstance(text, str):
        return text
    if len(text) == 1:
        return text[0]
    are_numbers = all(_number(each) is not None for each in text)
    # Other texts, such as paths, may have commas themselves. So they are typed as a TOML list.
    return ",".join(text) if are_numbers else toml_of(text)


def _number(text: str) -> int | float | None:
    """Return the number that a text means in a TOML file; None if it is not a number."""
    with suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"value = {text}")["value"]
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None
    return None


def _new_spelling_advice(key: str, value: object, from_text: bool) -> str:
    """Return what to write instead of one or more old spellings; "" for other values."""
    new_texts = new_spelling(key, value)
    if new_texts:
        assignments = as_typed(new_texts) if from_text else in_toml(new_texts)
        return f"say {assignments}"
    new_texts_of_each = new_spellings(key, value)
    return advise_run_each(new_texts_of_each) if new_texts_of_each else ""


def advise_run_each(texts_of_each: Sequence[TextsByKey]) -> str:
    """Return the advice to start several runs, each with its own keys and values."""
    return f"start a run for each: {', and '.join(map(as_typed, texts_of_each))}"


def _text_of(value: object) -> str:
    """Return a value as a person types it; a list has commas."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def in_toml(texts: Mapping[str, str | list[str]]) -> str:
    """Return keys and values as lines of a TOML file, for a message.

    For example `name = "muon" and state = "8bit" under [optim]`.
    """
    assignments: dict[str, list[str]] = {}  # by section
    for key, text in texts.items():
        section, _, name = key.partition(".")
        assignments.setdefault(section, []).append(f"{name} = {_toml_value(key, text)}")
    return " and ".join(
        f"{' and '.join(lines)} under [{section}]" for section, lines in assignments.items()
    )


def _toml_value(key: str, text: str | list[str]) -> str:
    """Return as TOML the value, or the list of values, that a person types in a shell as `text`."""
    try:
        value = checked_value(key, text, "", from_text=True)
    except UsageError:
        if isinstance(text, str) and text.isupper():
            return text  # a placeholder, such as N
        # The key does not take this text, which a later check reports.
        value = text
    # Numbers stay as a person wrote them: 3e-4 does not become 0.0003.
    if isinstance(text, list):
        are_numbers = not isinstance(value[0], str)
        return f"[{', '.join(text)}]" if are_numbers else toml_of(value)
    is_number = not isinstance(value, str) and _number(text) == value
    return text if is_number else toml_of(value)


@cache
def _adapter(section: str, name: str) -> TypeAdapter[Any]:
    """Return pydantic's validator of a key's type; NaN and infinity are invalid numbers."""
    annotation = SECTIONS[section].model_fields[name].rebuild_annotation()
    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))


def build(
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    written: Mapping[str, str] = MappingProxyType({}),
) -> Settings:
    """Build settings from checked values; missing keys take their defaults.

    Args:
        values: the values by key.
        origins: the origin of each value by key.
        written: by key, values as a person wrote them.

    Raises:
        UsageError: two values exclude each other.
    """
    origins = dict(origins)
    for implying_key, (key, value) in IMPLIED_CHOICES.items():
        if values.get(implying_key) is not None and values.get(key) is None:
            values = {**values, key: value}
            origins[key] = origins[implying_key]
    tables: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tables[section][name] = value
    if values.keys().isdisjoint(EXCLUSIVE[0]):
        # No key says how long the run is.
        tables["train"]["minutes"] = DEFAULT_MINUTES
    sections = {name: SECTIONS[name](**table) for name, table in tables.items()}
    way_sections = {way.section: sections.pop(way.section) for way in WAYS_TO_LEARN if way.keys}
    settings = Settings(
        **sections,  # type: ignore[arg-type]
        way_sections=way_sections,
        origins=origins,
        written=dict(written),
    )
    settings.require_consistent()
    return settings


def _is_valid(adapter: TypeAdapter[Any], text: str) -> bool:
    """Return whether a text is a value of a type, or stands for one, as "3" does for a number."""
    with suppress(ValidationError):
        adapter.validate_python(text)
        return True
    return False
