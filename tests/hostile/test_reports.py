r"""Run: pytest tests/hostile/test_reports.py (what people reported of other programs, each by its
smallest input).

dev/log.md lists all reports that were tried. Here is what no other test has: a row is named after
its report.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dialogues import TEMPLATES, TOOLS, said, speaking
from monograph.automata import acceptor
from monograph.data.conversations import Conversation, conversation_text
from monograph.data.corpus import corpus
from monograph.data.loss_mask import AnswerOptions, ConversationConverter
from monograph.data.options import ReadingOptions
from monograph.data.records import Fault, Unusable
from monograph.data.tables import table_objects
from monograph.errors import InputRefused
from monograph.rl.arrange import Rollout, answer_weights, arrange_window
from monograph.rl.pairs import read_pairs
from monograph.rl.prompts import read_prompts
from monograph.rl.rewards import Answer, Reward, reward_of
from monograph.text.chat import chat_ids
from monograph.text.tokenizer import Tokenizer
from rewarded import OPTIONS
from rl.test_pairs import documents


def written(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Ids as text with their special tokens."""
    names = {index: name for name, index in tokenizer.special.items()}
    pieces = [names[index].encode() if index in names else tokenizer.pieces[index] for index in ids]
    return b"".join(pieces).decode()


# ── which tokens of a conversation are trained on ─────────────────────────────────────────────────

# In the manner of Qwen 3: thoughts are taken out of the answer's text, and of earlier turns
# altogether.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% set said, thought = m.content, '' %}"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{% endif %}"
    "{{ said }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# In the manner of Qwen 3.5, whose prompt opens the thoughts.
OPENED = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TRAINED: list[tuple[str, str, list[dict[str, Any]], list[str]]] = [
    ("axolotl#2089", TEMPLATES["mistral-v1"], said("NOT MASKED", "NOT MASKED", "MASKED", "MASKED"),
     [" NOT MASKED<|eos|>", " MASKED<|eos|>"]),
    ("trl#5213", OPENED, said("why", "so"), ["\n</think>\n\nso<|im_end|>"]),
    ("trl#6361", OPENED, said("2+2?", "It is 4.\n</think>\n\n4"), ["It is 4.\n</think>\n\n4<|im_end|>"]),
    ("axolotl#3098", THINKING, said("a", "b", "c", "<think>d</think>e"),
     ["<think>\n\n</think>\n\nb<|im_end|>", "<think>\nd\n</think>\n\ne<|im_end|>"]),
    ("slime#330", THINKING, [*said("a"), said("", "b")[1] | {"reasoning_content": "hm"}],
     ["<think>\nhm\n</think>\n\nb<|im_end|>"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("report", "template", "chat", "trained"), TRAINED, ids=[row[0] for row in TRAINED]
)
def test_what_is_trained_is_what_the_model_has_to_write(
    report: str, template: str, chat: list[dict[str, Any]], trained: list[str], tmp_path: Path
) -> None:
    speaking(tmp_path, "chatml", stops=["<|im_end|>"])
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_file(tmp_path)
    text = conversation_text({"messages": chat})
    assert isinstance(text, str)
    rows = ConversationConverter(
        tokenizer, AnswerOptions(every=True, truncate=True, max_inputs=900)
    ).rows(Conversation.of_text(text))
    assert [
        written(tokenizer, row.ids[begin:end]) for row in rows for begin, end in row.spans
    ] == trained


IGNORING = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
IGNORING += "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_s_text_that_the_template_leaves_out_is_refused(role: str, tmp_path: Path) -> None:
    """llama.cpp#20079, Rapid-MLX#1765: templates that know nobody of that role left out what it
    said.
    """
    speaking(tmp_path, "chatml")
    template = tmp_path / "chat_template.jinja"
    template.write_text(IGNORING)
    chat = [{"role": role, "content": ' Be\n<|eot_id|> "brief".\n'}, *said("why")]
    with pytest.raises(InputRefused, match=f"leaves out what the {role} says, 'Be"):
        chat_ids(Tokenizer.from_file(tmp_path), chat, True)
    template.write_text(IGNORING + "{{ messages[0].content | tojson }}")
    assert chat_ids(Tokenizer.from_file(tmp_path), chat, True)
    if role == "system":
        template.write_text(IGNORING)
        answers = ConversationConverter(
            Tokenizer.from_file(tmp_path), AnswerOptions(every=True, truncate=True, max_inputs=900)
        )
        with pytest.raises(Unusable, match="leaves out what the system says"):
            answers.rows(Conversation([*chat, *said("", "so")[1:]], None, 0))


# ── pairs, answers with labels and prompts ────────────────────────────────────────────────────────

YES, NO = ([{"role": "assistant", "content": content}] for content in ("yes", "no"))
PAIRS: list[Any] = [
    # A default system text belongs to the prompt, and not to each answer too; an answer has one
    # end.
    ("trl#1752, trl#4908", "qwen2.5", {"prompt": said("Is it?"), "chosen": YES, "rejected": NO},
     "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n",
     ["yes<|im_end|>", "no<|im_end|>"]),
    ("axolotl#1616", "mistral-v1", {"prompt": said("Is it?"), "chosen": YES, "rejected": NO},
     "<|bos|>[INST] Is it? [/INST]", [" yes<|eos|>", " no<|eos|>"]),
    ("trl#1920, trl#2054", "chatml", {"prompt": "Answer: ", "chosen": "yes", "rejected": "no"},
     "<|bos|>Answer: ", ["yes<|eos|>", "no<|eos|>"]),
    ("orca_dpo_pairs", "chatml", {"system": "s", "question": "q", "chosen": "a", "rejected": "b"}, "", None),
    ("OpenRLHF#909", "chatml", {"prompt": said("q"), "chosen": said("q", "a"), "rejected": said("q", "b")}, "", None),
]  # fmt: skip


@pytest.mark.parametrize(("report", "template", "record", "begin", "answers"), PAIRS)
def test_two_answers_follow_one_prompt_or_are_refused(
    report: str,
    template: str,
    record: dict[str, Any],
    begin: str,
    answers: list[str] | None,
    tmp_path: Path,
) -> None:
    tokenizer = speaking(tmp_path, template)
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record))
    reading = ReadingOptions(
        str(tmp_path / "pairs.jsonl"), tokenizer=str(tmp_path), sequence_length=300, held_out=0.0
    )
    if answers is None:
        with pytest.raises(InputRefused, match=r"pairs\.jsonl:1: "):
            read_pairs(reading)
        return
    for (_, inputs, targets), answer in zip(
        documents(read_pairs(reading).train), answers, strict=True
    ):  # type: ignore[arg-type]
        assert written(tokenizer, targets) == answer
        assert (written(tokenizer, inputs) + "<|im_end|><|eos|>").startswith(
            begin + answer.removesuffix("<|eos|>")
        )


