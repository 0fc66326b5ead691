"""Run foreign code of a reward in a process of its own: a solution, the tests of one, or a user's function.

`monograph.rl.processes` starts this program. It imports nothing of the package, so that it starts in a few hundredths
of a second. It talks over sockets, not over its standard streams, which foreign code uses. A message is a line of JSON.
The first argument is the role:

    function: reads [source, path, function] and runs the source, then calls a function for each [name, arguments, named
        arguments]. A reply is [null, result], or [name, message] of an exception.
    solution 0 ROOT FOLDER...: does the same, but confined to the folders below ROOT.
    tests SOCKET ROOT FOLDER...: is confined, too. It reads [code, tests], sends the code to the solution at SOCKET, and
        writes for each test whether it passed. The tests see the solution's functions through proxies.
"""

import ast
import builtins
import ctypes
import functools
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

MOST_BYTES = 1 << 26  # of a message, more than a record may have
LIMITS = {
    resource.RLIMIT_CPU: 5,  # seconds of processor time
    resource.RLIMIT_AS: 1 << 29,  # bytes of address space
    resource.RLIMIT_NPROC: 0,  # no further process or thread
    resource.RLIMIT_FSIZE: 0,  # bytes of a file that it writes
    resource.RLIMIT_NOFILE: 16,
    resource.RLIMIT_CORE: 0,
}
LONGEST_S = 20.0  # if the trainer died before this process could ask to end with it
NOBODY = 65534  # the user without rights
# Linux's numbers, which Python does not name.
_NEW_NETWORK, _NEW_PROCESSES, _NEW_USER, _NEW_IPC, _NEW_MOUNTS = 1 << 30, 1 << 29, 1 << 28, 1 << 27, 1 << 17
_PRIVATE, _BIND, _RECURSIVE = 1 << 18, 1 << 12, 1 << 14
_MOUNT_SETATTR, _FROM_HERE, _WITH_MOUNTS_BELOW, _READ_ONLY_WITHOUT_DEVICES = 442, -100, 0x8000, 7
_END_WITH_PARENT, _OPEN_TO_OTHERS, _NO_NEW_RIGHTS, _CAPABILITIES_VERSION = 1, 4, 38, 0x20080522


class _Channel:
    """Lines of JSON in both directions over a socket, whose number then leads nowhere."""

    def __init__(self, descriptor: int) -> None:
        self._own = os.dup(descriptor), os.dup(descriptor)
        self._reader, self._writer = os.fdopen(self._own[0], "rb"), os.fdopen(self._own[1], "wb")
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)

    def leave_children(self) -> None:
        """Take the socket from this process's later children, which must not reply, nor keep it open."""
        os.register_at_fork(after_in_child=lambda: [os.dup2(0, each) for each in self._own])

    def send(self, value: Any) -> None:
        self._writer.write(json.dumps(value).encode() + b"\n")
        self._writer.flush()

    def receive(self) -> Any:
        """Read a message; raise EOFError if there is none any more, or it is too long."""
        line = self._reader.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def _confine(root: str, *folders: str) -> None:
    """Take from this process all that `monograph.rl.processes` says, and as much of it as the system allows."""
    libc = ctypes.CDLL(None)
    _hide(libc, root.encode(), [folder.encode() for folder in folders])
    if os.geteuid() == 0:  # root has no limit of processes, and may do too much
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(_NO_NEW_RIGHTS, 1, 0, 0, 0)
    libc.capset(struct.pack("Ii", _CAPABILITIES_VERSION, 0), bytes(24))
    libc.prctl(_OPEN_TO_OTHERS, 0)  # where no namespace parts them, a solution must not look into its tests' process
    libc.prctl(_END_WITH_PARENT, signal.SIGKILL)  # after the changes of rights, each of which cancels it
    for limit, most in LIMITS.items():
        resource.setrlimit(limit, (most, most))
    sys.set_int_max_str_digits(0)  # a long number is a fair result; processor time is limited


