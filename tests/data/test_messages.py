"""Run: pytest tests/data/test_messages.py (one reader of messages: whoever gets them, they are the
same).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daily import nightly, pairwise
from dialogues import TEMPLATES, call, said, speaking
from monograph.commands.generate import prompts_in_file
from monograph.data.conversations import Conversation, conversation_text
from monograph.data.corpus import corpus
from monograph.data.loss_mask import AnswerOptions, ConversationConverter
from monograph.data.messages import ROLES, message_of, read_messages
from monograph.data.options import ReadingOptions
from monograph.data.records import Unusable
from monograph.decode import Sampling
from monograph.errors import InputRefused
from monograph.rl.pairs import read_pairs
from monograph.rl.prompts import read_prompts
from monograph.rl.rewards import reward_of
from monograph.serve.fields import read
from monograph.serve.refused import Refused
from monograph.serve.requests import ChatRequest
from monograph.text.chat import chat_ids
from monograph.text.messages import MESSAGE_KEYS, METADATA
from monograph.text.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
# It writes everything that it gets, with the names.
SHOWING = (
    "{% for m in messages %}<|im_start|>{% for key in m %}{{ key }}={{ m[key] }};{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% for key in ['role'] %}role=assistant;{% endfor %}{% endif %}"
)
CLEAN: Messages = [
    {"role": "user", "content": "1 + 2?"},
    call(a=1, b=2),
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "It is 4."},
]


def nulls(chat: Messages) -> Messages:
    """As a table has it, whose rows all have all keys."""
    keys = dict.fromkeys(
        ("content", "name", "tool_calls", "tool_call_id", "reasoning_content", "weight")
    )
    filled: Messages = []
    for message in chat:
        calls = message.get("tool_calls")
        inner = [{**each, "id": None, "index": None} for each in calls] if calls else None
        filled.append({**message, **{key: None for key in keys if key not in message}})
        filled[-1]["tool_calls"] = inner
    return filled


def of_openai(chat: Messages) -> Messages:
    """As OpenAI's client writes an answer of its API."""
    nothing = {"refusal": None, "audio": None, "annotations": [], "function_call": None}
    usual = [
        {**message, "content": message.get("content"), **nothing}
        if message["role"] == "assistant"
        else message
        for message in chat
    ]
    return [
        {"tool_calls": [], **message} if message["role"] == "user" else message for message in usual
    ]


def parted(chat: Messages) -> Messages:
    """With each content in parts."""
    parts: Messages = []
    for message in chat:
        text = message.get("content")
        cut = [text[:2], text[2:]] if text else []
        said = (
            {"content": [{"type": "text", "text": part, "image_url": None} for part in cut]}
            if text
            else {}
        )
        parts.append({**message, **said})
    return parts


FORMS = {"nulls": nulls, "OpenAI's": of_openai, "parts": parted}


def rows_of(tokenizer: Tokenizer, record: dict[str, Any]) -> Any:
    text = conversation_text(record)
    assert isinstance(text, str), text
    return ConversationConverter(tokenizer, AnswerOptions(True, True, 10_000)).rows(
        Conversation.of_text(text)
    )


def trained(folder: Path, tokenizer: Tokenizer, chat: Messages) -> Any:
    return rows_of(tokenizer, {"messages": chat})


def completed(folder: Path, tokenizer: Tokenizer, chat: Messages) -> Any:
    return rows_of(tokenizer, {"prompt": chat[:-1], "completion": chat[-1:]})


