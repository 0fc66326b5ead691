"""Train, read and apply BPE tokenizers that lose no text: trained here, from a `tokenizer.json`, or
plain bytes.
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
from monograph.text.losses import Losses, require_apart
from monograph.text.tokenizer_config import TokenizerConfig

BOS = "<|bos|>"
EOS = "<|eos|>"
PAD = "<|pad|>"
DEFAULT_VOCABULARY = 4096  # entries of a tokenizer that is trained here
SMALLEST_VOCABULARY = 256 + 3

# The names of the tokens that begin and end documents in published tokenizers, most specific first.
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

ByteString = bytes  # `Tokenizer.bytes` hides the builtin's name inside the class


class Tokenizer:
    """A BPE tokenizer, byte-level or in SentencePiece's way; transformers can load the files that
    it saves.

    Special tokens that occur in a text as letters ("<|eos|>" in a file about tokenizers) are encoded as letters, so
    that no text can end a document. Encoding adds no beginning or end token. A tokenizer trained
    here gives any text back unchanged; one from a file may put a text into a normal form of Unicode
    or insert a space before it, as the tokenizers library does with that file. Text that the
    vocabulary cannot represent is refused and never left out.

    Attributes:
        vocab_size: V; ids are 0..V-1 without gaps.
        bos_id, eos_id: ids that begin and end a document; equal if the tokenizer file has only one
            of them.
        pad_id: id for unused positions, which are never a target; `eos_id` if the file has none.
        special: {content: id} of the special tokens.
        pieces: the bytes that each id stands for, [V]; empty for special tokens.
        token_bytes: the lengths of `pieces`, int32 [V].
        hash: hex sha256 of everything that decides ids: patterns, vocabulary, merges, special
            tokens.
        space_first: whether a space is inserted before a text that does not begin with one.
        strips: whether decoding omits one space at the beginning of a text; that space is not a
            byte of the text.
        config: the settings next to the tokenizer file, above all the chat template; empty unless
            made by `from_file`.
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
        """Read the JSON object of a `tokenizer.json`; see `from_file`."""
        try:
            checked = tokenizer_file.Checked(content, where)
        except InputRefused as error:
            if trusted or not (lost := tokenizer_trial.loss(json.dumps(content))):
                raise
            raise InputRefused(
                f"{error}. With it {lost[0]!r} would come back as {lost[1][:40]!r}"
            ) from None
        self.special: dict[str, int] = checked.special
        self._json = checked.json
        self.space_first = checked.space_first
        self._opening = checked.opening
        self._engine = self._inner = _loaded(checked, where, trusted)
        if self.space_first:
            self._inner = _literal(tokenizer_file.inside(self._json))
        require_apart(self._json["added_tokens"], self._engine, where)
        added = [token["id"] for token in self._json["added_tokens"] if not token["special"]]
        for index in added:
            # The library's normal form.
            checked.pieces[index] = checked.piece(self._engine.id_to_token(index) or "")
        self._losses = Losses(checked, added, self._engine, self._inner)
        self.pieces: list[ByteString] = checked.pieces
        self.token_bytes: NDArray[np.int32] = np.array(
            [len(piece) for piece in checked.pieces], dtype=np.int32
        )
        self.vocab_size = len(checked.pieces)
        self.bos_id, self.eos_id = _borders(checked.special, where, bos, eos)
        self.pad_id = next(
            (checked.special[name] for name in _PAD_NAMES if name in checked.special), self.eos_id
        )
        self.strips = checked.marks is not None and checked.marks.strips
        # [V]: whether, after this id, a space at the beginning of a stretch is not part of the
        # text.
        self._begins = np.zeros(self.vocab_size, dtype=np.bool_)
        self._begins[[self.bos_id, *(self._opening if self.space_first else ())]] = self.strips
        self._spaced = np.array([piece[:1] == b" " for piece in checked.pieces])
        self._lacking, self._marks = checked.lacking, checked.marks
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
        if checked.marks:
            identity.append(
                [
                    self._json["decoder"],
                    model["byte_fallback"],
                    model["unk_token"],
                    model["fuse_unk"],
                ]
            )
        self.hash = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Train on `texts` with GPT-2's split pattern; the same texts in the same order give the
        same tokenizer.

        Ids 0, 1, 2 are <|bos|>, <|eos|>, <|pad|>, followed by the 256 bytes and the merges, most frequent first. There
        are fewer than `vocab_size` ids if the texts have no pair left to merge.

        Raises:
            UsageError: vocab_size is outside 259..2^20.
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
        """Read a `tokenizer.json`, or the one in a folder, with its chat template and the other
        files next to it.

        Args:
            path: the file or its folder.
            trusted: whether Monograph wrote the file; any other is first loaded in a process with
                limits.

        Raises:
            InputRefused: the file is no BPE of known parts with a known bos or eos, or a file next
                to it is damaged.
        """
        path = Path(os.path.expanduser(path))
        path = path / "tokenizer.json" if is_folder(path) else path
        settings = tokenizer_config.read(path.parent)
        tokenizer = cls(tokenizer_file.read(path), str(path), *settings.borders, trusted)
        tokenizer.config = settings
        return tokenizer

    @classmethod
    def bytes(cls) -> Self:
        """Return the tokenizer with an id per byte: 0, 1, 2 are <|bos|>, <|eos|>, <|pad|>, then by sorted character."""
        specials = {name: index for index, name in enumerate((BOS, EOS, PAD))}
        vocab = specials | {
            letter: 3 + index for index, letter in enumerate(sorted(tokenizer_file.byte_alphabet()))
        }
        content = {
            "added_tokens": [
                {"id": index, "content": name, "special": True} for name, index in specials.items()
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

    def on(self, day: str) -> Self:
        """Return the same tokenizer, whose chat template sees another date as today's."""
        dated = copy.copy(self)
        dated.config = self.config.on(day)
        return dated

    def encode(self, text: str, inside: bool = False) -> list[int]:
        """Return the ids of a text, without beginning and end tokens; `decode` gives the text back.

        Args:
            text: any text.
            inside: whether the text follows other text, so that no space is inserted before it.

        Raises:
            InputRefused: the text has a lone surrogate (an undecodable byte), or the tokenizer
                would lose a part of it.
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
        """Return a sentence on the part of a text that would come back changed, or ""; see `encode`
        for `inside`.
        """
        return self._losses.of(text, inside)

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """Return lines for the user on text that would come back changed, except for text composed
        by NFC.
        """
        normal = json.dumps(self._json["normalizer"])
        forms = [
            form for form in tokenizer_file.NORMAL_FORMS if form != "NFC" and f'"{form}"' in normal
        ]
        notes = [
            f"the tokenizer rewrites text ({form}), and what it makes of it is trained and measured"
            for form in forms
        ]
        if self.space_first and not self.strips:
            notes.append(
                "the tokenizer puts a space before a text, which is trained and measured as a part of it"
            )
        if self.strips and self._marks and self._marks.scheme != "prepend":
            notes.append(
                "the tokenizer leaves out one space at the beginning of a text that begins with spaces"
            )
        added = [token["content"] for token in self._json["added_tokens"] if not token["special"]]
        if cut := [content for content in added if _CUT_INSIDE.search(content)]:
            notes.append(
                f"long texts are encoded in parts, so {_some(cut)} may be cut in two there"
            )
        if self.space_first or self._marks:
            texts = [f"a{content}a" for content in added]
            encodings = self._engine.encode_batch_fast(texts, add_special_tokens=False)
            both = zip(
                added,
                self._engine.decode_batch([encoding.ids for encoding in encodings]),
                strict=True,
            )
            if apart := [
                content
                for content, text in both
                if f"a {content}" in text or f"{content} a" in text
            ]:
                notes.append(
                    f"the tokenizer puts a space next to {_some(apart)}, as part of the text"
                )
        if self._lacking:
            lost = (
                chr(code)
                for code in (*range(0x20, 0xD800), *range(0x10000, 0x20000))
                if self.loss(chr(code))
            )
            examples = _some(lost) or "control characters"
            notes.append(
                f"the tokenizer has no tokens for {examples} and the like: text with such is refused"
            )
        return tuple(notes)

    def encode_rendered(self, text: str, marker: str = "", inside: bool = False) -> list[int]:
        """Return the ids of a rendered chat, in which special tokens are recognised and text
        between them is `encode`d.

        Args:
            text: a text that a chat template wrote.
            marker: the character that splits typed letters of special tokens (see
                `monograph.text.chat`); it is left out of the encoded text.
            inside: whether the text follows other text.

        Raises:
            InputRefused: as in `encode`.
        """
        ids = list[int]()
        at = 0
        for start, end, index in self.controls(text):
            ids += [*self.encode_between(text[at:start].replace(marker, ""), ids, inside), index]
            at = end
        return ids + self.encode_between(text[at:].replace(marker, ""), ids, inside)

    def encode_between(self, text: str, before: Sequence[int], inside: bool = False) -> list[int]:
        """Return the ids of a stretch of a rendered chat between special tokens; `before` are the
        ids before it.
        """
        return self.encode(text, before[-1] not in self._opening if before else inside)

    def controls(self, text: str) -> list[tuple[int, int, int]]:
        """Return (begin, end, id) of each special token in a rendered chat, with adjacent spaces
        that it matches.
        """
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
        """Return {id: text} of all tokens, as `to_json` writes them; the text of a special token is
        its content.
        """
        return tokenizer_file.texts(self._json, "tokenizer")

    def id_of(self, text: str) -> int | None:
        """Return the id of the token that stands for exactly this text, or None."""
        if text in self.special:
            return self.special[text]
        wanted = text.encode()
        indices = (
            [index for index, piece in enumerate(self.pieces) if piece == wanted] if wanted else []
        )
        # If a byte's token stands for the same text, return the one that the text is encoded to.
        return next(iter(self.encode(text, inside=True) if len(indices) > 1 else indices), None)

    def lead(self, before: Sequence[int]) -> ByteString:
        """Return b" " if one space at the beginning of a text after these ids is not part of the
        text, else b"".
        """
        return b" " if self.strips and self._begins[before[-1] if before else self.bos_id] else b""

    def bytes_of(self, ids: NDArray[Any], before: NDArray[Any]) -> int:
        """Return the bytes of text of ids, given the id before each (same shape), without spaces
        that are not text.
        """
        return int(self.token_bytes[ids].sum() - (self._begins[before] & self._spaced[ids]).sum())

    def decode_bytes(self, ids: Iterable[int]) -> ByteString:
        """Return the UTF-8 bytes of the text of ids; special tokens have none."""
        decoded = b"".join([self.pieces[index] for index in ids])
        return decoded.removeprefix(b" ") if self.strips else decoded

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
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


# A place where long texts are cut (see `data.reading`); no token but an added one can have it
# inside.
_CUT_INSIDE = re.compile(r"[^\W_][ \n][^\W_]")
# With this post-processor, transformers begins a prompt in the way in which each document began in
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


def _borders(
    special: dict[str, int], where: str, bos: str | None, eos: str | None
) -> tuple[int, int]:
    for name in (bos, eos):
        if name is not None and name not in special:
            raise InputRefused(
                f"{where}: has no special token {name[:60]!r}; its special tokens are {_few(special)}"
            )
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
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        if names
        else "none"
    )


def parse(asked: str | Path | Tokenizer, vocab_size: int | None = None) -> Tokenizer | int:
    """Return the tokenizer that a `tokenizer` setting names, or the number of entries of one that
    is to be trained.

    Args:
        asked: "bpe" for one that is trained on the text, "bytes", the path of a tokenizer.json, or
            a tokenizer.
        vocab_size: entries of the one that is trained; None: DEFAULT_VOCABULARY.

    Raises:
        UsageError: the size is out of range, or of a tokenizer that is not trained.
        InputRefused: the file is missing or cannot be used.
    """
    if asked == "bpe":
        size = DEFAULT_VOCABULARY if vocab_size is None else vocab_size
        if isinstance(size, int) and SMALLEST_VOCABULARY <= size <= tokenizer_file.MAX_VOCABULARY:
            return size
        bounds = f"{SMALLEST_VOCABULARY} to {tokenizer_file.MAX_VOCABULARY}"
        # Python writes no number of thousands of digits.
        said = "" if isinstance(size, int) and abs(size) > 10**18 else f" = {size!r}"
        raise UsageError(f"data.vocab_size{said}: expected a whole number from {bounds}")
    if vocab_size is not None:
        shown = "a tokenizer" if isinstance(asked, Tokenizer) else asked
        raise UsageError(
            f"data.vocab_size is of a tokenizer that is trained here, data.tokenizer = bpe, not of {shown}"
        )
    if isinstance(asked, Tokenizer):
        return asked
    if asked == "bytes":
        return Tokenizer.bytes()
    if not isinstance(asked, str | os.PathLike):
        raise UsageError(
            f"data.tokenizer = {asked!r}: expected bpe, bytes, a tokenizer.json or a Tokenizer"
        )
    return Tokenizer.from_file(asked)
