"""What the host keeps of the requests that run, and of the steps that it has started."""

from dataclasses import dataclass
from typing import NamedTuple

from monograph.decode.knobs import Chain
from monograph.decode.request import Finish, Request
from monograph.decode.step import Status

FINISHES: dict[Status, Finish] = {
    Status.STOP: "stop",
    Status.LENGTH: "length",
    Status.NOT_FINITE: "not_finite",
    Status.NOTHING_ALLOWED: "nothing_allowed",
}


@dataclass
class Record:
    """The host's record of a request in a row.

    Attributes:
        number: the request's number.
        request: the request.
        limit: most tokens that it may draw.
        least: the smallest chain that serves it.
        launched: steps that were started for it, and so the most tokens that it can have drawn.
        received: tokens that the host has read.
        exact: whether the fast truncation once could not decide a draw. From then on the request runs with the exact
            one, with a new record, so that the host skips the codes of the steps in which the row waited.
    """

    number: int
    request: Request
    limit: int
    least: Chain
    launched: int = 0
    received: int = 0
    exact: bool = False


class Block(NamedTuple):
    """Steps that were started together: how many, the half of the outbox with their codes, and each row's record."""

    steps: int
    half: int
    records: list[Record | None]


class Pace(NamedTuple):
    """How long running requests and those that wait for a row wait for each other.

    Attributes:
        steps: of a block, between two reads of the host.
        hurried: most steps of a block while a request waits for a row, or for its first tokens.
        chunks: most chunks of prompts that are read between two blocks if as many requests run as can begin; more
            where more can begin, as all of them wait for few; None: all.
    """

    steps: int
    hurried: int
    chunks: int | None
