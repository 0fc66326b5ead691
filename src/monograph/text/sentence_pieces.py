"""Read the parts of a `tokenizer.json` in SentencePiece's way (Llama 2, Mistral 7B, Phi-3, Gemma).

Each space is written as the letter ▁, most tokenizers put one ▁ before a text, and a character that
the vocabulary lacks is written as one token <0xXX> per byte of its UTF-8. Only known parts, which
take linear time, are accepted.
"""

import re
from typing import Any, NamedTuple, TypeGuard

MARK = "▁"
PREPEND = {"type": "Prepend", "prepend": MARK}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
KNOWN_NORMALIZERS = (PREPEND, _REPLACE)
# Gemma has this step after spaces are replaced, so that it splits nothing.
_SPLIT = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
_BACK = [
    {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Marks(NamedTuple):
    """The way in which a tokenizer of this kind treats spaces and bytes.

    Attributes:
        scheme: where a ▁ is inserted. "prepend": before each text, and before each stretch after an
            added token that is matched before normalisation. "always": before each stretch between
            added tokens, unless the stretch begins with a space. "first": only at the beginning of
            a text. "never": nowhere.
        strips: whether decoding leaves out one space at the beginning.
        byte_tokens: whether decoding turns the token <0xXX> into that byte.
    """

    scheme: str
    strips: bool
    byte_tokens: bool

    def piece(self, token: str) -> bytes:
        """Return the bytes that a vocabulary entry stands for."""
        byte = _BYTE.fullmatch(token) if self.byte_tokens else None
        if byte:
            return bytes([int(byte[1], 16)])
        return token.replace(MARK, " ").encode()


def is_marked(normalizers: list[Any], pre_tokenizers: list[Any]) -> bool:
    """Return whether some step of a tokenizer writes spaces as ▁."""
    return _REPLACE in normalizers or any(is_metaspace(step) for step in pre_tokenizers)


def is_metaspace(step: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a pre-tokenizer is SentencePiece's, with its usual letter."""
    return (
        isinstance(step, dict)
        and step.get("type") == "Metaspace"
        and step.get("replacement") == MARK
    )


def scheme_of(step: dict[str, Any]) -> str:
    """Return where a Metaspace inserts a ▁; older files only say whether it does."""
    return str(
        step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
    )


def marks(
    normalizers: list[Any],
    pre_tokenizers: list[Any],
    decoders: list[Any],
    model: dict[str, Any],
    added: list[str],
) -> Marks:
    """Return how a tokenizer's steps treat spaces and bytes; `added` are the texts of its added
    tokens, except special.

    Raises:
        ValueError: the tokenizer would lose text, or has an unknown decoder; the message says
            which.
    """
    metaspaces = [step for step in pre_tokenizers if is_metaspace(step)]
    schemes = {scheme_of(step) for step in metaspaces} | {
        "prepend" for step in normalizers if step == PREPEND
    }
    scheme = next(iter(schemes - {"never"}), "never")
    if (
        len(schemes) > 1
        or normalizers.count(PREPEND) > 1
        or not schemes <= {"prepend", "always", "first", "never"}
    ):
        shown = ", ".join(sorted(schemes))
        raise ValueError(
            f"puts spaces before a text in more ways than one, or in an unknown one ({shown[:80]})"
        )
    marks_of = _decoded(decoders, scheme, metaspaces, bool(model.get("byte_fallback")))
    vocab = model.get("vocab")
    merges = model.get("merges")
    if not isinstance(vocab, dict) or MARK not in vocab:
        raise ValueError(
            f"model.vocab has no {MARK!r} for a single space: 'a  b' would not come back"
        )
    merges = merges if isinstance(merges, list) else []
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    joined = ["".join(map(str, pair)) for pair in pairs if isinstance(pair, list)]
    if marks_of.byte_tokens and (
        model.get("ignore_merges") or any(map(_BYTE.fullmatch, [*joined, *added]))
    ):
        raise ValueError(
            r"reads the letters of a byte's token as the byte: '<0x0A>' would come back as '\n'"
        )
    return marks_of


def _decoded(decoders: list[Any], scheme: str, metaspaces: list[Any], byte_fallback: bool) -> Marks:
    if decoders in (_BACK, [*_BACK, _STRIP]):
        return Marks(scheme, decoders[-1] == _STRIP, byte_tokens=True)
    if len(decoders) != 1 or not is_metaspace(decoders[0]):
        raise ValueError(
            "decoder is not one of the known ones: Replace, ByteFallback, Fuse, maybe Strip; or Metaspace"
        )
    if byte_fallback:
        raise ValueError(r"decoder Metaspace reads no bytes: '\n' would come back as '<0x0A>'")
    if not metaspaces or any(step.get("split", True) is not True for step in metaspaces):
        raise ValueError(
            "decoder Metaspace leaves out all spaces of the first token: '   a' would come back as 'a'"
        )
    return Marks(scheme, scheme_of(decoders[0]) != "never", byte_tokens=False)


def pre_tokenizer(step: object) -> dict[str, Any] | None:
    """Return a pre-tokenizer in the library's current form, or None for an unknown one."""
    if is_metaspace(step):
        split = step.get("split", True) is True
        return {
            "type": "Metaspace",
            "replacement": MARK,
            "prepend_scheme": scheme_of(step),
            "split": split,
        }
    return _SPLIT if step == _SPLIT else None
