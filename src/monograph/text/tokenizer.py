"""Train, read and apply BPE tokenizers that lose no text: made here, from a `tokenizer.json`, or plain bytes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from monograph.errors import InputRefused, UsageError
from monograph.storage.reading import is_folder
from monograph.text import tokenizer_config, tokenizer_file, tokenizer_trial
from monograph.text.losses import Losses, require_apart
from monograph.text.tokenizer_config import TokenizerConfig

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SMALLEST_VOCABULARY = 256 + 3

# Published tokenizers call their document borders by these names, most specific first.
_BOS_NAMES = (BOS, "<|begin_of_text|>", "<|startoftext|>", "[BOT]", "[BOS]", "<s>", "<bos>")
_EOS_NAMES = (EOS, "<|end_of_text|>", "<|endoftext|>", "[EOT]", "[EOS]", "</s>", "<eos>", "<|im_end|>")
_PAD_NAMES = (PAD, "<|finetune_right_pad_id|>", "[PAD]", "<pad>")

ByteString = bytes  # `Tokenizer.bytes` hides the builtin's name inside the class


class Tokenizer:
    """A BPE tokenizer, byte-level or in SentencePiece's way; `tokenizer.json` files that it saves load in transformers.

    Special tokens that occur in a text as letters ("<|eos|>" in a file about tokenizers) are encoded as letters, so
    that no text can end a document. Encoding adds no beginning or end token. A tokenizer made here gives any text back;
    another may put a text into a normal form of Unicode or a space before it, as the tokenizers library does with the
    same file. Text that the vocabulary cannot write is refused and never left out.

    Attributes:
        vocab_size: V; ids are 0..V-1 without gaps.
        bos_id, eos_id: begin and end a document; the same id where the tokenizer file has only one of them.
        pad_id: fills unused positions, which are never a target; `eos_id` where the file has none.
        special: {content: id} of the special tokens.
        pieces: the bytes that each id stands for, [V]; empty for special tokens.
        token_bytes: their lengths, int32 [V].
        hash: hex sha256 of everything that decides ids: patterns, vocabulary, merges, special tokens.
        space_first: whether a text that does not begin with a space is given one.
        strips: whether decoding omits one space where a text begins, which then counts as no byte of the text.
        config: the files next to it, above all the chat template; empty unless `from_file` found some.
    """

    config = TokenizerConfig()

    def __init__(
        self, content: dict[str, Any], where: str, bos: str | None = None, eos: str | None = None, trusted: bool = True
    ) -> None:
        """Read the JSON object of a `tokenizer.json`; see `from_file`."""
        try:
            checked = tokenizer_file.Checked(content, where)
        except InputRefused as error:
            if trusted or not (lost := tokenizer_trial.loss(json.dumps(content))):
                raise
            raise InputRefused(f"{error}. With it {lost[0]!r} would come back as {lost[1][:40]!r}") from None
        self.special: dict[str, int] = checked.special
        self._json, self.space_first, self._opening = checked.json, checked.space_first, checked.opening
        self._engine = self._inner = _loaded(checked, where, trusted)
        if self.space_first:
            self._inner = _literal(tokenizer_file.inside(self._json))
        require_apart(self._json["added_tokens"], self._engine, where)
        added = [token["id"] for token in self._json["added_tokens"] if not token["special"]]
        for index in added:
            checked.pieces[index] = checked.piece(self._engine.id_to_token(index) or "")  # now in its normal form
        self._losses = Losses(checked, added, self._engine, self._inner)
        self.pieces: list[ByteString] = checked.pieces
        self.token_bytes: NDArray[np.int32] = np.array([len(piece) for piece in checked.pieces], dtype=np.int32)
        self.vocab_size = len(checked.pieces)
        self.bos_id, self.eos_id = _borders(checked.special, where, bos, eos)
        self.pad_id = next((checked.special[name] for name in _PAD_NAMES if name in checked.special), self.eos_id)
        self.strips = checked.marks is not None and checked.marks.strips
        # Where a space at the beginning of a stretch is not part of the text: [V], by the id before it.
        self._begins = np.zeros(self.vocab_size, dtype=np.bool_)
        self._begins[[self.bos_id, *(self._opening if self.space_first else ())]] = self.strips
        self._spaced = np.array([piece[:1] == b" " for piece in checked.pieces])
        self._lacking, self._marks = checked.lacking, checked.marks
        model = self._json["model"]
        decisive = [
            model["merges"],
            model["ignore_merges"],
            [self._json[key] for key in ("added_tokens", "normalizer", "pre_tokenizer")],
        ]
        identity = [
            sorted(model["vocab"].items(), key=lambda item: item[1]),
            decisive,
            self.bos_id,
            self.eos_id,
            self.pad_id,
        ]
        if checked.marks:
            identity.append([self._json["decoder"], model["byte_fallback"], model["unk_token"], model["fuse_unk"]])
        self.hash = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train on `texts` with GPT-2's split pattern; the same texts in the same order give the same tokenizer.

        Ids 0, 1, 2 are <|bos|>, <|eos|>, <|pad|>, then the 256 bytes, then merges, most frequent first. The result is
        smaller than `vocab_size` where the texts have no pair left to merge.

        Raises:
            UsageError: vocab_size is outside 259..2^20.
        """
        if not SMALLEST_VOCABULARY <= vocab_size <= tokenizer_file.MAX_VOCABULARY:
            raise UsageError(
                f"tokenizer bpe:{vocab_size}: N must be from {SMALLEST_VOCABULARY} to {tokenizer_file.MAX_VOCABULARY}"
            )
        engine = tokenizers.Tokenizer(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        engine.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS, EOS, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        engine.train_from_iterator(texts, trainer)
        return cls(json.loads(engine.to_str()) | {"post_processor": _BEGIN_WITH_BOS}, f"bpe:{vocab_size}")

    @classmethod
    def from_file(
        cls, path: str | Path, bos: str | None = None, eos: str | None = None, trusted: bool = False
    ) -> Tokenizer:
        """Read a `tokenizer.json`, or the one in a folder, with its chat template and the other files next to it.

        Args:
            path: the file or its folder.
            bos: content of the token that begins a document; by default what `tokenizer_config.json` next to the file
                says, else the first of the usual names that the file has.
            eos: the same for the end of a document. If only one of the two is known, it serves as both.
            trusted: whether the file is known to be one of ours; others are first loaded in a limited process.

        Raises:
            InputRefused: it is not a BPE of known parts, has no known bos or eos, or a file next to it is damaged.
        """
        path = Path(os.path.expanduser(path))
        path = path / "tokenizer.json" if is_folder(path) else path
        settings = tokenizer_config.read(path.parent)
        if bos is None and eos is None:
            bos, eos = settings.borders
        tokenizer = cls(tokenizer_file.read(path), str(path), bos, eos, trusted)
        tokenizer.config = settings
        return tokenizer

    @classmethod
    def bytes(cls) -> Tokenizer:
        """Use one id per byte: ids 0, 1, 2 are <|bos|>, <|eos|>, <|pad|>, then 256 bytes as their characters sort."""
        specials = {name: index for index, name in enumerate((BOS, EOS, PAD))}
        vocab = specials | {
            character: 3 + index for index, character in enumerate(sorted(tokenizer_file.byte_alphabet()))
        }
        content = {
            "added_tokens": [{"id": index, "content": name, "special": True} for name, index in specials.items()],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": _BEGIN_WITH_BOS,
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
        return cls(content, "bytes")

    def encode(self, text: str, inside: bool = False) -> list[int]:
        """Return the ids of a text, without beginning and end tokens; `decode` gives the text back.

        Args:
            text: any text.
            inside: whether it follows other text, so that no space is put before it.

        Raises:
            InputRefused: the text has a lone surrogate (an undecodable byte) or a character that the vocabulary lacks.
        """
        return self.encode_batch([text], inside)[0]

    def encode_batch(self, texts: Sequence[str], inside: bool = False) -> list[list[int]]:
        """Return the ids of each text, on all cores."""
        engine = self._inner if inside else self._engine
        try:
            encodings = engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise InputRefused(
                "text with a lone surrogate (U+D800 to U+DFFF) cannot be encoded; give valid Unicode"
            ) from None
        ids = [encoding.ids for encoding in encodings]
        for text, own in zip(texts, ids, strict=True):
            if loss := self._losses.of(text, inside, own):
                raise InputRefused(f"{loss}; give other text, or a tokenizer that can write it")
        return ids

    def loss(self, text: str, inside: bool = False) -> str:
        """Say which part of a text, `inside` as in `encode`, would come back changed, and as what; "" for none."""
        return self._losses.of(text, inside)

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """Return lines for a person on text that does not come back unchanged; composed text (NFC) is not worth one."""
        normal = json.dumps(self._json["normalizer"])
        forms = [form for form in tokenizer_file.NORMAL_FORMS if form != "NFC" and f'"{form}"' in normal]
        notes = [
            f"the tokenizer rewrites text ({form}), and what it makes of it is trained and measured" for form in forms
        ]
        if self.space_first and not self.strips:
            notes.append("the tokenizer puts a space before a text, which is trained and measured as a part of it")
        if self.strips and self._marks and self._marks.scheme != "prepend":
            notes.append("the tokenizer leaves out one space at the beginning of a text that begins with spaces")
        added = [token["content"] for token in self._json["added_tokens"] if not token["special"]]
        if cut := [content for content in added if _CUT_INSIDE.search(content)]:
            notes.append(f"long texts are encoded in parts, so {_some(cut)} may be cut in two there")
        if self.space_first or self._marks:
            texts = [f"a{content}a" for content in added]
            encodings = self._engine.encode_batch_fast(texts, add_special_tokens=False)
            back = self._engine.decode_batch([encoding.ids for encoding in encodings])
            both = zip(added, back, strict=True)
            apart = [content for content, text in both if f"a {content}" in text or f"{content} a" in text]
            if apart:
                notes.append(f"the tokenizer puts a space next to {_some(apart)}, as part of the text")
        if self._lacking:
            lost = (chr(code) for code in (*range(0x20, 0xD800), *range(0x10000, 0x20000)) if self.loss(chr(code)))
            examples = _some(lost) or "control characters"
            notes.append(f"the tokenizer has no tokens for {examples} and the like: text with such is refused")
        return tuple(notes)

    def encode_rendered(self, text: str, marker: str = "", inside: bool = False) -> list[int]:
        """Return the ids of a rendered chat: special tokens stand for themselves, and text between them is `encode`d.

        Args:
            text: the text that a chat template wrote.
            marker: a character that splits the letters of a special token that someone typed; it is left out.
            inside: whether it follows other text.

        Raises:
            InputRefused: as in `encode`.
        """
        ids, at = list[int](), 0
        for start, end, index in self.controls(text):
            ids += [*self.encode_between(text[at:start].replace(marker, ""), ids, inside), index]
            at = end
        return ids + self.encode_between(text[at:].replace(marker, ""), ids, inside)

    def encode_between(self, text: str, before: Sequence[int], inside: bool = False) -> list[int]:
        """Return the ids of a stretch of a rendered chat after the ids `before`: none, or up to a special token."""
        return self.encode(text, before[-1] not in self._opening if before else inside)

    def controls(self, text: str) -> list[tuple[int, int, int]]:
        """Return (begin, end, id) of the special tokens in a rendered chat, with the spaces that they swallow."""
        try:
            encoded = self._recognising.encode(text, add_special_tokens=False)
        except TypeError:
            self.encode(text)  # raises an error that says what is wrong with it
            raise
        special = set(self.special.values())
        both = zip(encoded.ids, encoded.offsets, strict=True)
        return [(start, end, index) for index, (start, end) in both if index in special]

    @functools.cached_property
    def _recognising(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(json.dumps(self._json))

    def texts(self) -> dict[int, str]:
        """Return each token's text by its id, as `to_json` writes it; for a special token, its content."""
        return tokenizer_file.texts(self._json, "tokenizer")

    def id_of(self, text: str) -> int | None:
        """Return the id of the one token that stands for a text; None if no single one does."""
        if text in self.special:
            return self.special[text]
        wanted = text.encode()
        indices = [index for index, piece in enumerate(self.pieces) if piece == wanted] if wanted else []
        # If a byte's token stands for the same text, return the one that the text is encoded to.
        return next(iter(self.encode(text, inside=True) if len(indices) > 1 else indices), None)

    def lead(self, before: Sequence[int]) -> ByteString:
        """Return the bytes that decoding puts before a text after these ids: a space, or none."""
        return b" " if self.strips and self._begins[before[-1] if before else self.bos_id] else b""

    def bytes_of(self, ids: NDArray[Any], before: NDArray[Any]) -> int:
        """Return the bytes of text for ids, given the id before each (same shape), without spaces left out of it."""
        return int(self.token_bytes[ids].sum() - (self._begins[before] & self._spaced[ids]).sum())

    def decode_bytes(self, ids: Iterable[int]) -> ByteString:
        """Return the bytes of the text that ids stand for; special tokens stand for none."""
        decoded = b"".join([self.pieces[index] for index in ids])
        return decoded.removeprefix(b" ") if self.strips else decoded

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that ids stand for; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json`."""
        return json.dumps(self._json, ensure_ascii=False, indent=1)

    @functools.cached_property
    def digest(self) -> str:
        """Return the hex sha256 of its file; unlike `hash` it tells files apart that name other border tokens."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


# In an added token: a place where a text is cut, as no other token has it inside; see `data.reading`.
_CUT_INSIDE = re.compile(r"[^\W_][ \n][^\W_]")
# transformers then begins a prompt as each document began in training.
_BEGIN_WITH_BOS: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [
        {"SpecialToken": {"id": BOS, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ],
    "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
}


def _some(texts: Iterable[str]) -> str:
    return ", ".join(map(repr, itertools.islice(texts, 3)))


def _literal(content: dict[str, Any]) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer.from_str(json.dumps(content))
    engine.encode_special_tokens = True
    return engine


def _loaded(checked: tokenizer_file.Checked, where: str, trusted: bool) -> tokenizers.Tokenizer:
    if not trusted and (fault := tokenizer_trial.fault(json.dumps(checked.json))):
        raise InputRefused(f"{where}: the tokenizers library cannot load it: {fault}")
    try:
        engine = _literal(checked.json)
    except Exception as error:  # the library raises a bare Exception
        raise InputRefused(f"{where}: the tokenizers library refuses it: {str(error)[:200]}") from None
    same_ids = all(engine.token_to_id(token["content"]) == token["id"] for token in checked.json["added_tokens"])
    if engine.get_vocab_size() != len(checked.pieces) or not same_ids:
        raise InputRefused(
            f"{where}: the ids of its added tokens do not continue those of its vocabulary; renumber them"
        )
    return engine


def _borders(special: dict[str, int], where: str, bos: str | None, eos: str | None) -> tuple[int, int]:
    for name in (bos, eos):
        if name is not None and name not in special:
            raise InputRefused(f"{where}: has no special token {name[:60]!r}; its special tokens are {_few(special)}")
    if bos is None and eos is None:
        bos = next((name for name in _BOS_NAMES if name in special), None)
        eos = next((name for name in _EOS_NAMES if name in special), None)
    begin, end = bos if bos is not None else eos, eos if eos is not None else bos
    if begin is None or end is None:
        raise InputRefused(
            f"{where}: no special token to begin and end documents with among {_few(special)}; "
            "name them as bos_token and eos_token in a tokenizer_config.json next to it"
        )
    return special[begin], special[end]


def _few(special: dict[str, int]) -> str:
    names = sorted(name[:40] for name in special)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"


def parse(asked: str | Path | Tokenizer) -> Tokenizer | int:
    """Return the tokenizer that a `tokenizer` setting means, or N where "bpe:N" asks to train one with N entries.

    Raises:
        UsageError: "bpe:" is not followed by a number in range.
        InputRefused: the file is missing or not usable.
    """
    if isinstance(asked, Tokenizer):
        return asked
    if asked == "bytes":
        return Tokenizer.bytes()
    if not isinstance(asked, str | os.PathLike):
        raise UsageError(f"data.tokenizer = {asked!r}: expected bpe:N, bytes, a tokenizer.json or a Tokenizer")
    if isinstance(asked, str) and asked.startswith("bpe:"):
        digits = asked.removeprefix("bpe:").replace("_", "")
        if (
            digits.isascii()
            and digits.isdigit()
            and len(digits) < 9
            and SMALLEST_VOCABULARY <= int(digits) <= tokenizer_file.MAX_VOCABULARY
        ):
            return int(digits)
        bounds = f"{SMALLEST_VOCABULARY} to {tokenizer_file.MAX_VOCABULARY}"
        raise UsageError(f"data.tokenizer = {asked!r}: bpe:N needs a whole number from {bounds}, such as bpe:4096")
    return Tokenizer.from_file(asked)
