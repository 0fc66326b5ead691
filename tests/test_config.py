"""Run: pytest tests/test_config.py"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.config import KEYS, Settings, classify, load
from monograph.config.commented import WIDTH, commented
from monograph.config.elsewhere import VALUES
from monograph.config.keys import SECTIONS, DataSection, ModelSection, key_declaration
from monograph.config.settings import (
    CHANGEABLE_ON_RESUME,
    IMPLIED_CHOICES,
    checked_value,
    choices,
)
from monograph.config.sources import written_fingerprint
from monograph.errors import InputRefused, MonographError, UsageError
from monograph.model.config import LlamaConfig


def settings_of(
    toml: str = "", environment: dict[str, str] | None = None, **overrides: Any
) -> Settings:
    """Settings from TOML text, an environment, and overrides such as `optim__lr="3e-4"`."""
    path = None
    if toml:
        path = Path("run.toml")
        path.write_text(toml)
    return load(
        path, {key.replace("__", "."): value for key, value in overrides.items()}, environment or {}
    )


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(toml: str = "", **more: Any) -> str:
    with pytest.raises(UsageError) as caught:
        settings_of(toml, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flag_over_environment_over_toml_over_default() -> None:
    toml, environment = "[train]\nseed = 1\n", {"MONOGRAPH_TRAIN_SEED": "2"}
    assert (settings_of().train.seed, settings_of().origins) == (0, {})
    for settings, seed, origin in (
        (settings_of(toml), 1, "run.toml:2"),
        (settings_of(toml, environment), 2, "MONOGRAPH_TRAIN_SEED"),
        (settings_of(toml, environment, train__seed="3"), 3, "command line"),
    ):
        assert (settings.train.seed, settings.origins) == (seed, {"train.seed": origin})


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optim.lr", "3e-4", 3e-4),
        ("optim.lr", "auto", "auto"),
        ("optim.betas", "0.9,0.99", (0.9, 0.99)),
        ("optim.betas", "[0.9, 0.99]", (0.9, 0.99)),
        ("optim.grad_clip", "none", "none"),
        ("optim.ema", "none", "none"),
        ("optim.ema", "0.999", 0.999),
        ("train.tokens", "512k", 512_000),
        ("train.tokens", "1.1M", 1_100_000),
        ("train.tokens", "512Ki", 2**19),
        ("train.tokens", "1e6", 1_000_000),
        ("train.tokens", "1.5b", 1_500_000_000),
        ("model.tie_word_embeddings", "true", True),
        ("model.preset", "124m", "124m"),
        ("data.source", "texts/", "texts/"),
        ("data.source", '["a", "b"]', ["a", "b"]),
    ],
)
def test_text_from_a_shell_is_read_as_its_type(key: str, text: str, value: object) -> None:
    assert load(None, {key: text}, {}).values()[key] == value
    assert (
        load(None, {}, {f"MONOGRAPH_{key.replace('.', '_').upper()}": text}).values()[key] == value
    )


@pytest.mark.parametrize(
    ("toml", "parts"),
    [
        (
            '[optim]\n\nlr = "3e-4"',
            ["run.toml:3", "optim.lr", '"3e-4"', "a number above 0", "without quotes"],
        ),
        ('[train]\nseed = "1"', ["run.toml:2", "train.seed", "without quotes"]),
        ('[train]\nupdates = "100"', ["train.updates", "without quotes"]),
        ("[train]\nseed = -1", ["train.seed = -1", "a whole number, 0 or more"]),
        ("[train]\nminutes = 1e300", ["train.minutes = 1e300", "above 0, at most 1e7"]),
        ("[train]\nseed = true", ["train.seed = true", "a whole number"]),
        ("[train]\nseed = 1.5", ["train.seed = 1.5", "a whole number"]),
        ("[train]\nupdates = 0", ["train.updates = 0", "above 0"]),
        ("[train]\nkeep = 0", ["train.keep = 0", "above 0"]),
        ("[optim]\nlr = inf", ["optim.lr", "a number above 0"]),
        ("[optim]\nbetas = [0.9]", ["optim.betas", "two numbers"]),
        ("[optim]\nema = 1", ["optim.ema = 1", "between 0 and 1, or none"]),
        ("[data]\nheld_out = 5", ["data.held_out = 5", "from 0 (none) to 0.5"]),
        ("[data]\nsource = []", ["data.source", "a path"]),
        ("[data]\nsource = ''", ["data.source", "a path"]),
        ("[model]\npreset = 'nan'", ["model.preset", "nano"]),
        ("[optim]\nlrr = 1", ["run.toml:2", "optim.lrr", "did you mean optim.lr?"]),
        ("[optm]\nlr = 1", ["optm.lr", "did you mean optim.lr?"]),
        ("[optm]", ["[optm]", "did you mean optim?"]),
        ("seed = 1", ["run.toml:1", "seed", "did you mean train.seed?"]),
        ("train.sed = 1", ["run.toml:1", "train.sed", "did you mean train.seed?"]),
        ("[train]\nzzz = 1", ["train.zzz", "[train] has updates, tokens"]),
        ("[zzz]\nzzz = 1", ["zzz.zzz", "the sections are model, data"]),
        ("[train]\nseed 1", ["run.toml:2: not TOML", "write seed = 1"]),
        (
            "[model]\nhidden_size = 64",
            ["model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads"],
        ),
        (
            "[model]\ninit = 'x'\nhidden_size = 64",
            ["run.toml:3", "model.hidden_size", "model.init"],
        ),
        (
            "[model]\ninit = 'x'\npreset = 'nano'",
            ["model.preset and model.init exclude each other"],
        ),
        ("[train]\nupdates = 1\ntokens = 1", ["train.updates and train.tokens exclude each other"]),
        (
            "[model]\ninit = 'x'\nfamily = 'qwen3'",
            ["run.toml:3", "model.family is that of a new model", "give one"],
        ),
        (
            "[train]\ntokens_per_update = 128\n[data]\nsequence_length = 256",
            ["train.tokens_per_update = 128", "data.sequence_length = 256"],
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(toml: str, parts: list[str]) -> None:
    message = refusal(toml)
    for part in parts:
        assert part in message


def test_a_misspelt_variable_is_refused() -> None:
    assert "did you mean MONOGRAPH_TRAIN_SEED?" in refusal(environment={"MONOGRAPH_TRAIN_SED": "1"})
    assert settings_of(environment={"MONOGRAPH_DEBUG": "1"}) == settings_of()


def test_a_toml_that_is_not_text_is_refused() -> None:
    Path("bad.toml").write_bytes(b"[train]\nseed = \xff")
    with pytest.raises(UsageError, match="bad.toml: not UTF-8 text .byte 15"):
        load(Path("bad.toml"), {}, {})


def test_a_byte_order_mark_is_no_part_of_a_toml() -> None:
    """Some editors begin a file with it; a key in the first line has its origin there."""
    Path("run.toml").write_text("train.seed = 7\n[optim]\nlr = 0.5\n", encoding="utf-8-sig")
    settings = load(Path("run.toml"), {}, {})
    assert (settings.train.seed, settings.optim.lr) == (7, 0.5)
    assert settings.origins["train.seed"] == "run.toml:1"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_toml_in_two_bytes_a_letter_says_how_to_save_it(encoding: str) -> None:
    Path("wide.toml").write_text("[train]\nseed = 7\n", encoding=encoding)
    with pytest.raises(UsageError, match="wide.toml: not UTF-8 text .*: save it as UTF-8"):
        load(Path("wide.toml"), {}, {})


def test_a_stronger_source_replaces_the_other_budget() -> None:
    assert settings_of().train.minutes == 3.0
    settings = settings_of("[train]\nupdates = 100", train__minutes=1.5)
    assert (settings.train.updates, settings.train.minutes) == (None, 1.5)
    assert settings_of("[train]\nupdates = 100").train.minutes is None
    assert settings_of("[model]\npreset = 'nano'", model__init="folder").model.preset == "auto"


REPLACED = [
    ('[data]\nsource = ["a", "b"]\nweights = [2, 1]', {"data.source": "c"}, "data.weights"),
    ('[data]\ntokenizer = "bpe"\nvocab_size = 300', {"data.tokenizer": "bytes"}, "data.vocab_size"),
    (
        '[optim]\nschedule = "wsd"\nmin_lr_ratio = 0.1',
        {"optim.schedule": "constant"},
        "optim.min_lr_ratio",
    ),
    ('[rl]\nreward = "regex"\nreward_regex = "a"', {"rl.reward": "number"}, "rl.reward_regex"),
    ('[rl]\nanswer_regex = "a"', {"rl.answer_schema": "s.json"}, "rl.answer_regex"),
    ('[prefer]\nloss = "simpo"\ngamma = 0.5', {"prefer.loss": "dpo"}, "prefer.gamma"),
]


@pytest.mark.parametrize(("toml", "typed", "gone"), REPLACED, ids=[gone for _, _, gone in REPLACED])
def test_what_is_said_of_a_value_goes_with_it(toml: str, typed: dict[str, str], gone: str) -> None:
    Path("run.toml").write_text(toml)
    [(key, value)] = typed.items()
    for found in (
        load(Path("run.toml"), typed, {}),
        load(Path("run.toml"), {}, {variable(key): value}),
    ):
        assert found.values()[key] == value and found.values()[gone] is None
    kept = load(Path("run.toml"), {}, {})
    same = {key: str(kept.values()[key])} if isinstance(kept.values()[key], str) else {}
    assert load(Path("run.toml"), same, {}).values()[gone] == kept.values()[gone] is not None


def variable(key: str) -> str:
    """The variable of the environment that says a key's value."""
    return f"MONOGRAPH_{key.replace('.', '_').upper()}"


