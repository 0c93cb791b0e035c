"""A worker that is stuck shows where, and ends a while later; one that rests, or goes on, is left alone."""

import signal
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest

BEGIN = """
import ctypes, sys, time
from pathlib import Path
from raygpt.training.watchdog import Watchdog

def stuck(seconds):
    time.sleep(seconds)

dog = Watchdog(float(sys.argv[2]), Path(sys.argv[1]))  # stacks after so many seconds, the end half as many later
"""

PROGRAMS = {
    "stuck after a rest": (
        1,
        """
        dog.rest()
        time.sleep(2)  # past stacks and end
        print("rested", flush=True)
        dog.feed()
        stuck(60)
        """,
    ),
    "going on": (
        6,
        """
        while "Timeout" not in Path(sys.argv[1]).read_text():
            time.sleep(0.02)
        dog.feed()
        time.sleep(3.5)  # past the end that was to come
        dog.stop()
        time.sleep(6)  # past the end that was to come after this
        print("went on")
        """,
    ),
    "holding the interpreter": (
        1,
        """
        ctypes.PyDLL(None).sleep(60)  # PyDLL: the lock is kept meanwhile
        """,
    ),
}


class Ended(NamedTuple):
    """A process that was watched."""

    status: int
    said: str
    log: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Each program's end. They mostly wait, and so they do it at the same time."""
    folder, running = tmp_path_factory.mktemp("watchdog"), {}
    for name, (seconds, code) in PROGRAMS.items():
        command = [sys.executable, "-c", BEGIN + textwrap.dedent(code), str(folder / name), str(seconds)]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = {name: process.communicate()[0] for name, process in running.items()}
    return {name: Ended(running[name].returncode, said[name], (folder / name).read_text()) for name in PROGRAMS}


def test_only_one_that_does_not_rest_is_ended(ended):
    status, said, log = ended["stuck after a rest"]
    assert said == "rested\n"
    assert status == -signal.SIGALRM
    assert "in stuck" in log


def test_its_stacks_are_there_before_it_ends_and_going_on_calls_that_off(ended):
    status, said, log = ended["going on"]
    assert (said, status) == ("went on\n", 0)
    assert "Timeout" in log


def test_one_that_holds_the_interpreter_is_ended_too(ended):
    status, _, log = ended["holding the interpreter"]
    assert status == -signal.SIGALRM
    assert "<string>" in log
