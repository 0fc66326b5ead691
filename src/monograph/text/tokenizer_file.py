"""Check a `tokenizer.json` before the tokenizers library sees it: only BPE of known parts is
accepted.

It is byte-level like GPT-2's, or in SentencePiece's way (`sentence_pieces`). Encoding and decoding
may change a text in three ways, which are all known here: a normal form of Unicode (Qwen composes
its text), a space at its beginning, and characters that the vocabulary has no token for.

The library aborts, hangs or panics on some hostile files (a padding of 4e9 tokens, a pattern with
catastrophic backtracking, a normaliser that inflates text), which Python cannot catch, so all
checks are allow-lists.
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
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_WORD = r"[^\r\n\p{L}\p{N}]?"
_WORD = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS, _SYMBOLS_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n]*", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
KNOWN_PATTERNS = {
    "llama3": _WORD + r"|\p{N}{1,3}" + _SYMBOLS + _END,
    "qwen2": _WORD + r"|\p{N}" + _SYMBOLS + _END,
    "qwen3.5": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _END,
    "gpt4o": f"{_NO_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_NO_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    + r"|\p{N}{1,3}"
    + _SYMBOLS_SLASH
    + _END,
    "tekken": f"{_NO_WORD}{_UPPER}*{_LOWER}+|{_NO_WORD}{_UPPER}+{_LOWER}*"
    + r"|\p{N}"
    + _SYMBOLS_SLASH
    + _END,
}


_KNOWN_REGEXES = [{"Regex": pattern} for pattern in KNOWN_PATTERNS.values()]
_KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
# The bytes that never occur in UTF-8: a tokenizer that learned its alphabet from text has no tokens
# for them.
NEVER_IN_TEXT = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


# Both put two special tokens around a text and do nothing else.
_ENDS = ("RobertaProcessing", "BertProcessing")
_BYTE_LEVEL_DECODER = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes, {character: byte}: printable Latin-1 for itself, U+0100
    and up for the rest.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


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
    """Return {id: text} of all tokens, as the file writes them, for any kind of tokenizer with such
    a list.

    Raises:
        InputRefused: there is no such list.
    """
    model = content.get("model")
    added = content.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    try:
        by_id = {index: text for text, index in vocab.items() if _is_id(index)}  # type: ignore[union-attr]
        by_id |= {token["id"]: str(token["content"]) for token in added if _is_id(token["id"])}
        if by_id:
            return by_id
        raise KeyError("vocab")
    except (AttributeError, TypeError, KeyError):
        raise InputRefused(
            f"{where}: has no list of tokens with their ids, so that none can be compared"
        ) from None


class Checked:
    """The accepted parts of a tokenizer.json.

    Attributes:
        json: a tokenizer.json object of known parts only; padding and truncation are dropped.
        pieces: the bytes that each id stands for, [V]; empty for added tokens.
        special: {content: id} of the special tokens.
        lacking: the bytes that occur in UTF-8 text but have no token.
        characters: the characters that have a token, even if some of their bytes are in `lacking`.
        marks: how spaces are written in SentencePiece's way; None for a byte-level tokenizer.
        space_first: whether a space is inserted before a text that does not begin with one.
        opening: the ids of special tokens after which a space is inserted, too.
        made: the ids of added tokens that merges can produce from the letters of a text.

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
        steps = _steps(content.get("pre_tokenizer"), "pretokenizers")
        unknown = model.get("unk_token")
        normal = _steps(content.get("normalizer"), "normalizers")
        self.marks = (
            self._marks(content, normal, steps, added)
            if sentence_pieces.is_marked(normal, steps)
            else None
        )
        self.pieces = self._pieces(vocab, added)
        has_bytes = not self.marks or model.get("byte_fallback")
        single = {piece[0] for piece in map(self.piece, vocab) if len(piece) == 1 and has_bytes}
        self.lacking = {*range(256)} - NEVER_IN_TEXT - single
        # Metaspace writes " " as ▁.
        mark = {" "} if any(map(sentence_pieces.is_metaspace, steps)) else set[str]()
        self.characters = (
            mark.union(token for token in vocab if len(token) == 1) if self.marks else mark
        )
        scheme = self.marks.scheme if self.marks else "always"
        inserts = self.marks is not None or any(
            _is_byte_level(step) and step["add_prefix_space"] for step in steps
        )
        self.space_first = scheme != "never" and inserts
        opening = [
            token
            for token in added
            if scheme == "always" or (scheme == "prepend" and not token["normalized"])
        ]
        self.opening = frozenset(token["id"] for token in opening if token["special"])
        self.json: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": self._normalizer(content.get("normalizer")),
            "pre_tokenizer": self._pre_tokenizer(content.get("pre_tokenizer")),
            "post_processor": self._post_processor(content.get("post_processor")),
            "decoder": content["decoder"]
            if self.marks
            else self._byte_level_decoder(content.get("decoder")),
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
        made = {"".join(pair) for pair in self.json["model"]["merges"]}
        made |= {
            token
            for token in vocab
            if model.get("ignore_merges") or 1 in (len(token), len(self.piece(token)))
        }
        self.made = frozenset(token["id"] for token in added if token["content"] in made)

    def _refuse(self, fault: str) -> InputRefused:
        return InputRefused(
            f"{self._where}: {fault}; give a BPE tokenizer (as GPT-2, Llama, Qwen and Gemma have), bpe or bytes"
        )

    def _section(self, content: dict[str, Any], key: str) -> dict[str, Any]:
        section = content.get(key)
        if not isinstance(section, dict):
            raise self._refuse(f"has no {key!r} object")
        return section

    def _check_model(self, model: dict[str, Any]) -> None:
        if model.get("type", "BPE") != "BPE":
            raise self._refuse(f"model.type is {str(model['type'])[:60]!r}, not 'BPE'")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise self._refuse(f"model.{key} = {str(model[key])[:60]} is not supported")

    def _vocab(self, model: dict[str, Any]) -> dict[str, int]:
        vocab = self._section(model, "vocab")
        if not all(map(_is_id, vocab.values())):
            raise self._refuse(
                f"model.vocab has an id that is not a whole number from 0 to {MAX_VOCABULARY - 1}"
            )
        return vocab

    def _added(self, tokens: object, vocab: dict[str, int]) -> list[dict[str, Any]]:
        if not isinstance(tokens, list):
            raise self._refuse("added_tokens is not a list")
        added: list[dict[str, Any]] = []
        for token in tokens:
            content = token.get("content") if isinstance(token, dict) else None
            if not isinstance(content, str) or not content or not _is_id(token.get("id")):
                raise self._refuse(
                    f"added token {str(token)[:60]!r} needs a content and an id from 0 to {MAX_VOCABULARY - 1}"
                )
            if vocab.get(content, token["id"]) != token["id"]:
                raise self._refuse(
                    f"added token {content[:60]!r} has id {token['id']}, but model.vocab says {vocab[content]}"
                )
            flags = {
                key: bool(token.get(key))
                for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            # A token that matches adjacent spaces would lose them in text. Marked as special, it is
            # only recognised in rendered chats.
            flags["special"] |= flags["lstrip"] or flags["rstrip"]
            added.append({"id": token["id"], "content": content} | flags)
        return sorted(added, key=lambda token: int(token["id"]))

    def _pieces(self, vocab: dict[str, int], added: list[dict[str, Any]]) -> list[bytes]:
        pieces: dict[int, bytes] = {}
        contents = {token["content"] for token in added}
        for token, index in vocab.items():
            if token in contents:
                continue
            if index in pieces:
                raise self._refuse(f"id {index} is given twice")
            if not self.marks and not _ALPHABET.keys() >= {*token}:
                raise self._refuse(
                    f"vocabulary entry {token[:60]!r} is not written in the byte-level alphabet"
                )
            pieces[index] = self.piece(token)
        for entry in added:
            if entry["id"] in pieces:
                raise self._refuse(f"id {entry['id']} is given twice")
            pieces[entry["id"]] = b""  # `Tokenizer` sets the bytes of those that are not special
        if max(pieces) != len(pieces) - 1:
            gap = next(index for index in range(len(pieces)) if index not in pieces)
            raise self._refuse(
                f"ids are not 0 to {len(pieces) - 1}: {gap} is missing and {max(pieces)} is there"
            )
        return [pieces[index] for index in range(len(pieces))]

    def piece(self, token: str) -> bytes:
        """Return the bytes to which the library decodes a token's text."""
        if self.marks:
            return self.marks.piece(token)
        return (
            bytes([_ALPHABET[letter] for letter in token])
            if _ALPHABET.keys() >= {*token}
            else token.encode()
        )

    def _byte_level_decoder(self, part: object) -> dict[str, Any]:
        steps = _steps(part, "decoders")
        if [_kind(step) for step in steps] != ["ByteLevel"]:
            shown = ", ".join(map(_kind, steps)) or None
            raise self._refuse(
                f"decoder {str(shown)[:80]} is not supported: the bytes of text need ByteLevel alone"
            )
        return _BYTE_LEVEL_DECODER

    def _marks(
        self,
        content: dict[str, Any],
        normal: list[Any],
        steps: list[Any],
        added: list[dict[str, Any]],
    ) -> sentence_pieces.Marks:
        text = [token["content"] for token in added if not token["special"]]
        decoder = _steps(content.get("decoder"), "decoders")
        try:
            return sentence_pieces.marks(normal, steps, decoder, content["model"], text)
        except ValueError as error:
            raise self._refuse(str(error)) from None

    def _merges(self, merges: object, vocab: dict[str, int]) -> list[list[str]]:
        if not isinstance(merges, list):
            raise self._refuse("model.merges is not a list")
        pairs = []
        for number, merge in enumerate(merges):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            is_pair = (
                isinstance(pair, list)
                and len(pair) == 2
                and all(isinstance(part, str) for part in pair)
            )
            if not is_pair or not {*pair, "".join(pair)} <= vocab.keys():
                raise self._refuse(
                    f"model.merges[{number}] = {str(merge)[:60]!r} does not join two vocabulary entries into a third"
                )
            pairs.append(pair)
        return pairs

    def _normalizer(self, part: object) -> object:
        for step in _steps(part, "normalizers"):
            known = step in [{"type": form} for form in NORMAL_FORMS]
            if not known and not (self.marks and step in sentence_pieces.KNOWN_NORMALIZERS):
                raise self._refuse(
                    f"normalizer {_kind(step)} is not supported (only {', '.join(NORMAL_FORMS)} are, and ▁ for spaces)"
                )
        return part

    def _pre_tokenizer(self, part: object) -> object:
        steps = _steps(part, "pretokenizers")
        if self.marks:
            known = [
                step if _is_digits(step) else sentence_pieces.pre_tokenizer(step) for step in steps
            ]
        elif not steps or _kind(steps[-1]) != "ByteLevel":
            raise self._refuse(
                "pre_tokenizer does not end in ByteLevel, the one order known, nor are spaces written as ▁"
            )
        else:
            known = [
                step if _is_digits(step) or _is_known_split(step) else None for step in steps[:-1]
            ]
            known += [steps[-1] if _is_byte_level(steps[-1]) else None]
        if None in known:
            step = str(steps[known.index(None)])[:80]
            raise self._refuse(
                f"pre_tokenizer step {step!r} is not one of the known ones, which take linear time"
            )
        if not self.marks:
            return part
        return {"type": "Sequence", "pretokenizers": known} if known else None

    def _post_processor(self, part: object) -> object:
        ends = [[*item] for item in self.special.items()]
        for step in _steps(part, "processors"):
            kind = _kind(step)
            known = (
                _is(step, "ByteLevel")
                or (_is(step, "TemplateProcessing") and self._is_small_template(step))
                or (_is(step, *_ENDS) and all(step.get(key) in ends for key in ("sep", "cls")))
            )
            if not known:
                raise self._refuse(
                    f"post_processor {kind} is not supported (only ByteLevel, TemplateProcessing, "
                    f"{' and '.join(_ENDS)} of special tokens are)"
                )
        return part

    def _is_small_template(self, step: dict[str, Any]) -> bool:
        specials = step.get("special_tokens")
        if not isinstance(specials, dict) or len(specials) > 16:
            return False
        for name, special in specials.items():
            if not isinstance(special, dict) or special.get("ids") != [self.special.get(name)]:
                return False
        return all(
            isinstance(step.get(key), list) and len(step[key]) <= 16 for key in ("single", "pair")
        )


def inside(content: dict[str, Any]) -> dict[str, Any]:
    """Return a checked tokenizer.json without the steps that insert a space before a text."""
    normal = _steps(content["normalizer"], "normalizers")
    steps = _steps(content["pre_tokenizer"], "pretokenizers")
    never = {"add_prefix_space": False, "prepend_scheme": "never"}
    steps = [step | {key: value for key, value in never.items() if key in step} for step in steps]
    return content | {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [step for step in normal if step != sentence_pieces.PREPEND],
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if steps else None,
    }


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_VOCABULARY


def _kind(step: object) -> str:
    return str(step.get("type"))[:40] if isinstance(step, dict) else str(step)[:40]


def _steps(part: object, key: str) -> list[Any]:
    if part is None:
        return []
    steps = part.get(key) if isinstance(part, dict) and part.get("type") == "Sequence" else [part]
    return steps if isinstance(steps, list) else [steps]


def _is(step: object, *kinds: str) -> TypeGuard[dict[str, Any]]:
    """Return whether a step is an object of one of these types."""
    return isinstance(step, dict) and _kind(step) in kinds


def _is_byte_level(step: object) -> TypeGuard[dict[str, Any]]:
    return _is(step, "ByteLevel") and isinstance(step.get("add_prefix_space"), bool)


def _is_digits(step: object) -> bool:
    return _is(step, "Digits") and isinstance(step.get("individual_digits"), bool)


def _is_known_split(step: object) -> bool:
    """Return whether a step splits text in linear time and drops nothing: at fixed letters or by a
    known pattern.
    """
    if not _is(step, "Split", "Punctuation") or step.get("behavior") not in _KEEPING:
        return False
    pattern = step.get("pattern")
    at_letters = _kind(step) == "Punctuation" or (
        isinstance(pattern, dict) and list(pattern) == ["String"]
    )
    kept = step["behavior"] == "Isolated" and step.get("invert") is False
    return at_letters or (kept and pattern in _KNOWN_REGEXES)
