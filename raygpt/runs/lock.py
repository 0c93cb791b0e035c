"""The run lock: a run has one driver. `hold.json` in its folder names the driver, which renews it while it trains.

A lock whose owner is gone is recognised: on this machine by its process id, from elsewhere by missed renewals.
"""

import contextlib
import getpass
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raygpt import storage
from raygpt.errors import DamagedError, RaygptError, TransientError
from raygpt.runs import LOCK, free_name

RENEW_S = 10.0
POLL_S = 1.0
STALE_S = 60.0  # six renewals missed; machines' clocks may differ by less


@dataclass(frozen=True)
class Owner:
    """The driver that has the lock."""

    user: str
    host: str
    process: int
    since: float
    renewed: float
    token: str  # tells two locks of one process apart

    @property
    def is_gone(self) -> bool:
        is_stale = time.time() - self.renewed > STALE_S  # also if a new container has the same host name and process id
        return is_stale or (self.host == socket.gethostname() and not _is_alive(self.process))

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"{self.user} on {self.host}, process {self.process}, since {when}"


@contextlib.contextmanager
def locked(run_folder: str, wait: bool = False) -> Iterator[Callable[[], None]]:
    """Lock a run for the block; refuse if another driver has the lock. With `wait`, a driver that may have been killed
    on another machine is given the time to renew it: only if it does, we refuse.

    Yields a check that raises if another driver has taken the lock since, e.g. while this machine was suspended.
    """
    uri = storage.join(run_folder, LOCK)
    if wait:
        _wait_until_renewed_or_gone(uri)
    now = time.time()
    ours = Owner(_user(), socket.gethostname(), os.getpid(), now, now, uuid.uuid4().hex)
    _take(uri, ours, run_folder)
    ended, taken_by = threading.Event(), list[Owner]()
    renewing = threading.Thread(target=_renew, args=(uri, ours, ended, taken_by), daemon=True)
    renewing.start()

    def check() -> None:
        if taken_by:
            raise TransientError(
                f"{run_folder} was taken over by {taken_by[0]}, because this driver had not renewed its lock"
            )

    try:
        yield check
    finally:
        ended.set()
        renewing.join()
        with contextlib.suppress(OSError, RaygptError):
            current = _read(uri)
            if current and current.token == ours.token:
                storage.delete(uri)


def lock_owner(run_folder: str) -> Owner | None:
    """The driver that locked a run, which may have died without unlocking; None if the run is not locked."""
    return _read(storage.join(run_folder, LOCK))


def _take(uri: str, ours: Owner, run_folder: str) -> None:
    before = _read(uri)
    if before and not before.is_gone:
        raise TransientError(
            f"{run_folder} is being trained by {before}; wait for it or stop it, or write "
            f"run.name={free_name(run_folder)} to begin another run"
        )
    storage.write_json(uri, asdict(ours))
    time.sleep(0.1)  # a driver that started at the same moment has written by now; the last writer has the lock
    after = _read(uri)
    if after is None or after.token != ours.token:
        remedy = f"wait for it, or write run.name={free_name(run_folder)}"
        raise TransientError(f"{run_folder} was taken at the same moment by {after}; {remedy}")


def _wait_until_renewed_or_gone(uri: str) -> None:
    before = current = _read(uri)
    while before and current and current == before and not current.is_gone:
        time.sleep(POLL_S)
        current = _read(uri)


def _renew(uri: str, ours: Owner, ended: threading.Event, taken_by: list[Owner]) -> None:
    while not ended.wait(RENEW_S):
        with contextlib.suppress(OSError, RaygptError):  # storage errors are reported elsewhere
            current = _read(uri)
            if current and current.token != ours.token:
                taken_by.append(current)
                return
            storage.write_json(uri, asdict(replace(ours, renewed=time.time())))


def _read(uri: str) -> Owner | None:
    try:
        read = storage.read_json(uri, form=Owner)
        return Owner(**read) if read else None
    except (TypeError, OSError, DamagedError):
        return None  # not written by raygpt


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
