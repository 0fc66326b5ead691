"""Write a tokenizer into a GGUF file for llama.cpp, and its chat template into Ollama's Modelfile.

**llama.cpp.** A file does not hold the pattern by which a tokenizer splits text into words, but the name
of a pattern in llama.cpp's own list. A file with a wrong name loads without an error, and text is split
into other tokens. So a name is written only for patterns whose tokens were compared on ten thousand
strings (tests/laws/test_exported_is_original.py). For a tokenizer in the style of SentencePiece,
llama.cpp reads a score per token instead of merges. Scores give the same tokens as merges if there is a
merge for each pair of tokens whose join is a token, as in published files.

**Ollama.** Chat templates are in Jinja. Ollama reads only templates of Go, and there is no general
translation. Without a TEMPLATE in Go, Ollama takes one of a model with a similar chat template, or sends
the bare prompt. So `_probe` renders a few chats to find the text that the chat template writes around
each role's message. From these texts a template in Go is made. It is used only if the chat template
writes the same for other chats, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.text.chat import end_of_turn, stop_ids
from monograph.text.template import ChatTemplate
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import KNOWN_PATTERNS

if TYPE_CHECKING:
    from gguf import GGUFWriter

# Types of tokens: `llama_token_type` in llama.h.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTE = 6

# llama.cpp's names of split patterns, by (name in `KNOWN_PATTERNS`, ignore_merges). With
# ignore_merges, a word that is itself a token becomes this token directly, without merges. Qwen's
# tokenizers also normalise text (NFC), which llama.cpp leaves to the caller.
_LLAMA_CPP_PATTERNS = {
    ("qwen2", False): "qwen2",
    ("qwen3.5", False): "qwen35",
    ("llama3", True): "llama-bpe",
    ("llama3", False): "smaug-bpe",
}
# The end of errors about tokenizers that llama.cpp would read wrongly.
_WOULD_DIFFER = "; llama.cpp would read other tokens without a word: export with --format hf"
# llama.cpp stops at tokens with these texts in any model (src/llama-vocab.cpp).
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


def add_tokenizer(
    writer: GGUFWriter, tokenizer: Tokenizer, config: LlamaConfig, warn: Callable[[str], None]
) -> tuple[int, ...]:
    """Add a tokenizer and its chat template to a file that is being written.

    Args:
        writer: the file's writer.
        tokenizer: the tokenizer.
        config: the model's configuration. Rows of the embedding without a token get the type
            "unused", and the configuration's end-of-text ids are kept.
        warn: called with each line that the user should read.

    Returns:
        The ids that end a text.

    Raises:
        InputRefused: llama.cpp does not have the split pattern, or cannot have so many stop tokens,
            or would read other tokens.
    """
    content = json.loads(tokenizer.to_json())
    if tokenizer.notes:
        raise InputRefused(f"{tokenizer.notes[0]}{_WOULD_DIFFER}")
    tokens, types = _tokens_and_types(content, config.vocab_size)
    if content["decoder"]["type"] == "ByteLevel":
        pattern_name = split_pattern_name(content)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pattern_name)
        merges = content["model"]["merges"]
        if not merges:
            # llama.cpp needs at least one merge. This one never applies, because no word has these tokens.
            merges = [[tokens[tokenizer.bos_id], tokens[tokenizer.eos_id]]]
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        # A tokenizer in the style of SentencePiece.
        scores = _merge_scores(content, tokens)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(tokenizer.inserts_space)
        unknown = content["model"]["unk_token"]
        for row, token in enumerate(tokens):
            # The token of a single byte has a text of six characters, such as <0x0A>.
            is_byte = len(tokenizer.pieces[row]) == 1 and len(token) == 6
            if types[row] == _NORMAL and is_byte:
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
    writer.add_add_bos_token(_should_add_bos(tokenizer, content, tokens[tokenizer.bos_id], warn))
    stops = stop_ids(tokenizer, config.eos_token_ids)
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
    """Add the named chat templates. llama.cpp finds the one for chats with tools by its name."""
    named = {
        re.sub("[^A-Za-z0-9]", "_", name): template.source
        for name, template in tokenizer.config.named_templates.items()
    }
    for name, source in sorted(named.items()):
        writer.add_string(f"tokenizer.chat_template.{name}", source)
    if named:
        writer.add_array("tokenizer.chat_templates", sorted(named))


def split_pattern_name(content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the split pattern of a tokenizer.

    Args:
        content: the content of a tokenizer.json that `Tokenizer` has accepted.

    Raises:
        InputRefused: llama.cpp does not have the pattern, or tokenises differently with it.
    """
    pre_tokenizer = content["pre_tokenizer"]
    ignores_merges = content["model"]["ignore_merges"]
    is_sequence = pre_tokenizer["type"] == "Sequence"
    steps = pre_tokenizer["pretokenizers"] if is_sequence else [pre_tokenizer]
    types = [step["type"] for step in steps]
    # The step ByteLevel with use_regex splits text by GPT-2's pattern.
    splits_as_gpt2 = any(
        step["type"] == "ByteLevel" and step.get("use_regex", True) for step in steps
    )
    if types == ["ByteLevel"] and splits_as_gpt2 and not ignores_merges:
        return "gpt-2"
    if types == ["Split", "ByteLevel"] and not splits_as_gpt2:
        pattern_name = next(
            name
            for name, pattern in KNOWN_PATTERNS.items()
            if steps[0]["pattern"] == {"Regex": pattern}
        )
        llama_cpp_name = _LLAMA_CPP_PATTERNS.get((pattern_name, ignores_merges))
        if llama_cpp_name is not None:
            return llama_cpp_name
    parts = [*types, "ignore_merges"] if ignores_merges else types
    description = ", ".join(parts)
    raise InputRefused(
        f"the tokenizer's way of splitting text ({description}) is not known to be one of "
        "llama.cpp's, which would then read other tokens without a word; export with --format hf"
    )


