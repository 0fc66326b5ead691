"""What can go wrong by no fault of the code, each with the exit code that the command line promises for it."""

from __future__ import annotations


class MonographError(Exception):
    """Base of every error that is shown to a person as one line; the command line exits with `exit_code`."""

    exit_code = 1


class UsageError(MonographError):
    """The command line or the configuration is wrong (a key, a type, a combination)."""

    exit_code = 2


class InputRefused(MonographError):
    """A file or value that was given is damaged, unsupported or does not fit; the message names it."""

    exit_code = 3


class NoValidCheckpoint(MonographError):
    """No checkpoint of the run passed verification."""

    exit_code = 4


class Diverged(MonographError):
    """Too many updates in a row had a non-finite loss or gradient."""

    exit_code = 5


class OutOfDeviceMemory(MonographError):
    """The smallest micro-batch does not fit the device."""

    exit_code = 6


class DiskFull(MonographError):
    """A file could not be written; what was on disk before is untouched."""

    exit_code = 7


class RunInUse(MonographError):
    """Another process holds the run folder's lock."""

    exit_code = 8


class Stopped(MonographError):
    """A signal asked the run to stop, and it did so after saving."""

    exit_code = 75