def _hide(libc: ctypes.CDLL, root: bytes, folders: list[bytes]) -> None:
    """Let this process see no network, no other process, and no files but the folders, read-only, below `root`."""
    apart = _NEW_NETWORK | _NEW_PROCESSES | _NEW_IPC | _NEW_MOUNTS
    if libc.unshare(apart) and libc.unshare(apart | _NEW_USER):
        return
    binds = [(root, root), *((folder, root + folder) for folder in folders)]
    attributes = struct.pack("4Q", _READ_ONLY_WITHOUT_DEVICES, 0, 0, 0)
    failed = libc.mount(None, b"/", None, _PRIVATE | _RECURSIVE, None)
    failed = failed or any(libc.mount(source, place, None, _BIND | _RECURSIVE, None) for source, place in binds)
    if not (failed or libc.syscall(_MOUNT_SETATTR, _FROM_HERE, root, _WITH_MOUNTS_BELOW, attributes, len(attributes))):
        os.chroot(root)
        os.chdir("/")
    # The first child is the namespace's first process: when it ends, the kernel ends all others in it. The second one
    # is the one that is confined, so that it cannot touch the first.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for _ in range(2):
        libc.prctl(_END_WITH_PARENT, signal.SIGKILL)
        if os.fork():
            signal.sigtimedwait({signal.SIGCHLD}, LONGEST_S)
            os._exit(0)


_KINDS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set}


def encoded(value: Any) -> Any:
    """Return plain data in JSON's types; a list is [kind, items]. A value of a subclass is sent as its base class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return ["dict", [[encoded(key), encoded(each)] for key, each in value.items()]]
    for kind, types in ("list", list), ("tuple", tuple), ("set", (set, frozenset)):
        if isinstance(value, types):
            return [kind, [encoded(each) for each in value]]
    if callable(item := getattr(value, "item", None)):  # a number of numpy, or of a tensor
        return encoded(item())
    raise TypeError(f"{type(value).__name__} is no plain data")


def decoded(value: Any) -> Any:
    """Return the plain data that `encoded` has written."""
    if not isinstance(value, list):
        return value
    kind, items = value
    if kind == "dict":
        return {decoded(key): decoded(each) for key, each in items}
    return _KINDS[kind](map(decoded, items))


def _serve(channel: _Channel) -> None:
    module = ModuleType("foreign")
    sys.modules["foreign"] = module  # dataclasses look their module up

    def run(source: str, path: str, wanted: str | None) -> None:
        module.__file__ = path
        sys.path.append(os.path.dirname(path))  # a file must find its neighbours, as it does when Python runs it
        # Latin-1 brought all bytes here: the source itself says in which encoding it is.
        exec(compile(source.encode("latin-1"), path, "exec"), module.__dict__)
        if wanted and not callable(getattr(module, wanted, None)):
            raise NameError(f"the file has no function {wanted!r}")

    def call(name: str, places: Any, named: Any) -> Any:
        if not hasattr(module, name):
            raise NameError(f"name {name!r} is not defined")
        return getattr(module, name)(*decoded(places), **decoded(named))

    perform: Callable[..., Any] = run
    while True:
        message = channel.receive()
        try:
            reply = [None, encoded(perform(*message))]
            perform = call
        except BaseException as error:
            reply = [type(error).__name__, str(error)]
        channel.send(reply)


def _test(parent: _Channel, solution: _Channel) -> None:
    def asked(*message: Any) -> Any:
        try:
            solution.send(message)
            raised, value = solution.receive()
            result, fault = decoded(value), _exception(raised, value) if raised else None
        except Exception:
            os._exit(0)  # a test that catches exceptions must not pass because the solution is dead, or lies
        if fault:
            raise fault
        return result

    def call(name: str, /, *places: Any, **named: Any) -> Any:
        return asked(name, encoded(places), encoded(named))

    code, tests = parent.receive()
    asked(code, "solution", None)
    for test in tests:
        parent.send(_passes(test, call))


def _exception(name: str, message: str) -> Exception:
    """Return the builtin exception of that name, else a RuntimeError."""
    kind = getattr(builtins, name, None)
    with suppress(TypeError):  # some take more than a message
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(message)
    return RuntimeError(message)


def _passes(test: str, call: Callable[..., Any]) -> bool:
    try:
        tree = ast.parse(test)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))
        exec(compile(tree, "tests", "exec"), {name: functools.partial(call, name) for name in used})
    except BaseException:
        return False
    return True


def main(role: str, descriptor: str = "0", *places: str) -> None:
    """Work until the socket is closed; see the module."""
    channels = [_Channel(number) for number in sorted({0, int(descriptor)})]
    if places:
        _confine(*places)
    elif sys.platform == "linux":
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    channels[0].leave_children()
    with suppress(EOFError, ConnectionError):
        _test(*channels) if role == "tests" else _serve(*channels)


if __name__ == "__main__":
    main(*sys.argv[1:])
