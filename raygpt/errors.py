"""The exception whose message users read, and other exceptions in one line."""

NOT_RETRIED = 78  # exit status for schedulers, EX_CONFIG of sysexits.h: a person has to change something first


class RaygptError(Exception):
    """An error that the user can fix. Its text is one line: what is wrong, where, and what to do about it.

    The command line prints that line and exits with status 1; from Python it is raised as it is.
    """


class DamagedError(RaygptError):
    """A file is corrupt: reading it again does not help."""


class DivergedError(RaygptError):
    """Training went astray: the loss is not a number, or has risen too far."""


class StoppedError(RaygptError):
    """The user asked to stop, and everything is saved."""


class TransientError(RaygptError):
    """Nothing is wrong with the recipe or its text: the same command may succeed later, on other nodes."""


class StorageError(TransientError):
    """The storage cannot be reached or written at the moment."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, shortened to fit into ours; its class name if it has no text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
