"""Turns documents into token shards: trains the tokenizer where asked, then encodes part by part in bounded memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np

from monograph.data.progress import Meter, Progress
from monograph.data.shards import ShardWriter, token_dtype
from monograph.data.split import Document
from monograph.data.text import cut_position, read_text
from monograph.data.tokenizer import Tokenizer

# Merges hardly change beyond this much text, and the time to count its words grows with it.
TOKENIZER_SAMPLE_BYTES = 1 << 27
_BATCH_CHARS = 1 << 19
_INDEX = np.dtype("<u8")


def train_tokenizer(
    documents: Sequence[Document], vocab_size: int, progress: Progress | None
) -> tuple[Tokenizer, str | None]:
    """A byte-level BPE trained on the documents, and a line for the person if it is not what was asked for.

    Beyond 128 MiB of text it is trained on a sample: documents in the order of sha256(name) up to that size.
    """
    sample, note = _sample(documents)
    fed_bytes, stop = [0], threading.Event()

    def texts() -> Iterator[str]:
        for document in sample:
            before = fed_bytes[0]
            for part, done in read_text(document.path, document.start, document.stop):
                if stop.is_set():
                    return
                fed_bytes[0] = before + done
                yield part

    meter = Meter(progress, "tokenizer", sum(document.bytes for document in sample))
    # The library is silent while it merges, for seconds; a thread lets this one tell that work goes on.
    with ThreadPoolExecutor(1, thread_name_prefix="monograph-tokenizer") as pool:
        training = pool.submit(Tokenizer.train_bpe, texts(), vocab_size)
        try:
            while not training.done():
                wait([training], timeout=0.2)
                meter.add(fed_bytes[0] - meter.done)
        finally:
            stop.set()
    tokenizer = training.result()
    meter.finish()
    if tokenizer.vocab_size < vocab_size:
        reason = "the text has no more pairs to merge"
        note = f"the tokenizer has {tokenizer.vocab_size:,} entries, not {vocab_size:,}: {reason}"
    return tokenizer, note


def _sample(documents: Sequence[Document]) -> tuple[Sequence[Document], str | None]:
    if sum(document.bytes for document in documents) <= TOKENIZER_SAMPLE_BYTES:
        return documents, None
    left, sample = TOKENIZER_SAMPLE_BYTES, []
    for document in sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest()):
        if document.bytes > left:
            sample.append(replace(document, stop=cut_position(document.path, document.start + left, document.stop)))
            break
        sample.append(document)
        left -= document.bytes
    return sample, f"the tokenizer was trained on {TOKENIZER_SAMPLE_BYTES >> 20} MiB of the text"


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer, stem: Path, meter: Meter) -> int:
    """Write STEM.tokens, STEM.starts and STEM.bytes; returns the number of tokens.

    STEM.tokens has [bos] + ids + [eos] of every document, STEM.starts has D + 1 entries (the first token of each
    document, and the end), STEM.bytes has D.
    """
    starts: list[int] = []
    dtype = token_dtype(tokenizer.vocab_size)
    with ShardWriter(stem.with_suffix(".tokens"), dtype, tokenizer.vocab_size, tokenizer.hash) as shard:
        for batch in _batches(documents, meter):
            ids: list[int] = []
            for (number, _), part_ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
                if number == len(starts):
                    ids.extend([tokenizer.eos_id] if starts else [])
                    starts.append(shard.count + len(ids))
                    ids.append(tokenizer.bos_id)
                ids.extend(part_ids)
            shard.append(np.array(ids))
        shard.append(np.array([tokenizer.eos_id] if starts else []))
    for suffix, items in ((".starts", [*starts, shard.count]), (".bytes", [document.bytes for document in documents])):
        with ShardWriter(stem.with_suffix(suffix), _INDEX, 0, tokenizer.hash) as index:
            index.append(np.array(items))
    return shard.count


def _batches(documents: Sequence[Document], meter: Meter) -> Iterator[list[tuple[int, str]]]:
    """Parts of documents as (document number, text), enough at a time for all cores and for bounded memory."""
    batch: list[tuple[int, str]] = []
    chars = 0
    for number, document in enumerate(documents):
        before = meter.done
        for text, done in read_text(document.path, document.start, document.stop):
            batch.append((number, text))
            chars += len(text)
            if chars >= _BATCH_CHARS:
                yield batch
                meter.add(before + done - meter.done)
                batch, chars = [], 0
        meter.add(before + document.bytes - meter.done)
    if batch:
        yield batch