def test_resolving_keeps_what_was_pinned_and_says_who_chose_the_rest() -> None:
    settings = settings_of("[optim]\nlr = 1e-3", train__minutes="5")
    resolved = settings.resolve({"train.updates": 700, "train.micro_batch": 8}, origin="plan")
    assert resolved.train.updates == 700 and resolved.train.minutes is None
    assert resolved.origins == {
        "optim.lr": "run.toml:2",
        "train.updates": "plan",
        "train.micro_batch": "plan",
    }
    assert resolved.given_values() == {
        "optim.lr": 1e-3,
        "train.updates": 700,
        "train.micro_batch": 8,
    }
    with pytest.raises(UsageError, match="plan: train.micro_batch"):
        settings.resolve({"train.micro_batch": "8"}, origin="plan")


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        settings_of().train.seed = 1  # type: ignore[misc]


# Any text that UTF-8 can hold; a surrogate alone is no character, and a NUL is in no path.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
# Text that begins like this is a list, and a source that ends like this once had a weight.
words = st.text(characters, min_size=1).filter(
    lambda text: not text.startswith("[") and "@" not in text
)
positive = st.floats(min_value=1e-300, max_value=1e300)
whole = st.integers(1, 2**24)
some_values = st.fixed_dictionaries(
    {},
    optional={
        "model.vocab_size": whole,
        "model.tie_word_embeddings": st.booleans(),
        "data.source": words | st.lists(words, min_size=1, max_size=3),
        "data.tokenizer": words,
        "data.held_out": st.floats(0, 0.5),
        "optim.lr": positive | st.just("auto"),
        "optim.ema": st.just("none") | st.floats(0, 1, exclude_min=True, exclude_max=True),
        "optim.betas": st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
        "train.updates": whole,
        "train.seed": st.integers(0, 2**63 - 1),
        "train.compile": st.sampled_from(["auto", "whole", "none"]),
    },
)