@pytest.mark.parametrize(
    ("report", "prompt"),
    [
        ("transformers#33198", said("why", "so")),
        ("transformers#33198", [{"role": "system", "content": "Be brief."}]),
    ],
)
def test_a_prompt_ends_where_an_answer_may_begin(
    report: str, prompt: list[dict[str, Any]], tmp_path: Path
) -> None:
    speaking(tmp_path, "chatml")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": prompt}))
    reading = ReadingOptions(
        str(tmp_path / "p.jsonl"), tokenizer=str(tmp_path), held_out=0.0, text_key="text"
    )
    with pytest.raises(InputRefused, match=r"p\.jsonl:1: .*an answer follows"):
        read_prompts(reading, room=90, reward=Reward())


# ── records ───────────────────────────────────────────────────────────────────────────────────────


def test_arguments_of_other_tools_do_not_come_from_a_tables_type(tmp_path: Path) -> None:
    """axolotl#2909, trl#5376: a table's type has the arguments of all tools, null where a call has
    none of them.
    """
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    speaking(tmp_path, "qwen2.5")
    calls = [
        {"name": "move", "arguments": {"x": 0, "y": 1}},
        {"name": "say", "arguments": {"text": "hi"}},
    ]
    turns = [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
        for call in calls
    ]
    records = [{"messages": [*said("go"), turn], "tools": TOOLS} for turn in turns]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "calls.parquet")
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, records)))
    read = [
        corpus(
            tmp_path / name,
            tokenizer=str(tmp_path),
            sequence_length=500,
            held_out=0,
            cache=tmp_path / "cache",
        )
        for name in ("calls.parquet", "calls.jsonl")
    ]
    table, lines = (
        [rows.train.row(index)["tokens"].tolist() for index in range(len(rows.train))]
        for rows in read
    )
    assert table == lines and "null" not in read[0].tokenizer.decode(table[0])


