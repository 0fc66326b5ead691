"""Train, read and apply BPE tokenizers that lose no text.

A tokenizer is trained here, read from a `tokenizer.json`, or has one id for each byte. An *added
token* is a token in addition to the BPE vocabulary; it is found in a text before BPE runs. A
*special token* is an added token that stands for no text, such as <|eos|>.
"""

import copy
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from monograph.errors import InputRefused, UsageError
from monograph.storage.reading import is_folder
from monograph.text import tokenizer_config, tokenizer_file, tokenizer_trial
from monograph.text.lossless import LosslessCheck, require_distinct_texts
from monograph.text.tokenizer_config import TokenizerConfig

BOS = "<|bos|>"
EOS = "<|eos|>"
PAD = "<|pad|>"
DEFAULT_VOCABULARY = 4096  # entries of a tokenizer that is trained here
SMALLEST_VOCABULARY = 256 + 3  # the bytes, and three special tokens

# The special tokens that begin, end and pad documents in published tokenizers, the most specific
# names first.
_BOS_NAMES = (BOS, "<|begin_of_text|>", "<|startoftext|>", "[BOT]", "[BOS]", "<s>", "<bos>")
_EOS_NAMES = (
    EOS,
    "<|end_of_text|>",
    "<|endoftext|>",
    "[EOT]",
    "[EOS]",
    "</s>",
    "<eos>",
    "<|im_end|>",
)
_PAD_NAMES = (PAD, "<|finetune_right_pad_id|>", "[PAD]", "<pad>")

# A place where long texts may be cut (see `monograph.data.reading`): between two words. Only added tokens
# can contain one.
_CUT_INSIDE = re.compile(r"[^\W_][ \n][^\W_]")
# With this post-processor, transformers begins a prompt with bos, as each document began in
# training.
_BEGIN_WITH_BOS: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": BOS, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [
        {"SpecialToken": {"id": BOS, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ],
    "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
}

ByteString = bytes  # inside the class, `bytes` is the method `Tokenizer.bytes`


