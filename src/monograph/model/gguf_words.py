"""A tokenizer inside a GGUF file: its tokens, how llama.cpp is to split text, its chat template and where texts end.

llama.cpp does not read a split pattern, it has a list of its own and takes a name. A wrong name loads without a word
and tokenises otherwise, so a name is written only for patterns for which the tokens were compared on ten thousand
strings (tests/laws/test_exported_is_original.py). Of a tokenizer in SentencePiece's way it takes no merges but a score
for each token, which says the same if every way to join two tokens into a third is a merge, as in published files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.text.chat import end_of_turn, stop_ids
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import KNOWN_PATTERNS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # llama.h, llama_token_type

# (split pattern, whether a word that is a token is taken before any merge): llama.cpp's name. Qwen composes its text
# first (NFC), which llama.cpp leaves to others.
_SPLITS = {
    ("qwen2", False): "qwen2",
    ("qwen3.5", False): "qwen35",
    ("llama3", True): "llama-bpe",
    ("llama3", False): "smaug-bpe",
}
# Tokens at which llama.cpp stops whatever the file says, by their text (src/llama-vocab.cpp).
_ALWAYS_STOP = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "</s>", "<|end_of_text|>")
)


def add_words(writer: Any, tokenizer: Tokenizer, config: LlamaConfig, warn: Callable[[str], None]) -> tuple[int, ...]:
    """Add a tokenizer to a file that is being written.

    Args:
        writer: a GGUFWriter.
        tokenizer: with its chat template, if it has one.
        config: of the model: rows without a token are named as unused ones, and its own end of a text stays one.
        warn: called with each line that a person should read.

    Returns:
        The ids that end a text.

    Raises:
        InputRefused: a split pattern or a set of stop tokens that llama.cpp does not know, or a tokenizer that changes
            text as llama.cpp does not.
    """
    content = json.loads(tokenizer.to_json())
    for changed in tokenizer.notes:
        raise InputRefused(f"{changed}; llama.cpp would read other tokens without a word: export with --format hf")
    tokens, types = _tokens(content, config.vocab_size)
    if content["decoder"]["type"] == "ByteLevel":
        pre = pre_tokenizer(content)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        # llama.cpp wants at least one merge; no word is split into these two.
        merges = content["model"]["merges"] or [[tokens[tokenizer.bos_id], tokens[tokenizer.eos_id]]]
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        scores = _scores(content, tokens)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(tokenizer.space_first)
        unknown = content["model"]["unk_token"]
        types = [
            _BYTE
            if kind == _NORMAL and len(tokenizer.pieces[row]) == 1 and len(token) == 6
            else _UNKNOWN
            if token == unknown
            else kind
            for row, (token, kind) in enumerate(zip(tokens, types, strict=True))
        ]
        if unknown:
            writer.add_unk_token_id(tokens.index(unknown))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    if tokenizer.pad_id != tokenizer.eos_id:
        writer.add_pad_token_id(tokenizer.pad_id)
    writer.add_add_bos_token(_begins_with_bos(tokenizer, content, tokens[tokenizer.bos_id], warn))
    stops = stop_ids(tokenizer, config.ends)
    _add_stops(writer, tokenizer, stops, tokens, warn)
    if template := tokenizer.config.template:
        writer.add_chat_template(template.source)
    if "NFC" in json.dumps(content["normalizer"]):
        warn("the tokenizer composes characters (NFC) and llama.cpp does not: give it composed text, as most text is")
    return stops


def pre_tokenizer(content: dict[str, Any]) -> str:
    """llama.cpp's name for how a checked tokenizer.json splits text.

    Raises:
        InputRefused: it has none, or one that tokenises otherwise.
    """
    part, whole_words = content["pre_tokenizer"], content["model"]["ignore_merges"]
    steps = part["pretokenizers"] if part["type"] == "Sequence" else [part]
    if [step["type"] for step in steps] == ["ByteLevel"] and steps[0].get("use_regex", True) and not whole_words:
        return "gpt-2"
    if [step["type"] for step in steps] == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        name = next(name for name, pattern in KNOWN_PATTERNS.items() if steps[0]["pattern"] == {"Regex": pattern})
        if known := _SPLITS.get((name, whole_words)):
            return known
    shown = ", ".join(step["type"] for step in steps)
    raise InputRefused(
        f"the tokenizer's way of splitting text ({shown}{', ignore_merges' * whole_words}) is not known to be one of "
        "llama.cpp's, which would then read other tokens without a word; export with --format hf"
    )


def _scores(content: dict[str, Any], tokens: list[str]) -> list[float]:
    """A score per token by which llama.cpp joins what the merges join, the best first: minus the rank of its merge.

    Raises:
        InputRefused: llama.cpp would join other tokens, or in another order, or put spaces elsewhere.
    """
    instead = "; llama.cpp would read other tokens without a word: export with --format hf"
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    rank_of: dict[str, int] = {}
    last = ""
    for rank, (left, right) in enumerate(merges):
        if left + right != last and left + right in rank_of:
            raise InputRefused(f"the merges of token {left + right!r} do not follow one another{instead}")
        rank_of.setdefault(last := left + right, rank)
    known = {tuple(pair) for pair in merges}
    for token in tokens:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in vocab and pair[1] in vocab and token in vocab and pair not in known:
                raise InputRefused(f"{pair[0]!r} and {pair[1]!r} are tokens, as their join is, but no merge{instead}")
    steps = content["pre_tokenizer"]["pretokenizers"] if content["pre_tokenizer"] else []
    if [step for step in steps if step["type"] != "Split"]:
        raise InputRefused(f"the tokenizer splits text before it joins ({steps[0]['type']}){instead}")
    for token in content["added_tokens"]:
        if token["special"] and (token["normalized"] or token["lstrip"] or token["rstrip"]):
            raise InputRefused(f"the spaces beside the special token {token['content']!r} are not text{instead}")
    return [-float(rank_of.get(token, len(merges))) for token in tokens]


def _tokens(content: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Text and type of each row's token."""
    text_of = {index: text for text, index in content["model"]["vocab"].items()}
    kind_of = dict.fromkeys(text_of, _NORMAL)
    for token in content["added_tokens"]:
        text_of[token["id"]] = token["content"]
        kind_of[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    tokens = [text_of.get(row, f"[UNUSED{row}]") for row in range(rows)]
    return tokens, [kind_of.get(row, _UNUSED) for row in range(rows)]


def _begins_with_bos(tokenizer: Tokenizer, content: dict[str, Any], bos: str, warn: Callable[[str], None]) -> bool:
    """Whether llama.cpp is to put the beginning-of-text token before a text: where there is a template, as it does."""
    part = content["post_processor"] or {}
    steps = part.get("processors", [part])
    added = any(step.get("single", [{}])[:1] == [{"SpecialToken": {"id": bos, "type_id": 0}}] for step in steps)
    if tokenizer.config.template is None:
        return added
    written = tokenizer.config.template.render([{"role": "user", "content": "."}]).startswith(bos)
    if added and not written:
        warn(
            f"the chat template does not begin with {bos}, so llama.cpp will put it before no text, plain text neither"
        )
    return written


def _add_stops(
    writer: Any, tokenizer: Tokenizer, stops: tuple[int, ...], tokens: list[str], warn: Callable[[str], None]
) -> None:
    """The file has room for the end of the text and two more stop tokens; some need none, as their names say it."""
    others = [stop for stop in stops if stop != tokenizer.eos_id and tokens[stop] not in _ALWAYS_STOP]
    if len(others) > 2:
        raise InputRefused(
            f"{len(stops)} tokens end a text ({', '.join(tokens[stop] for stop in stops)}), and a GGUF file can name "
            "three; leave those that the model does not write out of eos_token_id in generation_config.json"
        )
    for add, stop in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(stop)
    if tokenizer.config.template and end_of_turn(tokenizer) is None:
        warn("the chat template ends an answer with no special token, so llama.cpp will not know where an answer ends")
    for token in _ALWAYS_STOP & set(tokens):
        if tokens.index(token) not in stops:
            warn(f"llama.cpp stops at {token}, which does not end a text of this model by its configuration")