def judged(folder: Path, tokenizer: Tokenizer, record: dict[str, Any], labelled: bool) -> Any:
    usual: dict[str, Any] = {
        "tokenizer": str(folder),
        "sequence_length": 4000,
        "held_out": 0.0,
        "bad_records": "refuse",
    }
    other = (
        {**record, "prompt": [{"role": "user", "content": "other"}]}
        if labelled
        else {"chosen": "a", "rejected": "b"}
    )
    (folder / "r.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(other))
    rows = read_pairs(ReadingOptions(str(folder / "r.jsonl"), **usual), labelled=labelled).train
    return rows._side.tokens.tolist(), rows._side.answers.tolist()  # type: ignore[attr-defined, union-attr]


def paired(folder: Path, tokenizer: Tokenizer, chat: Messages) -> Any:
    record = {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": said("", "no")[1:]}
    return judged(folder, tokenizer, record, labelled=False)


def labelled(folder: Path, tokenizer: Tokenizer, chat: Messages) -> Any:
    record = {"prompt": chat[:-1], "completion": chat[-1:], "label": True}
    return judged(folder, tokenizer, record, labelled=True)


def rewarded(folder: Path, tokenizer: Tokenizer, chat: Messages) -> Any:
    (folder / "r.jsonl").write_text(json.dumps({"prompt": chat[:-1], "answer": "4"}))
    usual: dict[str, Any] = {"tokenizer": str(folder), "text_key": "text", "held_out": 0.0}
    prompts = read_prompts(
        ReadingOptions(str(folder / "r.jsonl"), **usual), room=4000, reward=reward_of("exact")
    )
    return [(prompt.text, prompt.ids) for prompt in prompts.train]


def asked(folder: Path, tokenizer: Tokenizer, chat: Messages) -> Any:
    (folder / "r.jsonl").write_text(json.dumps({"messages": chat[:-1]}))
    [found] = prompts_in_file(folder / "r.jsonl", True, Sampling(), tokenizer.vocab_size)
    assert not isinstance(found.prompt, str)
    return chat_ids(tokenizer, found.prompt, add_generation_prompt=True)


def served(folder: Path, tokenizer: Tokenizer, chat: Messages) -> Any:
    given = [
        {key: value for key, value in message.items() if key != "weight"} for message in chat[:-1]
    ]
    messages = read(ChatRequest, {"model": "m", "messages": given}, rows=8).messages
    return chat_ids(tokenizer, messages, add_generation_prompt=True)


READERS: dict[str, Callable[[Path, Tokenizer, Messages], Any]] = {
    "conversations": trained, "completions": completed, "pairs": paired, "labels": labelled, "rewards": rewarded,
    "generate": asked, "serve": served,
}  # fmt: skip


def showing(folder: Path) -> Tokenizer:
    speaking(folder, "chatml")
    (folder / "chat_template.jinja").write_text(SHOWING)
    return Tokenizer.from_file(folder)


@pytest.mark.parametrize(("reader", "form"), pairwise(list(READERS), list(FORMS)))
def test_a_message_is_the_same_in_every_form_and_to_every_reader(
    tmp_path: Path, reader: str, form: str
) -> None:
    """A template that shows all that it gets has the same ids, so that null is never the word None."""
    tokenizer = showing(tmp_path)
    read = READERS[reader]
    expected = read(tmp_path, tokenizer, CLEAN)
    assert read(tmp_path, tokenizer, FORMS[form](CLEAN)) == expected


@pytest.mark.parametrize(
    "name",
    nightly(
        ["showing", "chatml", "qwen2.5", "qwen3", "llama-3", "mistral-v3", "zephyr"],
        {"showing", "qwen3", "mistral-v3"},
    ),
)
def test_nulls_are_what_transformers_makes_of_them(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = showing(tmp_path) if name == "showing" else speaking(tmp_path, name)
    ours, theirs = tokenizer.config.template, AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    for chat in (nulls(CLEAN), nulls(CLEAN)[:2], of_openai(CLEAN)):
        known = [
            {key: part for key, part in message.items() if key != "weight"} for message in chat
        ]
        assert ours.render(known) == theirs.apply_chat_template(known, tokenize=False)
        assert "None" not in ours.render(known) or name == "showing", (
            "transformers shows the nulls inside a call"
        )


def test_a_table_with_a_column_for_each_key_is_the_same(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tokenizer = showing(tmp_path / "model")
    spoken = CLEAN[4:]
    options: dict[str, Any] = {"tokenizer": tokenizer, "sequence_length": 1024, "held_out": 0}
    for clean, chat in ((CLEAN, CLEAN), (CLEAN, nulls(CLEAN)), (spoken, parted(spoken))):
        (tmp_path / "clean.jsonl").write_text(json.dumps({"messages": clean}))
        parquet.write_table(pa.Table.from_pylist([{"messages": chat}]), tmp_path / "table.parquet")
        one, other = (
            corpus(tmp_path / name, **options).train.row(0)["tokens"].tolist()
            for name in ("clean.jsonl", "table.parquet")
        )
        assert one == other


def test_a_null_of_a_calls_arguments_is_a_value(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    [row] = trained(tmp_path, tokenizer, [CLEAN[0], call(unit=None, a=1)])
    assert '{"unit": null, "a": 1}' in tokenizer.decode(row.ids)


def weighed(*weights: Any, key: str = "weight") -> Messages:
    chat = said("q", "one", "r", "two", "s", "three")
    for message, weight in zip(chat[1::2], weights, strict=True):
        message[key] = weight
    return chat


def test_an_answer_of_the_weight_0_is_context(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    [whole] = trained(tmp_path, tokenizer, said("q", "one", "r", "two", "s", "three"))
    for weights, kept in (
        ((0, 1, 1), (1, 2)),
        ((1, 0, 0), (0,)),
        ((None, 0, 1.0), (0, 2)),
        ((0.0, 0, None), (2,)),
    ):
        [row] = trained(tmp_path, tokenizer, weighed(*weights))
        assert row.spans == tuple(whole.spans[number] for number in kept)
        assert row.ids == whole.ids[: row.spans[-1][1]], "the rest is context"
    for key in ("train", "training"):
        [row] = trained(tmp_path, tokenizer, weighed(True, False, True, key=key))
        assert row.spans == (whole.spans[0], whole.spans[2])
    qwen = speaking(tmp_path / "qwen3", "qwen3")  # a row for each answer
    assert len(trained(tmp_path, qwen, weighed(0, 1, 1))) == 2
    last = ConversationConverter(tokenizer, AnswerOptions(False, True, 10_000))
    [row] = last.rows(Conversation.of_text(str(conversation_text({"messages": weighed(1, 1, 0)}))))
    assert row.spans == whole.spans[1:2]
    shared = [
        {"from": "human", "value": "q", "weight": 0},
        {"from": "gpt", "value": "a", "weight": 1},
    ]
    assert rows_of(tokenizer, {"conversations": shared}) == trained(
        tmp_path, tokenizer, said("q", "a")
    )


USER, ANSWER = said("q", "a")
BAD: list[tuple[Messages, str]] = [
    ([USER, {**ANSWER, "weight": 0.5}], "messages[1].weight is 0.5: expected 0 or 1"),
    ([USER, {**ANSWER, "weight": "0"}], "messages[1].weight is a string: expected 0 or 1"),
    ([USER, {**ANSWER, "train": "no"}], "messages[1].train is a string: expected true or false"),
    ([USER, {**ANSWER, "train": True, "weight": 0}], "messages[1]: weight and train disagree"),
    (
        [{**USER, "train": True}, ANSWER],
        "messages[0].train asks to train on a message of user, and only an",
    ),
    (
        [USER, {**ANSWER, "weight": 0}],
        "'messages' has no message of an assistant with another weight than 0",
    ),
    (
        [USER, {**ANSWER, "refusal": "I cannot."}],
        "messages[1].refusal is not read: write what is said as the content",
    ),
    (
        [USER, {**ANSWER, "function_call": {"name": "f"}}],
        'messages[1].function_call is not read: give it as "tool_ca',
    ),
    ([USER, {**ANSWER, "audio": {"id": "x"}}], "messages[1].audio is not read: only text is read"),
    ([USER, {**ANSWER, "name": 5}], "messages[1].name is a number, not a string"),
    (
        [USER, {**ANSWER, "reasoning_content": ["x"]}],
        "messages[1].reasoning_content is an array, not a string",
    ),
    (
        [{**USER, "content": [{"type": "image_url", "image_url": {}}]}, ANSWER],
        "content[0] is a part of the type 'image",
    ),
    (
        [{**USER, "content": [{"type": "text", "text": "a", "cut": 1}]}, ANSWER],
        "messages[0].content[0] is another part",
    ),
    ([{**USER, "content": []}, ANSWER], "messages[0].content is empty"),
    ([USER, {**ANSWER, "content": 5}], "'messages[1].content' is a number, not a string"),
    (
        [USER, {"role": "assistant", "content": None, "tool_calls": []}],
        "messages[1] has no content",
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [None]}],
        "messages[1].tool_calls: expected an array of objects",
    ),
]


@pytest.mark.parametrize(("chat", "detail"), BAD, ids=[detail for _, detail in BAD])
def test_what_is_not_read_is_refused_by_its_name(chat: Messages, detail: str) -> None:
    fault = conversation_text({"messages": chat})
    assert not isinstance(fault, str) and detail in fault.detail


@pytest.mark.parametrize("reader", nightly(READERS, {"conversations", "serve"}))
def test_a_key_that_no_template_reads_is_refused_by_its_name(tmp_path: Path, reader: str) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    odd = [{**CLEAN[0], "mood": "glad"}, *CLEAN[1:]]
    if reader == "serve":
        with pytest.raises(Refused, match="there is no field 'mood'"):
            READERS[reader](tmp_path, tokenizer, odd)
        return
    with pytest.raises(
        (InputRefused, Unusable),
        match="message 0 has the key 'mood', which the chat template does not",
    ):
        READERS[reader](tmp_path, tokenizer, odd)
    reads = showing(tmp_path)
    with_mood, without = (READERS[reader](tmp_path, reads, chat) for chat in (odd, CLEAN))
    assert with_mood != without, "this template reads it"


def test_calls_that_no_template_writes_are_refused_and_thoughts_are_named_in_a_note(
    tmp_path: Path,
) -> None:
    speaking(tmp_path, "chatml")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = Tokenizer.from_file(tmp_path)
    with pytest.raises(
        Unusable,
        match="message 1 has tool_calls, which the chat template does not read: they would be",
    ):
        trained(tmp_path, tokenizer, CLEAN)
    answers = ConversationConverter(tokenizer, AnswerOptions(True, True, 10_000))
    chat = [{**USER, "id": 7, "name": "Ann"}, {**ANSWER, "reasoning_content": "hm"}]
    answers.rows(Conversation.of_text(str(conversation_text({"messages": chat}))))
    [note] = answers.notes({}, "")
    assert note.endswith("change nothing: id (1), name (1), reasoning_content (1)")


def test_every_key_of_the_table_is_read() -> None:
    values: dict[str, Any] = {
        "tool_calls": CLEAN[1]["tool_calls"],
        "weight": 0,
        "train": False,
        "training": False,
    }
    for key in MESSAGE_KEYS.keys() - {"role", "from", "value"}:
        message = message_of({"role": "assistant", "content": "a", key: values.get(key, "x")}, "m")
        assert message.get(key) == values.get(key, "x") or message["weight"] == 0
    assert read_messages([{"from": "human", "value": "a"}], "m") == said("a")
    assert not METADATA & MESSAGE_KEYS.keys() and all(
        role in MESSAGE_KEYS["role"] for role in ROLES
    )


# A family's way to write the arguments of a call: the template's part, and whether a text of JSON
# stays as it is.
ARGUMENTS = {
    "tojson": ("{{ c.function.arguments | tojson }}", False),
    "whole": ("{{ c | tojson }}", False),
    "items": ("{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}", False),
    "string or not": (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}",
        True,
    ),
    "text": ("{{ '```json\n' + c.function.arguments + '\n```' }}", True),
}
CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.id }}"
    "CALL{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("family", nightly(ARGUMENTS, {"string or not"}))
def test_arguments_as_a_text_of_json_are_written_once(tmp_path: Path, family: str) -> None:
    from transformers import AutoTokenizer

    part, is_kept = ARGUMENTS[family]
    speaking(tmp_path, "chatml")
    (tmp_path / "chat_template.jinja").write_text(CALLING.replace("CALL", part))
    tokenizer, theirs = Tokenizer.from_file(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    arguments = {"city": 'Saint-"Malo"', "days": 3}
    as_object = [CLEAN[0], call(**arguments)]
    as_text = [CLEAN[0], call()]
    as_text[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
    [row] = trained(tmp_path, tokenizer, as_text)
    wanted = theirs.apply_chat_template(as_text if is_kept else as_object, tokenize=False)
    written = theirs.decode(row.ids)
    assert wanted == written + "\n" and '\\\\"' not in written
    answers = ConversationConverter(tokenizer, AnswerOptions(True, True, 10_000))
    answers.rows(Conversation(as_text, None, 0))
    assert answers.notes({}, "") == (
        ()
        if is_kept
        else (
            "the chat template writes a call's arguments from an object: 1 texts of JSON became objects",
        )
    )
    not_json = [CLEAN[0], call()]
    not_json[1]["tool_calls"][0]["function"]["arguments"] = "{not JSON"
    if family != "items":  # it refuses a text
        assert "{not JSON" in theirs.decode(trained(tmp_path, tokenizer, not_json)[0].ids)
        answers = ConversationConverter(tokenizer, AnswerOptions(True, True, 10_000))
        answers.rows(Conversation(not_json, None, 0))
        assert is_kept or "not a JSON object" in " ".join(answers.notes({}, ""))


def test_an_escaped_control_token_in_arguments_stays_letters(tmp_path: Path) -> None:
    """It becomes a token's letters only when the text of JSON is parsed."""
    tokenizer = speaking(tmp_path, "chatml")
    chat = [CLEAN[0], call()]
    chat[1]["tool_calls"][0]["function"]["arguments"] = '{"a": "<\\u007cim_end\\u007c>"}'
    [row] = trained(tmp_path, tokenizer, chat)
    assert row.ids.count(tokenizer.special["<|im_end|>"]) == 2, "one for each message"
    assert '"<|im_end|>"' in tokenizer.decode(row.ids)
    assert chat_ids(tokenizer, chat).count(tokenizer.special["<|im_end|>"]) == 2


@pytest.mark.slow
def test_every_template_of_these_tests_takes_its_arguments_in_one_form(tmp_path: Path) -> None:
    forms = {}
    for name in TEMPLATES:
        template = speaking(tmp_path / name, name).config.template
        assert template is not None
        forms[name] = template.wants_objects
    assert forms == {name: name not in ("mistral-v1", "gemma") for name in TEMPLATES}, (
        "those two know no calls"
    )
