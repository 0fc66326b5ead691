# Run: pytest tests/data/test_records.py
"""Records become documents; a bad one is refused by its place or passed over and counted; memory
stays bounded.
"""

from __future__ import annotations

import gzip
import json
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from clocks import least_s
from data import bombs
from monograph.data import reading, records, tables
from monograph.data.corpus import corpus
from monograph.data.documents import Documents, ReadingPlan
from monograph.data.records import json_texts
from monograph.data.sources import find_sources
from monograph.errors import InputRefused
from monograph.storage.reading import parse_json

TEXTS = [f"text number {i} " + "word " * (i % 30) for i in range(200)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)).encode()


def saved(folder, texts, files=2):
    """A folder as `save_to_disk` of Hugging Face's datasets writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        part = pa.table({"text": texts[i * len(texts) // files : (i + 1) * len(texts) // files]})
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, part.schema) as writer,
        ):
            writer.write_table(part, max_chunksize=30)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0",
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.fixture
def sources(tmp_path):
    """The same texts in every form."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "a.ndjson.gz").write_bytes(
        gzip.compress(LINES[:900]) + gzip.compress(LINES[900:]) + bytes(5)
    )
    (folder / "a.jsonl.zst").write_bytes(
        zstandard.compress(LINES[:900]) + zstandard.compress(LINES[900:])
    )
    pq.write_table(
        pa.table({"id": range(200), "text": TEXTS}), folder / "a.parquet", row_group_size=64
    )
    saved(folder / "saved", TEXTS)
    whole = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as file,
        pa.ipc.new_file(file, whole.schema) as writer,
    ):
        writer.write_table(whole)
    return folder


def read(path, skip=False, key="text"):
    """[(record, text)] and the survey."""
    documents = Documents(find_sources(path, path.parent).files, ReadingPlan(key, skip), 0.0)
    return [(d.record, "".join(part for part, _ in d.parts)) for d in documents], documents.survey


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "saved"]
)
def test_every_form_gives_the_same_documents(sources, name):
    found, survey = read(sources / name)
    assert [text for _, text in found] == TEXTS and survey.skipped == {}
    numbers = [number for number, _ in found]
    assert numbers == (list(range(1, 201)) if name != "saved" else 2 * list(range(1, 101)))
    built = corpus(sources / name, tokenizer="bytes", sequence_length=32, held_out=0.2)
    texts = sorted(text.decode() for rows in (built.train, built.held_out) for text in rows.texts())
    assert texts == sorted(TEXTS) and built.stats.documents == 200
    assert 0.1 < built.stats.held_out_bytes / built.stats.bytes < 0.3
    pieces = {built.train.pieces(i)[0].document for i in range(len(built.train))}
    files = (
        ("data-00000-of-00002.arrow:", "data-00001-of-00002.arrow:")
        if name == "saved"
        else (f"{name}:",)
    )
    assert all(any(file in piece for file in files) for piece in pieces)


def test_the_split_follows_the_text_and_nothing_else(sources):
    held = []
    for name in ("a.jsonl", "a.parquet", "saved", "a.ndjson.gz"):
        built = corpus(sources / name, tokenizer="bytes", sequence_length=32, held_out=0.2)
        held.append(sorted(built.held_out.texts()))
    assert held[0] == held[1] == held[2] == held[3] and 10 < len(held[0]) < 90
    lines = LINES.decode().splitlines(keepends=True)
    (sources / "twice.jsonl").write_text("".join(lines[::-1] + lines))
    twice = corpus(sources / "twice.jsonl", tokenizer="bytes", sequence_length=32, held_out=0.2)
    assert not set(twice.held_out.texts()) & set(twice.train.texts())  # copies stay on one side


