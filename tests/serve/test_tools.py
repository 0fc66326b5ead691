"""Run: pytest tests/serve/test_tools.py

Tools of a chat: who may call them, calls that cannot be wrong, and calls in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from batches import tiny_llama
from calling import speaking
from monograph.automata.on_host import has_llguidance
from monograph.serve import prompts, texts
from monograph.text.tokenizer import Tokenizer
from served import ROWS, Served

FAMILIES = ("tags", "bare", "list", "marks", "channels", "described", "fields", "quotes")
CHAT = "/v1/chat/completions"
ADD = {
    "type": "object",
    "properties": {"sum": {"enum": [1, 2]}, "fast": {"type": "boolean"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    shown = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": "Does.", **shown, **more}}


TOOLS = [tool("add", ADD), tool("stop")]
STRICT = [tool("add", ADD, strict=True), tool("stop", strict=True)]
MESSAGES = [{"role": "user", "content": "Go?"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "seed": 1, "max_tokens": 120}
ADD_CHOICE = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """A function that returns a server of a family's model."""
    with ExitStack() as stack:

        @cache
        def serve(name: str) -> Served:
            tokenizer = speaking(tmp_path_factory.mktemp(name), name)
            model = tiny_llama(
                vocab_size=tokenizer.vocab_size, max_position_embeddings=1024, num_hidden_layers=1
            )
            return stack.enter_context(Served(model, tokenizer))

        yield serve


@pytest.fixture(scope="module")
def tags(family: Callable[[str], Served]) -> Served:
    return family("tags")


def asked(served: Served, **more: Any) -> dict[str, Any]:
    """A request, without thoughts if the prompt would begin some: a random model never ends them."""
    template = served.tokenizer.config.template
    if template is not None and "enable_thinking" in template.words:
        more = {"chat_template_kwargs": {"enable_thinking": False}} | more
    return ASKED | more


def choices(served: Served, **more: Any) -> list[dict[str, Any]]:
    answer = served.post(CHAT, asked(served, **more))
    assert answer.status == 200, answer.body
    return answer.body["choices"]


def require_valid(message: dict[str, Any]) -> None:
    assert message["content"] is None and message["tool_calls"]
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        assert call["type"] == "function" and len(call["id"]) == 9
        if function["name"] == "stop":
            assert arguments == {}
        else:
            assert function["name"] == "add" and arguments["sum"] in (1, 2)
            assert arguments.keys() <= {"sum", "fast"}


# Each family takes a server. How its frame is found and read is tested by day for all, in tests/text.
BY_DAY = ("tags", "fields")
SERVED = [
    each if each in BY_DAY else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES
]


@pytest.mark.parametrize("name", SERVED)
def test_a_required_call_is_a_call(name: str, family: Callable[[str], Served]) -> None:
    served = family(name)
    for seed in range(2):
        for choice in choices(
            served, tool_choice="required", seed=seed, n=2, parallel_tool_calls=False
        ):
            assert choice["finish_reason"] == "tool_calls"
            require_valid(choice["message"])
            assert len(choice["message"]["tool_calls"]) == 1
    for choice in choices(served, tool_choice=ADD_CHOICE, n=2):
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "add" and choice["finish_reason"] == "tool_calls"
    assert served.idle()


@pytest.mark.parametrize("name", SERVED)
def test_a_call_in_pieces_is_the_same_call(name: str, family: Callable[[str], Served]) -> None:
    served = family(name)
    scored = {"logprobs": True, "tool_choice": ADD_CHOICE}
    for more in ({"tool_choice": "required"}, {"tool_choice": "auto", "max_tokens": 30}, scored):
        whole = choices(served, n=2, **more)
        events = list(served.events(CHAT, asked(served, **more, n=2)))
        for choice in whole:
            own = [
                each
                for event in events
                for each in event["choices"]
                if each["index"] == choice["index"]
            ]
            first, *rest = [each["delta"] for each in own]
            assert first == {"role": "assistant", "content": ""}
            assert all(len(delta) <= 1 for delta in rest)
            said = "".join(delta.get("content", "") for delta in rest)
            calls: list[dict[str, Any]] = []
            for delta in rest:
                for piece in delta.get("tool_calls", []):
                    if "id" in piece:
                        assert piece["index"] == len(calls)
                        calls.append({"name": piece["function"]["name"], "arguments": ""})
                    calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
            message = choice["message"]
            assert said == (message["content"] or "")
            assert calls == [call["function"] for call in message.get("tool_calls", [])]
            finishes = [each["finish_reason"] for each in own if each["finish_reason"]]
            assert finishes == [choice["finish_reason"]]
            if "logprobs" in more:
                sent = [
                    entry
                    for each in own
                    for entry in (each["logprobs"] or {"content": []})["content"]
                ]
                assert sent == choice["logprobs"]["content"] and sent


