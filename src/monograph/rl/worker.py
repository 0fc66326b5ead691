"""Run foreign code of a reward in a separate process: a solution, its tests, a user's function, or a
user's environment.

`monograph.rl.processes` starts this program. It imports nothing from the package, so that it starts
in a few hundredths of a second. It communicates over sockets, since foreign code may use the
standard streams. A message is a line of JSON. The first argument is the role:

    function: reads [source, path, function] and runs the source. Then it calls a function for each
        [name, arguments, named arguments]. A reply is [null, result], or [name, message] of an
        exception.
    solution 0 FOLDER...: does the same, but is confined, and sees only the files of these folders.
    environment 0 FOLDER...: reads [source, path, class] and runs the source, with the rights of the
        user. Then it is confined as a solution is, with higher limits (ENVIRONMENT_LIMITS), and replies
        with the class's `tools`. After that it calls `reset` and `step` of the class's objects, one for
        each episode; see `_play`.
    tests SOCKET FOLDER...: is also confined. It reads [source, tests], sends the source to the
        solution at SOCKET, and writes for each test whether it passed. The tests call the solution's
        functions through proxies.

Every process talks to the process that started it over its standard input, which is a socket.
SOCKET is the file descriptor of a second socket; 0: there is none. Each character of a source is one
byte of its file (Latin-1), since only Python knows the encoding that the file declares.
"""

import ast
import builtins
import ctypes
import errno
import functools
import json
import os
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

# The maximum size of a message in bytes. A record of training data, which may be part of a message,
# has at most half of it (`monograph.data.records`).
MAX_BYTES = 1 << 26
LIMITS = {
    resource.RLIMIT_CPU: 5,  # seconds of processor time
    resource.RLIMIT_AS: 1 << 29,  # bytes of address space
    resource.RLIMIT_NPROC: 0,  # no further process or thread
    resource.RLIMIT_FSIZE: 0,  # bytes of a file that it writes
    resource.RLIMIT_NOFILE: 16,
    resource.RLIMIT_CORE: 0,
}
# The limits of a user's environment, which lives as long as the run and may need larger libraries.
ENVIRONMENT_LIMITS = {
    **{limit: value for limit, value in LIMITS.items() if limit != resource.RLIMIT_CPU},
    resource.RLIMIT_AS: 1 << 32,
    resource.RLIMIT_NOFILE: 64,
}
ENDS_OF_ITERATORS = (StopIteration, StopAsyncIteration)
# The longest life of a confined process. This matters only if the trainer died before the process
# could ask the system to end it with the trainer.
MAX_LIFETIME_S = 20.0
# An environment lives as long as the run, at most a year.
ENVIRONMENT_LIFETIME_S = 366 * 86400.0
# The user without rights.
NOBODY = 65534
# Constants of Linux that Python does not define, by their names in Linux.
CLONE_NEWNET = 1 << 30
CLONE_NEWPID = 1 << 29
CLONE_NEWUSER = 1 << 28
CLONE_NEWIPC = 1 << 27
CLONE_NEWNS = 1 << 17
MS_PRIVATE = 1 << 18
MS_BIND = 1 << 12
MS_REC = 1 << 14
SYS_MOUNT_SETATTR = 442
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
LINUX_CAPABILITY_VERSION_3 = 0x20080522
# Where the new root is mounted. Every Linux has this folder, and no library is in it.
ROOT = b"/proc"


class _Machine(NamedTuple):
    """A kind of processor, as Linux's system calls know it.

    Attributes:
        number: its identifier in a filter of system calls.
        column: the index of its system calls in the values of FORBIDDEN.
        largest: the largest number of its system calls; larger numbers are of another interface,
            such as x32.
    """

    number: int
    column: int
    largest: int