@pytest.mark.parametrize(
    ("line", "reason", "said"),
    [
        (b'{"text": "a"', "not JSON", "is not JSON: Expecting ',' delimiter, at character 13"),
        (b"[" * 5000, "not JSON", "nested too deeply"),
        (b'{"text": NaN}', "not JSON", "NaN is not a JSON value"),
        (b'["text"]', "not an object", "is an array, not an object"),
        (
            b'{"body": "a", "title": ""}',
            "no text",
            "has no key 'text'; its keys are 'body', 'title'",
        ),
        (
            b'{"prompt": "a"}',
            "no text",
            "a conversation needs 'completion' with 'prompt', and prompts to reward need rl.reward",
        ),
        (
            b'{"chosen": "a", "rejected": "b"}',
            "no text",
            "such pairs are for `monograph train` with prefer.loss",
        ),
        (b"{}", "no text", "its keys are none"),
        (b'{"text": 5}', "text is no string", "'text' is a number, not a string"),
        (b'{"text": null}', "text is no string", "'text' is null, not a string"),
        (b'{"text": "a\\u0000"}', "NUL in the text", "'text' has a NUL character at 1"),
        (b'{"text": "ab\\ud800"}', "lone surrogate", "'text' has a lone surrogate at character 2"),
        (b'{"text": "\xe9"}', "not UTF-8", "byte 10 is not UTF-8: 0xe9"),
        (b'{"text": "a", "text": "b"}', "a key twice", "has the key 'text' twice in one object"),
        (b'{"\\u001b[31m": 1, "\\u001b[31m": 2}', "a key twice", r"has the key '\x1b[31m' twice"),
        (b'{"text": "' + b"x" * 5000 + b'"}', "too long", "is longer than 0 MiB"),
    ],
)
def test_a_bad_line_is_refused_by_its_place_or_skipped(tmp_path, monkeypatch, line, reason, said):
    if reason == "too long":
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 4096)
        monkeypatch.setattr(records, "_TOO_LONG", records.Fault("too long", "is longer than 0 MiB"))
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n \n' + line + b'\n{"text": ""}\n{"text": "two"}'
    )
    with pytest.raises(InputRefused) as refused:
        read(path)
    assert f"{path}:3: " in str(refused.value) and said in str(refused.value)
    assert str(refused.value).endswith(
        "; correct or remove it, or train with data.bad_records=skip"
    )
    found, survey = read(path, skip=True)
    assert found == [(1, "one"), (5, "two")] and survey.skipped == {reason: 1, "empty text": 1}
    (note,) = survey.notes
    assert note.startswith("skipped of 4 records: 1 ") and f"the first: {path}:3: " in note


@pytest.mark.parametrize("count", [1, 6, 7, 9])
def test_of_many_keys_or_columns_six_are_named_and_the_others_counted(count, tmp_path):
    record = dict.fromkeys(map(str, range(count)), "a")
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    known = ", ".join(f"'{number}'" for number in range(min(count, 6))) + (
        f" and {count - 6} more" if count > 6 else ""
    )
    for name, what in (("a.jsonl", "keys"), ("a.parquet", "columns")):
        with pytest.raises(InputRefused) as refused:
            read(tmp_path / name)
        assert f"its {what} are {known}; " in str(refused.value)


def test_skipping_every_record_is_refused_with_the_first_reason(sources):
    (sources / "a.jsonl").write_text('{"txt": "a"}\n{"txt": "b"}\n')
    with pytest.raises(
        InputRefused, match=r"no text in it: skipped of 2 records: 2 no text; .*a.jsonl:1: has no"
    ):
        corpus(sources / "a.jsonl", tokenizer="bytes", sequence_length=32, bad_records="skip")