class Tokenizer:
    """A BPE tokenizer, byte-level or like SentencePiece's; transformers can load what it saves.

    The letters of a special token in a text ("<|eos|>" in a file about tokenizers) are encoded as
    letters, so no text can end a document. Encoding adds no bos or eos token.

    A tokenizer that was trained here gives any text back unchanged. A tokenizer from a file may
    change a text to a normal form of Unicode, or insert a space before it, as the tokenizers
    library does with this file. Text that the vocabulary cannot represent is refused; no part of a
    text is left out.

    Attributes:
        special: {content: id} of the special tokens.
        inserts_space: whether a space is inserted before a text that does not begin with a space.
        pieces: the bytes that each id stands for, [V]; empty for special tokens.
        token_bytes: the lengths of `pieces`, int32 [V].
        vocab_size: V; the ids are 0 to V - 1 without gaps.
        bos_id: the id that begins a document; equal to `eos_id` if the file has only that one.
        eos_id: the id that ends a document; equal to `bos_id` if the file has only that one.
        pad_id: the id for unused positions, which is never a target; `eos_id` if the file has none.
        strips_space: whether decoding leaves out one space at the beginning of a text. Encoding has
            inserted it, so it does not count as a byte of the text.
        hash: the hex sha256 of everything on which ids depend: patterns, vocabulary, merges,
            special tokens.
        config: the settings next to the tokenizer file, e.g. the chat template; empty if the
            tokenizer is not from a file.
    """

    config = TokenizerConfig()

    def __init__(
        self,
        content: dict[str, Any],
        where: str,
        bos: str | None = None,
        eos: str | None = None,
        trusted: bool = True,
    ) -> None:
        """Read the JSON object of a `tokenizer.json`.

        Args:
            content: the object.
            where: the tokenizer's name in messages.
            bos: the special token that begins a document; None: a token with a known name.
            eos: the special token that ends a document; None: a token with a known name.
            trusted: whether Monograph made the object. Any other is first loaded in a separate process
                with limits of memory and time.

        Raises:
            InputRefused: see `from_file`.
        """
        try:
            checked = tokenizer_file.CheckedTokenizer(content, where)
        except InputRefused as error:
            # An example of a text that the refused tokenizer would change makes the message clearer.
            example = None if trusted else tokenizer_trial.find_changed_text(json.dumps(content))
            if example is None:
                raise
            text, changed_text = example
            raise InputRefused(
                f"{error}. With it {text!r} would come back as {changed_text[:40]!r}"
            ) from None
        self.special: dict[str, int] = checked.special
        self._json = checked.json
        self.inserts_space = checked.inserts_space
        # The ids of special tokens after which a space is inserted.
        self._ids_before_space = checked.ids_before_space
        # The library's tokenizers: `_engine` for a text at the beginning of a document, and `_engine_inside`
        # for a text that follows other text, before which no space is inserted.
        self._engine = _load(checked, where, trusted)
        self._engine_inside = self._engine
        if self.inserts_space:
            self._engine_inside = _load_literal(tokenizer_file.without_inserted_space(self._json))
        require_distinct_texts(self._json["added_tokens"], self._engine, where)
        added = [token["id"] for token in self._json["added_tokens"] if not token["special"]]
        for token_id in added:
            # An added token is decoded to its normalised form, which `id_to_token` returns.
            checked.pieces[token_id] = checked.piece(self._engine.id_to_token(token_id) or "")
        self._lossless_check = LosslessCheck(checked, added, self._engine, self._engine_inside)
        self.pieces: list[ByteString] = checked.pieces
        self.token_bytes: NDArray[np.int32] = np.array(
            [len(piece) for piece in checked.pieces], dtype=np.int32
        )
        self.vocab_size = len(checked.pieces)
        self.bos_id, self.eos_id = _document_ids(checked.special, where, bos, eos)
        self.pad_id = self.eos_id
        for name in _PAD_NAMES:
            if name in checked.special:
                self.pad_id = checked.special[name]
                break
        self.strips_space = checked.marks is not None and checked.marks.strips_space
        # [V]: whether a space directly after this id was inserted by encoding and is left out by decoding,
        # so that it is not part of the text.
        self._strips_after = np.zeros(self.vocab_size, dtype=np.bool_)
        self._strips_after[self.bos_id] = self.strips_space
        if self.inserts_space:
            self._strips_after[list(self._ids_before_space)] = self.strips_space
        # [V]: whether the text of this id begins with a space.
        self._begins_with_space = np.array([piece[:1] == b" " for piece in checked.pieces])
        self._missing_bytes = checked.missing_bytes
        self._marks = checked.marks
        self.hash = self._identity_hash()

    def _identity_hash(self) -> str:
        """Return `hash`. Stored corpora and runs depend on it, so its content must not change."""
        model = self._json["model"]
        steps = [self._json[key] for key in ("added_tokens", "normalizer", "pre_tokenizer")]
        vocab = sorted(model["vocab"].items(), key=lambda item: item[1])
        identity = [
            vocab,
            [model["merges"], model["ignore_merges"], steps],
            self.bos_id,
            self.eos_id,
            self.pad_id,
        ]
        # The ids of a byte-level tokenizer do not depend on the following values.
        if self._marks:
            identity.append(
                [
                    self._json["decoder"],
                    model["byte_fallback"],
                    model["unk_token"],
                    model["fuse_unk"],
                ]
            )
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Train on texts with GPT-2's split pattern.

        The same texts in the same order give the same tokenizer. Ids 0, 1 and 2 are <|bos|>,
        <|eos|> and <|pad|>. The 256 bytes follow, and then the merges, the most frequent first.

        Args:
            texts: the texts.
            vocab_size: the number of ids; there are fewer if the texts have no pair left to merge.

        Raises:
            UsageError: vocab_size is not from 259 to 2^20.
        """
        if not SMALLEST_VOCABULARY <= vocab_size <= tokenizer_file.MAX_VOCABULARY:
            raise UsageError(
                f"vocab_size = {vocab_size}: must be from {SMALLEST_VOCABULARY} to {tokenizer_file.MAX_VOCABULARY}"
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
        return cls(
            json.loads(engine.to_str()) | {"post_processor": _BEGIN_WITH_BOS}, f"bpe:{vocab_size}"
        )

    @classmethod
    def from_file(cls, path: str | Path, trusted: bool = False) -> Self:
        """Read a `tokenizer.json`, and the files next to it, e.g. the chat template.

        Args:
            path: the file or its folder.
            trusted: whether Monograph wrote the file. Any other is first loaded in a separate process
                with limits of memory and time.

        Raises:
            InputRefused: the file is not a BPE tokenizer of known parts, has no known bos or eos
                token, or a file next to it is damaged.
        """
        path = Path(os.path.expanduser(path))
        path = path / "tokenizer.json" if is_folder(path) else path
        settings = tokenizer_config.read(path.parent)
        tokenizer = cls(tokenizer_file.read(path), str(path), *settings.document_tokens, trusted)
        tokenizer.config = settings
        return tokenizer

    @classmethod
    def bytes(cls) -> Self:
        """Return the tokenizer with one id for each byte.

        Ids 0, 1 and 2 are <|bos|>, <|eos|> and <|pad|>. The bytes follow, in the order of the
        characters that stand for them (`tokenizer_file.byte_alphabet`).
        """
        specials = {name: token_id for token_id, name in enumerate((BOS, EOS, PAD))}
        letters = sorted(tokenizer_file.byte_alphabet())
        vocab = specials | {letter: token_id for token_id, letter in enumerate(letters, 3)}
        content = {
            "added_tokens": [
                {"id": token_id, "content": name, "special": True}
                for name, token_id in specials.items()
            ],
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
            "post_processor": _BEGIN_WITH_BOS,
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
        return cls(content, "bytes")

    def with_date(self, day: str) -> Self:
        """Return a copy of the tokenizer, whose chat template sees `day` as today's date."""
        dated = copy.copy(self)
        dated.config = self.config.with_date(day)
        return dated

    def encode(self, text: str, inside: bool = False) -> list[int]:
        """Return the ids of a text, without bos and eos; `decode` gives the text back.

        Args:
            text: the text.
            inside: whether the text follows other text; then no space is inserted before it.

        Raises:
            InputRefused: the text has a lone surrogate (an undecodable byte), or the tokenizer
                would lose a part of it.
        """
        return self.encode_batch([text], inside)[0]

    def encode_batch(self, texts: Sequence[str], inside: bool = False) -> list[list[int]]:
        """Return the ids of each text, computed on all cores; see `encode`."""
        engine = self._engine_inside if inside else self._engine
        try:
            encodings = engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise InputRefused(
                "text with a lone surrogate (U+D800 to U+DFFF) cannot be encoded; give valid Unicode"
            ) from None
        ids = [encoding.ids for encoding in encodings]
        for text, ids_of_text in zip(texts, ids, strict=True):
            change = self._lossless_check.describe(text, inside, ids_of_text)
            if change:
                raise InputRefused(f"{change}; give other text, or a tokenizer that can write it")
        return ids

    def describe_change(self, text: str, inside: bool = False) -> str:
        """Return a sentence on the part of a text that would come back changed, or "".

        The arguments are those of `encode`.
        """
        return self._lossless_check.describe(text, inside)

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """Return lines for the user on text that would come back changed.

        Text that is only composed (NFC) is not mentioned.
        """
        normalizer = json.dumps(self._json["normalizer"])
        notes = [
            f"the tokenizer rewrites text ({form}), and the rewritten text is trained and measured"
            for form in tokenizer_file.NORMAL_FORMS
            if form != "NFC" and f'"{form}"' in normalizer
        ]
        if self.inserts_space and not self.strips_space:
            notes.append(
                "the tokenizer puts a space before a text, which is trained and measured as a part of it"
            )
        if self.strips_space and self._marks and self._marks.scheme != "prepend":
            notes.append(
                "the tokenizer leaves out one space at the beginning of a text that begins with spaces"
            )
        added = [token["content"] for token in self._json["added_tokens"] if not token["special"]]
        may_be_cut = [content for content in added if _CUT_INSIDE.search(content)]
        if may_be_cut:
            notes.append(
                f"long texts are encoded in parts, so {_shown_examples(may_be_cut)} may be cut in two there"
            )
        spaced = self._added_tokens_with_spaces(added)
        if spaced:
            notes.append(
                f"the tokenizer puts a space next to {_shown_examples(spaced)}, as part of the text"
            )
        if self._missing_bytes:
            # Characters that would come back changed. This is a generator, so that the search ends after the
            # first examples.
            without_token = (
                chr(code)
                for code in (*range(0x20, 0xD800), *range(0x10000, 0x20000))
                if self.describe_change(chr(code))
            )
            examples = _shown_examples(without_token) or "control characters"
            notes.append(
                f"the tokenizer has no tokens for {examples} and the like: text with such characters is refused"
            )
        return tuple(notes)

    def _added_tokens_with_spaces(self, added: Sequence[str]) -> list[str]:
        """Return the added tokens next to which encoding and decoding put a space."""
        if not self.inserts_space and not self._marks:
            return []
        texts = [f"a{content}a" for content in added]
        encodings = self._engine.encode_batch_fast(texts, add_special_tokens=False)
        decoded = self._engine.decode_batch([encoding.ids for encoding in encodings])
        return [
            content
            for content, text in zip(added, decoded, strict=True)
            if f"a {content}" in text or f"{content} a" in text
        ]

    def encode_rendered(self, text: str, marker: str = "", inside: bool = False) -> list[int]:
        """Return the ids of a rendered chat, with special tokens where their letters occur.

        Args:
            text: a text that a chat template wrote.
            marker: a character that the renderer has put into special tokens that a user typed, so that
                they are not taken for special tokens (see `monograph.text.chat`). It is removed from the
                text.
            inside: whether the text follows other text.

        Raises:
            InputRefused: as in `encode`.
        """
        ids = list[int]()
        position = 0
        for start, end, token_id in self.special_tokens_in(text):
            text_before = text[position:start].replace(marker, "")
            ids += self.encode_between(text_before, ids, inside)
            ids.append(token_id)
            position = end
        return ids + self.encode_between(text[position:].replace(marker, ""), ids, inside)

    def encode_between(self, text: str, before: Sequence[int], inside: bool = False) -> list[int]:
        """Return the ids of a text that stands between two special tokens of a rendered chat.

        Args:
            text: the text.
            before: the ids before it. They may be empty; otherwise the last one is a special token.
            inside: whether the text follows other text, if `before` is empty.
        """
        if before:
            inside = before[-1] not in self._ids_before_space
        return self.encode(text, inside)

    def special_tokens_in(self, text: str) -> list[tuple[int, int, int]]:
        """Return (begin, end, id) of each special token in a rendered chat.

        The positions include adjacent spaces, if the token matches them as well.
        """
        try:
            encoded = self._engine_with_special.encode(text, add_special_tokens=False)
        except TypeError:
            self.encode(text)  # raises an error that says what is wrong with the text
            raise
        special_ids = set(self.special.values())
        return [
            (start, end, token_id)
            for token_id, (start, end) in zip(encoded.ids, encoded.offsets, strict=True)
            if token_id in special_ids
        ]

    @functools.cached_property
    def _engine_with_special(self) -> tokenizers.Tokenizer:
        """The library's tokenizer that recognises special tokens in a text."""
        return tokenizers.Tokenizer.from_str(json.dumps(self._json))

    def texts(self) -> dict[int, str]:
        """Return {id: text} of all tokens, as `to_json` writes them."""
        return tokenizer_file.texts(self._json, "tokenizer")

    def id_of(self, text: str) -> int | None:
        """Return the id of the token that stands for exactly this text, or None."""
        if text in self.special:
            return self.special[text]
        text_bytes = text.encode()
        if not text_bytes:
            return None
        ids = [token_id for token_id, piece in enumerate(self.pieces) if piece == text_bytes]
        # A letter may have a token of its own, besides the token of its byte. Then the one that encoding
        # gives is returned.
        if len(ids) > 1:
            ids = self.encode(text, inside=True)
        return ids[0] if ids else None

    def inserted_space(self, before: Sequence[int]) -> ByteString:
        """Return the space that encoding inserts before a text and decoding leaves out again.

        Args:
            before: the ids before the text; empty: the text begins a document.

        Returns:
            b" "; or b"" if encoding inserts no space there, or decoding does not leave it out.
        """
        last_id = before[-1] if before else self.bos_id
        return b" " if self._strips_after[last_id] else b""

    def bytes_of(self, ids: NDArray[Any], before: NDArray[Any]) -> int:
        """Return the number of bytes of the text of ids, without inserted spaces.

        Args:
            ids: the ids, of any shape.
            before: the id before each of them, of the same shape.
        """
        inserted_spaces = self._strips_after[before] & self._begins_with_space[ids]
        return int(self.token_bytes[ids].sum() - inserted_spaces.sum())

    def decode_bytes(self, ids: Iterable[int]) -> ByteString:
        """Return the UTF-8 bytes of the text of ids; special tokens have none."""
        decoded = b"".join([self.pieces[token_id] for token_id in ids])
        return decoded.removeprefix(b" ") if self.strips_space else decoded

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        # Such bytes occur if the ids begin or end within a character.
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json`."""
        return json.dumps(self._json, ensure_ascii=False, indent=1)

    @functools.cached_property
    def digest(self) -> str:
        """Return the hex sha256 of `to_json`; unlike `hash` it covers the whole file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


def _shown_examples(texts: Iterable[str]) -> str:
    """Return the first three texts, for a message."""
    return ", ".join(map(repr, itertools.islice(texts, 3)))


def _load_literal(content: dict[str, Any]) -> tokenizers.Tokenizer:
    """Load a tokenizer that encodes the letters of special tokens as text."""
    engine = tokenizers.Tokenizer.from_str(json.dumps(content))
    engine.encode_special_tokens = True
    return engine


def _load(
    checked: tokenizer_file.CheckedTokenizer, where: str, trusted: bool
) -> tokenizers.Tokenizer:
    """Load the library's tokenizer for whole texts.

    Raises:
        InputRefused: the library refuses the tokenizer, or has other ids.
    """
    fault = None if trusted else tokenizer_trial.load_fault(json.dumps(checked.json))
    if fault:
        raise InputRefused(f"{where}: the tokenizers library cannot load it: {fault}")
    try:
        engine = _load_literal(checked.json)
    except Exception as error:  # the library raises a bare Exception
        raise InputRefused(
            f"{where}: the tokenizers library refuses it: {str(error)[:200]}"
        ) from None
    same_ids = all(
        engine.token_to_id(token["content"]) == token["id"]
        for token in checked.json["added_tokens"]
    )
    if engine.get_vocab_size() != len(checked.pieces) or not same_ids:
        raise InputRefused(
            f"{where}: the ids of its added tokens do not continue those of its vocabulary; renumber them"
        )
    return engine


def _document_ids(
    special: dict[str, int], where: str, bos: str | None, eos: str | None
) -> tuple[int, int]:
    """Return the ids that begin and end a document.

    Args:
        special: {content: id} of the special tokens.
        where: the tokenizer's name in messages.
        bos: the token that begins a document; None: `eos`, or a token with a known name.
        eos: the token that ends a document; None: `bos`, or a token with a known name.
    """
    for name in (bos, eos):
        if name is not None and name not in special:
            raise InputRefused(
                f"{where}: has no special token {name[:60]!r}; its special tokens are {_shown_names(special)}"
            )
    if bos is None and eos is None:
        bos = next((name for name in _BOS_NAMES if name in special), None)
        eos = next((name for name in _EOS_NAMES if name in special), None)
    begin = eos if bos is None else bos
    end = bos if eos is None else eos
    if begin is None or end is None:
        raise InputRefused(
            f"{where}: no special token to begin and end documents with among {_shown_names(special)}; "
            "name them as bos_token and eos_token in a tokenizer_config.json next to it"
        )
    return special[begin], special[end]


def _shown_names(special: dict[str, int]) -> str:
    """Return up to eight names of special tokens, for a message."""
    names = sorted(name[:40] for name in special)
    if not names:
        return "none"
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def parse_setting(
    setting: str | Path | Tokenizer, vocab_size: int | None = None
) -> Tokenizer | int:
    """Return the tokenizer that the settings data.tokenizer and data.vocab_size ask for.

    Args:
        setting: "bpe": a tokenizer to be trained on the text; or "bytes", the path of a
            tokenizer.json, or a tokenizer.
        vocab_size: the number of entries of a tokenizer to be trained; None: DEFAULT_VOCABULARY.

    Returns:
        The tokenizer; for "bpe" the number of its entries.

    Raises:
        UsageError: the size is out of range, or is given for a tokenizer that is not trained.
        InputRefused: the file is missing or cannot be used.
    """
    if setting == "bpe":
        size = DEFAULT_VOCABULARY if vocab_size is None else vocab_size
        if isinstance(size, int) and SMALLEST_VOCABULARY <= size <= tokenizer_file.MAX_VOCABULARY:
            return size
        bounds = f"{SMALLEST_VOCABULARY} to {tokenizer_file.MAX_VOCABULARY}"
        # A huge number is not shown: Python refuses to print thousands of digits.
        is_huge = isinstance(size, int) and abs(size) > 10**18
        shown_size = "" if is_huge else f" = {size!r}"
        raise UsageError(f"data.vocab_size{shown_size}: expected a whole number from {bounds}")
    if vocab_size is not None:
        shown = "a tokenizer" if isinstance(setting, Tokenizer) else setting
        raise UsageError(
            f"data.vocab_size is of a tokenizer that is trained here, data.tokenizer = bpe, not of {shown}"
        )
    if isinstance(setting, Tokenizer):
        return setting
    if setting == "bytes":
        return Tokenizer.bytes()
    if not isinstance(setting, str | os.PathLike):
        raise UsageError(
            f"data.tokenizer = {setting!r}: expected bpe, bytes, a tokenizer.json or a Tokenizer"
        )
    return Tokenizer.from_file(setting)
