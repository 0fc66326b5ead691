"""The queue of requests that wait for a decoder's rows."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from monograph.decode.knobs import Chain
from monograph.decode.request import Request


class WaitingRequest(NamedTuple):
    """A waiting request.

    Attributes:
        number: the request's number, which its events have.
        request: the request.
        smallest_chain: the smallest chain that serves the request.
        knobs: the values of the knobs of its row.
    """

    number: int
    request: Request
    smallest_chain: Chain
    knobs: dict[str, Any]


class RequestQueue:
    """Requests in the order in which they get rows.

    Owners take turns, with one request each. An owner's requests keep the order in which they came.
    """

    def __init__(self) -> None:
        # Each owner's requests; the owner whose turn is next comes first.
        self._by_owner: dict[str, deque[WaitingRequest]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def __bool__(self) -> bool:
        return bool(self._by_owner)

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Yield all requests, in the order in which they would get rows now."""
        # Each owner's remaining requests; the owner whose turn is next comes first.
        turns = deque(map(iter, self._by_owner.values()))
        while turns:
            entries = turns.popleft()
            entry = next(entries, None)
            if entry is not None:
                yield entry
                turns.append(entries)

    @property
    def first(self) -> WaitingRequest:
        """Return the next request."""
        return next(iter(self))

    def add(self, entry: WaitingRequest) -> None:
        """Add a request after those of its owner."""
        self._by_owner.setdefault(entry.request.owner, deque()).append(entry)

    def take(self) -> WaitingRequest:
        """Remove and return the next request; its owner's next turn comes after those of all others."""
        owner = next(iter(self._by_owner))
        entries = self._by_owner.pop(owner)
        entry = entries.popleft()
        if entries:
            self._by_owner[owner] = entries
        return entry

    def move_to_front(self, entry: WaitingRequest) -> None:
        """Make a waiting request the next one; the next turn is then its owner's."""
        entries = self._by_owner.pop(entry.request.owner)
        entries.remove(entry)
        entries.appendleft(entry)
        self._by_owner = {entry.request.owner: entries, **self._by_owner}

    def remove(self, number: int) -> None:
        """Remove the request with this number, if it waits."""
        for owner, entries in self._by_owner.items():
            for entry in entries:
                if entry.number == number:
                    self._drop(owner, entry)
                    return

    def _drop(self, owner: str, entry: WaitingRequest) -> None:
        """Remove a request, and its owner if the owner has no other."""
        self._by_owner[owner].remove(entry)
        if not self._by_owner[owner]:
            del self._by_owner[owner]
