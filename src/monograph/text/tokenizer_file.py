"""Check a `tokenizer.json` before the tokenizers library loads it: only BPE of known parts is
accepted.

The tokenizer is byte-level like GPT-2's, or writes text as SentencePiece does (`sentence_pieces`).
With these parts, encoding and decoding can change a text in three ways only: the text is brought
into a normal form of Unicode (Qwen's tokenizers compose characters), it gets a space at its beginning, or it
loses characters that have no token.

The library aborts, hangs or panics on some hostile files (a padding of 4e9 tokens, a pattern with
catastrophic backtracking, a normalizer that inflates text). Python cannot catch this, and no list of bad
parts could be complete. So a part is accepted only if it is known to be good.
"""

from pathlib import Path
from typing import Any, TypeGuard

from monograph.errors import InputRefused
from monograph.storage.reading import read_json
from monograph.text import sentence_pieces

MAX_FILE_BYTES = 1 << 27
MAX_VOCABULARY = 1 << 20

# The split patterns in the published tokenizer.json files of Llama 3, Qwen 2, Qwen 3.5, GPT-4o and
# Tekken (Mistral). GPT-2's pattern is built into the ByteLevel component.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_PREFIX = r"[^\r\n\p{L}\p{N}]?"  # a character, such as a space, in front of a word
_WORD = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_AND_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
KNOWN_PATTERNS = {
    "llama3": _WORD + r"|\p{N}{1,3}" + _SYMBOLS + _SPACES,
    "qwen2": _WORD + r"|\p{N}" + _SYMBOLS + _SPACES,
    "qwen3.5": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _SPACES,
    "gpt4o": f"{_WORD_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    + r"|\p{N}{1,3}"
    + _SYMBOLS_AND_SLASHES
    + _SPACES,
    "tekken": f"{_WORD_PREFIX}{_UPPER}*{_LOWER}+|{_WORD_PREFIX}{_UPPER}+{_LOWER}*"
    + r"|\p{N}"
    + _SYMBOLS_AND_SLASHES
    + _SPACES,
}
_KNOWN_REGEXES = [{"Regex": pattern} for pattern in KNOWN_PATTERNS.values()]
# The behaviors of a split that keep all of the text; "Removed" drops the delimiters.
_LOSSLESS_BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
# The bytes that never occur in UTF-8. A tokenizer that learned its alphabet from text has no tokens
# for them.
NEVER_IN_TEXT = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
# Post-processors that put two special tokens around a text and do nothing else.
_PUT_AROUND = ("RobertaProcessing", "BertProcessing")
_BYTE_LEVEL_DECODER = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}


def byte_alphabet() -> dict[str, int]:
    """Return {character: byte}, with the characters that GPT-2's tokenizer writes for bytes.

    A printable character of Latin-1 stands for its own byte. The characters from U+0100 stand for
    the other bytes, in order.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + number): byte for number, byte in enumerate(others)}
    return alphabet


_ALPHABET = byte_alphabet()


def read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a tokenizer file.

    Raises:
        InputRefused: the file is missing, too large, or not a JSON object.
    """
    return read_json(
        path, "; give bpe, bytes or the tokenizer.json of a BPE tokenizer", MAX_FILE_BYTES
    )


def texts(content: dict[str, Any], where: str) -> dict[int, str]:
    """Return {id: text} of all tokens of any kind of tokenizer, as the file writes them.

    Args:
        content: the JSON object of a tokenizer file, which need not be an accepted one.
        where: the tokenizer's name in messages.

    Raises:
        InputRefused: there is no list of tokens with their ids.
    """
    model = content.get("model")
    added = content.get("added_tokens") or []
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    # The parts may have any type, which raises an error.
    try:
        by_id = {index: text for text, index in vocab.items() if _is_id(index)}
        by_id |= {token["id"]: str(token["content"]) for token in added if _is_id(token["id"])}
    except (AttributeError, TypeError, KeyError):
        by_id = {}
    if not by_id:
        raise InputRefused(
            f"{where}: has no list of tokens with their ids, so no token can be compared"
        )
    return by_id


