"""A request that is answered with an error, and the error in OpenAI's form."""

from typing import Any


class Refused(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status.
        param: the field that is wrong, if it is one.
        code: OpenAI's word for it, if it has one.
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
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def error_of(refused: Refused) -> dict[str, Any]:
    """Return an error in the protocol's words."""
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        refused.status
    )
    kind = kind or ("invalid_request_error" if refused.status < 500 else "server_error")
    return {
        "error": {
            "message": str(refused),
            "type": kind,
            "param": refused.param,
            "code": refused.code,
        }
    }