def test_a_map_is_an_object(tmp_path: Path) -> None:
    """arrow#39010, datasets#5612: Spark's and DuckDB's dicts are maps, which pyarrow gives as lists
    of pairs.
    """
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    inner = pa.map_(
        pa.string(),
        pa.list_(pa.struct([("x", pa.int64()), ("y", pa.map_(pa.string(), pa.int64()))])),
    )
    maps: list[Any] = [
        [("a", [{"x": 1, "y": [("b", 2), ("c", None)]}, None]), ("d", None)],
        [],
        None,
        [("a", None), ("a", [])],
    ]
    for name, kind in (("plain", inner), ("listed", pa.large_list(inner))):
        values = maps if name == "plain" else [[value] for value in maps]
        parquet.write_table(pa.table({"of": pa.array(values, kind)}), tmp_path / f"{name}.parquet")
    plain, listed = (
        [*table_objects(tmp_path / f"{name}.parquet", ["of"])] for name in ("plain", "listed")
    )
    objects = [{"a": [{"x": 1, "y": {"b": 2, "c": None}}, None], "d": None}, {}, None]
    assert [row for _, row in plain[:3]] == [{"of": objects[0]}, {"of": {}}, {}]
    assert [row for _, row in listed[:3]] == [{"of": [value]} for value in objects]
    for number, fault in (plain[3], listed[3]):
        assert (
            number == 4
            and isinstance(fault, Fault)
            and fault.detail == "has the key 'a' twice in one map"
        )


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    """datasets#8241 and its kind: a byte order mark, CRLF, and separators that Python's splitlines
    cuts at.
    """
    chat = json.dumps({"messages": said("a\u2028b\u0085c\x0bd", "e")}, ensure_ascii=False)
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{chat}\r\n{chat}\r\n\r\n".encode())
    speaking(tmp_path, "chatml")
    read = corpus(
        tmp_path / "windows.jsonl",
        tokenizer=str(tmp_path),
        sequence_length=90,
        held_out=0,
        cache=tmp_path / "cache",
    )
    assert read.stats.conversations == 2 and not read.stats.skipped


# ── rewards ───────────────────────────────────────────────────────────────────────────────────────

NUMBERS: list[Any] = [
    (
        "Math-Verify#44",
        "840",
        r"therefore \boxed{840}.,but let me explain. **Final Answer** \boxed{840}",
        1.0,
    ),
    (
        "Math-Verify#44",
        "4",
        r"the sum is 2,552,004. So, \boxed{004} is it. **Final Answer** \boxed{004}",
        1.0,
    ),
    ("open-instruct#1530", "#### -3", "it is 3", 0.0),
    ("open-instruct#1530", "#### -1234.5", "so -1,234.5", 1.0),
    ("verl#7274", "42", "2+40=42\n#### 42\n" + " and this is consistent." * 20, 1.0),
    ("officeqa#23", "8.12412", "[8.124,12.852]", 0.0),
    ("helm#4337", "72", "The answer is 72, in total, so the farmer earns that much.", 1.0),
    ("ms-swift#10163", "0.1", "Reward: 1e-1", 1.0),
    ("CoursIA#12505", "1234", "The answer is $1,234.00", 1.0),
    # What is not understood whole is refused as a right answer, or read right: a wrong answer gets
    # nothing for it.
    *(
        ("reasoning-from-scratch#133", gold, wrong, None)
        for gold, wrong in [
            (r"\frac{1}{2}", "2"),
            ("1/2", "2"),
            ("52_8", "8"),
            ("(2, 5)", "5"),
            (r"2\sqrt{3}", "3"),
            ("2^10", "10"),
            ("15 m^2", "99 m^2"),
            ("1,00,000", "0"),
            ("[100,200]", "100200"),
        ]
    ),
    ("reasoning-from-scratch#133", "11111111100", r"11,\! 111,\! 111,\! 100", 1.0),
    ("proeval#19", "-5", "it is -$5", 1.0),
    ("proeval#19", "-$5", "it is $5", 0.0),
]


@pytest.mark.parametrize(("report", "gold", "answer", "score"), NUMBERS)
def test_the_number_of_an_answer_is_read_whole(
    report: str, gold: str, answer: str, score: float | None
) -> None:
    reward = reward_of("number")
    record = {"prompt": "p", "answer": gold}
    try:
        reward.require(record, "p.jsonl:1")
    except InputRefused:
        assert score is None
        return
    assert reward.score([Answer("p", answer, record, "p.jsonl:1")]) == [score or 0.0]


