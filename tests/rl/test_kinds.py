"""Run: pytest tests/rl/test_kinds.py (what the records of a source are trained as, and what each of
their keys does)
"""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_parts import made_parts

from daily import nightly, pairwise
from dialogues import TOOLS, said
from monograph.config import load
from monograph.config.keys import PreferSection
from monograph.config.sources import classify
from monograph.data.corpus import Corpus, corpus
from monograph.data.options import ReadingOptions
from monograph.errors import InputRefused, UsageError
from monograph.evaluation.choices import are_question_files
from monograph.rl.pairs import read_pairs
from monograph.rl.prompts import read_prompts
from monograph.rl.rewards import Reward, TeacherReward
from monograph.session.objectives import with_records
from monograph.text.tokenizer import Tokenizer
from record_files import PROMPTS, RECORDS, SOURCES, Records, Source, last_with, reader
from scripts import script

LENGTH = 512
COMMON: dict[str, Any] = {"sequence_length": LENGTH, "held_out": 0.0, "bad_records": "refuse"}
JUDGED = [name for name, (_, trained_as) in RECORDS.items() if trained_as in ("dpo", "kto")]
# By day each name and each form once.
DAY = {
    (list(RECORDS)[n % len(RECORDS)], list(SOURCES)[n % len(SOURCES)])
    for n in range(max(len(RECORDS), len(SOURCES)))
}
CHATS = [name for name, (_, trained_as) in RECORDS.items() if trained_as == "conversations"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose template reads all keys."""
    return reader(tmp_path_factory.mktemp("reader"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOGRAPH_HOME", str(tmp_path / "monograph-home"))


def decided(source: Source, tokenizer: Tokenizer, **data: Any) -> str:
    """What `monograph train` learns from a source: the loss of judged answers, or texts, or
    conversations.
    """
    named = classify([source] if isinstance(source, str) else source).overrides
    loss = (
        with_records(load(None, named | {f"data.{key}": value for key, value in data.items()}))
        .section(PreferSection)
        .loss
    )
    if loss is not None:
        return str(loss)
    weights = named.get("data.weights")
    rows = corpus(
        named["data.source"], tokenizer=tokenizer, weights=weights, **{**COMMON, **data}
    ).train
    return "conversations" if rows.conversations else "texts"


def windows(text: Corpus) -> Any:
    """Everything that a run learns from rows: their tokens, targets, answers and labels."""
    window = text.train.window(np.arange(len(text.train)))
    labels = getattr(text.train, "labels", np.zeros(0))
    return {name: array.tolist() for name, array in window.items()} | {"labels": labels.tolist()}


def learned(
    name: str, source: Source, tokenizer: Tokenizer, reward: Reward | None = None, **data: Any
) -> Any:
    """Everything that a run learns from records of this name, with the source's notes."""
    if name in PROMPTS:
        reading = ReadingOptions(source, tokenizer=tokenizer, **{**COMMON, **data})
        prompts = read_prompts(reading, room=LENGTH, reward=reward or Reward())
        return [(prompt.text, prompt.ids, prompt.teacher_ids) for prompt in prompts.train], ()
    if name in JUDGED:
        reading = ReadingOptions(source, tokenizer=tokenizer, **{**COMMON, **data})
        pairs = read_pairs(reading, labelled=RECORDS[name][1] == "kto")
        return windows(pairs), pairs.notes
    text = corpus(source, tokenizer=tokenizer, **{**COMMON, **data})
    return windows(text), text.notes


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


# ---- which kind ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[] if (name, form) in DAY else pytest.mark.slow)
        for name in RECORDS
        for form in SOURCES
    ],
)
def test_records_are_of_one_kind_in_every_form_of_source(
    name: str, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records, trained_as = RECORDS[name]
    assert decided(SOURCES[form](tmp_path, records), tokenizer) == trained_as


@pytest.mark.parametrize(
    ("name", "form"),
    pairwise(
        [name for name in JUDGED if RECORDS[name][1] == "kto"],
        [form for form in SOURCES if form != "list"],
    ),
)
def test_a_missing_label_does_not_make_bad_answers_good_ones(
    name: str, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = RECORDS[name][0]
    source = SOURCES[form](tmp_path, [{**records[0], "label": None}, *records[1:]])
    assert decided(source, tokenizer) == "kto"
    if form != "weight":
        with pytest.raises(InputRefused, match=r"a\.\w+.*:1: expected true or false under 'label', which is missing|"
                           r"data-00000-of-00001.arrow:1: expected true or false"):  # fmt: skip
            learned(name, source, tokenizer)


@pytest.mark.parametrize("label", [2, -1, 0.5, "good", "yes", "", [], {"good": True}])
def test_what_is_no_label_is_refused_by_its_line(
    label: Any, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = last_with(RECORDS["labelled texts"][0], label=label)
    source = lines(tmp_path / "a.jsonl", *records)
    assert decided(source, tokenizer) == "kto"
    with pytest.raises(
        InputRefused, match="a.jsonl:4: expected true or false under 'label', which is "
    ):
        learned("labelled texts", source, tokenizer)
    every = lines(tmp_path / "b.jsonl", *({**record, "label": label} for record in records))
    assert decided(every, tokenizer) == "kto"


def test_labels_in_all_their_forms_are_the_same_labels(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    forms = [lambda good: good, int, float, lambda good: str(good).lower(), str]
    found = []
    for number, form in enumerate(forms):
        records = [
            {**record, "label": form(record["label"])} for record in RECORDS["labelled texts"][0]
        ]
        found.append(
            learned("labelled texts", lines(tmp_path / f"{number}.jsonl", *records), tokenizer)
        )
    assert all(each == found[0] for each in found[1:])
    assert found[0][0]["labels"] == [1, 0, -1, 0, 1, 0, -1, 0]


PREFERENCE = {
    "prompt": "q",
    "chosen": said("q", "a"),
    "rejected": said("q", "b"),
    "messages": said("q", "a"),
}
TWO_KINDS: list[tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (
        PREFERENCE,
        [({"text_key": "messages"}, "conversations"), ({"ignore_keys": "messages"}, "dpo")],
    ),
    (
        {"text": "the text", "messages": said("q", "a")},
        [({"text_key": "text"}, "texts"), ({"text_key": "messages"}, "conversations")],
    ),
    (
        {"text": "the text", "chosen": "a", "rejected": "b"},
        [({"text_key": "text"}, "texts"), ({"ignore_keys": ["text"]}, "dpo")],
    ),
    (
        {"text": "the text", "completion": "a", "label": True},
        [({"text_key": "text"}, "texts"), ({"ignore_keys": ["text"]}, "kto")],
    ),
    (
        {"messages": said("q", "a"), "conversations": said("q", "b")},
        [
            ({"text_key": "messages"}, "conversations"),
            ({"text_key": "conversations"}, "conversations"),
        ],
    ),
    (
        {"prompt": "q", "completion": "a", "messages": said("q", "a")},
        [({"text_key": "prompt"}, "conversations"), ({"text_key": "messages"}, "conversations")],
    ),
    (
        {"prompt": "q", "completion": "a", "label": True, "chosen": "c", "rejected": "d"},
        [
            ({"ignore_keys": ["completion", "label"]}, "dpo"),
            ({"ignore_keys": ["chosen", "rejected"]}, "kto"),
        ],
    ),
]


@pytest.mark.parametrize(
    ("record", "choices"), TWO_KINDS, ids=[" ".join(record) for record, _ in TWO_KINDS]
)
@pytest.mark.parametrize(
    "form",
    [
        "file",
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in ("folder", "pattern", "parquet", "saved dataset")
        ),
    ],
)
def test_what_could_be_two_kinds_is_refused_with_both_keys_unless_a_setting_chooses(
    record: dict[str, Any], choices: Any, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = SOURCES[form](tmp_path, [record] * 3)
    with pytest.raises(InputRefused, match="could be read in two ways: ") as raised:
        decided(source, tokenizer)
    for settings, trained_as in choices:
        assert decided(source, tokenizer, **settings) == trained_as
        key = settings.get("text_key")
        assert key is None or f"data.text_key={key}" in str(raised.value)
    assert "data.ignore_keys" in str(raised.value)
    others = [
        key for key in ("messages", "conversations", "chosen", "label", "text") if key in record
    ]
    assert all(f"'{key}'" in str(raised.value) for key in others)


def test_a_loss_that_is_given_decides(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = lines(tmp_path / "a.jsonl", *([PREFERENCE] * 3))
    assert (
        with_records(load(None, {"data.source": source, "prefer.loss": "simpo"}))
        .section(PreferSection)
        .loss
        == "simpo"
    )
    found, notes = learned("pairs of chats", source, tokenizer)
    alone = lines(
        tmp_path / "b.jsonl", *([{k: v for k, v in PREFERENCE.items() if k != "messages"}] * 3)
    )
    assert found == learned("pairs of chats", alone, tokenizer)[0]
    assert notes == (
        "ignored keys, which change nothing, by the number of their records: 'messages' in 3",
    )


def test_records_of_two_kinds_in_one_file_are_refused_by_their_lines(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kinds = {
        "texts": "texts",
        "messages": "conversations",
        "pairs of texts": "pairs",
        "labelled texts": "labelled",
    }
    for one, word in kinds.items():
        for other, its_word in kinds.items():
            if one == other:
                continue
            source = lines(tmp_path / "a.jsonl", *RECORDS[one][0], *RECORDS[other][0])
            with pytest.raises(
                InputRefused, match=f"a.jsonl:1: is one of {word}.*a.jsonl:5 is one of {its_word}"
            ):
                decided(source, tokenizer)
            files = [
                lines(tmp_path / "b.jsonl", *RECORDS[one][0]),
                lines(tmp_path / "c.jsonl", *RECORDS[other][0]),
            ]
            with pytest.raises(
                UsageError, match=f"b.jsonl holds {word}.*c.jsonl holds {its_word}.*; give one kind"
            ):
                decided(files, tokenizer)


def test_a_record_of_another_kind_after_the_sample_is_refused_by_its_line(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    chats, labelled = (
        [{"prompt": f"{n}?", "completion": "a"} for n in range(120)],
        {"prompt": "q", "completion": "bad"},
    )
    unknown = "unknown key '{}' beside 'prompt' and 'completion'"
    more_of: list[tuple[dict[str, Any], str]] = [
        ({**labelled, "weight": 0}, unknown.format("weight")),
        ({**labelled, "chosen": "a", "rejected": "b"}, unknown.format("chosen")),
        (
            {**labelled, "label": False},
            "is one of labelled answers by 'completion' and 'label', but the earlier records are",
        ),
        (
            {"chosen": "a", "rejected": "b"},
            "is one of pairs of answers by 'chosen' and 'rejected', but the earlier records are",
        ),
    ]
    for record, said_of_it in more_of:
        source = lines(tmp_path / "a.jsonl", *chats, record)
        with pytest.raises(InputRefused, match=f"a.jsonl:121: {said_of_it}"):
            learned("messages", source, tokenizer)


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("[1]", "null", '{"error": "too many requests"}')
        ),
    ],
)
@pytest.mark.parametrize("name", nightly([*RECORDS, *PROMPTS], [*RECORDS, *PROMPTS][::3]))
def test_a_bad_first_line_is_skipped_alone(
    name: str, bad: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = every(name)
    content = Path(lines(tmp_path / "good.jsonl", *records)).read_text()
    source = tmp_path / "a.jsonl"
    source.write_text(f"{bad}\n{content}")
    assert learned(name, str(source), tokenizer, bad_records="skip")[0] == learned(
        name, str(tmp_path / "good.jsonl"), tokenizer
    )[0]  # fmt: skip
    if name in RECORDS:
        assert decided(str(source), tokenizer, bad_records="skip") == RECORDS[name][1]
    with pytest.raises(InputRefused, match="a.jsonl:1: "):
        learned(name, str(source), tokenizer)


def test_a_damaged_file_is_passed_over_where_bad_records_are(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    whole = lines(tmp_path / "a.jsonl", *RECORDS["labelled texts"][0])
    damaged = Path(str(SOURCES["gzip"](tmp_path / "b", RECORDS["labelled texts"][0])))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert decided([whole, str(damaged)], tokenizer, bad_records="skip") == "kto"
    with pytest.raises(InputRefused, match="a.jsonl.gz: is cut short"):
        decided([whole, str(damaged)], tokenizer)


def test_a_bad_first_line_does_not_hide_questions(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{\n{"question": "q", "choices": ["a", "b"], "answer": 1}\n')
    assert are_question_files([str(path)], None)


def test_standard_input_and_text_files_that_hold_records_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def piped(content: str) -> Any:
        return types.SimpleNamespace(buffer=io.BytesIO(content.encode()), isatty=lambda: False)

    for name, (records, _) in RECORDS.items():
        content = Path(lines(tmp_path / "a.jsonl", *records)).read_text()
        monkeypatch.setattr(sys, "stdin", piped(content))
        with pytest.raises(
            InputRefused, match=r"standard input: holds records in JSON.*ends in .jsonl"
        ):
            learned("texts", "-", tokenizer)
        for suffix, text in ((".json", json.dumps(records, indent=2)), (".txt", content)):
            path = tmp_path / f"a{suffix}"
            path.write_text(text)
            with pytest.raises(InputRefused, match=f"a{suffix}: holds records in JSON"):
                decided(str(path), tokenizer)
        assert name
    monkeypatch.setattr(sys, "stdin", piped('{"name": "a package", "version": "1"}\n' * 9))
    assert learned("texts", "-", tokenizer), "JSON that is no record is a text"


# ---- which keys ----------------------------------------------------------------------------------

UNKNOWN: dict[str, Any] = {
    "weight": 0, "train": False, "mask": [0, 1], "loss_weight": 0.5, "functions": TOOLS, "function_call": "none",
    "tool_choice": "auto", "parallel_tool_calls": False, "response_format": {"type": "text"}, "images": ["a.png"],
    "audio": "a.wav", "system_prompt": "Be brief.", "instruction": "Add.", "input": "1", "output": "2",
    "response": "2", "question": "1?", "answer": "2", "reward": 0.5, "margin": 0.1, "thinking": "hm", "reasoning": "hm",
    "enable_thinking": True, "add_generation_prompt": True, "chat_template": "{{ messages }}",
    "Messages": said("q", "a"), "message": said("q", "a"), "conversation": said("q", "a"), "reject": "b",
    "labels": [True], "Label": False,
    "tool": TOOLS[0], "eos": "</s>", "ünknown": "x",
}  # fmt: skip
KNOWN: dict[str, Any] = {
    "system": "Be brief.", "tools": TOOLS, "documents": [{"title": "a", "text": "b"}],
    "chat_template_kwargs": {"enable_thinking": True},
}  # fmt: skip
KEYED = [name for name in RECORDS if name != "texts"]


def refused_unknown(
    name: str, form: str, key: str, at: int, folder: Path, tokenizer: Tokenizer
) -> None:
    records = list(RECORDS[name][0])
    records[at] = {**records[at], key: UNKNOWN[key]}
    with pytest.raises(InputRefused) as raised:
        learned(name, SOURCES[form](folder, records), tokenizer)
    message = str(raised.value)
    row = at - 1 if form == "list" and at > 1 else at + 1
    assert (
        f":{row}: unknown key {ascii(key)} beside " in message
        or f", row {row}: unknown key {ascii(key)}" in message
    )
    assert "name it in data.ignore_keys to train without it" in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "form"), pairwise(KEYED, [form for form in SOURCES if form != "weight"])
)
def test_an_unknown_key_is_refused_by_name_with_its_record(
    name: str, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    number = KEYED.index(name) * len(SOURCES) + list(SOURCES).index(form)
    refused_unknown(name, form, list(UNKNOWN)[number % len(UNKNOWN)], 0, tmp_path, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in SOURCES if form != "weight"])
@pytest.mark.parametrize("name", KEYED)
def test_every_unknown_key_is_refused_by_name_with_its_record(
    name: str, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    for number, key in enumerate(UNKNOWN):
        refused_unknown(name, form, key, number % 4, tmp_path / str(number), tokenizer)


OF_TEXTS = (
    "pairs of texts",
    "labelled texts",
    "labels of 0 and 1",
    "labels as texts",
    "text to reward",
)
SEEN = {
    "system": "Be brief.",
    "tools": '"name": "add"',
    "documents": '"title": "a"',
    "chat_template_kwargs": "think",
}


def every(name: str) -> Records:
    return RECORDS[name][0] if name in RECORDS else PROMPTS[name]


@pytest.mark.parametrize(
    ("name", "form"),
    pairwise([name for name in [*KEYED, *PROMPTS] if name not in OF_TEXTS], ["file", "parquet"]),
)
def test_known_keys_are_seen_in_the_tokens(
    name: str, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    keyed = [
        {**record, **dict([item])} for record, item in zip(every(name), KNOWN.items(), strict=True)
    ]
    found = learned(name, SOURCES[form](tmp_path, keyed), tokenizer)[0]
    texts = [
        tokenizer.decode(row)
        for row in (found["tokens"] if isinstance(found, dict) else [ids for _, ids, _ in found])
    ]
    answers = 2 if name in JUDGED else 1
    # A labelled answer may be beside several prompts.
    others = 2 * answers if name.startswith("labelled") else answers
    for key, mark in SEEN.items():
        assert answers <= sum(text.count(mark) for text in texts) <= others, key


@pytest.mark.parametrize(("name", "form"), pairwise(OF_TEXTS, ["file", "parquet"]))
def test_keys_of_chats_are_refused_by_name_beside_texts(
    name: str, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    before = learned(name, SOURCES[form](tmp_path / "before", every(name)), tokenizer)[0]
    for key, value in KNOWN.items():
        source = SOURCES[form](tmp_path / key, last_with(every(name), **{key: value}))
        with pytest.raises(
            InputRefused, match=f":4: '{key}' is for chats, and the .* (is a text|are texts): .*"
        ):
            learned(name, source, tokenizer)
        assert learned(name, source, tokenizer, ignore_keys=key)[0] == before


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in SOURCES if form != "weight"])
@pytest.mark.parametrize("name", [name for name in [*KEYED, *PROMPTS] if name not in OF_TEXTS])
def test_each_known_key_alone_changes_what_is_learned_and_is_left_out_if_it_is_asked(
    name: str, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    seen = [learned(name, SOURCES[form](tmp_path / "before", every(name)), tokenizer)[0]]
    for key, value in KNOWN.items():
        source = SOURCES[form](tmp_path / key, last_with(every(name), **{key: value}))
        found = learned(name, source, tokenizer)[0]
        assert found not in seen, f"{key} changes what is learned"
        seen.append(found)
        if key != "system":
            as_text = SOURCES[form](
                tmp_path / f"{key} as text", last_with(every(name), **{key: json.dumps(value)})
            )
            assert learned(name, as_text, tokenizer)[0] == found, f"{key} as a text of JSON"
        assert learned(name, source, tokenizer, ignore_keys=[key])[0] == seen[0], (
            f"{key} is left out"
        )
        nothing = SOURCES[form](tmp_path / f"no {key}", last_with(every(name), **{key: None}))
        assert learned(name, nothing, tokenizer)[0] == seen[0], f"null under {key} is nothing"


@pytest.mark.parametrize(
    ("name", "form"),
    pairwise(
        ["messages", "prompt and completion", "pairs of texts", "labelled texts"],
        ["file", "parquet"],
    ),
)
def test_metadata_change_nothing_and_are_counted(
    name: str, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    from monograph.data.forms import METADATA

    records = RECORDS[name][0]
    before, notes = learned(name, SOURCES[form](tmp_path / "before", records), tokenizer)
    more = dict.fromkeys(sorted(METADATA), "x")
    after, counted = learned(
        name, SOURCES[form](tmp_path / "a", [{**each, **more} for each in records]), tokenizer
    )
    assert after == before
    [note] = [line for line in counted if line not in notes]
    assert note.startswith("ignored keys, which change nothing, by the number of their records: ")
    assert note.count(" in 4") == len(METADATA)


def test_a_text_is_read_alone_whatever_stands_beside_it(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = RECORDS["texts"][0]
    before = learned("texts", lines(tmp_path / "a.jsonl", *records), tokenizer)
    beside = lines(tmp_path / "b.jsonl", *({**record, **UNKNOWN, "label": 1} for record in records))
    assert learned("texts", beside, tokenizer) == before


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    (
        {"chat_template_kwargs": {"messages": []}},
        "'messages' cannot be a variable of the chat template",
    ),
    ({"chat_template_kwargs": {"tokenizer": 1}}, "'tokenizer' cannot be a variable"),
    ({"chat_template_kwargs": {"a b": 1}}, "'a b' cannot be a variable"),
    ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' is an array, not an object"),
    ({"chat_template_kwargs": "{"}, "'chat_template_kwargs' is a text that is not JSON"),
    (
        {"chat_template_kwargs": {"unheard_of": 1}},
        "'unheard_of' changes nothing, because the model's chat template",
    ),
    ({"documents": "x"}, "'documents' is a text that is not JSON"),
    ({"documents": {"a": 1}}, "'documents' is an object, not an array"),
    ({"system": 5}, "'system' is a number, not a string"),
]


@pytest.mark.parametrize(
    ("name", "case"),
    pairwise([*CHATS, "pairs of messages", "labelled messages", "messages to reward"], BAD_VALUES),
)
def test_a_bad_value_is_refused_by_its_key(
    name: str, case: tuple[dict[str, Any], str], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    more, said_of_it = case
    with pytest.raises(InputRefused, match="a.jsonl:1: ") as raised:
        learned(name, lines(tmp_path / "a.jsonl", {**every(name)[0], **more}), tokenizer)
    assert said_of_it in str(raised.value)


def test_a_system_message_is_not_given_twice(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = [{"role": "system", "content": "s"}, *said("q", "a")]
    records: dict[str, Records] = {
        "messages": [{"messages": chat, "system": "t"}],
        "pairs of messages": [
            {
                "prompt": chat[:-1],
                "chosen": chat[-1:],
                "rejected": said("q", "b")[1:],
                "system": "t",
            }
        ],
        "messages to reward": [{"prompt": chat[:-1], "system": "t"}],
    }
    for name, each in records.items():
        with pytest.raises(
            InputRefused,
            match="a.jsonl:1: has 'system' and begins with a message of system: keep one",
        ):
            learned(name, lines(tmp_path / "a.jsonl", *each), tokenizer)


def test_tools_that_the_template_does_not_read_are_refused(tmp_path: Path) -> None:
    deaf = reader(tmp_path / "deaf")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    (tmp_path / "deaf" / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    deaf = Tokenizer.from_file(tmp_path / "deaf")
    for name in ("messages", "pairs of messages", "labelled messages", "messages to reward"):
        source = lines(tmp_path / "a.jsonl", {**every(name)[0], "tools": TOOLS}, *every(name)[1:])
        with pytest.raises(
            InputRefused, match="a.jsonl:1: 'tools' changes nothing, because the model's"
        ):
            learned(name, source, deaf)
        assert learned(name, source, deaf, ignore_keys="tools")


def test_a_prompt_beside_a_whole_chat_is_a_copy_of_a_message(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    for name in ("messages", "conversations", "pairs of chats"):
        for prompt, passes in (
            ("3?", True),
            (" 3?\n", True),
            (said("3?"), True),
            ("4?", False),
            (said("4?"), False),
        ):
            if name == "pairs of chats" and isinstance(prompt, list):
                continue  # there a list is what stands before the answers
            source = lines(tmp_path / "a.jsonl", {**every(name)[3], "prompt": prompt})
            if passes:
                assert learned(name, source, tokenizer)
                continue
            with pytest.raises(
                InputRefused,
                match="a.jsonl:1: 'prompt' beside a whole chat, of which no message is",
            ):
                learned(name, source, tokenizer)


def test_a_prompt_to_reward_obeys_or_refuses_what_would_change_it_and_gives_the_rest_to_its_reward(
    tmp_path: Path,
) -> None:
    tokenizer = reader(tmp_path / "reader")
    for record in (*(each[0] for each in PROMPTS.values()),):
        source = lines(tmp_path / "a.jsonl", {**record, "functions": TOOLS, "weight": 3})
        with pytest.raises(
            InputRefused, match="a.jsonl:1: 'functions' is not read: write them under 'tools'"
        ):
            learned("text to reward", source, tokenizer)
        reading = ReadingOptions(source, tokenizer=tokenizer, ignore_keys="functions", **COMMON)
        [prompt] = read_prompts(reading, room=LENGTH, reward=Reward()).train
        assert prompt.record["weight"] == 3 and prompt.record["functions"] == TOOLS


def test_a_teacher_s_prompt_has_the_record_s_tools_and_system(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    record = {
        "prompt": said("q?"),
        "teacher_prompt": said("q, in other words?"),
        "tools": TOOLS,
        "system": "Be brief.",
    }
    source = lines(tmp_path / "a.jsonl", record)
    [(text, ids, teacher_ids)], _ = learned(
        "messages to reward", source, tokenizer, TeacherReward()
    )
    for each in (ids, teacher_ids):
        assert "Be brief." in tokenizer.decode([*each]) and '"name": "add"' in tokenizer.decode(
            [*each]
        )
    assert json.loads(text)[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "name", nightly(["messages", "pairs of messages", "messages to reward"], {"messages"})
)
def test_an_ignored_key_is_part_of_the_fingerprint_only_if_it_would_say_what_is_learned(
    name: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = lines(tmp_path / "a.jsonl", *every(name))

    def fingerprint(ignored: str | list[str] | None) -> str:
        reading = ReadingOptions(source, tokenizer=tokenizer, ignore_keys=ignored, **COMMON)
        if name in PROMPTS:
            return read_prompts(reading, room=LENGTH, reward=Reward()).fingerprint
        return (
            read_pairs(reading).fingerprint
            if name in JUDGED
            else corpus(**vars(reading)).fingerprint
        )

    assert (
        fingerprint(None)
        == fingerprint("weight")
        == fingerprint(["weight", "id"])
        != fingerprint("tools")
    )


def test_pages_say_which_keys_a_record_of_each_kind_may_have() -> None:
    made = script("docs/make_records.py")
    for page, tables in made.tables().items():
        shown = made_parts(page.read_text(encoding="utf-8"), made.BEGIN)
        assert shown == tables, f"{page.name}: run python docs/make_records.py"
