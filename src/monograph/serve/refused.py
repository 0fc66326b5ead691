"""A request that is answered with an error, and the error in OpenAI's form."""

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


# OpenAI's type of an error, by the HTTP status; see `error_body` for the others.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(refused: Refused) -> dict[str, Any]:
    """Return an error in the protocol's form."""
    other_type = "invalid_request_error" if refused.status < 500 else "server_error"
    return {
        "error": {
            "message": str(refused),
            "type": _TYPES.get(refused.status, other_type),
            "param": refused.param,
            "code": refused.code,
        }
    }