def test_every_whole_number_has_a_bound() -> None:
    """Whatever is built, counted or multiplied by it afterwards."""
    unbounded = []
    for key in KEYS:
        try:
            if type(checked_value(key, 10**30, "here", from_text=False)) is int:
                unbounded.append(key)
        except UsageError:
            pass
    assert not unbounded


@given(some_values)
def test_the_written_file_loads_as_the_same_settings(values: dict[str, Any]) -> None:
    settings = Settings().resolve(values, origin="here")
    for text in (settings.to_toml(), commented(settings)):
        path = Path("again.toml")
        path.write_text(text, encoding="utf-8", newline="")
        again = load(path, {}, {})
        assert again.values() == settings.values()
        assert again.fingerprint == settings.fingerprint


def test_the_fingerprint_sees_values_and_not_origins() -> None:
    assert settings_of("[train]\nseed = 1").fingerprint == settings_of(train__seed="1").fingerprint
    assert settings_of().fingerprint == settings_of(train__seed="0").fingerprint
    assert settings_of().fingerprint != settings_of(train__seed="1").fingerprint


def test_a_key_that_came_later_does_not_make_an_older_file_another_one(tmp_path: Path) -> None:
    """An older version wrote and hashed all keys that it had; here that was all but `train.keep`."""
    whole = (
        settings_of("[train]\nseed = 1\ncompile = 'none'")
        .resolve(CHANGEABLE_ON_RESUME, "test")
        .to_toml()
    )
    (tmp_path / "config.toml").write_text(older := whole.replace("keep = 2\n", ""))
    recorded = hashlib.sha256(older.encode()).hexdigest()
    assert older != whole and load(tmp_path / "config.toml", {}, {}).fingerprint != recorded
    assert written_fingerprint(tmp_path / "config.toml") == recorded
    for change in (("seed = 1", "seed = 3"), ("eps = 1e-08\n", ""), ("seed = 1\n", "")):
        (tmp_path / "config.toml").write_text(older.replace(*change))
        assert written_fingerprint(tmp_path / "config.toml") != recorded, change


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    program = (
        "from monograph.config import load; print(load(None, {'train.seed': 5}, {}).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program], env=environment, text=True, capture_output=True
        ).stdout.strip()
        for environment in (
            os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": SOURCES} for seed in ("1", "2")
        )
    }
    assert prints == {settings_of(train__seed=5).fingerprint}


@pytest.mark.parametrize("broken", ['["a",', "['a'", '["a" "b"]', '[ "a'])
def test_a_list_that_is_broken_off_is_no_name(broken: str) -> None:
    with pytest.raises(UsageError, match="expected a path, a glob, or a list of them"):
        settings_of(data__source=broken)
    assert settings_of(data__source="[ab]*.txt").data.source == "[ab]*.txt"


SOURCES = str(Path(sys.modules["monograph"].__file__ or "").parents[1])


