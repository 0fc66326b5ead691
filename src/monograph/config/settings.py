"""Hold the settings of one run: frozen values, where each came from, and their text form."""

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
from monograph.config.keys import DEFAULT_MINUTES, KEYS, SECTIONS, WAYS_TO_LEARN, Section, described
from monograph.config.renamed import Texts, translated, translated_each
from monograph.config.slips import meant_value
from monograph.errors import UsageError
from monograph.model.config import WEIGHT_FILES
from monograph.storage.code import code_named
from monograph.terminal import shell_words

# The keys whose values may name a function in a Python file.
NAME_CODE = ("model.init", *(key for way in WAYS_TO_LEARN for key in way.names_code))
# The keys that a resumed run may change, with their defaults: see `monograph.config.keys.Key`. The
# fingerprint of its records says whether an ignored key changes them.
ANYWHERE = {key: described(key).default for key in KEYS if described(key).is_of_place}
# The keys that a run decides anew if it begins from another one.
OF_ONE_RUN = frozenset(key for key in KEYS if described(key).is_of_one_run)
# At most one key of each group counts: the one whose origin has the highest rank.
EXCLUSIVE = (
    ("train.updates", "train.tokens", "train.epochs", "train.minutes"),
    ("model.preset", "model.init"),
    *(group for way in WAYS_TO_LEARN for group in way.exclusive),
)
BELONGS = keys.belonging()
WaySection = TypeVar("WaySection", bound=Section)


class Settings(BaseModel):
    """All settings of a run, checked.

    `settings.optim.lr` reads a value, and `settings.section(RlSection).kl` one of a way to learn. None
    means "not given", and "auto" means "the planner's choice".

    Attributes:
        way_sections: the sections that belong to one way to learn each, by name.
        origins: the origin of each key that was set, by dotted key: "run.toml:7",
            "MONOGRAPH_TRAIN_SEED", "command line".
        written: the values as a person wrote them, for messages, by dotted key.
        vouched: the digest of each Python file that may run, by the value that names it
            (`monograph.run.trust`).
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
        return next(each for each in self.way_sections.values() if isinstance(each, section))

    @property
    def programs(self) -> list[str]:
        """Return the values that name a function in a Python file."""
        return programs_in(self.values())

    def vouching(self, digests: Mapping[str, str]) -> "Settings":
        """Return the same settings which vouch for more Python files; `digests` are by the value
        that names a file.
        """
        return self.model_copy(update={"vouched": {**self.vouched, **digests}})

    def values(self) -> dict[str, Any]:
        """Return every key's value, by dotted key, in the order of `KEYS`."""
        return {
            f"{name}.{key}": value
            for name in SECTIONS
            for key, value in self.way_sections.get(name) or getattr(self, name)
        }

    def said(self, key: str) -> str:
        """Return a key as an error begins with it: "run.toml:7: train.seed = 3"."""
        return f"{self.origins.get(key, 'default')}: {key} = {self.as_written(key)}"

    def as_written(self, key: str) -> str:
        """Return a key's value as a person wrote it, or else as it is."""
        return self.written.get(key) or str(self.values()[key])

    def pinned(self) -> dict[str, Any]:
        """Return the values that were set, without defaults."""
        return {key: value for key, value in self.values().items() if key in self.origins}

    def resolve(self, values: Mapping[str, Any], origin: str) -> "Settings":
        """Return the same settings with some keys fixed, for example by the plan; `origin` is shown
        with each.

        Fixing one key of an exclusive group (say `train.updates` after a calibration) unsets the
        others.

        Raises:
            UsageError: a key is unknown, or a value has the wrong type.
        """
        checked = {key: check(key, value, origin, from_text=False) for key, value in values.items()}
        unset = {
            key for group in EXCLUSIVE for key in group if not checked.keys().isdisjoint(group)
        } - checked.keys()
        kept = {key: value for key, value in self.pinned().items() if key not in unset}
        origins = {key: self.origins[key] for key in kept} | dict.fromkeys(checked, origin)
        written = {
            key: self.written[key] for key in kept if key in self.written and key not in checked
        }
        return build(kept | checked, origins, written).vouching(self.vouched)

    def require_consistent(self) -> None:
        """Refuse values that are right alone and do not fit together.

        Raises:
            UsageError: there are some; the message names them.
        """
        model = self.model
        data = self.data
        train = self.train
        sizes = model.sizes().keys()
        if model.init and sizes and not model.init.endswith(WEIGHT_FILES):
            key = f"model.{min(sizes)}"
            raise UsageError(
                f"{self.origins[key]}: {key} cannot change what model.init brings; give one or the other"
            )
        if model.init and model.family:
            origin = self.origins["model.family"]
            raise UsageError(
                f"{origin}: model.family is that of a new model, and model.init brings its own; give one"
            )
        shape = ("hidden_size", "num_hidden_layers", "num_attention_heads")
        given = [key for key in shape if key in sizes]
        if model.preset == "auto" and model.init is None and given and len(given) < len(shape):
            missing = ", ".join(f"model.{key}" for key in shape if key not in sizes)
            raise UsageError(
                f"model.{given[0]} alone is no shape: give {missing} too, or a model.preset that it changes"
            )
        per_update = train.tokens_per_update
        length = data.sequence_length
        if per_update != "auto" and length != "auto" and per_update < length:
            raise UsageError(
                f"train.tokens_per_update = {self.as_written('train.tokens_per_update')} is less than one row of "
                f"data.sequence_length = {self.as_written('data.sequence_length')} tokens; raise one or lower the other"
            )

    def to_toml(self) -> str:
        """Return the TOML text that loads as these settings."""
        return "\n".join(self._lines()) + "\n"

    @property
    def fingerprint(self) -> str:
        """Return the hex SHA-256 of the values, which ignores their origins and the keys in
        `ANYWHERE`.
        """
        then = self.resolve(ANYWHERE, "fingerprint")
        return hashlib.sha256(then.to_toml().encode()).hexdigest()

    def _lines(self) -> Iterator[str]:
        values = self.values()
        if self.model.init is not None:
            values["model.preset"] = None  # the default preset would exclude model.init
        for name, section in SECTIONS.items():
            given = {key: values[f"{name}.{key}"] for key in section.model_fields}
            lines = [
                f"{key} = {toml_of(value)}" for key, value in given.items() if value is not None
            ]
            if lines:
                yield f"[{name}]"
                yield from lines
                yield ""


