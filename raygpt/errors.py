"""The one exception that people are meant to read."""


class RaygptError(Exception):
    """Something the user can mend. Its text is one line: what is wrong, where, and what to do about it.

    The command line prints that line and exits with status 1; from Python it is raised as it is.
    """


class StorageError(RaygptError):
    """A storage that cannot be reached or written just now: trying again later may help."""
