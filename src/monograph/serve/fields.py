"""Reads the body of a request: what is asked, every field checked, and nothing that is not known.

A field that would change the answer and is not built is refused, never ignored; a few that change nothing are accepted.
"""

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from monograph.data.messages import message_of
from monograph.data.records import Unusable
from monograph.decode import Sampling
from monograph.errors import MonographError, UsageError, did_you_mean
from monograph.ranges import whole
from monograph.storage.reading import json_fault, parse_json
from monograph.text.messages import CALLS, THOUGHTS

# bytes, and lists and objects inside each other
MOST_BODY = 1 << 20
MOST_DEPTH = 64
MOST_LOGPROBS = 20
MOST_BIASES = 1024
MOST_MESSAGES = 1024
MOST_PROMPTS = 1024
MOST_STOPS = 4
MOST_STOP_BYTES = 64
MOST_BREAKERS = 64  # each is looked for in every token
SEEDS = 1 << 53  # a seed that is drawn is below it: a page's numbers are floats
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
}
# Fields of the protocol that would change the text and are not built, with what to do instead.
NOT_BUILT = {
    "tools": "write what the tools can do into a message",
    "tool_choice": "leave it out",
    "functions": "write what they can do into a message",
    "function_call": "leave it out",
    "reasoning_effort": "leave it out",
    "suffix": "leave it out",
    "best_of": "ask for n texts",
    "audio": "leave it out",
    "modalities": "leave it out",
    "prediction": "leave it out",
    "web_search_options": "leave it out",
    "verbosity": "leave it out",
    "order": "leave it out",
}
# The options of `Sampling` by name; `logprobs` is another number here, and the seed has a field of its own.
OPTIONS = {field.name for field in fields(Sampling)} - {"logprobs", "seed", "order"}
ROLES = ("system", "developer", "user", "assistant", "tool")
SPOKEN = {"role", "content", "name", "tool_call_id", CALLS, *THOUGHTS}  # fields of a message
EMPTY = {"refusal", "annotations", "audio", "function_call"}  # fields that may be there if they say nothing