@pytest.mark.parametrize("name", [pytest.param("marks", marks=pytest.mark.slow), "list"])
def test_a_strict_call_that_has_begun_is_valid(name: str, family: Callable[[str], Served]) -> None:
    """The first token of the frame, which is made likely here, switches the constraint on."""
    served = family(name)
    begin = served.tokenizer.special["[CALLS]"]
    ends = {str(stop): -100 for stop in served.tokenizer.config.stops}
    for seed in range(2):
        [choice] = choices(
            served,
            tools=STRICT,
            seed=seed,
            logit_bias={str(begin): 100, **ends},
            parallel_tool_calls=False,
        )
        assert choice["finish_reason"] == "tool_calls"
        require_valid(choice["message"])
    [loose] = choices(served, logit_bias={str(begin): 100})
    assert "tool_calls" not in loose["message"], "without strict, the model would write nonsense"


def test_thoughts_are_told_apart_from_the_content_and_come_before_a_call(
    family: Callable[[str], Served],
) -> None:
    """The prompt begins thoughts here, and a random model does not end them by itself."""
    served = family("fields")
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    for more in ({"tools": None}, {}, {"tool_choice": "required"}):
        [choice] = choices(served, max_tokens=20, **thinking, **more)
        message = choice["message"]
        assert message["reasoning_content"] and not message["content"]
        assert "tool_calls" not in message and choice["finish_reason"] == "length"
        events = list(served.events(CHAT, asked(served, max_tokens=20, **thinking, **more)))
        deltas = [each["delta"] for event in events for each in event["choices"]]
        streamed = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert streamed == message["reasoning_content"]
    [end] = served.tokenizer.encode_rendered("</think>")
    [choice] = choices(served, tool_choice="required", logit_bias={str(end): 100}, **thinking)
    require_valid(choice["message"])
    assert choice["finish_reason"] == "tool_calls"
    # The other protocols have them, too.
    thoughts = choices(served, max_tokens=20, tools=None, **thinking)[0]["message"][
        "reasoning_content"
    ]
    body: dict[str, Any] = {"input": MESSAGES, "max_output_tokens": 20, "seed": 1}
    [reasoning] = served.post("/v1/responses", body | thinking).body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": thoughts}]
    body = {"messages": MESSAGES, "max_tokens": 20, "seed": 1, "thinking": {"type": "adaptive"}}
    [block] = served.post("/v1/messages", body).body["content"]
    assert block == {"type": "thinking", "thinking": thoughts, "signature": ""}


def test_several_calls_may_follow_each_other(tags: Served) -> None:
    found = 0
    for seed in range(2):
        for choice in choices(
            tags, tool_choice="required", seed=seed, n=ROWS, tools=[tool("stop")], max_tokens=90
        ):
            calls = choice["message"]["tool_calls"]
            assert [call["function"]["name"] for call in calls[:-1]] == ["stop"] * (len(calls) - 1)
            assert len({call["id"] for call in calls}) == len(calls)
            found += len(calls) > 1
    assert found


@pytest.mark.parametrize("name", ["tags", "fields"])
def test_no_stop_text_cuts_a_required_call(name: str, family: Callable[[str], Served]) -> None:
    """Agents send stop texts with every request. Here some are in the call, and in its frame."""
    served = family(name)
    for more in ({"tool_choice": "required"}, {"tool_choice": ADD_CHOICE}):
        [whole] = choices(served, **more)
        [choice] = choices(served, stop=["add", "sum", "<", "}"], **more)
        require_valid(choice["message"])
        for each in (whole, choice):
            each["message"]["tool_calls"][0].pop("id")
        assert choice == whole


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_a_call_that_the_limit_cuts_ends_with_length(step: int, tags: Served) -> None:
    whole = choices(tags, tool_choice=ADD_CHOICE)[0]["message"]["tool_calls"][0]["function"][
        "arguments"
    ]
    seen = set()
    for limit in range(1, 120, step):
        [choice] = choices(tags, tool_choice=ADD_CHOICE, max_tokens=limit)
        if choice["finish_reason"] == "tool_calls":
            break
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", []):
            seen.add(call["function"]["arguments"])
            assert whole.startswith(call["function"]["arguments"])
    assert limit > 5 and len(seen) > 1