class CheckedTokenizer:
    """The accepted parts of a tokenizer.json.

    A step is one part of the normalizer, pre-tokenizer, post-processor or decoder.

    Attributes:
        special: {content: id} of the special tokens.
        marks: how spaces and bytes are written as SentencePiece does; None for a byte-level
            tokenizer.
        pieces: the bytes that each id stands for, [V]; empty for added tokens.
        missing_bytes: the bytes that occur in UTF-8 text but have no token.
        writable_characters: characters that have a token, although some of their bytes may be in
            `missing_bytes`.
        inserts_space: whether a space is inserted before a text that does not begin with a space.
        ids_before_space: the ids of the special tokens after which a space is inserted as well.
        json: a tokenizer.json object of known parts only, without padding and truncation.
        ids_from_merges: the ids of added tokens that merges can produce from the letters of a text.

    Raises:
        InputRefused: a part is unknown, changes text in an unknown way, or is inconsistent; the
            message names `where` and the part.
    """

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self._where = where
        model = self._section(content, "model")
        self._check_model(model)
        vocab = self._vocab(model)
        added = self._added(content.get("added_tokens", []), vocab)
        self.special = {token["content"]: token["id"] for token in added if token["special"]}
        normalizers = _steps(content.get("normalizer"), "normalizers")
        pre_tokenizers = _steps(content.get("pre_tokenizer"), "pretokenizers")
        self.marks = None
        if sentence_pieces.is_marked(normalizers, pre_tokenizers):
            self.marks = self._read_marks(content, normalizers, pre_tokenizers, added)
        self.pieces = self._pieces(vocab, added)
        self.missing_bytes = self._find_missing_bytes(vocab, bool(model.get("byte_fallback")))
        self.writable_characters = set[str]()
        if self.marks:
            self.writable_characters |= {token for token in vocab if len(token) == 1}
        # A Metaspace writes a space as ▁, which has a token.
        if any(map(sentence_pieces.is_metaspace, pre_tokenizers)):
            self.writable_characters.add(" ")
        # Where a space is inserted, if at all; see `sentence_pieces.Marks.scheme`.
        if self.marks:
            scheme = self.marks.scheme
            self.inserts_space = scheme != "never"
        else:
            scheme = "always"
            self.inserts_space = any(
                _is_byte_level(step) and step["add_prefix_space"] for step in pre_tokenizers
            )
        # With "always", a space is inserted after every special token. With "prepend", it is inserted after those
        # that are found in a text before it is normalised. If no space is inserted at all, nothing reads this.
        before_space = [token for token in added if token["special"]]
        if scheme == "prepend":
            before_space = [token for token in before_space if not token["normalized"]]
        elif scheme != "always":
            before_space = []
        self.ids_before_space = frozenset(token["id"] for token in before_space)
        unknown = model.get("unk_token")
        normalizer = self._normalizer(content.get("normalizer"))
        pre_tokenizer = self._pre_tokenizer(content.get("pre_tokenizer"))
        post_processor = self._post_processor(content.get("post_processor"))
        if self.marks:
            decoder = content["decoder"]
        else:
            decoder = self._byte_level_decoder(content.get("decoder"))
        self.json: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": post_processor,
            "decoder": decoder,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": unknown if isinstance(unknown, str) and unknown in vocab else None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": bool(model.get("fuse_unk")),
                "byte_fallback": bool(model.get("byte_fallback")),
                "ignore_merges": bool(model.get("ignore_merges")),
                "vocab": vocab,
                "merges": self._merges(model.get("merges", []), vocab),
            },
        }
        entries_from_text = self._entries_from_text(self.json["model"])
        self.ids_from_merges = frozenset(
            token["id"] for token in added if token["content"] in entries_from_text
        )

    def _entries_from_text(self, model: dict[str, Any]) -> set[str]:
        """Return the vocabulary entries to which BPE can encode letters of a text."""
        vocab = model["vocab"]
        if model["ignore_merges"]:
            return set(vocab)
        entries_from_merges = {"".join(pair) for pair in model["merges"]}
        # These need no merge.
        single = {token for token in vocab if len(token) == 1 or len(self.piece(token)) == 1}
        return entries_from_merges | single

    def _refusal(self, fault: str) -> InputRefused:
        """Return the error for a part that is not accepted."""
        return InputRefused(
            f"{self._where}: {fault}; give a BPE tokenizer (as GPT-2, Llama, Qwen and Gemma have), bpe or bytes"
        )

    def _section(self, content: dict[str, Any], key: str) -> dict[str, Any]:
        """Return the object at a key."""
        section = content.get(key)
        if not isinstance(section, dict):
            raise self._refusal(f"has no {key!r} object")
        return section

    def _find_missing_bytes(self, vocab: dict[str, int], byte_fallback: bool) -> set[int]:
        """Return the bytes that occur in UTF-8 text but have no token."""
        single_bytes = set[int]()
        # Without byte fallback, a tokenizer like SentencePiece's writes no single bytes, but only the whole
        # characters of `writable_characters`.
        if not self.marks or byte_fallback:
            single_bytes = {piece[0] for piece in map(self.piece, vocab) if len(piece) == 1}
        return set(range(256)) - NEVER_IN_TEXT - single_bytes

    def _check_model(self, model: dict[str, Any]) -> None:
        """Check that a model is BPE without dropout and without affixes of subwords."""
        if model.get("type", "BPE") != "BPE":
            raise self._refusal(f"model.type is {str(model['type'])[:60]!r}, not 'BPE'")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise self._refusal(f"model.{key} = {str(model[key])[:60]} is not supported")

    def _vocab(self, model: dict[str, Any]) -> dict[str, int]:
        """Return the vocabulary, {entry: id}."""
        vocab = self._section(model, "vocab")
        if not all(map(_is_id, vocab.values())):
            raise self._refusal(
                f"model.vocab has an id that is not a whole number from 0 to {MAX_VOCABULARY - 1}"
            )
        return vocab

    def _added(self, tokens: object, vocab: dict[str, int]) -> list[dict[str, Any]]:
        """Return the added tokens, in the order of their ids."""
        if not isinstance(tokens, list):
            raise self._refusal("added_tokens is not a list")
        added: list[dict[str, Any]] = []
        for token in tokens:
            content = token.get("content") if isinstance(token, dict) else None
            if not isinstance(content, str) or not content or not _is_id(token.get("id")):
                raise self._refusal(
                    f"added token {str(token)[:60]!r} needs a content and an id from 0 to {MAX_VOCABULARY - 1}"
                )
            if vocab.get(content, token["id"]) != token["id"]:
                raise self._refusal(
                    f"added token {content[:60]!r} has id {token['id']}, but model.vocab says {vocab[content]}"
                )
            flags = {
                key: bool(token.get(key))
                for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            # A token that also matches adjacent spaces would lose the spaces of a text. As a
            # special token it is recognised in rendered chats only, so no text can lose its spaces.
            if flags["lstrip"] or flags["rstrip"]:
                flags["special"] = True
            added.append({"id": token["id"], "content": content} | flags)
        return sorted(added, key=lambda token: int(token["id"]))

    def _pieces(self, vocab: dict[str, int], added: list[dict[str, Any]]) -> list[bytes]:
        """Return the bytes that each id stands for; empty for added tokens."""
        pieces: dict[int, bytes] = {}
        added_contents = {token["content"] for token in added}
        for token, index in vocab.items():
            if token in added_contents:
                continue
            if index in pieces:
                raise self._refusal(f"id {index} is given twice")
            if not self.marks and not _is_byte_level_text(token):
                raise self._refusal(
                    f"vocabulary entry {token[:60]!r} is not written in the byte-level alphabet"
                )
            pieces[index] = self.piece(token)
        for entry in added:
            if entry["id"] in pieces:
                raise self._refusal(f"id {entry['id']} is given twice")
            # `Tokenizer` sets the bytes of added tokens that are not special.
            pieces[entry["id"]] = b""
        if max(pieces) != len(pieces) - 1:
            gap = next(index for index in range(len(pieces)) if index not in pieces)
            raise self._refusal(
                f"ids are not 0 to {len(pieces) - 1}: {gap} is missing and {max(pieces)} is there"
            )
        return [pieces[index] for index in range(len(pieces))]

    def piece(self, token: str) -> bytes:
        """Return the bytes to which the library decodes a token."""
        if self.marks:
            return self.marks.piece(token)
        if _is_byte_level_text(token):
            return bytes([_ALPHABET[letter] for letter in token])
        return token.encode()

    def _byte_level_decoder(self, part: object) -> dict[str, Any]:
        """Check that a decoder is ByteLevel, and return it."""
        steps = _steps(part, "decoders")
        if [_kind(step) for step in steps] != ["ByteLevel"]:
            shown = ", ".join(map(_kind, steps)) or None
            raise self._refusal(
                f"decoder {str(shown)[:80]} is not supported: the bytes of text need ByteLevel alone"
            )
        return _BYTE_LEVEL_DECODER

    def _read_marks(
        self,
        content: dict[str, Any],
        normalizers: list[Any],
        pre_tokenizers: list[Any],
        added: list[dict[str, Any]],
    ) -> sentence_pieces.Marks:
        """Return how the tokenizer writes spaces and bytes."""
        not_special = [token["content"] for token in added if not token["special"]]
        decoders = _steps(content.get("decoder"), "decoders")
        try:
            return sentence_pieces.read_marks(
                normalizers, pre_tokenizers, decoders, content["model"], not_special
            )
        except ValueError as error:
            raise self._refusal(str(error)) from None

    def _merges(self, merges: object, vocab: dict[str, int]) -> list[list[str]]:
        """Return the merges as pairs; files have pairs, or texts with a space between the two."""
        if not isinstance(merges, list):
            raise self._refusal("model.merges is not a list")
        pairs = []
        for number, merge in enumerate(merges):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            is_pair = (
                isinstance(pair, list)
                and len(pair) == 2
                and all(isinstance(part, str) for part in pair)
            )
            if not is_pair or not {*pair, "".join(pair)} <= vocab.keys():
                raise self._refusal(
                    f"model.merges[{number}] = {str(merge)[:60]!r} does not join two vocabulary entries into a third"
                )
            pairs.append(pair)
        return pairs

    def _normalizer(self, part: object) -> object:
        """Check that a normalizer is known, and return it."""
        for step in _steps(part, "normalizers"):
            is_known = step in [{"type": form} for form in NORMAL_FORMS]
            if self.marks and step in sentence_pieces.KNOWN_NORMALIZERS:
                is_known = True
            if not is_known:
                raise self._refusal(
                    f"normalizer {_kind(step)} is not supported (only {', '.join(NORMAL_FORMS)} are, and ▁ for spaces)"
                )
        return part

    def _pre_tokenizer(self, part: object) -> object:
        """Check that a pre-tokenizer is known, and return it in the library's current form."""
        steps = _steps(part, "pretokenizers")
        # Each step in the current form; None for an unknown step.
        current: list[Any] = []
        if self.marks:
            for step in steps:
                current.append(step if _is_digits(step) else sentence_pieces.pre_tokenizer(step))
        elif not steps or _kind(steps[-1]) != "ByteLevel":
            raise self._refusal(
                "pre_tokenizer does not end in ByteLevel, and does not write spaces as ▁"
            )
        else:
            *splits, byte_level = steps
            for step in splits:
                current.append(step if _is_digits(step) or _is_known_split(step) else None)
            current.append(byte_level if _is_byte_level(byte_level) else None)
        if None in current:
            unknown = str(steps[current.index(None)])[:80]
            raise self._refusal(
                f"pre_tokenizer step {unknown!r} is not one of the known ones, which take linear time"
            )
        if not self.marks:
            # All known steps are in the current form already.
            return part
        return {"type": "Sequence", "pretokenizers": current} if current else None

    def _post_processor(self, part: object) -> object:
        """Check that a post-processor is known, and return it."""
        for step in _steps(part, "processors"):
            is_known = (
                _has_type(step, "ByteLevel")
                or (_has_type(step, "TemplateProcessing") and self._is_small_template(step))
                or (_has_type(step, *_PUT_AROUND) and self._puts_special_tokens(step))
            )
            if not is_known:
                raise self._refusal(
                    f"post_processor {_kind(step)} is not supported (only ByteLevel, TemplateProcessing, "
                    f"{' and '.join(_PUT_AROUND)} of special tokens are)"
                )
        return part

    def _puts_special_tokens(self, step: dict[str, Any]) -> bool:
        """Return whether the two tokens of a post-processor are special tokens with their ids."""
        pairs = [[content, token_id] for content, token_id in self.special.items()]
        return all(step.get(key) in pairs for key in ("sep", "cls"))

    def _is_small_template(self, step: dict[str, Any]) -> bool:
        """Return whether a template has few parts, and special tokens with their ids."""
        specials = step.get("special_tokens")
        if not isinstance(specials, dict) or len(specials) > 16:
            return False
        for name, special in specials.items():
            if not isinstance(special, dict) or special.get("ids") != [self.special.get(name)]:
                return False
        return all(
            isinstance(step.get(key), list) and len(step[key]) <= 16 for key in ("single", "pair")
        )


def without_inserted_space(content: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json without the steps that insert a space before a text.

    The tokenizer is for a text that follows other text.

    Args:
        content: a checked tokenizer.json (`CheckedTokenizer.json`).
    """
    normalizers = [
        step
        for step in _steps(content["normalizer"], "normalizers")
        if step != sentence_pieces.PREPEND
    ]
    # The keys by which a step inserts a space, with the values by which it inserts none.
    without_space = {"add_prefix_space": False, "prepend_scheme": "never"}
    pre_tokenizers = []
    for step in _steps(content["pre_tokenizer"], "pretokenizers"):
        changed = {key: value for key, value in without_space.items() if key in step}
        pre_tokenizers.append(step | changed)
    pre_tokenizer: dict[str, Any] | None = None
    if pre_tokenizers:
        pre_tokenizer = {"type": "Sequence", "pretokenizers": pre_tokenizers}
    return content | {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": pre_tokenizer,
    }


def _is_id(value: object) -> bool:
    """Return whether a JSON value can be a token's id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_VOCABULARY


def _kind(step: object) -> str:
    """Return the type of a step, for comparison and messages; if it is not an object, its beginning."""
    return str(step.get("type") if isinstance(step, dict) else step)[:40]


def _steps(part: object, key: str) -> list[Any]:
    """Return the steps of a normalizer, pre-tokenizer, post-processor or decoder.

    Args:
        part: a step, a sequence of steps, or None.
        key: the key of a sequence's steps.
    """
    if part is None:
        return []
    if isinstance(part, dict) and part.get("type") == "Sequence":
        steps = part.get(key)
        return steps if isinstance(steps, list) else [steps]
    return [part]


def _is_byte_level_text(token: str) -> bool:
    """Return whether each letter of a token stands for a byte."""
    return _ALPHABET.keys() >= {*token}


def _has_type(step: object, *kinds: str) -> TypeGuard[dict[str, Any]]:
    """Return whether a step is an object of one of these types."""
    return isinstance(step, dict) and _kind(step) in kinds


def _is_byte_level(step: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a step is a ByteLevel pre-tokenizer, which says whether it inserts a space."""
    return _has_type(step, "ByteLevel") and isinstance(step.get("add_prefix_space"), bool)


def _is_digits(step: object) -> bool:
    """Return whether a step separates digits from other text, and does nothing else."""
    return _has_type(step, "Digits") and isinstance(step.get("individual_digits"), bool)


def _is_known_split(step: object) -> bool:
    """Return whether a step splits text in linear time and keeps all of the text.

    It must split at punctuation, at a fixed text, or by a known pattern.
    """
    if not _has_type(step, "Split", "Punctuation"):
        return False
    if step.get("behavior") not in _LOSSLESS_BEHAVIORS:
        return False
    if _has_type(step, "Punctuation"):
        return True
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and list(pattern) == ["String"]:
        return True
    as_published = step["behavior"] == "Isolated" and step.get("invert") is False
    return as_published and pattern in _KNOWN_REGEXES
