"""A worker that is stuck shows where, and ends a while later; one that rests, or goes on, is left alone."""

import signal
import subprocess
import sys
import textwrap

BEGIN = """
import sys, time
from pathlib import Path
from raygpt.training.watchdog import Watchdog

def stuck(seconds):
    time.sleep(seconds)

dog = Watchdog(1, Path(sys.argv[1]))  # stacks after a second, the end half a second later
"""


def watch(code, log):
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(code), str(log)]
    return subprocess.run(command, capture_output=True, text=True)


def test_only_one_that_does_not_rest_is_ended(tmp_path):
    code = """
    dog.rest()
    time.sleep(1.5)
    print("rested", flush=True)
    dog.feed()
    stuck(60)
    """
    done = watch(code, tmp_path / "log")
    assert done.stdout == "rested\n"
    assert done.returncode == -signal.SIGALRM
    assert "in stuck" in (tmp_path / "log").read_text()


def test_its_stacks_are_there_before_it_ends_and_going_on_calls_that_off(tmp_path):
    code = """
    dog.stop()
    dog = Watchdog(4, Path(sys.argv[1]))  # the end would come 2 s after the stacks
    while "Timeout" not in Path(sys.argv[1]).read_text():
        time.sleep(0.02)
    dog.feed()
    time.sleep(2.5)  # past that
    dog.stop()
    time.sleep(4)
    print("went on")
    """
    done = watch(code, tmp_path / "log")
    assert (done.stdout, done.returncode) == ("went on\n", 0)


def test_one_that_holds_the_interpreter_is_ended_too(tmp_path):
    code = """
    import ctypes
    ctypes.PyDLL(None).sleep(60)  # PyDLL: the lock is kept meanwhile
    """
    assert watch(code, tmp_path / "log").returncode == -signal.SIGALRM
    assert "<string>" in (tmp_path / "log").read_text()