@pytest.mark.parametrize("objective", ["dapo", "grpo", "dr_grpo", "rloo"])
def test_answers_that_are_cut_count_in_neither_sum_and_all_of_them_are_no_nan(
    objective: Any,
) -> None:
    """trl#6369: the tokens of masked answers stayed in the denominator. trl#5662: nothing left was
    0 / 0.
    """
    options = replace(OPTIONS, advantage=objective, masks_truncated=True, max_new_tokens=7)
    whole = [Rollout((1, 2), (3,) * length, (-1.0,) * length) for length in (2, 4)]
    cut = Rollout((1, 2), (3,) * 7, (-1.0,) * 7, is_cut=True)
    assert answer_weights([*whole, cut, cut], [1.0, 0.0, 1.0, 0.0], options)[:2] == answer_weights(
        whole, [1.0, 0.0], options
    )
    none = answer_weights([cut, cut], [1.0, 0.0], options)
    window = arrange_window([cut, cut], none, options)
    assert float(window["shares"].sum()) == 1.0 and not window["factors"].any()


# ── schemas ───────────────────────────────────────────────────────────────────────────────────────

EAST = "\u6771"
SCHEMAS: list[Any] = [
    ("llama.cpp#8073", {"$defs": {"C": {"type": "string", "enum": ["red"]}}, "$ref": "#/$defs/C"},
     ['"red"'], ['{"red":1}', "{}", '"blue"']),
    ("llama.cpp#7797", {"type": "integer", "minimum": 3}, ["3", "10"], ["2", "03", "01", "-3"]),
    ("llama.cpp#25923", {"type": "object", "properties": {}}, ["{}"], ["", "{  }"]),
    ("outlines#935, #759", {"type": "string"}, [r'"(\"Net\")"', r'"\\"', '"\'"'], [r'"won\'t"', r'"\q"', r'"\u12"']),
    ("lattice#931", {"type": "string"}, [r'"\n"', '"\x7f"'], ['"a\nb"', '"\x01"']),
    ("vllm#45592", {"type": "string", "pattern": r"^[\x20-\x7E]+$", "maxLength": 8},
     ['"abcdefgh"', r'"a\"b"'], ['"abcdefghi"', '""', '"\xe9"']),
    ("xgrammar#749", {"type": "string", "pattern": "^a+$", "maxLength": 2}, ['"a"', '"aa"'], ['"aaa"', '""']),
    ("vllm#15790", {"type": "string", "maxLength": 10},
     [f'"{EAST * 10}"', '"' + "\U0001f642" * 10 + '"'], [f'"{EAST * 11}"', '"' + "\U0001f642" * 11 + '"']),
    ("vllm#12028", {"type": "integer", "minimum": 1, "maximum": 5}, ["1", "5"], ["0", "6", "10", '"1"']),
    ("llguidance#265", {"type": "object", "properties": {}, "patternProperties": {"^a$": {"type": "null"}}}, [], None),
    ("llama.cpp#7703", {"type": "object", "properties": {}, "oneOf": [{"type": "object", "properties": {}}]}, [], None),
    ("llama.cpp#25746", {"type": "string", "pattern": r"\S", "maxLength": 4}, ['"a"'], ['"\xa0"']),
    ("by ECMA-262", {"type": "string", "pattern": "^a{,2}$", "maxLength": 8}, [], None),
    ("gLLM#282", {"type": "string", "minLength": 70}, ['"' + "a" * 80 + '"'], []),
    ("llama.cpp#16790",
     {"prefixItems": [{"anyOf": [{"const": 1}]}, {"$ref": "#/prefixItems/0/anyOf/0"}], "type": "array"},
     ["[1,1]"], ["[1,2]"]),
]  # fmt: skip


@pytest.mark.parametrize(("report", "schema", "valid", "invalid"), SCHEMAS)
def test_a_schema_is_followed_or_refused(
    report: str, schema: dict[str, Any], valid: list[str], invalid: list[str] | None
) -> None:
    if invalid is None:
        with pytest.raises(InputRefused, match="the JSON schema at"):
            acceptor("json_schema", schema)
        return
    automaton = acceptor("json_schema", schema)
    assert [text for text in valid if not automaton.accepts(text.encode())] == []
    assert [text for text in invalid if automaton.accepts(text.encode())] == []