MACHINES = {
    "x86_64": _Machine(0xC000003E, 0, (1 << 30) - 1),
    "aarch64": _Machine(0xC00000B7, 1, (1 << 31) - 1),
}
# System calls that fail, with their numbers on x86_64 and aarch64. Each of them does one of these:
# - It creates a process or thread.
# - It holds memory that no limit counts, and that may outlive this process.
# - It reaches other processes.
# - It creates a namespace or a file system, which has its own rights and memory.
# - It opens a socket, through which the network can be reached unless a namespace hides it.
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
    """Lines of JSON in both directions over a socket."""

    def __init__(self, descriptor: int) -> None:
        """Take over the socket with this descriptor.

        The descriptor then leads to /dev/null, so that foreign code cannot use the socket.
        """
        self._descriptors = os.dup(descriptor), os.dup(descriptor)
        self._reader = os.fdopen(self._descriptors[0], "rb")
        self._writer = os.fdopen(self._descriptors[1], "wb")
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)

    def close_in_children(self) -> None:
        """Close the socket in later children of this process.

        They must neither reply nor keep the socket open.
        """
        # Standard input was the socket to the parent, and has led to /dev/null since the channel to the
        # parent took that socket over. Here the children's copies of this socket are replaced by it.

        def replace_copies() -> None:
            for descriptor in self._descriptors:
                os.dup2(0, descriptor)

        os.register_at_fork(after_in_child=replace_copies)

    def send(self, value: object) -> None:
        self._writer.write(json.dumps(value).encode() + b"\n")
        self._writer.flush()

    def receive(self) -> Any:
        """Read a message; raise EOFError if the socket is closed or the message too long."""
        line = self._reader.readline(MAX_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def _confine(
    folders: Sequence[str],
    limits: Mapping[int, int] = LIMITS,
    lifetime_s: float = MAX_LIFETIME_S,
) -> None:
    """Confine this process as `monograph.rl.processes` says, as far as the system allows.

    Args:
        folders: the folders whose files it may see.
        limits: the limits on resources, by the constants of `resource`.
        lifetime_s: the longest life of the process, if the system hides other processes from it.

    Raises:
        OSError: system calls cannot be filtered, which is always needed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _hide(libc, [folder.encode() for folder in folders], lifetime_s)
    # Root is not bound by the limit on processes, and has too many rights.
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    no_capabilities = bytes(24)
    libc.capset(struct.pack("Ii", LINUX_CAPABILITY_VERSION_3, 0), no_capabilities)
    # On a system without namespaces, a solution could otherwise read the memory of its tests' process.
    libc.prctl(PR_SET_DUMPABLE, 0)
    # Each change of rights cancels the signal that a process asks for at its parent's death. So it is
    # asked for after all of them.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    _forbid(libc)
    # A solution may return an integer of any length, which is converted to a text for the reply. The limit
    # on processor time bounds this, so Python's own limit on digits is not needed.
    sys.set_int_max_str_digits(0)


def _forbid(libc: ctypes.CDLL) -> None:
    """Make the calls of FORBIDDEN fail with EPERM in this process and its children.

    Raises:
        OSError: the system takes no filter, or no filter is known for this kind of processor.
    """
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(f"no filter of system calls is known for {os.uname().machine}")
    # Instructions of BPF, the kernel's virtual machine.
    load = 0x20
    jump_if_equal = 0x15
    jump_if_above = 0x25
    end = 0x06
    # What becomes of a call: the operands of `end`.
    allow = 0x7FFF0000
    fail = 0x00050000 | errno.EPERM
    kill = 0x80000000
    # Offsets in the kernel's description of a call.
    number = 0
    architecture = 4
    calls = [
        numbers[machine.column]
        for numbers in FORBIDDEN.values()
        if numbers[machine.column] is not None
    ]
    # An instruction is (operation, instructions to skip if true, instructions to skip if false, operand).
    # The first three end the process if the processor is another one. All later jumps lead to the last
    # instruction, `fail`: if the call's number is above the largest one, or is one of `calls`. The jump of
    # call `index` skips the comparisons with the calls after it, and `allow`.
    code = [
        (load, 0, 0, architecture),
        (jump_if_equal, 1, 0, machine.number),
        (end, 0, 0, kill),
        (load, 0, 0, number),
        (jump_if_above, len(calls) + 1, 0, machine.largest),
        *((jump_if_equal, len(calls) - index, 0, call) for index, call in enumerate(calls)),
        (end, 0, 0, allow),
        (end, 0, 0, fail),
    ]
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    )
    # The kernel's struct sock_fprog: the number of instructions and their address.
    program_struct = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program_struct, 0, 0):
        raise OSError(ctypes.get_errno(), "the system takes no filter of system calls")


def _mount_root(libc: ctypes.CDLL, folders: list[bytes]) -> bool:
    """Mount a root in memory, with the folders in it, read-only; return whether that succeeded."""
    # The functions of libc return 0 if they succeed.
    if libc.mount(None, b"/", None, MS_PRIVATE | MS_REC, None):
        return False
    if libc.mount(b"tmpfs", ROOT, b"tmpfs", 0, b"size=64k,mode=755"):
        return False
    for folder in folders:
        os.makedirs(ROOT + folder, exist_ok=True)
        if libc.mount(folder, ROOT + folder, None, MS_BIND | MS_REC, None):
            return False
    # The kernel's struct mount_attr: the attributes to set, and three fields that are not needed.
    read_only = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    attributes = struct.pack("4Q", read_only, 0, 0, 0)
    error = libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, ROOT, AT_RECURSIVE, attributes, len(attributes)
    )
    return not error


def _hide(libc: ctypes.CDLL, folders: list[bytes], lifetime_s: float) -> None:
    """Hide the network, other processes and files from this process, if the system allows that.

    The process then sees only the files of the folders, read-only. Its root is a file system in
    memory, which disappears with the process, however the process ends.
    """
    namespaces = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNS
    # `unshare` returns 0 if it succeeds. Root may make these namespaces; another user needs a namespace
    # of users for that.
    failed = libc.unshare(namespaces)
    if failed:
        failed = libc.unshare(namespaces | CLONE_NEWUSER)
    if failed:
        return
    if _mount_root(libc, folders):
        os.chroot(ROOT)
        os.chdir("/")
    # This process forks twice. Each time the parent only waits for its child and then ends, and the child
    # goes on. The first child is the first process of the namespace: when it ends, the kernel ends all
    # other processes there. The second child is the confined one, which cannot end the first. The caller
    # sets the limits afterwards, so they are those of the second child alone. SIGCHLD is blocked, so that
    # it stays pending until `sigtimedwait` takes it, even if the child ends before that call.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for _ in range(2):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        is_parent = os.fork() != 0
        if is_parent:
            signal.sigtimedwait({signal.SIGCHLD}, lifetime_s)
            _, status = os.waitpid(-1, os.WNOHANG)
            # If a signal ended the child, `code` is the negative number of the signal. The exit code is
            # then 128 plus that number, as in shells.
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


# The types of containers other than dicts, by the names that `encoded` gives them.
_CONTAINERS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set}


def encoded(value: object) -> Any:
    """Return plain data as a JSON value, in which a container is [kind, items].

    A value of a subclass is encoded as a value of its base class.

    Raises:
        TypeError: the value is not plain data.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return ["dict", [[encoded(key), encoded(each)] for key, each in value.items()]]
    for kind, types in ("list", list), ("tuple", tuple), ("set", (set, frozenset)):
        if isinstance(value, types):
            return [kind, [encoded(each) for each in value]]
    # A scalar of numpy or of torch has a method `item`, which returns it as a number.
    item = getattr(value, "item", None)
    if callable(item):
        return encoded(item())
    raise TypeError(f"{type(value).__name__} is not plain data")


def decoded(value: object) -> Any:
    """Return the plain data that `encoded` has written."""
    if not isinstance(value, list):
        return value
    kind, items = value
    if kind == "dict":
        return {decoded(key): decoded(each) for key, each in items}
    return _CONTAINERS[kind](map(decoded, items))


def _run_source(source: str, path: str, name: str | None, kind: str = "function") -> ModuleType:
    """Run a file as a module, and return the module.

    Args:
        source: the file; each character is one byte.
        path: its path.
        name: a function or class that it must define; None: any file will do.
        kind: "function" or "class", for the message.

    Raises:
        NameError: the file does not define the name.
    """
    module = ModuleType("foreign")
    # A dataclass looks up the module that defines it in `sys.modules`.
    sys.modules["foreign"] = module
    module.__file__ = path
    # The file can import modules of its folder, as if Python ran it.
    sys.path.append(os.path.dirname(path))
    exec(compile(source.encode("latin-1"), path, "exec"), module.__dict__)
    if name and not callable(getattr(module, name, None)):
        # Imported only here, since it would delay the start of each process.
        import difflib

        names = [each for each, value in module.__dict__.items() if callable(value)]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise NameError(f"the file has no {kind} {name!r}{hint}")
    return module


def _serve(channel: _Channel) -> None:
    """Run the source of the first message, and call a function for each further message."""
    module = ModuleType("foreign")

    def run_source(source: str, path: str, function: str | None) -> None:
        nonlocal module
        module = _run_source(source, path, function)

    def call(name: str, positional: object, named: object) -> Any:
        """Call a function of the source, and return its result."""
        if not hasattr(module, name):
            raise NameError(f"name {name!r} is not defined")
        return getattr(module, name)(*decoded(positional), **decoded(named))

    # The first message has the source. Once the source has run, each further message is a call.
    handle: Callable[..., Any] = run_source
    while True:
        message = channel.receive()
        try:
            reply = [None, encoded(handle(*message))]
            handle = call
        except BaseException as error:
            reply = [type(error).__name__, str(error)]
        channel.send(reply)


def _play(channel: _Channel, folders: Sequence[str]) -> None:
    """Run the source of the first message, and play the episodes that further messages ask for.

    Messages, with their replies:

        [source, path, class]: the class's `tools`, or None.
        ["reset", episode, seed, record]: what `reset(record)` of a new object of the class returns.
        ["step", episode, answer]: what `step(answer)` of the episode's object returns.
        ["end", episode]: None; the object is forgotten.

    Python's `random` has a state of its own in each episode, which begins with the seed. So what it
    gives does not depend on other episodes of this process.
    """
    environment: Any = None
    # The object of each episode, and the state of `random` after its last call.
    episodes: dict[int, tuple[Any, Any]] = {}

    def open_class(source: str, path: str, name: str) -> Any:
        """Run the source, confine the process, and return the tools of the class."""
        nonlocal environment
        environment = getattr(_run_source(source, path, name, kind="class"), name)
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                raise AttributeError(f"{name} has no method {method!r}")
        tools = encoded(getattr(environment, "tools", None))
        # From here on, the code reads what the model wrote.
        _confine(folders, ENVIRONMENT_LIMITS, ENVIRONMENT_LIFETIME_S)
        channel.close_in_children()
        return tools

    def reset(episode: int, seed: int, record: object) -> Any:
        random.seed(seed)
        played = environment()
        opening = encoded(played.reset(decoded(record)))
        episodes[episode] = played, random.getstate()
        return opening

    def step(episode: int, answer: object) -> Any:
        played, state = episodes[episode]
        random.setstate(state)
        result = encoded(played.step(answer))
        episodes[episode] = played, random.getstate()
        return result

    def end(episode: int) -> None:
        del episodes[episode]

    calls: dict[str, Callable[..., Any]] = {"reset": reset, "step": step, "end": end}

    def call(name: str, *arguments: object) -> Any:
        return calls[name](*arguments)

    handle: Callable[..., Any] = open_class
    while True:
        message = channel.receive()
        try:
            reply = [None, handle(*message)]
            handle = call
        except BaseException as error:
            reply = [type(error).__name__, str(error)]
        channel.send(reply)


def _test(parent: _Channel, solution: _Channel) -> None:
    """Run the tests that `parent` sends, and send it for each test whether it passed."""

    def ask(*message: object) -> Any:
        """Send a message to the solution, and return its result or raise its exception."""
        try:
            solution.send(message)
            raised, value = solution.receive()
            result = decoded(value)
            error = _exception(raised, value) if raised else None
        except Exception:
            # The solution is dead or sends invalid replies. A test that catches exceptions must not
            # pass because of that.
            os._exit(0)
        if error:
            raise error
        return result

    def call(name: str, /, *positional: object, **named: object) -> Any:
        """Call a function of the solution, and return its result or raise its exception."""
        return ask(name, encoded(positional), encoded(named))

    source, tests = parent.receive()
    ask(source, "solution", None)
    for test in tests:
        parent.send(_passes(test, call))


def _exception(name: str, message: str) -> Exception:
    """Return the builtin exception of this name, or else a RuntimeError.

    An exception that ends an iterator becomes a RuntimeError, as in generators (PEP 479). Otherwise
    `all(map(f, cases))` would be true if f raised it.
    """
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return RuntimeError(message)
    if issubclass(kind, ENDS_OF_ITERATORS):
        return RuntimeError(message)
    try:
        return kind(message)
    except TypeError:
        # Some exceptions need more arguments than a message.
        return RuntimeError(message)


def _passes(test: str, call: Callable[..., Any]) -> bool:
    """Return whether a test runs to its end. `call` calls a function of the solution by name."""
    try:
        tree = ast.parse(test)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        proxies = {name: functools.partial(call, name) for name in names - set(dir(builtins))}
        exec(compile(tree, "tests", "exec"), proxies)
    except BaseException:
        return False
    return True


def main(role: str, descriptor: str = "0", *folders: str) -> None:
    """Work until the socket is closed; see the module.

    Args:
        role: "function", "environment", "solution" or "tests".
        descriptor: the file descriptor of the tests' socket to the solution; "0" for other roles.
        folders: the folders whose files a solution or its tests may see. A user's own function gets
            none, and is not confined.
    """
    parent = _Channel(0)
    solution = None
    if role == "tests":
        solution = _Channel(int(descriptor))
    plays = role == "environment"
    # An environment is confined later, once its source has run. A process that is confined asks for the
    # signal at the trainer's death in `_confine`.
    if folders and not plays:
        _confine(folders)
    elif sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The process of an environment still has to fork, in `_confine`.
    if not plays:
        parent.close_in_children()
    with suppress(EOFError, ConnectionError):
        if plays:
            _play(parent, folders)
        elif solution is None:
            _serve(parent)
        else:
            _test(parent, solution)


if __name__ == "__main__":
    main(*sys.argv[1:])
