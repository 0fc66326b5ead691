"""Write a tokenizer into a GGUF file for llama.cpp, and into Ollama's Modelfile the chat template,
if it can be.

llama.cpp does not read a tokenizer's split pattern but has its own list of them, by name. A wrong
name loads silently and tokenises differently, so a name is written only for patterns whose tokens
were compared on ten thousand strings (tests/laws/test_exported_is_original.py). For a
SentencePiece-style tokenizer it reads a score per token instead of merges, which is equivalent if
every way to join two tokens into a third is a merge, as in published files.

Ollama runs no Jinja, and there is no general translation from Jinja to Go. Without a TEMPLATE in Go
it takes that of a model with a similar template, or sends the bare prompt. So the chat template is
probed for the text around each role's message, what was found is compared with it on chats that the
probe did not use, and the same is written in Go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.text.chat import end_of_turn, stop_ids
from monograph.text.template import ChatTemplate
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import KNOWN_PATTERNS

if TYPE_CHECKING:
    from gguf import GGUFWriter

# llama.h, llama_token_type
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTE = 6

# llama.cpp's name by (split pattern, whether a word that is a token is taken before any merge).
# Qwen's tokenizer also normalises text (NFC), which llama.cpp leaves to the caller.
_SPLITS = {
    ("qwen2", False): "qwen2",
    ("qwen3.5", False): "qwen35",
    ("llama3", True): "llama-bpe",
    ("llama3", False): "smaug-bpe",
}
# Texts of tokens at which llama.cpp always stops (src/llama-vocab.cpp).
_ALWAYS_STOP = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "</s>",
        "<|end_of_text|>",
    )
)


def add_words(
    writer: GGUFWriter, tokenizer: Tokenizer, config: LlamaConfig, warn: Callable[[str], None]
) -> tuple[int, ...]:
    """Add a tokenizer to a file that is being written.

    Args:
        writer: a GGUFWriter.
        tokenizer: the tokenizer, with its chat template if it has one.
        config: the model's; rows without a token are named as unused, and its own end-of-text ids
            are kept.
        warn: called with each line that the user should read.

    Returns:
        The ids that end a text.

    Raises:
        InputRefused: a split pattern or a set of stop tokens that llama.cpp lacks, or a tokenizer
            that changes text in a way that llama.cpp does not.
    """
    content = json.loads(tokenizer.to_json())
    if notes := tokenizer.notes:
        raise InputRefused(
            f"{notes[0]}; llama.cpp would read other tokens without a word: export with --format hf"
        )
    tokens, types = _tokens(content, config.vocab_size)
    if content["decoder"]["type"] == "ByteLevel":
        pre = pre_tokenizer(content)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        # llama.cpp needs at least one merge; no word contains these two tokens, so this one never
        # applies.
        merges = content["model"]["merges"] or [
            [tokens[tokenizer.bos_id], tokens[tokenizer.eos_id]]
        ]
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        scores = _scores(content, tokens)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(tokenizer.space_first)
        unknown = content["model"]["unk_token"]
        for row, token in enumerate(tokens):
            # Such as <0x0A>.
            if types[row] == _NORMAL and len(tokenizer.pieces[row]) == 1 and len(token) == 6:
                types[row] = _BYTE
            elif token == unknown:
                types[row] = _UNKNOWN
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
        _add_named_templates(writer, tokenizer)
    if "NFC" in json.dumps(content["normalizer"]):
        warn(
            "the tokenizer composes characters (NFC) and llama.cpp does not: give it composed text, as most text is"
        )
    return stops


def _add_named_templates(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    """Add the chat templates with a name, by which llama.cpp finds that for chats with tools."""
    named = {
        re.sub("[^A-Za-z0-9]", "_", name): each.source
        for name, each in tokenizer.config.named.items()
    }
    for name, source in sorted(named.items()):
        writer.add_string(f"tokenizer.chat_template.{name}", source)
    if named:
        writer.add_array("tokenizer.chat_templates", sorted(named))


def pre_tokenizer(content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the split pattern of a verified tokenizer.json.

    Raises:
        InputRefused: llama.cpp has no name for it, or only one that tokenises differently.
    """
    part, whole_words = content["pre_tokenizer"], content["model"]["ignore_merges"]
    steps = part["pretokenizers"] if part["type"] == "Sequence" else [part]
    if (
        [step["type"] for step in steps] == ["ByteLevel"]
        and steps[0].get("use_regex", True)
        and not whole_words
    ):
        return "gpt-2"
    if [step["type"] for step in steps] == ["Split", "ByteLevel"] and not steps[1].get(
        "use_regex", True
    ):
        name = next(
            name
            for name, pattern in KNOWN_PATTERNS.items()
            if steps[0]["pattern"] == {"Regex": pattern}
        )
        if known := _SPLITS.get((name, whole_words)):
            return known
    shown = ", ".join(step["type"] for step in steps)
    raise InputRefused(
        f"the tokenizer's way of splitting text ({shown}{', ignore_merges' * whole_words}) is not known to be one of "
        "llama.cpp's, which would then read other tokens without a word; export with --format hf"
    )


