"""Run foreign code of a reward in a process of its own: a solution, the tests of one, or a user's
function.

`monograph.rl.processes` starts this program. It imports nothing of the package, so that it starts
in a few hundredths of a second. It talks over sockets, not over its standard streams, which foreign
code uses. A message is a line of JSON. The first argument is the role:

    function: reads [source, path, function] and runs the source, then calls a function for each
        [name, arguments, named arguments]. A reply is [null, result], or [name, message] of an
        exception.
    solution 0 FOLDER...: does the same, but confined, with no other files than those folders.
    tests SOCKET FOLDER...: is confined, too. It reads [code, tests], sends the code to the solution
        at SOCKET, and writes for each test whether it passed. The tests see the solution's
        functions through proxies.
"""

import ast
import builtins
import ctypes
import errno
import functools
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

MOST_BYTES = 1 << 26  # of a message, more than a record may have
LIMITS = {
    resource.RLIMIT_CPU: 5,  # seconds of processor time
    resource.RLIMIT_AS: 1 << 29,  # bytes of address space
    resource.RLIMIT_NPROC: 0,  # no further process or thread
    resource.RLIMIT_FSIZE: 0,  # bytes of a file that it writes
    resource.RLIMIT_NOFILE: 16,
    resource.RLIMIT_CORE: 0,
}
ENDS_OF_ITERATORS = (StopIteration, StopAsyncIteration)
LONGEST_S = 20.0  # if the trainer died before this process could ask to end with it
NOBODY = 65534  # the user without rights
# Linux's numbers, which Python does not name.
_NEW_NETWORK = 1 << 30
_NEW_PROCESSES = 1 << 29
_NEW_USER = 1 << 28
_NEW_IPC = 1 << 27
_NEW_MOUNTS = 1 << 17
_PRIVATE = 1 << 18
_BIND = 1 << 12
_RECURSIVE = 1 << 14
_MOUNT_SETATTR = 442
_FROM_HERE = -100
_WITH_MOUNTS_BELOW = 0x8000
_READ_ONLY_WITHOUT_DEVICES = 7
_END_WITH_PARENT = 1
_OPEN_TO_OTHERS = 4
_NO_NEW_RIGHTS = 38
_CAPABILITIES_VERSION = 0x20080522
_FILTER_CALLS, _BY_PROGRAM = 22, 2
# Where a file system of its own becomes the root: every Linux has this folder, and no library is in
# it.
ROOT = b"/proc"


class _Machine(NamedTuple):
    """A kind of processor, as Linux's system calls know it.

    Attributes:
        number: what a filter sees as its name.
        column: the place of its numbers in FORBIDDEN.
        most: the largest number of a call; beyond it are the calls of another kind, such as x32.
    """

    number: int
    column: int
    most: int


MACHINES = {
    "x86_64": _Machine(0xC000003E, 0, (1 << 30) - 1),
    "aarch64": _Machine(0xC00000B7, 1, (1 << 31) - 1),
}
# System calls that fail, with their numbers on x86_64 and aarch64: those that make another process
# or thread; that hold memory, or reach a process, that no limit of this process counts, and that
# may outlive it; that make namespaces and file systems, with rights and memory of their own; and
# sockets, which lead to the network where no namespace hides it.
FORBIDDEN: dict[str, tuple[int, int | None]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_setup": (206, 0),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "socket": (41, 198),
    "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
}