def test_a_line_may_end_anywhere_in_a_block(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr(reading, "BLOCK_BYTES", size)
        assert list(json_texts(path, "text")) == list(enumerate(TEXTS, 1))


def test_skipped_records_are_in_the_stats_and_said_whenever_the_corpus_is_opened(sources):
    (sources / "a.jsonl").write_bytes(LINES + b'{"text": 1}\nnothing\nnothing\n')
    for _ in range(2):
        built = corpus(
            sources / "a.jsonl",
            tokenizer="bytes",
            sequence_length=32,
            held_out=0.2,
            bad_records="skip",
        )
        assert built.stats.skipped == {"not JSON": 2, "text is no string": 1}
        assert built.notes[0].startswith(
            "skipped of 203 records: 2 not JSON, 1 text is no string; the first: "
        )
    with pytest.raises(InputRefused, match=r"a.jsonl:201: 'text' is a number"):
        corpus(sources / "a.jsonl", tokenizer="bytes", sequence_length=32)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("a.ndjson.gz", lambda data: data[:-30], "is cut short: it ends inside a gzip member"),
        ("a.ndjson.gz", lambda data: data + b"more", "has bytes after its end"),
        ("a.ndjson.gz", lambda data: b"no" + data, "is not gzip"),
        ("a.ndjson.gz", lambda data: data[:-20] + b"\1" + data[-19:], "is damaged"),
        ("a.jsonl.zst", lambda data: data[:-3], "is cut short: it ends inside a zstd frame"),
        (
            "a.jsonl.zst",
            lambda data: data + b"more than it should have",
            "is damaged (zstd decompress",
        ),
        ("a.parquet", lambda data: data[:-8], "is damaged"),
        ("a.parquet", lambda data: data[:100], "is damaged"),
        ("a.arrow", lambda data: data[:-8], "is damaged"),
        (
            "saved/data-00000-of-00002.arrow",
            lambda data: data[:-8],
            "does not end with Arrow's end-of-stream mark",
        ),
        ("saved/data-00000-of-00002.arrow", lambda data: data[:9] + data[10:], "is damaged"),
    ],
)
def test_a_damaged_file_is_refused_or_skipped_whole(sources, name, harm, said):
    path = sources / name
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(InputRefused) as refused:
        read(path)
    assert said in str(refused.value) and str(path) in str(refused.value)
    assert str(refused.value).endswith("; get the file again or leave it out")
    found, survey = read(path, skip=True)
    assert found == [] and survey.skipped == {"damaged file": 1}
    # The other file of a corpus is whole, and stays.
    (sources / "other.jsonl").write_bytes(LINES)
    documents = Documents(
        find_sources([path, sources / "other.jsonl"], sources).files, ReadingPlan("text", True), 0.0
    )
    assert len(list(documents)) == 200


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([1, 2]), "column 'text' holds int64, not string, large_string or string_view"),
        (
            pa.array([b"a", b"b"]),
            "column 'text' holds binary, not string, large_string or string_view",
        ),
        (pa.array([["a"], ["b"]]), "column 'text' holds list<"),
        (pa.array(["a", None]), ", row 2: 'text' is null, not a string"),
        (pa.array(["a", "b\0"]), ", row 2: 'text' has a NUL character at 1"),
        (pa.array([b"a", b"b\xff"]).view(pa.string()), ", row 2: byte 1 is not UTF-8: 0xff"),
    ],
)
def test_a_bad_column_is_refused_by_name_and_row(tmp_path, column, said):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, pa.schema([("text", column.type)])) as w,
    ):
        w.write_table(pa.table({"text": column}))  # fmt: skip
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(InputRefused) as refused:
            read(tmp_path / name)
        assert f"{tmp_path / name}" in str(refused.value) and said in str(refused.value)
        with pytest.raises(
            InputRefused, match=r"has no column 'body'; its columns are 'text'; name the one with"
        ):
            read(tmp_path / name, key="body")


