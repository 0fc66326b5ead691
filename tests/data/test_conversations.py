"""Run: pytest tests/data/test_conversations.py (conversations in files: forms, faults, and the rows
they become).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daily import pairwise
from dialogues import CHATS, TOOLS, call, said, speaking, write_chats
from monograph.data.conversations import Conversation, conversation_records, conversation_text
from monograph.data.corpus import Corpus, answer_ends, corpus, render_row
from monograph.data.forms import DEFAULT_SETTINGS, RecordKeys, RecordKind
from monograph.data.loss_mask import AnswerOptions, ConversationConverter
from monograph.data.rows import IGNORE, Rows
from monograph.data.sources import find_sources
from monograph.errors import InputRefused, UsageError

SAID = said("q", "a")


def read(record: dict[str, Any]) -> Conversation:
    text = conversation_text(record)
    assert isinstance(text, str), text
    return Conversation.of_text(text)


def test_every_form_is_the_same_conversation() -> None:
    expected = Conversation(SAID, None, 0)
    assert (
        read({"messages": SAID}) == expected
        and read({"messages": SAID, "id": 5, "tools": []}) == expected
    )
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert read({"conversations": shared}) == read({"conversations": SAID}) == expected
    for prompt in ("q", SAID[:1]):
        for completion in ("a", SAID[1:]):
            assert read({"prompt": prompt, "completion": completion}) == expected._replace(
                trained_from=1
            )
    assert read({"messages": SAID, "tools": json.dumps(TOOLS)}) == read(
        {"messages": SAID, "tools": TOOLS}
    )
    assert read({"prompt": said("q", "a", "r"), "completion": "b"}).answer_indices == [3]
    # "strict" is for the server, which does not show it to the model.
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    assert read({"messages": SAID, "tools": strict}).template_variables == {"tools": TOOLS}
    assert read({"messages": CHATS["two rounds of tools"]}).answer_indices == [1, 3, 5, 7]


USER, ANSWER = SAID


@pytest.mark.parametrize(
    ("record", "detail"),
    [
        ({"text": "x"}, "has none of the keys messages, conversations, prompt and completion"),
        ({"prompt": "x"}, "has none of the keys messages, conversations, prompt and completion"),
        ({"messages": "x"}, "'messages' is a string, not an array of messages"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["x"]}, "messages[0] is a string, not an object with a role and a content"),
        ({"messages": [{"role": "owner", "content": "x"}]}, "messages[0].role is 'owner': expected system, user,"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is null: expected system, user, assistant or tool"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role is an array: expected"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "conversations[0].from is 'robot': expected human"),
        ({"messages": [{"role": "user"}, ANSWER]}, "messages[0] has no content"),
        ({"messages": [USER, {**ANSWER, "content": [1]}]}, "messages[1].content[0] is another part: expected"),
        ({"messages": [USER, {**ANSWER, "content": " \n"}]}, "messages[1].content is empty"),
        ({"messages": [USER, {**ANSWER, "content": "\0"}]}, "'messages[1].content' has a NUL character"),
        ({"messages": [USER, {**ANSWER, "content": "\ud800"}]}, "'messages[1].content' has a lone surrogate"),
        ({"messages": [USER, {**ANSWER, "name": "\ud800"}]}, "has a lone surrogate"),
        ({"messages": [USER]}, "'messages' has no message of an assistant"),
        ({"prompt": SAID, "completion": [USER]}, "'completion' has no message of an assistant"),
        (
            {"system": "s", "prompt": "q", "completion": [{**ANSWER, "weight": 0}]},
            "'completion' has no message of an assistant with another weight than 0",
        ),
        ({"messages": [ANSWER]}, "messages[0]: roles out of order, assistant begins"),
        ({"messages": [USER, USER, ANSWER]}, "messages[1]: roles out of order, user follows user"),
        ({"messages": [USER, ANSWER, ANSWER]}, "messages[2]: roles out of order, assistant follows assistant"),
        ({"messages": [USER, {**USER, "role": "system"}]}, "messages[1]: roles out of order, system follows user"),
        ({"prompt": "x", "completion": [USER]}, "message 1 of 'prompt' and 'completion': roles out of order"),
        (
            {"messages": [USER, ANSWER, {"role": "tool", "content": "3"}]},
            "messages[2]: roles out of order, tool follows assistant, which called no tool",
        ),
        ({"messages": [{**USER, "tool_calls": [1]}]}, "messages[0].tool_calls: expected an array of objects that name"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": 5}]}]}, "messages[1].tool_calls: expected"),
        ({"prompt": "x", "completion": " "}, "completion is empty"),
        ({"prompt": "x", "completion": "\0"}, "'completion' has a NUL character"),
        ({"messages": SAID, "tools": 5}, "'tools' is a number, not an array"),
        ({"messages": SAID, "tools": "{"}, "'tools' is a text that is not JSON"),
        ({"messages": SAID * 501}, "has 1,002 messages, more than 1,000"),
    ],
)  # fmt: skip
def test_a_bad_record_is_named_with_its_field(record: dict[str, Any], detail: str) -> None:
    fault = conversation_text(record)
    assert not isinstance(fault, str) and fault.detail.startswith(detail)


def test_a_chat_that_begins_with_a_tool_is_not_said_to_lack_a_call() -> None:
    fault = conversation_text({"messages": [{"role": "tool", "content": "3"}, USER, ANSWER]})
    assert (
        not isinstance(fault, str)
        and fault.detail == "messages[0]: roles out of order, tool begins"
    )


def test_numbers_stay_as_they_are(tmp_path: Path) -> None:
    chat = [USER, call(a=1, b=2.0, c=10**30)]
    [file] = find_sources(write_chats(tmp_path / "a.jsonl", [chat]), tmp_path).files
    keys = RecordKeys(RecordKind.CONVERSATIONS, DEFAULT_SETTINGS, is_kind_set=False)
    [(_, text)] = conversation_records(file, keys)
    assert isinstance(text, str) and Conversation.of_text(text).messages == chat
    (tmp_path / "a.jsonl").write_text('{"messages": ' + "9" * 5000 + "}")
    [(_, fault)] = conversation_records(file, keys)
    assert not isinstance(fault, str) and "not JSON" in fault.detail


def many(count: int) -> list[list[dict[str, Any]]]:
    """Chats of one to three turns, all different."""
    words = ("why", "what", "so ü", "it is\nthe answer", "1")
    return [
        said(*[f"{words[(number + turn) % 5]} {number}" for turn in range(2 + 2 * (number % 3))])
        for number in range(count)
    ]


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """opened(name, chats, ...) is the corpus of these chats in the template of that name."""

    def build(name: str = "chatml", chats: Any = None, **options: Any) -> Corpus:
        path = write_chats(tmp_path / "chats.jsonl", many(40) if chats is None else chats)
        tokenizer = speaking(tmp_path / name, name)
        return corpus(
            path, tokenizer=tokenizer, **({"sequence_length": 128, "held_out": 0.2} | options)
        )

    return build


def expected_rows(text: Corpus, chats: Any, **how: Any) -> list[tuple[list[int], list[int]]]:
    """(ids, targets) of every row, straight from the rule."""
    answers = ConversationConverter(
        text.tokenizer,
        AnswerOptions(**({"every": True, "truncate": True, "max_inputs": 128} | how)),
    )
    found = []
    for chat in chats:
        for row in answers.rows(Conversation(chat, None, 0)):
            targets = [IGNORE] * len(row.ids)
            for begin, end in row.spans:
                targets[begin:end] = row.ids[begin:end]
            found.append((row.ids[:-1], targets[1:]))
    return found


def pieces_of(rows: Rows) -> list[tuple[list[int], list[int]]]:
    found = []
    for index in range(len(rows)):
        row, column = rows.row(index), 0
        for piece in rows.pieces(index):
            place = slice(column, column + piece.length)
            assert piece.begin == 0 and piece.document_tokens == piece.length + 1, (
                "no row of a conversation is cut"
            )
            found.append((row["tokens"][place].tolist(), row["targets"][place].tolist()))
            column += piece.length
    return found


@pytest.mark.parametrize(("packing", "name"), pairwise(["packed", "padded"], ["qwen3", "chatml"]))
def test_rows_have_the_answers_for_targets(opened: Any, packing: str, name: str) -> None:
    text, chats = opened(name, packing=packing), many(40)
    found = [*pieces_of(text.train), *pieces_of(text.held_out)]
    expected = expected_rows(text, chats)
    assert Counter(map(str, found)) == Counter(map(str, expected))
    assert (len(expected) == 40) == (name == "chatml")
    stats = text.stats
    assert (
        text.train.conversations + text.held_out.conversations == 40
        and text.held_out.conversations > 2
    )
    for rows in (text.train, text.held_out):
        window = rows.window(np.arange(len(rows)))
        trained = window["targets"][window["targets"] != IGNORE]
        assert (
            (rows.tokens, rows.bytes)
            == (len(trained), rows.bytes_of(window))
            == rows.count_targets()
        )
        few = rows.window(rows.evenly_spaced(2))
        assert rows.count_targets(2) == ((few["targets"] != IGNORE).sum(), rows.bytes_of(few))
        assert rows.inputs == sum(len(ids) for ids, _ in pieces_of(rows))
    assert (
        stats.tokens == text.train.tokens
        and stats.trained_share == text.train.tokens / text.train.inputs
    )
    assert (len(text.train) < text.train.documents) == (packing == "packed")


def test_a_side_knows_its_conversations(opened: Any, tmp_path: Path) -> None:
    text = opened(held_out=0)
    assert (
        text.train.conversations == 40
        and text.held_out.conversations == 0
        and len(text.held_out) == 0
    )
    again = corpus(
        tmp_path / "chats.jsonl", tokenizer=text.tokenizer, sequence_length=128, held_out=0
    )
    assert again.fingerprint == text.fingerprint and again.folder == text.folder
    for name in ("b.jsonl", "c.jsonl"):
        write_chats(tmp_path / name, many(2)[-1:])
    two = corpus([tmp_path / "b.jsonl", tmp_path / "c.jsonl"], tokenizer=text.tokenizer, held_out=0)
    assert two.train.conversations == 2, "each the first of its file"


def test_what_decides_the_rows_decides_the_fingerprint(opened: Any, tmp_path: Path) -> None:
    found = [
        opened().fingerprint,
        opened(answers="last").fingerprint,
        opened(too_long="refuse").fingerprint,
        opened(sequence_length=129).fingerprint,
        opened("qwen2.5").fingerprint,
    ]
    (tmp_path / "chatml" / "generation_config.json").write_text("{}")
    config = json.loads((tmp_path / "chatml" / "tokenizer_config.json").read_text())
    (tmp_path / "chatml" / "tokenizer_config.json").write_text(
        json.dumps(config | {"eos_token": "<|im_end|>"})
    )
    found.append(
        corpus(
            tmp_path / "chats.jsonl", tokenizer=tmp_path / "chatml", sequence_length=128
        ).fingerprint
    )
    assert len(set(found)) == len(found)


def test_what_counts_as_conversations(opened: Any, tmp_path: Path) -> None:
    text = opened()
    both = tmp_path / "both.jsonl"
    records = [{"text": f"plain {number}", "messages": chat} for number, chat in enumerate(many(9))]
    both.write_text("".join(json.dumps(record) + "\n" for record in records))
    asked: dict[str, Any] = {"tokenizer": text.tokenizer, "held_out": 0, "sequence_length": 128}
    with pytest.raises(
        InputRefused,
        match="both.jsonl:1: could be read in two ways: as one of texts by 'text' or as",
    ):
        corpus(both, **asked)
    assert corpus(both, text_key="text", **asked).train.conversations == 0
    assert corpus(both, text_key="messages", **asked).train.conversations == 9
    (tmp_path / "plain.txt").write_text("text")
    with pytest.raises(
        UsageError,
        match="chats.jsonl holds conversations and .*plain.txt holds texts; give one kind",
    ):
        corpus([tmp_path / "chats.jsonl", tmp_path / "plain.txt"], **asked)
    with pytest.raises(
        UsageError, match="data.tokenizer = bpe: conversations need the tokenizer and"
    ):
        corpus(tmp_path / "chats.jsonl", tokenizer="bpe", vocab_size=300)
    with pytest.raises(InputRefused, match="the model has no chat template"):
        corpus(tmp_path / "chats.jsonl", tokenizer="bytes")
    with pytest.raises(UsageError, match="data.answers = 'all': must be 'every' or 'last'"):
        corpus(tmp_path / "chats.jsonl", **asked, answers="all")


LONG = said("why " * 80, "so")
SYSTEM = [{"role": "system", "content": "x"}, *SAID]


@pytest.mark.parametrize(
    ("name", "chat", "line", "skipped"),
    [
        ("chatml", LONG, r"chats.jsonl:3: messages.1., an answer, with the least .* raise it; correct", "too long"),
        ("chatml", [USER, USER], "chats.jsonl:3: .*user follows user; correct", "roles out of order"),
        ("gemma", SYSTEM, "chats.jsonl:3: .*system is not supported; correct", "refused by the chat template"),
        ("mistral-v3", SYSTEM, "chats.jsonl:3: the chat template writes the chat before an answer in anoth", None),
        ("glm", SAID, "chats.jsonl:1: the model would never learn to stop", None),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_named_or_skipped(
    opened: Any, name: str, chat: Any, line: str, skipped: str | None
) -> None:
    chats = [*many(2), chat, *many(5)[2:]]
    with pytest.raises(InputRefused, match=line):
        opened(name, chats, held_out=0)
    if skipped is None:
        with pytest.raises(InputRefused, match=line):
            opened(name, chats, held_out=0, bad_records="skip")
        return
    text = opened(name, chats, held_out=0, bad_records="skip")
    assert text.stats.skipped == {skipped: 1} and text.train.conversations == 5
    assert any("chats.jsonl:3: " in note and skipped in note for note in text.notes)
    with pytest.raises(InputRefused, match="no conversation is to train on|no text in it"):
        opened(name, [chat], held_out=0, bad_records="skip")


def test_too_few_to_hold_any_out(opened: Any) -> None:
    with pytest.raises(
        InputRefused,
        match="no conversation is held out; give more of them, or set data.held_out = 0",
    ):
        opened(chats=many(1))


def test_turns_left_out_are_counted(opened: Any) -> None:
    text = opened(chats=[said(*["why so", "because"] * 6)], held_out=0, sequence_length=40)
    assert any(note.startswith("turns were left out before") for note in text.notes)
    assert text.train.conversations == 1 and text.train.documents > 1
    with pytest.raises(
        InputRefused,
        match=r"chats.jsonl:1: messages\[\d+\], an answer, with all .* data.too_long=truncate",
    ):
        opened(
            chats=[said(*["why so", "because"] * 6)],
            held_out=0,
            sequence_length=40,
            too_long="refuse",
        )


def test_a_row_shows_what_is_trained(opened: Any) -> None:
    text = opened(chats=[said("why\x1b", "so", "and", "thus")], held_out=0)
    begin, end = "<|im_start|>", "<|im_end|>"
    plain = f"[{begin}user\nwhy\\x1b{end}\n{begin}assistant\n]so{end}["
    plain += f"\n{begin}user\nand{end}\n{begin}assistant\n]thus{end}"
    shown = render_row(text, 0, colour=False)
    assert plain in shown and f"128 positions, {text.train.tokens} trained, 1 piece" in shown
    assert f"\x1b[32mso{end}\x1b[0m" in render_row(text, 0, colour=True)
    assert answer_ends(text) == f"{end} (id {text.tokenizer.special[end]}) 2x"


def test_damage_is_found_and_mended(opened: Any) -> None:
    text = opened()
    path = text.folder / "train.answers"
    damaged = bytearray(path.read_bytes())
    damaged[130] ^= 1
    path.write_bytes(damaged)
    again = opened()
    assert again.fingerprint == text.fingerprint and any(
        "tokenised again" in note for note in again.notes
    )
    assert again.train.tokens == text.train.tokens


@pytest.mark.parametrize(
    ("kind", "form"), pairwise(["parquet", "arrow"], ["messages", "conversations", "prompt"])
)
def test_tables_have_the_same_rows(opened: Any, tmp_path: Path, kind: str, form: str) -> None:
    pa = pytest.importorskip(
        "pyarrow", reason="pyarrow is not installed: pip install -e '.[parquet]'"
    )
    chats = [*many(12), CHATS["two rounds of tools"]] if form == "messages" else many(12)
    records: list[dict[str, Any]] = [
        {"id": number, form: chat} for number, chat in enumerate(chats)
    ]
    if form == "conversations":
        names = {"user": "human", "assistant": "gpt"}
        records = [
            {form: [{"from": names[m["role"]], "value": m["content"]} for m in chat]}
            for chat in chats
        ]
    if form == "prompt":
        records = [{"prompt": chat[:-1], "completion": chat[-1]["content"]} for chat in chats]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = pa.Table.from_pylist(records)
    if kind == "parquet":
        from pyarrow import parquet

        parquet.write_table(table, tmp_path / "c.parquet")
    else:
        with (
            pa.OSFile(str(tmp_path / "c.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    tokenizer = speaking(tmp_path / "chatml", "chatml")
    one, other = (
        corpus(tmp_path / name, tokenizer=tokenizer, sequence_length=512, held_out=0)
        for name in ("c.jsonl", f"c.{kind}")
    )
    # A call that lacks an argument has null for it, as all calls of a table have all of them.
    if form == "messages":
        assert one.train.conversations == other.train.conversations == 13
    assert pieces_of(one.train) == pieces_of(other.train)


def test_a_damaged_table_of_conversations_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip(
        "pyarrow", reason="pyarrow is not installed: pip install -e '.[parquet]'"
    )
    from pyarrow import parquet

    tokenizer = speaking(tmp_path / "chatml", "chatml")
    parquet.write_table(pa.Table.from_pylist([{"messages": [5]}]), tmp_path / "a.parquet")
    with pytest.raises(
        InputRefused, match=r"a.parquet, row 1: messages\[0\] is a number, not an object"
    ):
        corpus(tmp_path / "a.parquet", tokenizer=tokenizer)
    parquet.write_table(
        pa.Table.from_pylist([{"messages": [{"role": b"user"}]}]), tmp_path / "a.parquet"
    )
    with pytest.raises(InputRefused, match="a.parquet, row 1: is not JSON"):
        corpus(tmp_path / "a.parquet", tokenizer=tokenizer)
    parquet.write_table(pa.Table.from_pylist([{"messages": SAID}] * 99), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for damaged in (content[:-9], content[: len(content) // 2]):
        (tmp_path / "a.parquet").write_bytes(damaged)
        with pytest.raises(InputRefused, match="a.parquet: is damaged"):
            corpus(tmp_path / "a.parquet", tokenizer=tokenizer)
