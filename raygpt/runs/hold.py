"""One driver at a time: while a run is trained, `hold.json` in its folder says by whom, and is renewed.

A hold whose holder is gone is recognised: on this machine by its process, from elsewhere by not being renewed.
"""

import contextlib
import getpass
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raygpt import storage
from raygpt.errors import DamagedError, RaygptError

HOLD = "hold.json"
RENEWED_S = 10.0
STALE_S = 60.0  # six renewals missed; machines' clocks may differ by less


@dataclass(frozen=True)
class Holder:
    """Who drives a run."""

    user: str
    host: str
    process: int
    since: float
    renewed: float
    token: str  # tells two holds of one process apart

    @property
    def is_gone(self) -> bool:
        is_stale = time.time() - self.renewed > STALE_S  # also where a container has the same names and numbers again
        return is_stale or (self.host == socket.gethostname() and not _is_alive(self.process))

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"{self.user} on {self.host}, process {self.process}, since {when}"


@contextlib.contextmanager
def held(run_folder: str) -> Iterator[Callable[[], None]]:
    """Inside the block the run is ours alone; refuses where somebody else drives it.

    What it gives raises where somebody else has taken it over since: a machine that slept looked gone.
    """
    uri = storage.join(run_folder, HOLD)
    now = time.time()
    ours = Holder(_user(), socket.gethostname(), os.getpid(), now, now, uuid.uuid4().hex)
    _take(uri, ours, run_folder)
    ended, taken_by = threading.Event(), list[Holder]()
    renewing = threading.Thread(target=_renew, args=(uri, ours, ended, taken_by), daemon=True)
    renewing.start()

    def check() -> None:
        if taken_by:
            raise RaygptError(f"{run_folder} was taken over by {taken_by[0]}, as nothing was heard from here")

    try:
        yield check
    finally:
        ended.set()
        renewing.join()
        with contextlib.suppress(OSError, RaygptError):
            current = _read(uri)
            if current and current.token == ours.token:
                storage.delete(uri)


def holder_of(run_folder: str) -> Holder | None:
    """Who drives a run, or did until it was gone without a word; None where nobody holds it."""
    return _read(storage.join(run_folder, HOLD))


def _take(uri: str, ours: Holder, run_folder: str) -> None:
    before = _read(uri)
    if before and not before.is_gone:
        raise RaygptError(
            f"{run_folder} is being trained by {before}; wait for it or stop it, or set run.name to begin another run"
        )
    storage.write_bytes(uri, _json(ours))
    time.sleep(0.1)  # whoever began in the same moment has written by now, and the last one has it
    after = _read(uri)
    if after is None or after.token != ours.token:
        raise RaygptError(f"{run_folder} was taken in this very moment by {after}; wait for it, or set run.name")


def _renew(uri: str, ours: Holder, ended: threading.Event, taken_by: list[Holder]) -> None:
    while not ended.wait(RENEWED_S):
        with contextlib.suppress(OSError, RaygptError):  # a storage that fails is for others to complain about
            current = _read(uri)
            if current and current.token != ours.token:
                taken_by.append(current)
                return
            storage.write_bytes(uri, _json(replace(ours, renewed=time.time())))


def _read(uri: str) -> Holder | None:
    try:
        read = storage.read_json(uri)
        return Holder(**read) if read else None
    except (TypeError, OSError, DamagedError):
        return None  # another program's


def _json(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _is_alive(process: int) -> bool:
    if Path("/proc").is_dir():
        return Path(f"/proc/{process}").is_dir()
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())
