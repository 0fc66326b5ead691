"""The protocols in which a client can ask for texts: how a request is read, and how it is answered.

`monograph.serve.texts` answers requests for completions and for chats. A request in another protocol is
translated into a request of a chat, and the answer is written in the form of that other protocol.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from monograph.serve import messages_request, responses_request
from monograph.serve.answers import AnswerBuilder, ChatAnswerBuilder, CompletionAnswerBuilder
from monograph.serve.fields import read
from monograph.serve.messages_answer import MessageBuilder
from monograph.serve.requests import AnyTextRequest, ChatRequest, CompletionRequest
from monograph.serve.responses_answer import ResponseBuilder
from monograph.serve.versions import ServedModel


class AskedTexts(NamedTuple):
    """A request for texts.

    Attributes:
        request: the request.
        answer: returns the builder of the answer, for the model that writes it.
    """

    request: AnyTextRequest
    answer: Callable[[ServedModel], AnswerBuilder]


class TextProtocol(NamedTuple):
    """How requests for texts are read, and how they are answered.

    Attributes:
        read: reads a JSON object as a request of this protocol. Its second argument is the number of
            texts that the model writes at the same time. It raises `Refused` if a field is wrong.
        field_names: the protocol's names of those fields of a chat's request that have another name there.
    """

    read: Callable[[dict[str, Any], int], AskedTexts]
    field_names: Mapping[str, str] = {}


def _read_completion(fields: dict[str, Any], rows: int) -> AskedTexts:
    request = read(CompletionRequest, fields, rows=rows)
    return AskedTexts(request, lambda model: CompletionAnswerBuilder(model, request))


def _read_chat(fields: dict[str, Any], rows: int) -> AskedTexts:
    request = read(ChatRequest, fields, rows=rows)
    return AskedTexts(request, lambda model: ChatAnswerBuilder(model, request))


def _read_response(fields: dict[str, Any], rows: int) -> AskedTexts:
    request, chat = responses_request.read_request(fields, rows)
    return AskedTexts(chat, lambda model: ResponseBuilder(model, request, chat))


def _read_message(fields: dict[str, Any], rows: int) -> AskedTexts:
    chat = messages_request.read_request(fields, rows)
    return AskedTexts(chat, lambda model: MessageBuilder(model, chat))


COMPLETIONS = TextProtocol(_read_completion)
CHAT = TextProtocol(_read_chat)
RESPONSES = TextProtocol(_read_response, responses_request.FIELD_NAMES)
MESSAGES = TextProtocol(_read_message, messages_request.FIELD_NAMES)