def _merge_scores(content: dict[str, Any], tokens: list[str]) -> list[float]:
    """Return a score for each token: minus the place of its merge in the list of merges.

    Of all pairs, llama.cpp first joins the one whose token has the highest score.

    Raises:
        InputRefused: llama.cpp would join other tokens, or in another order, or would treat spaces
            differently.
    """
    vocab = content["model"]["vocab"]
    merges = content["model"]["merges"]
    # A token may be made by several merges. All of them get the same score, so they must follow one
    # another in the list.
    rank_of: dict[str, int] = {}
    previous = ""
    for rank, (left, right) in enumerate(merges):
        token = left + right
        if token != previous and token in rank_of:
            raise InputRefused(
                f"the merges of token {token!r} do not follow one another{_WOULD_DIFFER}"
            )
        rank_of.setdefault(token, rank)
        previous = token
    # llama.cpp joins any two tokens that together are a token, so each such pair must be a merge.
    merge_pairs = {tuple(pair) for pair in merges}
    for token in tokens:
        if token not in vocab:
            continue
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in vocab and right in vocab and (left, right) not in merge_pairs:
                raise InputRefused(
                    f"{left!r} and {right!r} are tokens, as their join is, but no merge{_WOULD_DIFFER}"
                )
    steps = content["pre_tokenizer"]["pretokenizers"] if content["pre_tokenizer"] else []
    if any(step["type"] != "Split" for step in steps):
        raise InputRefused(
            f"the tokenizer splits text before it joins ({steps[0]['type']}){_WOULD_DIFFER}"
        )
    for token in content["added_tokens"]:
        if token["special"] and (token["normalized"] or token["lstrip"] or token["rstrip"]):
            raise InputRefused(
                f"the spaces next to the special token {token['content']!r} are not text{_WOULD_DIFFER}"
            )
    return [-float(rank_of.get(token, len(merges))) for token in tokens]