def programs_in(values: Mapping[str, Any]) -> list[str]:
    """Return those of some values, by dotted key, that name a function in a Python file."""
    codes = [code_named(values.get(key)) for key in NAME_CODE]
    return [code.value for code in codes if code is not None]


def digest_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the hex SHA-256 of the TOML text of these tables, as `Settings.to_toml` writes it."""
    lines = list[str]()
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {toml_of(value)}" for key, value in table.items()), ""]
    return hashlib.sha256(("\n".join(lines) + "\n").encode()).hexdigest()


def toml_of(value: object) -> str:
    """Return a value as TOML text; JSON's strings are valid TOML, except that TOML requires DEL to
    be escaped.
    """
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def check(key: str, value: object, origin: str, *, from_text: bool, written: str = "") -> Any:
    """Return the value of `key`, converted to its type; with `from_text`, text may stand for a
    number.

    Args:
        key: the key.
        value: its value.
        origin: where it comes from, for messages.
        from_text: whether text may stand for a number.
        written: the value as a person wrote it, for messages; "": as it is.

    Raises:
        UsageError: the value is wrong; the message names the origin, the key, the value and the
            expected values.
    """
    if instead := _today(key, value, from_text):
        raise UsageError(f"{origin}: {key} = {written or _shown(value)}: {instead}")
    section, _, name = key.partition(".")
    adapter = _adapter(section, name)
    try:
        checked = adapter.validate_python(value, strict=not from_text)
    except ValidationError:
        shown = written or json.dumps(value, ensure_ascii=False, default=str)
        hint = _hint(key, value) if isinstance(value, str) else ""
        raise UsageError(
            f"{origin}: {key} = {shown}: expected {described(key).expected}{hint}"
        ) from None
    return checked


def _hint(key: str, text: str) -> str:
    """Return what was perhaps meant by a text that is no value of a key."""
    adapter = _adapter(*key.split("."))
    if _reads(adapter, text):
        return " (write it without quotes)"
    return meant_value(key, text, choices(key), lambda candidate: _reads(adapter, candidate))


def choices(key: str) -> tuple[str, ...]:
    """Return the words that a key's type lists, among the other values that it may take."""
    section, _, name = key.partition(".")
    annotation = SECTIONS[section].model_fields[name].annotation
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))


