"""Read the parts of a `tokenizer.json` that write text as SentencePiece does (Llama 2, Mistral 7B,
Phi-3, Gemma).

Each space is written as the letter ▁, the *mark*. Most of these tokenizers insert one ▁ before a
text. A character that the vocabulary lacks is written as one token <0xXX> for each byte of its
UTF-8. Only known parts, which take linear time, are accepted.
"""

import re
from typing import Any, NamedTuple, TypeGuard

MARK = "▁"
PREPEND = {"type": "Prepend", "prepend": MARK}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
KNOWN_NORMALIZERS = (PREPEND, _REPLACE)
# Gemma's tokenizer has this step. It splits nothing, because all spaces have been replaced before.
_SPLIT = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
# The steps of the usual decoder, which undo the encoding. _STRIP may follow them.
_DECODERS = [
    {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Marks(NamedTuple):
    """How a tokenizer of this kind writes spaces and bytes.

    Attributes:
        scheme: where a ▁ is inserted. A *stretch* is text between added tokens.
            "prepend": before a text, and before each stretch after an added token that is matched
            before normalisation.
            "always": before each stretch, unless it begins with a space.
            "first": only at the beginning of a text.
            "never": nowhere.
        strips_space: whether decoding leaves out one space at the beginning.
        has_byte_tokens: whether decoding turns the token <0xXX> into that byte.
    """

    scheme: str
    strips_space: bool
    has_byte_tokens: bool

    def piece(self, token: str) -> bytes:
        """Return the bytes that a vocabulary entry stands for."""
        byte_token = _BYTE.fullmatch(token) if self.has_byte_tokens else None
        if byte_token:
            return bytes([int(byte_token[1], 16)])
        return token.replace(MARK, " ").encode()


def is_marked(normalizers: list[Any], pre_tokenizers: list[Any]) -> bool:
    """Return whether a step of a tokenizer writes spaces as ▁."""
    return _REPLACE in normalizers or any(is_metaspace(step) for step in pre_tokenizers)


def is_metaspace(step: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a step is a Metaspace, SentencePiece's pre-tokenizer, with the letter ▁."""
    return (
        isinstance(step, dict)
        and step.get("type") == "Metaspace"
        and step.get("replacement") == MARK
    )


def scheme_of(step: dict[str, Any]) -> str:
    """Return where a Metaspace inserts a ▁; see `Marks.scheme`."""
    if "prepend_scheme" in step:
        return str(step["prepend_scheme"])
    # Older files have this key instead.
    return "always" if step.get("add_prefix_space", True) else "never"


def read_marks(
    normalizers: list[Any],
    pre_tokenizers: list[Any],
    decoders: list[Any],
    model: dict[str, Any],
    added: list[str],
) -> Marks:
    """Return how a tokenizer writes spaces and bytes.

    Args:
        normalizers: the steps of its normalizer.
        pre_tokenizers: the steps of its pre-tokenizer.
        decoders: the steps of its decoder.
        model: its BPE model.
        added: the texts of its added tokens that are not special.

    Raises:
        ValueError: the tokenizer would lose text, or has an unknown decoder; the message says
            which.
    """
    metaspaces = [step for step in pre_tokenizers if is_metaspace(step)]
    schemes = {scheme_of(step) for step in metaspaces}
    if PREPEND in normalizers:
        schemes.add("prepend")
    is_unknown = not schemes <= {"prepend", "always", "first", "never"}
    if is_unknown or len(schemes) > 1 or normalizers.count(PREPEND) > 1:
        shown = ", ".join(sorted(schemes))
        raise ValueError(
            f"puts spaces before a text in more ways than one, or in an unknown one ({shown[:80]})"
        )
    scheme = schemes.pop() if schemes else "never"
    marks = _marks_of_decoder(decoders, scheme, metaspaces, bool(model.get("byte_fallback")))
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or MARK not in vocab:
        raise ValueError(
            f"model.vocab has no {MARK!r} for a single space: 'a  b' would not come back"
        )
    # If decoding turns <0xXX> into a byte, these letters in a text must not be encoded to that token. This could
    # happen in three ways: by merges, as a whole vocabulary entry, or as an added token.
    from_text = _merged_entries(model.get("merges")) + added
    text_gives_byte_token = model.get("ignore_merges") or any(map(_BYTE.fullmatch, from_text))
    if marks.has_byte_tokens and text_gives_byte_token:
        raise ValueError(
            r"reads the letters of a byte's token as the byte: '<0x0A>' would come back as '\n'"
        )
    return marks


def _merged_entries(merges: object) -> list[str]:
    """Return the vocabulary entries that merges produce.

    Args:
        merges: the merges of a model that is not checked yet. A merge is a pair, or a text with a space between
            the two parts.
    """
    entries = []
    for merge in merges if isinstance(merges, list) else []:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(pair, list):
            entries.append("".join(map(str, pair)))
    return entries


def _marks_of_decoder(
    decoders: list[Any], scheme: str, metaspaces: list[Any], byte_fallback: bool
) -> Marks:
    """Return how a tokenizer writes spaces and bytes, as far as its decoder decides it.

    Args:
        decoders: the steps of the decoder.
        scheme: see `Marks`.
        metaspaces: the pre-tokenizer's steps that are Metaspaces.
        byte_fallback: whether the model writes unknown characters as tokens of bytes.

    Raises:
        ValueError: the decoder is unknown, or would lose text.
    """
    if decoders in (_DECODERS, [*_DECODERS, _STRIP]):
        return Marks(scheme, strips_space=decoders[-1] == _STRIP, has_byte_tokens=True)
    if len(decoders) != 1 or not is_metaspace(decoders[0]):
        raise ValueError(
            "decoder is not one of the known ones: Replace, ByteFallback, Fuse, maybe Strip; or Metaspace"
        )
    if byte_fallback:
        raise ValueError(
            r"decoder Metaspace does not decode bytes: '\n' would come back as '<0x0A>'"
        )
    if not metaspaces or any(step.get("split", True) is not True for step in metaspaces):
        raise ValueError(
            "decoder Metaspace leaves out all spaces of the first token: '   a' would come back as 'a'"
        )
    strips_space = scheme_of(decoders[0]) != "never"
    return Marks(scheme, strips_space, has_byte_tokens=False)


def pre_tokenizer(step: object) -> dict[str, Any] | None:
    """Return a pre-tokenizer's step in the library's current form; None: the step is unknown."""
    if is_metaspace(step):
        split = step.get("split", True) is True
        return {
            "type": "Metaspace",
            "replacement": MARK,
            "prepend_scheme": scheme_of(step),
            "split": split,
        }
    return _SPLIT if step == _SPLIT else None
