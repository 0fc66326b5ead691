"""Records of every kind, and every form in which a source may hold them; see test_kinds.py."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from dialogues import said, speaking
from monograph.text.tokenizer import Tokenizer

Records = list[dict[str, Any]]
Source = str | list[str]
COUNT = 4


def _answer(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def _each(make: Callable[[int], dict[str, Any]]) -> Records:
    return [make(number) for number in range(COUNT)]


def _shared(number: int) -> list[dict[str, str]]:
    return [{"from": "human", "value": f"{number}?"}, {"from": "gpt", "value": f"yes {number}"}]


# By name: records, and what they are trained as without any setting.
RECORDS: dict[str, tuple[Records, str]] = {
    "texts": (_each(lambda n: {"text": f"the text number {n}"}), "texts"),
    "messages": (_each(lambda n: {"messages": said(f"{n}?", f"yes {n}")}), "conversations"),
    "conversations": (_each(lambda n: {"conversations": _shared(n)}), "conversations"),
    "prompt and completion": (
        _each(lambda n: {"prompt": f"{n}?", "completion": f"yes {n}"}),
        "conversations",
    ),
    "messages as completion": (
        _each(lambda n: {"prompt": said(f"{n}?"), "completion": _answer(f"yes {n}")}),
        "conversations",
    ),
    "pairs of texts": (
        _each(lambda n: {"prompt": f"{n}=", "chosen": f"a{n}", "rejected": "no"}),
        "dpo",
    ),
    "pairs of messages": (
        _each(
            lambda n: {
                "prompt": said(f"{n}?"),
                "chosen": _answer(f"a{n}"),
                "rejected": _answer("no"),
            }
        ),
        "dpo",
    ),
    "pairs of chats": (
        _each(
            lambda n: {
                "prompt": f"{n}?",
                "chosen": said(f"{n}?", "a"),
                "rejected": said(f"{n}?", "no"),
            }
        ),
        "dpo",
    ),
    "labelled texts": (
        _each(lambda n: {"prompt": f"{n}=", "completion": f"{n}", "label": n % 2 == 0}),
        "kto",
    ),
    "labelled messages": (
        _each(
            lambda n: {"prompt": said(f"{n}?"), "completion": _answer(f"a{n}"), "label": n % 2 == 0}
        ),
        "kto",
    ),
    "labels of 0 and 1": (
        _each(lambda n: {"prompt": f"{n}=", "completion": f"{n}", "label": n % 2}),
        "kto",
    ),
    "labels as texts": (
        _each(
            lambda n: {
                "prompt": f"{n}=",
                "completion": f"{n}",
                "label": "true" if n % 2 else "false",
            }
        ),
        "kto",
    ),
}
# These need rl.reward, as prompts alone say nothing of what to learn.
PROMPTS: dict[str, Records] = {
    "text to reward": _each(lambda n: {"prompt": f"{n}=", "answer": str(n)}),
    "messages to reward": _each(lambda n: {"prompt": said(f"{n}?"), "answer": str(n)}),
}


def _lines(records: Records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _written(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def _table(records: Records) -> pa.Table:
    names = dict.fromkeys(name for record in records for name in record)
    return pa.Table.from_pylist([{name: record.get(name) for name in names} for record in records])


def _parquet(folder: Path, records: Records) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(_table(records), folder / "a.parquet")
    return str(folder / "a.parquet")


def _arrow(path: Path, records: Records, as_stream: bool) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = _table(records)
    begin = pa.ipc.new_stream if as_stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, begin(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def _saved(folder: Path, records: Records) -> str:
    """A folder as `save_to_disk` of Hugging Face's datasets writes it."""
    _arrow(folder / "data-00000-of-00001.arrow", records, as_stream=True)
    state = {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
        "_fingerprint": "0",
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


def _two(folder: Path, records: Records) -> list[str]:
    """Two files, of which the second has the last two records."""
    return [
        _written(folder / "a.jsonl", _lines(records[:-2])),
        _written(folder / "b.jsonl", _lines(records[-2:])),
    ]


# By name: a function of (folder, records) that writes them and returns the source.
SOURCES: dict[str, Callable[[Path, Records], Source]] = {
    "file": lambda folder, records: _written(folder / "a.jsonl", _lines(records)),
    "ndjson": lambda folder, records: _written(folder / "a.ndjson", _lines(records)),
    "gzip": lambda folder, records: _written(folder / "a.jsonl.gz", gzip.compress(_lines(records))),
    "zstd": lambda folder, records: _written(
        folder / "a.jsonl.zst", zstandard.compress(_lines(records))
    ),
    "folder": lambda folder, records: (
        _written(folder / "in" / "a.jsonl", _lines(records)) and str(folder / "in")
    ),
    "folder in a folder": lambda folder, records: (
        _written(folder / "in" / "deep" / "a.jsonl", _lines(records)) and str(folder / "in")
    ),
    "pattern": lambda folder, records: (
        _written(folder / "a.jsonl", _lines(records)) and str(folder / "*.jsonl")
    ),
    "list": _two,
    "weight": lambda folder, records: _written(folder / "a.jsonl", _lines(records)) + "@2",
    "parquet": _parquet,
    "arrow": lambda folder, records: _arrow(folder / "a.arrow", records, as_stream=True),
    "arrow file": lambda folder, records: _arrow(folder / "a.arrow", records, as_stream=False),
    "saved dataset": lambda folder, records: _saved(folder / "saved", records),
}

# It reads everything that a record may say beside its messages.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if documents %}<|im_start|>documents\n{{ documents | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = TEMPLATE.replace(
    "{% for", "{% if enable_thinking %}<|im_start|>think<|im_end|>\n{% endif %}{% for", 1
)


def reader(folder: Path) -> Tokenizer:
    """A tokenizer whose template reads all keys."""
    speaking(folder, "chatml")
    (folder / "chat_template.jinja").write_text(THINKING)
    return Tokenizer.from_file(folder)


def last_with(records: Sequence[dict[str, Any]], **more: Any) -> Records:
    """The records, of which the last has further keys."""
    return [*records[:-1], {**records[-1], **more}]