def _scores(content: dict[str, Any], tokens: list[str]) -> list[float]:
    """Return each token's score, minus the rank of its merge; llama.cpp joins the pair with the
    highest score first.

    Raises:
        InputRefused: llama.cpp would join other tokens, or in another order, or put spaces
            elsewhere.
    """
    instead = "; llama.cpp would read other tokens without a word: export with --format hf"
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    rank_of: dict[str, int] = {}
    last = ""
    for rank, (left, right) in enumerate(merges):
        token = left + right
        if token != last and token in rank_of:
            raise InputRefused(f"the merges of token {token!r} do not follow one another{instead}")
        rank_of.setdefault(token, rank)
        last = token
    known = {tuple(pair) for pair in merges}
    for token in tokens:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in vocab and pair[1] in vocab and token in vocab and pair not in known:
                raise InputRefused(
                    f"{pair[0]!r} and {pair[1]!r} are tokens, as their join is, but no merge{instead}"
                )
    steps = content["pre_tokenizer"]["pretokenizers"] if content["pre_tokenizer"] else []
    if [step for step in steps if step["type"] != "Split"]:
        raise InputRefused(
            f"the tokenizer splits text before it joins ({steps[0]['type']}){instead}"
        )
    for token in content["added_tokens"]:
        if token["special"] and (token["normalized"] or token["lstrip"] or token["rstrip"]):
            raise InputRefused(
                f"the spaces next to the special token {token['content']!r} are not text{instead}"
            )
    return [-float(rank_of.get(token, len(merges))) for token in tokens]


