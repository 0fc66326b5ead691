"""Makes items ahead of their use, by one thread, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


def ahead(items: Iterator[Item], count: int) -> Generator[Item, None, None]:
    """The same items in the same order, up to `count` of them made by a thread before they are asked for.

    An error in `items` is raised here, in its item's turn. The thread begins when the first item is asked for and has
    ended when this generator has ended or was closed (see `contextlib.closing`), which waits for one item at most.

    Args:
        items: only the thread takes items from it.
        count: at least 1.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="monograph-ahead")
    try:
        pending = deque(pool.submit(list, islice(items, 1)) for _ in range(count))
        while made := pending.popleft().result():
            pending.append(pool.submit(list, islice(items, 1)))
            yield from made
    finally:
        pool.shutdown(cancel_futures=True)