def test_arguments_are_told_apart_in_any_order() -> None:
    Path("run.toml").write_text("")
    Path("texts").mkdir()
    Path("a=b.txt").write_text("")
    Path("one.txt").write_text("")
    for order in (
        ["run.toml", "optim.lr=3e-4", "texts", "*.txt"],
        ["texts", "*.txt", "optim.lr=3e-4", "run.toml"],
    ):
        assert classify(order) == (
            Path("run.toml"),
            {"optim.lr": "3e-4", "data.source": ["texts", "*.txt"]},
            [],
        )
    assert classify(["a=b.txt"]) == (None, {"data.source": "a=b.txt"}, [])
    assert classify(["-"]) == (None, {"data.source": "-"}, [])
    assert classify(["stdlib", "data.tokenizer=a=b"]) == (
        None,
        {"data.source": "stdlib", "data.tokenizer": "a=b"},
        [],
    )
    assert classify([]) == (None, {}, [])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["lr=3e-4"], UsageError, "no key lr; did you mean optim.lr=3e-4?"),
        (["optim.lrr=3e-4"], UsageError, "did you mean optim.lr=3e-4?"),
        (["nano"], UsageError, "did you mean model.preset=nano?"),
        (["run.tml"], InputRefused, "did you mean run.toml?"),
        (["texts/on.txt"], InputRefused, "did you mean texts/one.txt?"),
        (["text/"], InputRefused, "did you mean texts?"),
        (["nowhere/at/all"], InputRefused, "nowhere/at/all: no such file or folder"),
        (["circle"], InputRefused, "circle: a link that leads to no file"),
        (["*.md"], InputRefused, "no file matches"),
        (["run.toml", "other.toml"], UsageError, "both configurations"),
        (["texts", "data.source=stdlib"], UsageError, "both name the data"),
        (
            ["optim.lr=1e-3", "optim.lr=2e-3"],
            UsageError,
            "optim.lr is given twice, as 1e-3 and as 2e-3",
        ),
        (["data.source=texts", "data.source=texts"], UsageError, "data.source is given twice"),
    ],
)
def test_an_argument_that_is_nothing_known_is_refused(
    arguments: list[str], kind: type[MonographError], message: str
) -> None:
    Path("texts").mkdir()
    Path("circle").symlink_to("circle")
    for name in ("run.toml", "other.toml", "texts/one.txt"):
        Path(name).write_text("")
    toml, overrides, faults = classify(arguments)
    with pytest.raises(kind) as caught:
        load(toml, overrides, {}, faults=faults)
    assert message in str(caught.value)


def test_every_key_says_in_one_line_what_it_means_and_what_it_is_without_a_value() -> None:
    for key in KEYS:
        said = key_declaration(key)
        assert re.fullmatch(
            r"\S[^\n]{5,115}\.", said.meaning.removesuffix(f" auto: {said.auto}.")
        ), key
        assert said.expected and len(said.auto) < 200, key
        shown = said.example if said.default is None else said.default
        assert (said.default in (None, "auto")) == (said.example is not None), key
        assert not (said.otherwise and said.default is not None), key
        checked_value(key, shown, "here", from_text=False)
    assert "data.source" in KEYS and DataSection().source == "stdlib"


def test_every_word_that_a_key_takes_says_what_it_stands_for() -> None:
    for key in KEYS:
        said = key_declaration(key)
        listed = {*choices(key)} - {"auto"}
        assert listed <= said.choices.keys(), key
        assert (
            not listed or listed == said.choices.keys() or key in ("data.tokenizer", "rl.reward")
        ), key
        parts = re.split(r", or |, | or ", said.expected)
        assert said.choices.keys() <= {*parts} and [
            word for word in parts if word in said.choices
        ] == [*said.choices]
        assert all(
            re.fullmatch(r"\S[^\n]{2,75}[^\s.]", meaning) for meaning in said.choices.values()
        ), key
    assert sum(map(len, (key_declaration(key).choices for key in KEYS))) >= 90


def test_what_a_key_says_applies_without_it_is_what_does() -> None:
    """Of keys whose default is decided elsewhere."""
    from monograph.loss import MtpLoss
    from monograph.planner import defaults
    from monograph.rl.preferences import LOSSES
    from monograph.rl.rewards import REWARDS
    from monograph.session import adapting, door, new_tokens
    from monograph.session.objectives import rewards

    usual: dict[str, Any] = {
        f"lora.{key}": value for key, value in dataclasses.asdict(adapting.DEFAULT_LORA).items()
    }
    usual |= {
        "lora.lr_ratio": 1.0,
        "lora.tokens": new_tokens.AUTO,
        "optim.min_lr_ratio": door.DEFAULT_MIN_LR_RATIO,
    }
    usual |= {"model.family": door.DEFAULT_FAMILY, "data.vocab_size": defaults.DEFAULT.vocabulary}
    usual |= rewards.DEFAULTS | {"rl.truncated": "keep", "rl.truncation_penalty": 0.0}
    usual |= {
        each.key: each.default
        for choice in (*LOSSES.values(), *REWARDS.values())
        for each in choice.parameters
    }
    usual |= {"train.minutes": Settings().train.minutes}
    usual |= {"model.mtp_num_hidden_layers": 0, "train.mtp_weight": MtpLoss().weight}
    fields = {
        f"{name}.{key}": field
        for name, each in SECTIONS.items()
        for key, field in each.model_fields.items()
    }
    stated = {
        key: key_declaration(key).default for key, field in fields.items() if field.default is None
    }
    stated = {key: value for key, value in stated.items() if value is not None}
    assert stated == {key: usual[key] for key in stated}
    assert f"auto: {defaults.DEFAULT.preset}," in key_declaration("model.preset").meaning
    assert (
        f"auto: {defaults.NEW_LENGTH} for a new model"
        in key_declaration("data.sequence_length").meaning
    )
    assert (
        f"auto: {defaults.DEFAULT.tokens_per_update:,}, or"
        in key_declaration("train.tokens_per_update").meaning
    )


