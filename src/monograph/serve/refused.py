"""Refusals: `Refused`, the exception for a request that is answered with an error, and the error's JSON.

The JSON has the form of OpenAI's or of Anthropic's errors, depending on the address.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Refused(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status.
        param: the field that is wrong, or None.
        code: OpenAI's name of the error, or None.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        **headers: str,
    ):
        """Take the parts of the answer; an underscore in a header's name stands for a hyphen."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Let refusals inside the block name fields as the client knows them.

    Args:
        names: for each field that the client knows by another name, the client's name.
    """
    try:
        yield
    except Refused as refused:
        if refused.param is None or refused.param not in names:
            raise
        name = names[refused.param]
        # A message about a field begins with its name.
        message = re.sub(rf"^{refused.param}\b", name, str(refused))
        raise Refused(refused.status, message, name, refused.code, **refused.headers) from None


# Addresses whose errors have Anthropic's form begin with this.
MESSAGES_PATH = "/v1/messages"
# Anthropic's name of the error for a request that refers to stored messages. A client of Anthropic's that
# gets this error sends the messages themselves.
THREAD_UNSUPPORTED = "thread_unsupported_request"
# OpenAI's type of an error, by the HTTP status; see `_openai_body` for other statuses.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Anthropic's type of an error, by the HTTP status; see `_anthropic_body` for other statuses.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(refused: Refused, path: str = "") -> dict[str, Any]:
    """Return an error in the form of the protocol to which the address `path` belongs."""
    is_anthropic = path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")
    return _anthropic_body(refused) if is_anthropic else _openai_body(refused)


def _openai_body(refused: Refused) -> dict[str, Any]:
    other_type = "invalid_request_error" if refused.status < 500 else "server_error"
    return {
        "error": {
            "message": str(refused),
            "type": _OPENAI_TYPES.get(refused.status, other_type),
            "param": refused.param,
            "code": refused.code,
        }
    }


def _anthropic_body(refused: Refused) -> dict[str, Any]:
    other_type = "invalid_request_error" if refused.status < 500 else "api_error"
    error_type = _ANTHROPIC_TYPES.get(refused.status, other_type)
    error: dict[str, Any] = {"type": error_type, "message": str(refused)}
    if refused.code == THREAD_UNSUPPORTED:
        error["details"] = {"error_code": refused.code, "unsupported": []}
    return {"type": "error", "error": error}