def test_tools_are_shown_to_the_model_and_none_are_not(
    tags: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    original = prompts.chat_ids

    def chat_ids(tokenizer: Tokenizer, *arguments: Any, **variables: Any) -> list[int]:
        ids = original(tokenizer, *arguments, **variables)
        rendered.append(tokenizer.decode(ids))
        return ids

    monkeypatch.setattr(prompts, "chat_ids", chat_ids)
    plain = choices(tags, tools=[])
    for more in ({"tools": None}, {"tool_choice": "none"}):
        [choice] = choices(tags, **more)
        assert choice == plain[0] and "tool_calls" not in choice["message"]
    assert len(set(rendered)) == 1
    choices(tags, tools=STRICT)
    assert '"name": "add", "description": "Does."' in rendered[-1] and "strict" not in rendered[-1]


@pytest.mark.parametrize("name", SERVED)
def test_results_go_back_to_the_model(name: str, family: Callable[[str], Served]) -> None:
    served = family(name)
    [choice] = choices(served, tool_choice=ADD_CHOICE)
    message = choice["message"]
    call = message["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is 3."}
    [after] = choices(served, messages=[*MESSAGES, message, result], max_tokens=4)
    assert after["finish_reason"] in ("length", "stop")


def test_without_strict_tools_nothing_is_added_to_a_step(
    tags: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder gets the same request as without tools, apart from the prompt."""
    seen: list[Any] = []
    original = texts.ServedText

    def served_text(request: Any, *arguments: Any) -> Any:
        seen.append(request)
        return original(request, *arguments)

    monkeypatch.setattr(texts, "ServedText", served_text)
    choices(tags)
    choices(tags, tools=STRICT)
    choices(tags, tool_choice="required")
    assert [request.constraint is None for request in seen] == [True, False, False]


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"tools": {}}, "tools", "a list of up to 128 tools"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is missing"),
        ({"tools": [tool("a"), tool("a b")]}, "tools", "tools[1].function.name = 'a b': expected"),
        ({"tools": [tool("a", colour=1)]}, "tools", "tools[0]: there is no field 'colour'"),
        ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools", "tools[0].type = 'retrieval'"),
        ({"tools": [tool("a", strict="yes")]}, "tools", "tools[0].function.strict = 'yes': expected true or false"),
        ({"tools": [tool("a"), tool("a")]}, "tools", "two functions have one name"),
        ({"tools": [tool("a", {"type": "thing"}, strict=True)]}, "tools", "the arguments of a: the JSON schema at #"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice = 'any': expected none, auto, required or"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.function is missing"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice",
         "there is no function 'sub': expected add, stop"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "expected true or false"),
        ({"stop": "x"}, "stop", "stop and tools: give one of them"),
        ({"regex": "x"}, "regex", "regex and tools: give one of them"),
        ({"functions": [{"name": "a"}]}, "functions", "functions is not supported: give tools"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(
    change: dict[str, Any], param: str, said: str, tags: Served
) -> None:
    answer = tags.post(CHAT, ASKED | change)
    assert answer.status == 400, answer.body
    error = answer.body["error"]
    assert said in error["message"] and error["param"] == param


def test_a_model_that_does_not_know_tools_says_so(served: Served) -> None:
    answer = served.post(CHAT, ASKED)
    assert answer.status == 400 and answer.body["error"]["param"] == "tools"
    assert answer.body["error"]["message"].startswith("tools: the model has no chat template")
    assert served.post("/v1/completions", {"prompt": "a", "tools": TOOLS}).status == 400


def test_openais_client_calls_a_tool_whole_and_in_pieces(openai: Any, tags: Served) -> None:
    with openai.OpenAI(base_url=f"{tags.url}/v1", api_key="none", max_retries=0) as client:
        asked = {
            "model": "last", "messages": MESSAGES, "tools": STRICT, "tool_choice": "required", "seed": 2,
            "max_tokens": 120, "parallel_tool_calls": False,
        }  # fmt: skip
        whole = client.chat.completions.create(**asked).choices[0]
        [call] = whole.message.tool_calls
        assert (
            whole.finish_reason == "tool_calls" and json.loads(call.function.arguments) is not None
        )
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        [streamed] = final.message.tool_calls
        assert streamed.function.name == call.function.name
        assert streamed.function.arguments == call.function.arguments
        said = [*MESSAGES, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        answer = client.chat.completions.create(**asked | {"messages": said, "tool_choice": "auto"})
        assert answer.choices[0].message.role == "assistant"


TREE = {
    "type": "object",
    "properties": {"sum": {"enum": [1, 2]}, "fast": {"type": "boolean"}, "then": {"$ref": "#"}},
    "required": ["sum"],
    "additionalProperties": False,
}


@pytest.mark.skipif(not has_llguidance(), reason="llguidance is missing")
@pytest.mark.parametrize("name", ["tags", pytest.param("list", marks=pytest.mark.slow)])
def test_a_strict_call_of_a_recursive_schema_is_valid(
    name: str, family: Callable[[str], Served]
) -> None:
    def require_tree(arguments: dict[str, Any]) -> None:
        assert arguments["sum"] in (1, 2) and arguments.keys() <= {"sum", "fast", "then"}
        if "then" in arguments:
            require_tree(arguments["then"])

    served = family(name)
    whole = 0
    for seed in range(3):
        tools = [tool("add", TREE, strict=True)]
        for choice in choices(served, tools=tools, tool_choice="required", seed=seed, n=2):
            if choice["finish_reason"] == "tool_calls":
                whole += 1
                for call in choice["message"]["tool_calls"]:
                    require_tree(json.loads(call["function"]["arguments"]))
    assert whole > 0 and served.idle()