def test_every_parameter_of_a_reward_or_a_loss_is_a_key_that_says_what_its_declaration_says() -> (
    None
):
    """Two declarations of one key, or one that another key hides, would differ from what it says."""
    from monograph.rl.preferences import LOSSES
    from monograph.rl.rewards import REWARDS

    for chosen_by, table in (("rl.reward", REWARDS), ("prefer.loss", LOSSES)):
        assert any(row.parameters for row in table.values())
        for parameter in (each for row in table.values() for each in row.parameters):
            said = key_declaration(parameter.key)
            expected = getattr(parameter.values, "expected", parameter.values)
            assert (said.meaning, said.expected) == (parameter.meaning, expected)
            assert said.belongs_to == chosen_by


def as_typed() -> str:
    return commented(settings_of("[optim]\nlr = 1e-3\n[rl]\nreward = 'exact'", train__updates="9"))


def test_the_commented_file_has_each_key_once_with_its_meaning_and_what_it_accepts() -> None:
    text = as_typed()
    paragraphs = text.split("\n\n")
    for key in KEYS:
        name, said = key.partition(".")[2], key_declaration(key)
        about = [" ".join(each.replace("\n## ", " ").split()) for each in paragraphs]
        assert any(f"## {said.meaning} Accepts: {said.expected}. " in each for each in about), key
        assert re.search(rf"^(# )?{name} = .*# \S", text, re.M), key
        assert all(f"## {word}: {meaning}" in text for word, meaning in said.choices.items()), key
    assert len(re.findall(r"^(?:# )?\w+ = ", text, re.M)) == len(KEYS)
    assert max(map(len, text.splitlines())) <= WIDTH == 120


def test_the_commented_file_says_where_each_value_comes_from() -> None:
    lines = [" ".join(line.split()) for line in as_typed().splitlines()]
    for line in (
        "lr = 0.001 # run.toml:2",
        "updates = 9 # command line",
        "# seed = 0 # default",
        "# rank = 16 # example; default: no adapters",
        "# kl_coef = 0.05 # example; not set",
        "# minutes = 3.0 # not set, as train.updates is",
    ):
        assert line in lines


def test_a_key_is_set_by_removing_the_mark_before_it() -> None:
    text = commented(Settings())
    assert tomllib.loads(text) == {name: {} for name in SECTIONS}
    everything = tomllib.loads(re.sub(r"^# ", "", text, flags=re.M))
    assert [f"{name}.{key}" for name, table in everything.items() for key in table] == list(KEYS)
    shape = {"model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads"}
    for key in KEYS:
        name, field = key.split(".")
        together = {each.partition(".")[2] for each in shape} if key in shape else {field}
        before, after = text.split(f"[{name}]")
        set_ = re.sub(
            rf"^# (?=({'|'.join(together)}) = )", "", after, flags=re.M, count=len(together)
        )
        settings = settings_of(f"{before}[{name}]{set_}")
        assert key in settings.origins, key
        assert len(settings.origins) == len(together) + (key in IMPLIED_CHOICES), key
        given = everything[name][field]
        value = settings.values()[key]
        assert (list(value) if isinstance(value, tuple) else value) == given, key


@pytest.mark.parametrize("name", ["a\nb.toml", "a\x07.toml", f"{'long-' * 30}name.toml"])
def test_an_odd_or_long_name_of_a_file_does_not_break_the_commented_one(name: str) -> None:
    Path(name).write_text("[train]\nseed = 7\n")
    text = commented(load(Path(name), {}, {}))
    assert settings_of(text).train.seed == 7
    assert re.search(r"^seed = 7", text, re.M)
    assert max(map(len, text.splitlines())) <= WIDTH


def test_presets_and_sizes_are_the_models_own() -> None:
    presets = get_args(ModelSection.model_fields["preset"].annotation)
    for preset in set(presets) - {"auto"}:
        assert LlamaConfig.preset(preset).hidden_size
    fields = {field.name for field in dataclasses.fields(LlamaConfig)}
    assert set(ModelSection.model_fields) - {"preset", "family", "init"} <= fields


def test_the_configuration_needs_no_torch() -> None:
    program = (
        "import sys, monograph.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": SOURCES}, check=True
    )