class _Channel:
    """Lines of JSON in both directions over a socket, whose number then leads nowhere."""

    def __init__(self, descriptor: int) -> None:
        self._own = os.dup(descriptor), os.dup(descriptor)
        self._reader, self._writer = os.fdopen(self._own[0], "rb"), os.fdopen(self._own[1], "wb")
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)

    def leave_children(self) -> None:
        """Take the socket from this process's later children, which must not reply, nor keep it
        open.
        """
        os.register_at_fork(after_in_child=lambda: [os.dup2(0, each) for each in self._own])

    def send(self, value: object) -> None:
        self._writer.write(json.dumps(value).encode() + b"\n")
        self._writer.flush()

    def receive(self) -> Any:
        """Read a message; raise EOFError if there is none any more, or it is too long."""
        line = self._reader.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def _confine(folders: Sequence[str]) -> None:
    """Take from this process all that `monograph.rl.processes` says, and as much of it as the
    system allows.

    Raises:
        OSError: it would be left with calls that no limit counts.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _hide(libc, [folder.encode() for folder in folders])
    if os.geteuid() == 0:  # root has no limit of processes, and may do too much
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(_NO_NEW_RIGHTS, 1, 0, 0, 0)
    libc.capset(struct.pack("Ii", _CAPABILITIES_VERSION, 0), bytes(24))
    # Where no namespace parts them, a solution must not look into its tests' process.
    libc.prctl(_OPEN_TO_OTHERS, 0)
    # After the changes of rights, each of which cancels it.
    libc.prctl(_END_WITH_PARENT, signal.SIGKILL)
    for limit, most in LIMITS.items():
        resource.setrlimit(limit, (most, most))
    _forbid(libc)
    sys.set_int_max_str_digits(0)  # a long number is a fair result; processor time is limited


def _forbid(libc: ctypes.CDLL) -> None:
    """Let the calls of FORBIDDEN fail in this process and its children, as those do that rights are
    missing for.
    """
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(f"no filter of system calls is known for {os.uname().machine}")
    # instructions of the kernel's small machine
    load = 0x20
    jump_if_equal = 0x15
    jump_if_above = 0x25
    end = 0x06
    allow = 0x7FFF0000
    fail = 0x00050000 | errno.EPERM
    kill = 0x80000000
    number, architecture = 0, 4  # where they stand in what the kernel shows of a call
    calls = [
        numbers[machine.column]
        for numbers in FORBIDDEN.values()
        if numbers[machine.column] is not None
    ]
    code = [
        (load, 0, 0, architecture),
        (jump_if_equal, 1, 0, machine.number),
        (end, 0, 0, kill),
        (load, 0, 0, number),
        (jump_if_above, len(calls) + 1, 0, machine.most),
        *((jump_if_equal, len(calls) - index, 0, call) for index, call in enumerate(calls)),
        (end, 0, 0, allow),
        (end, 0, 0, fail),
    ]
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    )
    described = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
    if libc.prctl(_FILTER_CALLS, _BY_PROGRAM, described, 0, 0):
        raise OSError(ctypes.get_errno(), "the system takes no filter of system calls")


def _hide(libc: ctypes.CDLL, folders: list[bytes]) -> None:
    """Let this process see no network, no other process, and no files but the folders, read-only,
    and only if it can.

    Its root is a file system of its own, in memory, which ends with it: it leaves nothing behind,
    however it ends.
    """
    apart = _NEW_NETWORK | _NEW_PROCESSES | _NEW_IPC | _NEW_MOUNTS
    if libc.unshare(apart) and libc.unshare(apart | _NEW_USER):
        return
    failed = libc.mount(None, b"/", None, _PRIVATE | _RECURSIVE, None)
    if not (failed or libc.mount(b"tmpfs", ROOT, b"tmpfs", 0, b"size=64k,mode=755")):
        for folder in folders:
            os.makedirs(ROOT + folder, exist_ok=True)
            failed = failed or libc.mount(folder, ROOT + folder, None, _BIND | _RECURSIVE, None)
        attributes = struct.pack("4Q", _READ_ONLY_WITHOUT_DEVICES, 0, 0, 0)
        size = len(attributes)
        if not (
            failed
            or libc.syscall(_MOUNT_SETATTR, _FROM_HERE, ROOT, _WITH_MOUNTS_BELOW, attributes, size)
        ):
            os.chroot(ROOT)
            os.chdir("/")
    # The first child is the namespace's first process: when it ends, the kernel ends all others in
    # it. The second one is the one that is confined, so that it cannot touch the first.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for _ in range(2):
        libc.prctl(_END_WITH_PARENT, signal.SIGKILL)
        if os.fork():
            signal.sigtimedwait({signal.SIGCHLD}, LONGEST_S)
            os._exit(0)


_KINDS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set}


def encoded(value: object) -> Any:
    """Return plain data in JSON's types; a list is [kind, items]. A value of a subclass is sent as
    its base class.
    """
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


def decoded(value: object) -> Any:
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
        # A file must find its neighbours, as it does when Python runs it.
        sys.path.append(os.path.dirname(path))
        # Latin-1 brought all bytes here: the source itself says in which encoding it is.
        exec(compile(source.encode("latin-1"), path, "exec"), module.__dict__)
        if wanted and not callable(getattr(module, wanted, None)):
            # Needed here alone: every process of this program would start later by it.
            import difflib

            functions = [name for name, value in module.__dict__.items() if callable(value)]
            near = difflib.get_close_matches(wanted, functions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise NameError(f"the file has no function {wanted!r}{hint}")

    def call(name: str, places: object, named: object) -> Any:
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
    def asked(*message: object) -> Any:
        try:
            solution.send(message)
            raised, value = solution.receive()
            result = decoded(value)
            fault = _exception(raised, value) if raised else None
        except Exception:
            # A test that catches exceptions must not pass because the solution is dead, or lies.
            os._exit(0)
        if fault:
            raise fault
        return result

    def call(name: str, /, *places: object, **named: object) -> Any:
        return asked(name, encoded(places), encoded(named))

    code, tests = parent.receive()
    asked(code, "solution", None)
    for test in tests:
        parent.send(_passes(test, call))


def _exception(name: str, message: str) -> Exception:
    """Return the builtin exception of that name, else a RuntimeError.

    Those that only end an iterator become one, too, as in generators (PEP 479):
    `all(map(f, cases))` would be true as soon as f raises it.
    """
    kind = getattr(builtins, name, None)
    with suppress(TypeError):  # some take more than a message
        if (
            isinstance(kind, type)
            and issubclass(kind, Exception)
            and not issubclass(kind, ENDS_OF_ITERATORS)
        ):
            return kind(message)
    return RuntimeError(message)


def _passes(test: str, call: Callable[..., Any]) -> bool:
    try:
        tree = ast.parse(test)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(
            dir(builtins)
        )
        exec(compile(tree, "tests", "exec"), {name: functools.partial(call, name) for name in used})
    except BaseException:
        return False
    return True


def main(role: str, descriptor: str = "0", *folders: str) -> None:
    """Work until the socket is closed; see the module."""
    channels = [_Channel(number) for number in sorted({0, int(descriptor)})]
    if folders:
        _confine(folders)
    elif sys.platform == "linux":
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    channels[0].leave_children()
    with suppress(EOFError, ConnectionError):
        _test(*channels) if role == "tests" else _serve(*channels)


if __name__ == "__main__":
    main(*sys.argv[1:])
