"""The one exception that people are meant to read, and what others say in one line."""


class RaygptError(Exception):
    """Something the user can mend. Its text is one line: what is wrong, where, and what to do about it.

    The command line prints that line and exits with status 1; from Python it is raised as it is.
    """


def first_line(error: BaseException) -> str:
    """What an error of someone else's says, short enough to stand in one line of ours; else what kind it is."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class DamagedError(RaygptError):
    """A file is not what was written: reading it again does not help."""


class StorageError(RaygptError):
    """A storage that cannot be reached or written just now: trying again later may help."""