def test_all_that_is_wrong_with_a_command_line_its_file_and_its_environment_is_said_at_once() -> (
    None
):
    Path("run.toml").write_text("[train]\nlrr = 1\n[optim]\nlr = -2e-4\n")
    arguments = [
        "run.toml",
        "optim.lrr=3e-4",
        "train.seed=x",
        "nowhere/",
        "train.keep=1",
        "train.keep=2",
        "bf16=True",
    ]
    toml, overrides, faults = classify(arguments)
    with pytest.raises(UsageError) as caught:
        load(toml, overrides, {"MONOGRAPH_TRAIN_SED": "1"}, faults=faults)
    said = str(caught.value).split("; also ")
    assert [line.split(":")[0] for line in said[:4]] == [
        "nowhere/",
        "command line",
        "run.toml",
        "environment",
    ]
    assert said[1].endswith("train.keep is given twice, as 1 and as 2; give it once")
    assert said[4:] == [
        "command line: there is no key optim.lrr; did you mean optim.lr=3e-4?",
        "3 more like these",
    ]
    toml, overrides, faults = classify(["train.seed=x", "bf16=True", "optim.lr=-1"])
    with pytest.raises(
        UsageError, match=r"no key bf16; .*; also .*: train.seed = .*; also .*: optim.lr = "
    ):
        load(toml, overrides, {}, faults=faults)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("optim.name=AdamW_torch", "adamw"),
        ("train.precision=BF16", "bf16"),
        ("train.compile=True", "whole"),
        ("optim.grad_clip=0", "none"),
        ("model.preset=1B", "1b"),
        ("optim.lr=0,0001", "0.0001"),
        ("data.held_out=5%", "0.05"),
        ("train.tokens=1,000,000", "1000000"),
        ("train.minutes=1.5h", "90"),
        ("train.seed=7,", "7"),
        ("train.seed='7'", "7"),
    ],
)
def test_a_value_as_other_programs_or_people_write_it_is_answered_with_the_one_here(
    given: str, meant: str
) -> None:
    key, _, value = given.partition("=")
    with pytest.raises(UsageError, match=f"; did you mean {re.escape(meant)}\\?$"):
        load(None, {key: value}, {})
    checked_value(key, meant, "here", from_text=True)


def test_each_value_of_other_programs_leads_to_one_that_is_taken() -> None:
    assert len(VALUES) >= 15
    for key, named in VALUES.items():
        for name, said in named.items():
            with pytest.raises(UsageError, match=re.escape(said)):
                load(None, {key: name}, {})
            if re.fullmatch(r"\w+", said):
                checked_value(key, said, "here", from_text=True)
            for assignment in re.findall(r"[a-z]+\.[a-z_]+=\w+", said):
                checked_value(*assignment.split("="), "here", from_text=True)


def test_the_beginning_of_one_value_is_answered_with_it() -> None:
    """Not with a shorter value that has more letters in common."""
    with pytest.raises(UsageError, match=r"did you mean gemma4_text\?$"):
        load(None, {"model.family": "gemma4"}, {})


@pytest.mark.parametrize("text", ["1e-4,1e-3", "1e-4 1e-3", "1e-4;1e-3"])
def test_several_values_of_a_run_are_answered_with_the_axis_of_a_sweep(text: str) -> None:
    with pytest.raises(
        UsageError,
        match=r"a run has one value: .* `sweep` in place of `train`, with optim.lr=1e-4,1e-3$",
    ):
        load(None, {"optim.lr": text}, {})


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("train.seed = 1", "did you mean train.seed=1?"),
        ("train/seed=1", "did you mean train.seed=1?"),
        ("++train.seed=1", "did you mean train.seed=1?"),
        ("+lr=1", "did you mean optim.lr=1?"),
        ("1e-3", "a number is a key's value, as in optim.lr=1e-3; several are joined by commas"),
        ("1B", "did you mean model.preset=1b?"),
        ("qwen3", "did you mean model.family=qwen3?"),
        ("dpo", "did you mean --recipe dpo?"),
        ("optim", "it is a section of keys, which `monograph keys optim` lists"),
    ],
)
def test_an_argument_that_is_no_file_is_answered_with_what_was_meant(
    argument: str, said: str
) -> None:
    [fault] = classify([argument]).faults
    assert str(fault) == f"command line: {argument} is not a file; {said}" and isinstance(
        fault, UsageError
    )


def test_a_configuration_of_other_programs_is_not_trained_on_as_text() -> None:
    Path("run.yaml").write_text("lr: 1")
    [fault] = classify(["run.yaml"]).faults
    assert str(fault).startswith("command line: run.yaml: a configuration is a TOML file here: ")
    assert classify(["data.source=run.yaml"]).faults == []
    [fault] = classify(["meta-llama/Llama-3.2-1B"]).faults
    assert "model.init=hf://meta-llama/Llama-3.2-1B for a model" in str(fault) and isinstance(
        fault, InputRefused
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optim.lr", "=", "3e-4"], "write optim.lr=3e-4"),
        (["optim.lr", "3e-4"], "write optim.lr=3e-4"),
        (["optim.lr=", "3e-4"], "write optim.lr=3e-4"),
        (["optim.lr", "=3e-4"], "write optim.lr=3e-4"),
        (["optim.lr:3e-4"], "write optim.lr=3e-4"),
        (["optim.lr:", "3e-4"], "write optim.lr=3e-4"),
        (["optim.lr"], "it takes a number above 0, or auto"),
        (["optim.lr="], "it takes a number above 0, or auto"),
        (["optim.lr", "texts"], "it takes a number above 0, or auto"),
    ],
)
def test_a_key_apart_from_its_value_is_one_fault(arguments: list[str], said: str) -> None:
    Path("texts").mkdir()
    faults = classify(arguments).faults
    assert [str(fault) for fault in faults] == [
        f"command line: optim.lr and its value are one word: {said}"
    ]