def as_polars_writes(batches, schema):
    """A file of Arrow's format whose first message is not one of a stream, and whose dictionaries
    come last.

    Its footer alone says where what is, as in files of polars; pyarrow's own bytes, in another
    order.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(
        sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data = bytearray(sink.getvalue().to_pybytes())
    footer_begin = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    places = [
        place
        for place in range(footer_begin, len(data) - 24, 4)
        if is_block(data, place, footer_begin)
    ]
    blocks = [(place, *block_at(data, place)) for place in places]
    moved = bytearray(b"ARROW1\0\0" + bytes(data[16 : min(begin for _, begin, _ in blocks)]))
    moved += bytes(-len(moved) % 8)
    for place, begin, size in sorted(
        blocks, key=lambda block: (is_dictionary(data, block[1]), block[1])
    ):
        data[place : place + 8] = len(moved).to_bytes(8, "little")
        moved += data[begin : begin + size]
    return bytes(moved + b"\xff\xff\xff\xff\0\0\0\0" + data[footer_begin:])


def block_at(data, place):
    number = [
        int.from_bytes(data[place + 8 * index : place + 8 * index + 8], "little")
        for index in range(3)
    ]
    return number[0], (number[1] & 0xFFFFFFFF) + number[2]


def is_block(data, place, footer_begin):
    begin, size = block_at(data, place)
    return (
        8 <= begin < footer_begin
        and data[begin : begin + 4] == b"\xff" * 4
        and 8 < size <= footer_begin - begin
    )


def is_dictionary(data, begin):
    return pa.ipc.read_message(pa.BufferReader(bytes(data[begin:]))).type == "dictionary"


def test_a_file_that_only_its_footer_explains_is_read(tmp_path):
    table = pa.table(
        {
            "text": pa.array(TEXTS, pa.string_view()),
            "kind": pa.array(["a", "b"] * 100).dictionary_encode(),
        }
    )
    path = tmp_path / "a.arrow"
    path.write_bytes(as_polars_writes(table.to_batches(max_chunksize=64), table.schema))
    with pytest.raises((pa.ArrowException, OSError)), pa.OSFile(str(path)) as file:
        file.seek(8)
        pa.ipc.open_stream(file)
    assert [text for _, text in read(path)[0]] == TEXTS
    objects = [row for _, row in tables.table_objects(path, ["text", "kind"])]
    assert objects == [
        {"text": text, "kind": "ab"[number % 2]} for number, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize(
    "kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
)
@pytest.mark.parametrize("form", ["file", "stream", "parquet"])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_texts_in_any_type_of_arrow_are_the_same_rows(tmp_path, kind, form, compression):
    table = pa.table(
        {
            "text": pa.array(TEXTS[:40]).cast(kind)
            if pa.types.is_dictionary(kind)
            else pa.array(TEXTS[:40], kind)
        }
    )
    path = tmp_path / ("a.parquet" if form == "parquet" else "a.arrow")
    if form == "parquet":
        pq.write_table(table, path, compression=compression or "none")
    else:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with (pa.ipc.new_file if form == "file" else pa.ipc.new_stream)(
            path, table.schema, options=options
        ) as writer:
            writer.write_table(table, max_chunksize=9)
    assert [text for _, text in read(path)[0]] == TEXTS[:40]
    assert [row for _, row in tables.table_objects(path, ["text"])] == [
        {"text": text} for text in TEXTS[:40]
    ]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda block, footer: (block[0] - 8, *block[1:]), "is damaged"),
        (lambda block, footer: (footer, *block[1:]), "lies over another or beyond the file"),
        (
            lambda block, footer: (block[0], block[1], block[2] + 64),
            "lies over another or beyond the file",
        ),
        (lambda block, footer: (block[0], block[1], block[2] - 8), "of another size than it has"),
        (lambda block, footer: (0, *block[1:]), "lies over another or beyond the file"),
    ],
)
def test_a_footer_that_points_elsewhere_is_refused(tmp_path, harm, said):
    """Of two blocks the second: over the first it would be read twice, as a bomb is."""
    table = pa.table({"text": pa.array(TEXTS)})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    data = bytearray(path.read_bytes())
    footer = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    place = max(
        place for place in range(footer, len(data) - 24, 4) if is_block(data, place, footer)
    )
    block = [
        int.from_bytes(data[place + 8 * index : place + 8 * index + 8], "little")
        for index in range(3)
    ]
    for index, number in enumerate(harm(block, footer)):
        data[place + 8 * index : place + 8 * index + 8] = (number % (1 << 64)).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(InputRefused, match=said):
        read(path)
    first = [
        int.from_bytes(data[place - 24 + 8 * index : place - 16 + 8 * index], "little")
        for index in range(3)
    ]
    for index, number in enumerate(first):
        data[place + 8 * index : place + 8 * index + 8] = number.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(InputRefused, match="lies over another"):
        read(path)


@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_show_one_text_are_counted_as_many(tmp_path, monkeypatch, nested):
    """As values of Python each is a text of its own; so, too, where they lie in one row's list."""
    column = bombs.shared(pa.array(["x" * (1 << 16)], pa.string_view()), 64)
    if nested:
        column = pa.ListArray.from_arrays(pa.array([0, 64], pa.int32()), column)
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("text", column.type)])) as writer:
        writer.write_table(pa.table({"text": column}))
    assert len(list(tables.table_objects(tmp_path / "a.arrow", ["text"]))) == (1 if nested else 64)
    monkeypatch.setattr(reading, "BOMB_MIN_BYTES", 1 << 20)
    monkeypatch.setattr(reading, "BOMB_MIN_RATIO", 2)
    with pytest.raises(InputRefused, match="compression bomb"):
        list(tables.table_objects(tmp_path / "a.arrow", ["text"]))