def _tokens_and_types(content: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of the token of each row of the embedding."""
    text_of = {index: text for text, index in content["model"]["vocab"].items()}
    type_of = dict.fromkeys(text_of, _NORMAL)
    for token in content["added_tokens"]:
        text_of[token["id"]] = token["content"]
        type_of[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    tokens = [text_of.get(row, f"[UNUSED{row}]") for row in range(rows)]
    types = [type_of.get(row, _UNUSED) for row in range(rows)]
    return tokens, types


def _should_add_bos(
    tokenizer: Tokenizer, content: dict[str, Any], bos: str, warn: Callable[[str], None]
) -> bool:
    """Return whether llama.cpp has to put the beginning-of-text token before every text.

    A GGUF file has one answer for chats and for other texts. If there is a chat template, the answer
    is whether the template writes the token.

    Args:
        tokenizer: the tokenizer.
        content: its tokenizer.json.
        bos: the text of the beginning-of-text token.
        warn: called with each line that the user should read.
    """
    post = content["post_processor"] or {}
    # A post-processor is a list of steps or one step. A step that adds tokens has a list under "single":
    # the special tokens and the text in their order. It adds BOS if BOS comes first.
    steps = post.get("processors", [post])
    bos_element = {"SpecialToken": {"id": bos, "type_id": 0}}
    tokenizer_adds_bos = any(step.get("single", [])[:1] == [bos_element] for step in steps)
    template = tokenizer.config.template
    if template is None:
        return tokenizer_adds_bos
    template_writes_bos = template.render([{"role": "user", "content": "."}]).startswith(bos)
    if tokenizer_adds_bos and not template_writes_bos:
        warn(
            f"the chat template does not begin with {bos}, so llama.cpp will not put it before any text"
        )
    return template_writes_bos


def _add_stops(
    writer: GGUFWriter,
    tokenizer: Tokenizer,
    stops: tuple[int, ...],
    tokens: list[str],
    warn: Callable[[str], None],
) -> None:
    """Add the stop tokens to a file.

    A file can name three: the end of text, which `add_tokenizer` adds, and two others, whose keys are
    meant for the ends of a turn and of a message. llama.cpp also stops at tokens with certain texts
    (`_ALWAYS_STOP`), which need no key.

    Raises:
        InputRefused: there are more than two others.
    """
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


ChatMessages = Sequence[dict[str, str]]
# Contents of messages with which the translation of a chat template is tested.
_CONTENTS = (
    "Why?",
    "one\ntwo\n\nthree",
    "ünï 数据 🙂",
    'say "so" {it}',
    "a <b> & c's",
    "1 2  3",
    "#\t.",
)


class _NotInGo(Exception):
    """A chat template cannot be written in Go. The message is the reason, for the Modelfile."""


def modelfile(weights_file: str, tokenizer: Tokenizer, stops: Sequence[int]) -> str:
    """Return the text of a Modelfile, for chats without tools.

    Args:
        weights_file: the name of the GGUF file in the same folder.
        tokenizer: the tokenizer whose chat template is translated.
        stops: ids that end a text.
    """
    text_of = {index: text for text, index in tokenizer.special.items()}
    lines = [f"FROM ./{weights_file}"]
    try:
        go_template = _go_template(tokenizer.config.template, text_of[tokenizer.bos_id])
        lines.append(f'TEMPLATE """{go_template}"""')
    except _NotInGo as reason:
        lines.append(f"# No TEMPLATE: {reason}.")
    for stop in stops:
        # A quote would end the string in the Modelfile.
        if stop in text_of and '"' not in text_of[stop]:
            lines.append(f'PARAMETER stop "{text_of[stop]}"')
    return "\n".join(lines) + "\n"


def _go_template(template: ChatTemplate | None, bos: str) -> str:
    """Return a template of Go that writes what a chat template writes.

    Args:
        template: the chat template; None if the model has none.
        bos: the text of the beginning-of-text token. It is not in the result, because Ollama adds it
            if the GGUF file says so.

    Raises:
        _NotInGo: it cannot be translated.
    """
    if template is None:
        raise _NotInGo("the model has no chat template")
    if "strftime_now" in template.source:
        raise _NotInGo("the chat template writes the day's date")
    try:
        around, answer_prompt = _probe(template, bos)
        for chat in held_out_chats():
            expected = ""
            for message in chat:
                before, after = around[message["role"]]
                expected += before + message["content"] + after
            expected += answer_prompt
            if template.render(chat, add_generation_prompt=True).removeprefix(bos) != expected:
                raise _NotInGo("the chat template does more than put text around each message")
    except InputRefused as error:
        # The error begins with the path of the model's folder, which must not get into the export.
        reason = " ".join(str(error).partition("the chat template ")[2].split())
        raise _NotInGo("the chat template " + reason) from None
    # For example: {{ range .Messages }}{{ if eq .Role "user" }}BEFORE{{ .Content }}AFTER{{ else if
    # ... end }}{{ end }}PROMPT
    cases = [
        'if eq .Role "' + role + '" }}' + before + "{{ .Content }}" + after + "{{"
        for role, (before, after) in around.items()
    ]
    chain_of_cases = "{{ " + " else ".join(cases) + " end }}"
    return "{{ range .Messages }}" + chain_of_cases + "{{ end }}" + answer_prompt


def _probe(template: ChatTemplate, bos: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Render chats of known messages, to find what a chat template writes around them.

    Returns:
        By role, the texts before and after a message.
        The text at the end of a chat that asks for an answer.

    Raises:
        _NotInGo: the texts depend on the other messages, or cannot be written in Go.
    """

    def split_at_messages(*roles: str, prompt: bool = False) -> list[str]:
        """Return the texts before, between and after messages of these roles."""
        chat = [{"role": role, "content": f"Q{number}q"} for number, role in enumerate(roles)]
        rendered = template.render(chat, add_generation_prompt=prompt).removeprefix(bos)
        texts = re.split(r"Q\dq", rendered)
        if len(texts) != len(roles) + 1:
            raise _NotInGo("the chat template leaves a message out or repeats it")
        return texts

    before_user, after_user = split_at_messages("user")
    _, user_to_assistant, assistant_to_user, last = split_at_messages(
        "user", "assistant", "user", prompt=True
    )
    before_system, system_to_user, _ = split_at_messages("system", "user")
    is_same_before_user = assistant_to_user.endswith(before_user) and system_to_user.endswith(
        before_user
    )
    is_same_after_user = user_to_assistant.startswith(after_user) and last.startswith(after_user)
    if not is_same_before_user or not is_same_after_user:
        raise _NotInGo("the chat template writes other text around a message that follows another")
    around = {
        "system": (before_system, system_to_user.removesuffix(before_user)),
        "user": (before_user, after_user),
        "assistant": (
            user_to_assistant.removeprefix(after_user),
            assistant_to_user.removesuffix(before_user),
        ),
    }
    answer_prompt = last.removeprefix(after_user)
    # A brace at the end of a text would be read together with the braces that follow it in Go.
    go_marks = r'\{\{|\}\}|"""|\{\Z'
    if any(re.search(go_marks, text) for text in (*chain(*around.values()), answer_prompt)):
        raise _NotInGo(
            "the chat template writes marks that Go's templates or a Modelfile would read as their own"
        )
    return around, answer_prompt


def held_out_chats() -> list[ChatMessages]:
    """Return 20 chats of 1 to 5 questions, with and without a system message.

    `_probe` does not use these chats. No message begins or ends with a space, because some templates
    strip spaces.
    """
    chats: list[ChatMessages] = []
    contents = cycle(_CONTENTS)
    for number in range(20):
        roles = ["user", *["assistant", "user"] * (number % 5)]
        if number >= 10:
            roles.insert(0, "system")
        chats.append(
            [
                {"role": role, "content": content}
                for role, content in zip(roles, contents, strict=False)
            ]
        )
    return chats