# A file, and what is said of it after its name.
SLIPS = [
    ("[optim]\nname = muon", '2: not TOML: a text is in quotes: write name = "muon"'),
    (
        "[optim]\nname = muon # fast",
        '2: not TOML: a text is in quotes: write name = "muon"  # fast',
    ),
    ("[optim]\nlr: 3e-4", "2: not TOML: = stands between a key and its value: write lr = 3e-4"),
    ("[optim]\nlr 3e-4", "2: not TOML: = stands between a key and its value: write lr = 3e-4"),
    ("[optim]\nlr == 3e-4", "2: not TOML: = stands between a key and its value: write lr = 3e-4"),
    (
        "[optim]\n[train]\n[optim]\n",
        "3: not TOML: [optim] is there twice, in lines 1 and 3: keep one, with all ",
    ),
    (
        "[optim]\nlr = 1\n\nlr = 2\n\n",
        "4: not TOML: lr is there twice, in lines 2 and 4: keep one of them",
    ),
    (
        "optim.lr = 1\n[optim]\neps = 1",
        "2: not TOML: optim is there twice, as a section and as a key with a dot: ",
    ),
    ("[optim\nlr = 1", "1: not TOML: a section is a name in brackets: write [optim]"),
    ("optim:\n  lr: 1", "1: not TOML: a section is a name in brackets: write [optim]"),
    ("[optim] lr = 1", "1: not TOML: a section has a line of its own: write [optim] and lr = 1"),
    (
        "[optim]\nbetas = [0.9, 0.95\neps = 1",
        "2: not TOML: the ] is missing: write betas = [0.9, 0.95]",
    ),
    (
        "[optim]\nbetas = 0.9, 0.95",
        "2: not TOML: several numbers are a list: write betas = [0.9, 0.95]",
    ),
    ("[data]\nsource = [a, b]", '2: not TOML: a text is in quotes: write source = ["a", "b"]'),
    (
        "[data]\nsource = ('a', 'b')",
        "2: not TOML: a list is in square brackets: write source = ['a', 'b']",
    ),
    (
        "[optim]\n\tmaster_weights\t=\tTrue",
        "2: not TOML: true and false are in small letters: write master_weights = true",
    ),
    ("[optim]\nlr = 1e-3,", "2: not TOML: nothing stands after a value: write lr = 1e-3"),
    ("[optim]\nlr = 1e-3; eps = 1", "2: not TOML: a line has one key: write lr = 1e-3 and eps = 1"),
    ("[optim]\nname = “muon”", '2: not TOML: quotes are straight in TOML: write name = "muon"'),
    ("[optim]\nlr = “1e-3”", "2: not TOML: a number is not in quotes: write lr = 1e-3"),
    (
        '[optim]\nname = "muon',
        '2: not TOML: a text begins and ends with the same quote: write name = "muon"',
    ),
    (
        '[model]\ninit = "C:\\Users"',
        r"2: not TOML: a backslash is itself only in single quotes: write init = 'C:\Users'",
    ),
    ("[train]\ntokens = 512k", '2: not TOML: a text is in quotes: write tokens = "512k"'),
    (
        "[optim]\nlr = .5",
        "2: not TOML: a number begins and ends with a digit, and not with a 0 before others: write lr = 0.5",
    ),
    (
        "[train]\nseed = 07",
        "2: not TOML: a number begins and ends with a digit, and not with a 0 before others: write seed = 7",
    ),
    ("[optim]\nlr =", "2: not TOML: a key without a value is left out: write # lr ="),
    ("[model]\ninit = None", "2: not TOML: a key without a value is left out: write # init ="),
    ("[optim]\ngrad_clip = none", '2: not TOML: a text is in quotes: write grad_clip = "none"'),
    ("[optim]\nlr = fast", "2: not TOML: lr = fast: expected a number above 0, or auto"),
    ("// a comment", "1: not TOML: a comment begins with #: write # a comment"),
    ("[optim]\nlr\u00a0= 1 2", "2: not TOML: lr = 1 2: expected a number above 0, or auto"),
    (
        "[optim]\u00a0",
        "1: not TOML: it has a space that TOML does not take as one (U+00A0): write [optim]",
    ),
    ("[optim]\r\nname = muon\r\n", '2: not TOML: a text is in quotes: write name = "muon"'),
    ("\ufeff[optim]\nname = muon", '2: not TOML: a text is in quotes: write name = "muon"'),
    (
        "[optim]\rlr = 1",
        " not TOML: its lines end as those of an old Mac do: save it with the line ends of Linux",
    ),
    (
        '{"optim": {"lr": 1}}',
        " not TOML, but JSON: `monograph train --print-config` writes a file to edit",
    ),
    (
        "= 3",
        "1: not TOML: Invalid statement in `= 3`: a line is `key = value`, `[section]` or `# a comment`",
    ),
]


@pytest.mark.parametrize(("text", "said"), SLIPS)
def test_a_slip_of_a_file_is_answered_with_the_line_as_it_should_be(text: str, said: str) -> None:
    Path("run.toml").write_text(text, encoding="utf-8", newline="")
    with pytest.raises(UsageError) as caught:
        load(Path("run.toml"), {}, {})
    assert str(caught.value).startswith(f"run.toml:{said}")
    if "write " in said and "# lr" not in said and "# init" not in said:
        correction = str(caught.value).partition(": write ")[2].replace(" and ", "\n")
        tomllib.loads(correction)