def _tokens(content: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return the texts and the types of the tokens of all rows."""
    text_of = {index: text for text, index in content["model"]["vocab"].items()}
    kind_of = dict.fromkeys(text_of, _NORMAL)
    for token in content["added_tokens"]:
        text_of[token["id"]] = token["content"]
        kind_of[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    tokens = [text_of.get(row, f"[UNUSED{row}]") for row in range(rows)]
    return tokens, [kind_of.get(row, _UNUSED) for row in range(rows)]


def _begins_with_bos(
    tokenizer: Tokenizer, content: dict[str, Any], bos: str, warn: Callable[[str], None]
) -> bool:
    """Return whether llama.cpp shall put the beginning-of-text token before texts; a chat template,
    if any, decides.
    """
    part = content["post_processor"] or {}
    steps = part.get("processors", [part])
    added = any(
        step.get("single", [{}])[:1] == [{"SpecialToken": {"id": bos, "type_id": 0}}]
        for step in steps
    )
    if tokenizer.config.template is None:
        return added
    written = tokenizer.config.template.render([{"role": "user", "content": "."}]).startswith(bos)
    if added and not written:
        warn(
            f"the chat template does not begin with {bos}, so llama.cpp will put it before no text, plain text neither"
        )
    return written


def _add_stops(
    writer: GGUFWriter,
    tokenizer: Tokenizer,
    stops: tuple[int, ...],
    tokens: list[str],
    warn: Callable[[str], None],
) -> None:
    """Add the stop tokens: a file can name three, and llama.cpp knows some others by their texts."""
    others = [
        stop for stop in stops if stop != tokenizer.eos_id and tokens[stop] not in _ALWAYS_STOP
    ]
    if len(others) > 2:
        raise InputRefused(
            f"{len(stops)} tokens end a text ({', '.join(tokens[stop] for stop in stops)}), and a GGUF file can name "
            "three; leave those that the model does not write out of eos_token_id in generation_config.json"
        )
    for add, stop in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(stop)
    if tokenizer.config.template and end_of_turn(tokenizer) is None:
        warn(
            "the chat template ends an answer with no special token, so llama.cpp will not know where an answer ends"
        )
    for token in _ALWAYS_STOP & set(tokens):
        if tokens.index(token) not in stops:
            warn(
                f"llama.cpp stops at {token}, which does not end a text of this model by its configuration"
            )


Chat = Sequence[dict[str, str]]
_WORDS = (
    "Why?",
    "one\ntwo\n\nthree",
    "ünï 数据 🙂",
    'say "so" {it}',
    "a <b> & c's",
    "1 2  3",
    "#\t.",
)


class _NotInGo(Exception):
    """The reason why a template cannot be written in Go, which becomes a comment in the Modelfile."""


def modelfile(weights: str, tokenizer: Tokenizer, stops: Sequence[int]) -> str:
    """Return the text of a Modelfile, for chats without tools.

    Args:
        weights: name of the GGUF file in the same folder, which makes Ollama put the
            beginning-of-text token first.
        tokenizer: the tokenizer whose chat template is translated.
        stops: ids that end a text.
    """
    text_of = {index: text for text, index in tokenizer.special.items()}
    lines = [f"FROM ./{weights}"]
    try:
        lines.append(
            f'TEMPLATE """{_in_go(tokenizer.config.template, text_of[tokenizer.bos_id])}"""'
        )
    except _NotInGo as reason:
        lines.append(f"# No TEMPLATE: {reason}.")
    # A quote would end the string in the file's syntax.
    lines += [
        f'PARAMETER stop "{text_of[stop]}"'
        for stop in stops
        if stop in text_of and '"' not in text_of[stop]
    ]
    return "\n".join(lines) + "\n"


def _in_go(template: ChatTemplate | None, bos: str) -> str:
    if template is None:
        raise _NotInGo("the model has no chat template")
    if "strftime_now" in template.source:
        raise _NotInGo("the chat template writes the day's date")
    try:
        around, turn = _probed(template, bos)
        for chat in held_out_chats():
            said = ((around[message["role"]], message["content"]) for message in chat)
            same = "".join(before + content + after for (before, after), content in said) + turn
            if template.render(chat, add_generation_prompt=True).removeprefix(bos) != same:
                raise _NotInGo("the chat template does more than put text around each message")
    except (
        InputRefused
    ) as error:  # its message begins with the model's folder, which must not get into the export
        raise _NotInGo(
            "the chat template " + " ".join(str(error).partition("the chat template ")[2].split())
        ) from None
    cases = (
        f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{'
        for role, (before, after) in around.items()
    )
    return f"{{{{ range .Messages }}}}{{{{ {' else '.join(cases)} end }}}}{{{{ end }}}}{turn}"


def _probed(template: ChatTemplate, bos: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the text before and after each role's message, and the text that asks for an answer."""

    def around(*roles: str, prompt: bool = False) -> list[str]:
        chat = [{"role": role, "content": f"Q{number}q"} for number, role in enumerate(roles)]
        parts = re.split(
            r"Q\dq", template.render(chat, add_generation_prompt=prompt).removeprefix(bos)
        )
        if len(parts) != len(roles) + 1:
            raise _NotInGo("the chat template leaves a message out or repeats it")
        return parts

    before_user, after_user = around("user")
    _, to_answer, to_user, turn = around("user", "assistant", "user", prompt=True)
    before_system, from_system, _ = around("system", "user")
    ends_alike = to_user.endswith(before_user) and from_system.endswith(before_user)
    if not (ends_alike and to_answer.startswith(after_user) and turn.startswith(after_user)):
        raise _NotInGo("the chat template writes other text around a message that follows another")
    found = {
        "system": (before_system, from_system.removesuffix(before_user)),
        "user": (before_user, after_user),
        "assistant": (to_answer.removeprefix(after_user), to_user.removesuffix(before_user)),
    }
    turn = turn.removeprefix(after_user)
    # A brace at the end would be read with those of the action that follows.
    if any(re.search(r'\{\{|\}\}|"""|\{\Z', part) for part in (*chain(*found.values()), turn)):
        raise _NotInGo(
            "the chat template writes marks that Go's templates or a Modelfile would read as their own"
        )
    return found, turn


def held_out_chats() -> list[Chat]:
    """Return 20 chats of 1 to 5 questions, with and without a system message; no message begins or
    ends in a space.
    """
    chats: list[Chat] = []
    words = cycle(_WORDS)
    for number in range(20):
        roles = ["user", *["assistant", "user"] * (number % 5)]
        if number >= 10:
            roles.insert(0, "system")
        chats.append(
            [
                {"role": role, "content": word}
                for role, word in zip(roles, islice(words, 11), strict=False)
            ]
        )
    return chats