def translated_values(key: str, value: object) -> dict[str, Any] | None:
    """Return the keys and values that say what an old spelling of a key's value said; None if it is
    none.
    """
    now = translated(key, value)
    return now and {
        new: check(new, said, f"{key} = {value}", from_text=True) for new, said in now.items()
    }


def as_typed(texts: Mapping[str, str | list[str]]) -> str:
    """Return keys with their values as they are typed in a shell:
    `optim.name=muon optim.state=8bit`.
    """
    return shell_words(*(f"{key}={_joined(said)}" for key, said in texts.items()))


def _joined(said: str | list[str]) -> str:
    """Return the text of a value, or of several: numbers with commas, and paths, in which commas
    may be, as a list.
    """
    if isinstance(said, str) or len(said) == 1:
        return "".join(said)
    return ",".join(said) if all(map(_number, said)) else toml_of(said)


def _number(text: str) -> int | float | None:
    """Return the number that a text is in a TOML file; None if it is none."""
    with suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"value = {text}")["value"]
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None
    return None


def _today(key: str, value: object, from_text: bool) -> str:
    """Return what to do instead of giving an old spelling, or several; "" if it is none."""
    if now := translated(key, value):
        return f"say {as_typed(now) if from_text else in_toml(now)}"
    each = translated_each(key, value)
    return a_run_each(each) if each else ""


def a_run_each(each: Sequence[Texts]) -> str:
    """Return the advice to start a run with each of several groups of keys."""
    return f"start a run for each: {', and '.join(map(as_typed, each))}"


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def in_toml(texts: Mapping[str, str | list[str]]) -> str:
    """Return keys and values as a file has them: `name = "muon" and state = "8bit" under [optim]`."""
    lines: dict[str, list[str]] = {}
    for key, said in texts.items():
        section, _, name = key.partition(".")
        lines.setdefault(section, []).append(f"{name} = {_toml_value(key, said)}")
    return " and ".join(
        f"{' and '.join(assignments)} under [{section}]" for section, assignments in lines.items()
    )


def _toml_value(key: str, said: str | list[str]) -> str:
    """Return a text as a TOML file has it: a number as it was written, if that is TOML."""
    try:
        value = check(key, said, "", from_text=True)
    except UsageError:
        if isinstance(said, str) and said.isupper():
            return said  # it stands for a value
        value = said  # which is refused once the key has it
    if isinstance(said, list) and not isinstance(value[0], str):
        return f"[{', '.join(said)}]"
    if isinstance(said, str) and not isinstance(value, str) and _number(said) == value:
        return said
    return toml_of(value)


@cache
def _adapter(section: str, name: str) -> TypeAdapter[Any]:
    annotation = SECTIONS[section].model_fields[name].rebuild_annotation()
    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))


def build(
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    written: Mapping[str, str] = MappingProxyType({}),
) -> Settings:
    """Build settings from checked values by dotted key; missing keys take their defaults.

    Args:
        values: the values.
        origins: where each comes from.
        written: values as a person wrote them.

    Raises:
        UsageError: values that are right alone do not fit together.
    """
    tables: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tables[section][name] = value
    if values.keys().isdisjoint(EXCLUSIVE[0]):
        tables["train"]["minutes"] = DEFAULT_MINUTES
    sections = {name: SECTIONS[name](**table) for name, table in tables.items()}
    way_sections = {way.section: sections.pop(way.section) for way in WAYS_TO_LEARN if way.keys}
    settings = Settings(
        **sections,  # type: ignore[arg-type]
        way_sections=way_sections,
        origins=dict(origins),
        written=dict(written),
    )
    settings.require_consistent()
    return settings


def _reads(adapter: TypeAdapter[Any], text: str) -> bool:
    with suppress(ValidationError):
        adapter.validate_python(text)
        return True
    return False