@pytest.mark.parametrize("kind", bombs.KINDS)
def test_a_bomb_is_refused_whatever_it_is_packed_with(tmp_path, monkeypatch, kind):
    def everything(mebibytes):
        path = bombs.made(kind, mebibytes, tmp_path)
        return list(
            reading.decompressed_blocks(path)
            if kind.startswith("txt")
            else tables.table_texts(path, "text")
        )

    assert len(everything(3)) == 3
    monkeypatch.setattr(reading, "BOMB_MIN_BYTES", 1 << 20)
    monkeypatch.setattr(reading, "BOMB_MIN_RATIO", 2)
    with pytest.raises(
        InputRefused, match=r"compression bomb: [0-9,]+ bytes become .* unpack it and give that"
    ):
        everything(3)


@pytest.mark.parametrize("kind", ["zstd.arrow"])
def test_a_packed_batch_is_measured_before_it_is_unpacked(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tables, "_MAX_BATCH_BYTES", 1 << 19)
    monkeypatch.setattr(pa.ipc, "open_stream", None)
    with pytest.raises(InputRefused, match="has a batch that becomes 1,048,[0-9]+ bytes"):
        list(tables.table_texts(bombs.made(kind, 3, tmp_path), "text"))


def test_compressed_bombs_stay_in_bounded_memory(python, tmp_path):
    """150 MiB of one line, and a million empty ones, from a few kilobytes."""
    for name, unit in (("long", b"x"), ("empty", b"\n")):
        packer = zstandard.ZstdCompressor(level=1).compressobj()
        block = unit * ((1 << 20) // len(unit))
        packed = (
            b"".join(packer.compress(block) for _ in range(150 if name == "long" else 1))
            + packer.flush()
        )
        (tmp_path / f"{name}.jsonl.zst").write_bytes(packed)
        if name == "long":
            (tmp_path / "long.jsonl.gz").write_bytes(gzip.compress(block * 150, compresslevel=1))
    script = """
import sys
from pathlib import Path
from monograph.data.records import json_texts
for name in sys.argv[1:]:
    count = sum(1 for _ in json_texts(Path(name), "text"))
status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(count, int(status["VmHWM"].split()[0]) // 1024)
"""
    for name, count in (("long.jsonl.zst", 1), ("long.jsonl.gz", 1), ("empty.jsonl.zst", 0)):
        found, peak_mib = map(int, python(script, str(tmp_path / name)).split())
        assert found == count and peak_mib < 220, name


def test_a_missing_extra_is_one_line(sources, monkeypatch):
    for module, name in (("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            InputRefused, match=rf"{name}: reading it needs {module}, .* install .*{module}"
        ):
            read(sources / name)  # fmt: skip


def test_saved_datasets(sources, tmp_path):
    both = tmp_path / "both"
    saved(both / "train", TEXTS[:50])
    (both / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(read(both)[0]) == 50
    saved(both / "test", TEXTS[50:])
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        InputRefused, match=r"both: a saved dataset with the splits train, test; give one of them"
    ):
        read(both)
    mixed = tmp_path / "mixed"
    saved(mixed / "deeper", TEXTS)
    (mixed / "a.txt").write_text("a text")
    files = find_sources(mixed, tmp_path).files
    assert [file.name for file in files] == [
        "mixed/a.txt", "mixed/deeper/data-00000-of-00002.arrow", "mixed/deeper/data-00001-of-00002.arrow"
    ]  # fmt: skip
    state = sources / "saved" / "state.json"
    for content, said in (
        ("[]", "expected a JSON object; save"),
        ("{", "cannot be read as JSON"),
        ('{"_data_files": 1}', "is not what save_to_disk writes"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "lists a.arrow, which is not there"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "lists gone.arrow, which is not there"),
        ('{"_data_files": [], "_indices_data_files": [1]}', "saved with an order of its own"),
    ):
        state.write_text(content)
        with pytest.raises(InputRefused, match=said):
            find_sources(sources / "saved", tmp_path)


def test_the_hub_is_asked_only_for_a_hub_id_and_its_faults_are_one_line(
    sources, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InputRefused, match=r"hf://owner/name: reading it needs datasets, .* install 'datasets>="
    ):
        find_sources("hf://owner/name", tmp_path)
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        if name == "owner/gone":
            raise ConnectionError("Couldn't reach\n the hub")
        files = sorted((sources / "saved").glob("*.arrow"))
        return types.SimpleNamespace(cache_files=[{"filename": str(file)} for file in files])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = find_sources(["hf://owner/name", "hf://owner/name/plain"], tmp_path, weights=[2, 2])
    assert asked == [("owner/name", None, "train"), ("owner/name", "plain", "train")]
    assert [(file.name, file.weight) for file in found.files] == [
        ("hf://owner/name/data-00000-of-00002.arrow", 2.0), ("hf://owner/name/data-00001-of-00002.arrow", 2.0)
    ]  # fmt: skip
    with pytest.raises(
        InputRefused,
        match=r"hf://owner/gone: cannot be fetched: Couldn't reach the hub; try again, or save",
    ):
        find_sources("hf://owner/gone", tmp_path)


def test_a_key_twice_is_found_in_one_pass():
    """The last two of thirty thousand: to count each in turn takes half a minute."""
    names = [f"k{number}" for number in range(30_000)]
    text = "{" + ",".join(f'"{name}":0' for name in [*names, names[-1]]) + "}"
    assert least_s(lambda: pytest.raises(ValueError, parse_json, text), enough_s=5, tries=2) < 5


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date32(), 30_000_000),
        (pa.timestamp("s"), 400_000_000_000),
        (pa.timestamp("us"), -(10**17)),
    ],
    ids=["a date", "a time", "before the year 1"],
)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_date_that_python_cannot_hold_is_refused_by_its_column(kind, value, ending, tmp_path):
    number = pa.int32() if kind == pa.date32() else pa.int64()
    table = pa.table({"text": ["a", "b"], "when": pa.array([1, value], number).cast(kind)})
    path = tmp_path / f"dates.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    said = f"{path}: column 'when' has a date or time that is outside of the years 1 to 9999; "
    with pytest.raises(InputRefused) as refused:
        list(tables.table_objects(path, ["text", "when"]))
    assert str(refused.value) == said + "correct it, write the column as texts, or leave it out"
