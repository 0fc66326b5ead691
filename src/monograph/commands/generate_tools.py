"""The tools of `monograph generate --tools`: how the chat template shows them to the model, and which
calls an answer may have.

Every call has the name of a tool, and arguments that follow the tool's schema, because an automaton in
the decoding graph, or llguidance on the host, lets no other token pass.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monograph.automata import Automaton, Calls, call_constraint, types_of_tools
from monograph.automata.on_host import (
    HostConstraint,
    HostVocabulary,
    lark_of_calls,
    require_llguidance,
)
from monograph.errors import InputRefused, UsageError, did_you_mean
from monograph.storage.reading import json_fault, parse_json
from monograph.terminal import warn
from monograph.text.call_reader import message_of
from monograph.text.calls import NAME_CHARACTERS, CallFrame, find_frame, spellings, with_tools
from monograph.text.chat import chat_ids
from monograph.text.template import Message
from monograph.text.thoughts import find_thoughts
from monograph.text.tokenizer import Tokenizer

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
AUTO = "auto"
REQUIRED = "required"


class AnswerTools(NamedTuple):
    """The tools of a chat.

    Attributes:
        tokenizer: the tokenizer, with the chat template.
        end_ids: the ids that end an answer.
        shown: the tools, as the chat template reads them.
        callable_functions: the functions that an answer may call.
        must_call: whether an answer consists of calls and nothing else.
        is_parallel: whether an answer may have several calls.
        frame: how the template writes calls.
        spelling_V: the spelling of each token.
    """

    tokenizer: Tokenizer
    end_ids: Sequence[int]
    shown: list[dict[str, Any]]
    callable_functions: list[dict[str, Any]]
    must_call: bool
    is_parallel: bool
    frame: CallFrame
    spelling_V: list[str]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat's messages with the tools, up to where the model's answer begins."""
        shown_messages, variables = with_tools(self.tokenizer, messages, self.shown)
        return chat_ids(self.tokenizer, shown_messages, add_generation_prompt=True, **variables)

    def constraint(self, prompts: Iterable[Sequence[int]]) -> Automaton | HostConstraint:
        """Return the constraint that allows a token only if all calls can still become valid ones.

        It is an automaton or, if no automaton can follow a schema, a constraint that the host follows.

        Args:
            prompts: the ids of the prompts that are answered.

        Raises:
            UsageError: the answers would need different automata.
            InputRefused: neither can follow the schema of a function.
        """
        grammar = self.frame.grammar()
        thoughts = find_thoughts(self.tokenizer)
        if thoughts is not None:
            places = set()
            for prompt_ids in prompts:
                prompt_text = "".join(self.spelling_V[token_id] for token_id in prompt_ids)
                places.add(thoughts.place_after(prompt_text))
            if len(places) > 1:
                raise UsageError(
                    "--tools: some prompts end inside thoughts, and others do not: answer them one by one"
                )
            grammar["thoughts"] = thoughts.grammar(places.pop())
        functions = [
            (function["name"], function.get("parameters") or _NO_ARGUMENTS)
            for function in self.callable_functions
        ]
        calls = Calls(grammar, functions, self.must_call, self.is_parallel)
        pieces = self.tokenizer.pieces
        try:
            return call_constraint(calls, pieces, self.end_ids)
        except InputRefused as refusal:
            require_llguidance(refusal)
            lark = lark_of_calls(calls, pieces)
            followed = HostConstraint(lark, HostVocabulary(pieces, self.end_ids), refusal)
            warn(f"{refusal}; so llguidance follows it on the host, token by token")
            return followed

    def calls_in(self, answer_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the calls of an answer, as {"name": ..., "arguments": {...}} each."""
        ids = list(answer_ids)
        if ids and ids[-1] in self.end_ids:
            ids.pop()
        types = types_of_tools(self.shown)
        message = message_of(ids, self.frame, self.spelling_V, types=types)
        calls: list[dict[str, Any]] = message["tool_calls"]
        return calls


def answer_tools(
    text: str, path: Path, choice: str, tokenizer: Tokenizer, end_ids: Sequence[int]
) -> AnswerTools:
    """Return the tools that a file describes.

    Args:
        text: the file's content: a JSON array of tools, as in a request to `monograph serve`.
        path: the file, for messages.
        choice: which tools an answer calls: "auto": any or none; "required": at least one; or the name
            of the one that it calls.
        tokenizer: the tokenizer, with the chat template.
        end_ids: the ids that end an answer.

    Raises:
        InputRefused: the file has no tools, or the chat template does not write calls.
        UsageError: no tool has the name that was chosen.
    """
    try:
        tools = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InputRefused(f"--tools {path}: not JSON: {json_fault(error)}") from None
    if not isinstance(tools, list) or not tools:
        raise InputRefused(f"--tools {path}: expected a JSON array of tools")
    shown = [_tool(tool, f"--tools {path}: [{index}]") for index, tool in enumerate(tools)]
    functions = {tool["function"]["name"]: tool["function"] for tool in shown}
    if len(functions) < len(shown):
        raise InputRefused(f"--tools {path}: two tools have one name")
    callable_functions = list(functions.values())
    if choice not in (AUTO, REQUIRED):
        if choice not in functions:
            known = [AUTO, REQUIRED, *functions]
            hint = did_you_mean(choice, known) or f"; expected one of {', '.join(known)}"
            raise UsageError(f"--tool-choice {choice}: there is no such tool{hint}")
        callable_functions = [functions[choice]]
    try:
        frame = find_frame(tokenizer, end_ids)
    except InputRefused as refused:
        raise InputRefused(f"--tools {path}: {refused}") from None
    return AnswerTools(
        tokenizer,
        end_ids,
        shown,
        callable_functions,
        must_call=choice != AUTO,
        is_parallel=choice in (AUTO, REQUIRED),
        frame=frame,
        spelling_V=spellings(tokenizer),
    )


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """Return a tool of the file as the chat template reads it.

    Raises:
        InputRefused: it is not a tool.
    """
    form = 'expected {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}'
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise InputRefused(f"{where}: {form}")
    name = function.get("name")
    if not isinstance(name, str) or not name or not NAME_CHARACTERS.fullmatch(name):
        raise InputRefused(
            f"{where}.function.name = {name!r:.80}: expected up to 64 letters, digits, _ and -"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InputRefused(f"{where}.function.parameters: expected an object, a JSON schema")
    # "strict" asks the decoder to follow the schema. It always does, and the model need not see the word.
    shown_function = {key: value for key, value in function.items() if key != "strict"}
    return {"type": "function", "function": shown_function}
