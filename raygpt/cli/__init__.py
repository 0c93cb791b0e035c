"""The command line: verbs that parse their arguments, call the function that does the work, and print the result."""

import errno
import io
import sys

# In the order of `raygpt --help`:
# isort: off
from raygpt.cli import training  # noqa: F401
from raygpt.cli import before  # noqa: F401
from raygpt.cli import after  # noqa: F401
from raygpt.cli import setup  # noqa: F401

# isort: on
from raygpt.cli.app import app
from raygpt.errors import RaygptError, StoppedError


def main() -> None:
    """Run a verb; an error that the user can fix is one line and status 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know all characters, e.g. with LC_ALL=C
    try:
        app()
    except RaygptError as error:
        from raygpt.show import console

        is_stopped = isinstance(error, StoppedError)
        (console.note if is_stopped else console.fail)(str(error))
        sys.exit(130 if is_stopped else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        from raygpt.show import console

        console.fail("standard output cannot be written, its disk is full; free some space and run the command again")
        sys.exit(1)