BIG = 200_000


@pytest.mark.parametrize(
    "text",
    [
        "[" + " " * BIG + "x",
        "[optim]\nlr = 1" + " " * BIG + "x",
        '[optim]\nlr = "' + "#" * BIG + '"',
        "[\n" * BIG,
        "a = [\n" * BIG,
        "a " * BIG,
        "[optim]\nlr = " + "1," * BIG,
        "\n" * BIG + "x",
    ],
    ids=range(8),
)
def test_a_large_file_that_is_wrong_is_answered_at_once(text: str) -> None:
    """No pattern goes over it again and again, which would take hours."""
    assert len(refusal(text)) < 2000


@given(st.text(st.sampled_from("ab=:[]{}\"'.,#\n\t \\“é0-+e"), max_size=40))
def test_any_file_that_is_not_toml_is_one_line_that_names_it(text: str) -> None:
    Path("run.toml").write_text(text, encoding="utf-8", newline="")
    try:
        load(Path("run.toml"), {}, {})
    except UsageError as error:
        assert str(error).startswith("run.toml") and "\n" not in str(error)


@pytest.mark.parametrize("section", [*SECTIONS])
@pytest.mark.parametrize("value", ["3", '"adamw"', "true", "[1, 2]"])
def test_a_section_that_is_given_a_value_is_said_to_be_one(section: str, value: str) -> None:
    said = refusal(f"{section} = {value}")
    assert said.startswith(
        f"run.toml:1: {section} = {value}: {section} is a section, not a key: write its keys under "
    )
    line = said.partition("as in `")[2].partition("`")[0]
    settings_of(f"[{section}]\n{line}")
    assert f"[[{section}]] is a list of tables, and {section} is one section" in refusal(
        f"[[{section}]]"
    )


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_given_a_table_is_said_to_be_one(key: str) -> None:
    section, _, name = key.partition(".")
    said = refusal(f"[{section}]\n[{key}]\nx = 1")
    assert said.startswith(f"run.toml:2: {key} is a key, not a section: write `{name} = ")
    assert (
        refusal("[optim.lr]\neps = 1")
        == "run.toml:1: optim.lr is a key, not a section: write eps under [optim]"
    )


@pytest.mark.parametrize("text", ["-2e-4", "-1_000.5", "[1e-3]", '"2e-4"', "'x'"])
def test_a_value_of_a_file_comes_back_as_it_was_written(text: str) -> None:
    said = refusal(f"[optim]\nlr = {text}  # 2e-4")
    assert said.startswith(f"run.toml:2: optim.lr = {text}: expected a number above 0, or auto")


def test_what_an_error_says_of_a_key_is_what_was_written() -> None:
    settings = settings_of(
        "[optim]\nlr = 2e-4  # slow\n[train]\ntokens = '1M'", train__tokens_per_update="64Ki"
    )
    assert settings.quoted("optim.lr") == "run.toml:2: optim.lr = 2e-4"
    assert settings.quoted("train.tokens") == "run.toml:4: train.tokens = '1M'"
    assert (
        settings.quoted("train.tokens_per_update") == "command line: train.tokens_per_update = 64Ki"
    )
    resolved = settings.resolve({"train.tokens_per_update": 128, "train.seed": 3}, "plan")
    assert resolved.quoted("optim.lr") == "run.toml:2: optim.lr = 2e-4"
    assert resolved.quoted("train.tokens_per_update") == "plan: train.tokens_per_update = 128"
    assert settings.quoted("train.seed") == "default: train.seed = 0"


def test_a_hint_for_a_file_is_a_line_of_it() -> None:
    said = refusal("[lora]\nload_in_4bit = true\n[train]\nbf16 = true\n")
    assert (
        'say base = "nf4" and rank = 16 under [lora]' in said
        and 'say precision = "bf16" under [train]' in said
    )


def test_every_wrong_key_and_every_wrong_value_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[train]\nlrr = 1\nseed = 1\nepoch = 2\n[optm]\nlr = 1\neps = 2\n")
    with pytest.raises(UsageError) as caught:
        load(toml, {}, {})
    said = str(caught.value).split("; also ")
    assert [
        re.sub(r".*run.toml:(\d): there is no key ([\w.]+).*", r"\1 \2", line) for line in said
    ] == [
        "2 train.lrr",
        "4 train.epoch",
        "6 optm.lr",
    ]
    toml.write_text('[train]\nseed = "x"\nepochs = -1\n')
    with pytest.raises(
        UsageError,
        match=r'run.toml:2: train.seed = "x": .*; also .*run.toml:3: train.epochs = -1: exp',
    ):
        load(toml, {}, {})
    toml.write_text("[train]\n" + "".join(f"{'q' * number} = 1\n" for number in range(1, 9)))
    with pytest.raises(UsageError, match="; also 3 more like these$"):
        load(toml, {}, {})