class Refused(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status.
        param: the field that is wrong, if it is one.
        code: OpenAI's word for it, if it has one.
        headers: further headers of the answer.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Limit(NamedTuple):
    """A constraint: "choices", "regex" or "json_schema", its value, and the field that has it."""

    kind: str
    value: Any
    field: str


class Asked(NamedTuple):
    """What a request for texts asks.

    Attributes:
        model: the name of the model.
        prompts: texts or ids; of a chat none.
        messages: of a chat.
        variables: what the chat's template reads beside the messages.
        n: texts of each prompt.
        max_tokens: of each text; None: as many as the context holds.
        sampling: how tokens are chosen, with the seed.
        stop: texts to end before.
        limit: a constraint, or None.
        stream: whether the text is sent in pieces; usage: whether a last piece says how many tokens it took.
        echo: whether the answer begins with the prompt.
        likeliest: how many of the likeliest tokens are reported with each; None: no log-probabilities at all.
    """

    model: str
    prompts: list[str | list[int]]
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    n: int
    max_tokens: int | None
    sampling: Sampling
    stop: list[str]
    limit: Limit | None
    stream: bool
    usage: bool
    echo: bool
    likeliest: int | None


def parsed(body: bytes) -> dict[str, Any]:
    """Return a body's JSON object, in which every text is UTF-8 and every number finite.

    Raises:
        Refused: it is none, or nested too deep.
    """
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        raise Refused(400, f"the body is in {encoding.upper()}: JSON is sent in UTF-8 (RFC 8259)")
    try:
        value = parse_json(body)
    except (ValueError, RecursionError) as error:
        fault = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else json_fault(error)
        raise Refused(400, f"the body is no JSON: {fault}") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body is not a JSON object")
    _require_sound(value)
    return value


def _require_sound(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        texts = [each for each in level if isinstance(each, str)]
        texts += [key for each in level if isinstance(each, dict) for key in each]
        if any("\ud800" <= letter <= "\udfff" for text in texts if not text.isascii() for letter in text):
            raise Refused(400, "a text has half of a surrogate pair, which is no Unicode")
        if not all(math.isfinite(each) for each in level if isinstance(each, float)):
            raise Refused(400, "a number is not finite")
        level = [inner for each in level if isinstance(each, dict | list) for inner in _inner(each)]
        if not level:
            return
    raise Refused(400, f"the body has lists and objects inside each other more than {MOST_DEPTH} deep")


def _inner(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


class Fields:
    """The fields of a body, each to be taken once; what is left at the end is unknown."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        self._known: set[str] = set()

    def take(self, name: str, check: Callable[[str, Any], Any], default: Any = None) -> Any:
        """Return a field's checked value; null is as good as nothing."""
        self._known.add(name)
        return check(name, self._left.pop(name)) if name in self._left else default

    def need(self, name: str, check: Callable[[str, Any], Any], advice: str) -> Any:
        """Return the checked value of a field that a body must have."""
        if (value := self.take(name, check)) is None:
            raise Refused(400, f"{name} is missing: {advice}", name)
        return value

    def end(self) -> None:
        """Refuse a field that nobody took.

        Raises:
            Refused: the first of them.
        """
        for name, value in self._left.items():
            if name in NOT_BUILT and (not value or value == "none"):
                continue  # as a client says that it wants none of it
            if name in NOT_BUILT:
                raise Refused(400, f"{name} is not supported: {NOT_BUILT[name]}", name, "unsupported_parameter")
            raise Refused(400, f"there is no field {name!r:.80}{did_you_mean(name, self._known)}", name)


def completion(body: dict[str, Any], rows: int) -> Asked:
    """Return what a request to /v1/completions asks; `rows` is the largest n.

    Raises:
        Refused: a field is wrong; the error names it.
    """
    given = Fields(body)
    prompts = given.need("prompt", _prompts, "expected a text, a list of texts, or lists of token ids")
    likeliest = given.take("logprobs", _whole(0, MOST_LOGPROBS))
    echo = given.take("echo", a_bool, False)
    most = given.take("max_tokens", _whole(0, 2**31 - 1), 16)
    if most == 0 and not echo:
        raise Refused(400, "max_tokens is 0: only a request with echo asks for no token", "max_tokens")
    best_of = given.take("best_of", _whole(1, 2**31 - 1), 1)
    asked = _asked(given, rows, prompts=prompts, messages=[], variables={}, max_tokens=most, echo=echo)
    if best_of > asked.n:
        raise Refused(400, "best_of is not supported: ask for n texts", "best_of", "unsupported_parameter")
    given.end()
    if echo and asked.stream:
        raise Refused(400, "echo is for a text that is not streamed", "echo")
    return asked._replace(likeliest=likeliest)


def chat(body: dict[str, Any], rows: int) -> Asked:
    """Return what a request to /v1/chat/completions asks; `rows` is the largest n.

    Raises:
        Refused: a field is wrong; the error names it.
    """
    given = Fields(body)
    messages = given.need("messages", _messages, "expected a list of messages")
    most, older = (given.take(name, _whole(1, 2**31 - 1)) for name in ("max_completion_tokens", "max_tokens"))
    if most is not None and older is not None:
        raise Refused(400, "max_tokens is the older name of max_completion_tokens: give one of them", "max_tokens")
    wanted = given.take("logprobs", a_bool, False)
    likeliest = given.take("top_logprobs", _whole(0, MOST_LOGPROBS))
    if likeliest is not None and not wanted:
        raise Refused(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    variables = given.take("chat_template_kwargs", _variables, {})
    most = older if most is None else most
    asked = _asked(given, rows, prompts=[], messages=messages, variables=variables, max_tokens=most, echo=False)
    given.end()
    return asked._replace(likeliest=(likeliest or 0) if wanted else None)


def _asked(given: Fields, rows: int, **rest: Any) -> Asked:
    """Return what both kinds of requests have in common, with what they have not."""
    model = given.need("model", a_text, "GET /v1/models says which there are")
    stream = given.take("stream", a_bool, False)
    options = given.take("stream_options", _object, {})
    if options and not stream:
        raise Refused(400, "stream_options is for a stream", "stream_options")
    inner = Fields(options)
    usage = inner.take("include_usage", a_bool, False)
    inner.take("include_obfuscation", a_bool)
    inner.end()
    kinds = {"response_format": _response_format, "regex": _regex, "choice": _choice}
    named = [limit for name, check in kinds.items() if (limit := given.take(name, check)) is not None]
    if len(named) > 1:
        raise Refused(400, f"{named[0].field} and {named[1].field}: give one of them", named[1].field)
    return Asked(
        model=model,
        n=given.take("n", _whole(1, rows), 1),
        sampling=_sampling(given),
        stop=given.take("stop", _stops, []),
        limit=named[0] if named else None,
        stream=stream,
        usage=usage,
        likeliest=None,
        **rest,
    )


def _sampling(given: Fields) -> Sampling:
    checks = {"logit_bias": _biases, "dry_sequence_breakers": _texts(MOST_BREAKERS)}
    values = {name: given.take(name, checks.get(name, lambda _, value: value)) for name in sorted(OPTIONS)}
    values = {"temperature": 1.0} | {name: value for name, value in values.items() if value is not None}
    seed = given.take("seed", _whole(0, 2**63 - 1))
    try:
        return Sampling(**values, seed=secrets.randbelow(SEEDS) if seed is None else seed)
    except UsageError as error:
        # The longest: temperature_range, not temperature.
        name = max((name for name in values if str(error).startswith(name)), key=len, default=None)
        raise Refused(400, str(error), name) from None


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise Refused(400, f"{name}: expected an object of at most {MOST_BIASES:,} biases by token id", name)
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) < 19):
            raise Refused(400, f"{name} has the key {key!r:.40}: expected a token id", name)
    # The protocol's least bias forbids a token; so does any bias of -100 here, to the last bit.
    return {int(key): -math.inf if bias == -100 else bias for key, bias in value.items()}


# ── the kinds of values ───────────────────────────────────────────────────────────────────────────


def _of(kind: type, said: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise Refused(400, f"{name} = {value!r:.80}: expected {said}", name)
        return value

    return check


a_text = _of(str, "a text")
a_bool = _of(bool, "true or false")
_object = _of(dict, "an object")


def _whole(least: int, most: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        try:
            return whole(least, most).integer(name, value)
        except MonographError as error:
            raise Refused(400, str(error)[:200], name) from None

    return check


def _prompts(name: str, value: Any) -> list[str | list[int]]:
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MOST_PROMPTS:
        raise Refused(400, f"{name}: expected a text, or a list of 1 to {MOST_PROMPTS:,} texts or lists of ids", name)
    if not (all(isinstance(each, str) for each in prompts) or all(map(_are_ids, prompts))):
        raise Refused(400, f"{name}: expected texts, or lists of token ids, of which none is empty", name)
    return prompts


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _texts(most: int) -> Callable[[str, Any], list[str]]:
    def check(name: str, value: Any) -> list[str]:
        short = isinstance(value, list) and len(value) <= most and all(isinstance(each, str) and each for each in value)
        if not short or any(len(each.encode()) > MOST_STOP_BYTES for each in value):
            raise Refused(400, f"{name}: expected up to {most} texts of 1 to {MOST_STOP_BYTES} bytes", name)
        return value  # type: ignore[no-any-return]

    return check


def _stops(name: str, value: Any) -> list[str]:
    return _texts(MOST_STOPS)(name, [value] if isinstance(value, str) else value)


def _regex(name: str, value: Any) -> Limit:
    return Limit("regex", a_text(name, value), name)


def _choice(name: str, value: Any) -> Limit:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise Refused(400, f"{name}: expected a list of texts", name)
    return Limit("choices", value, name)


def _response_format(name: str, value: Any) -> Limit | None:
    inner = Fields(_object(name, value))
    kind = inner.take("type", a_text)
    given = inner.take("json_schema", _object)
    if kind == "text" and given is None:
        inner.end()
        return None
    if kind != "json_schema" or given is None:
        raise Refused(400, f'{name}: expected {{"type": "json_schema", "json_schema": {{"schema": ...}}}}', name)
    inner.end()
    schema = Fields(given)
    for key, check in (("name", a_text), ("description", a_text), ("strict", a_bool)):
        schema.take(key, check)
    found = schema.take("schema", _object)
    schema.end()
    if found is None:
        raise Refused(400, f"{name}: json_schema has no schema", name)
    return Limit("json_schema", found, name)


def _variables(name: str, value: Any) -> dict[str, Any]:
    inner = Fields(_object(name, value))
    thinking = inner.take("enable_thinking", a_bool)
    inner.end()
    return {} if thinking is None else {"enable_thinking": thinking}


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        raise Refused(400, f"{name}: expected a list of 1 to {MOST_MESSAGES:,} messages", name)
    return [_message(f"{name}[{index}]", each) for index, each in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, Any]:
    try:
        message = message_of(value, name, ROLES)
    except Unusable as unusable:
        raise Refused(400, str(unusable), "messages") from None
    known = SPOKEN | EMPTY
    for key in value.keys() - known:
        raise Refused(400, f"{name}: there is no field {key!r:.80}{did_you_mean(key, known)}", "messages")
    return message
