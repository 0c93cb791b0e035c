"""A worker that is stuck ends itself and shows where; one that rests is left alone."""

import subprocess
import sys

CODE = """
import sys, time
from pathlib import Path
from raygpt.training.watchdog import Watchdog

dog = Watchdog(0.4, Path(sys.argv[1]))
dog.rest()
time.sleep(1)
print("rested", flush=True)
dog.feed()

def stuck():
    time.sleep(60)

stuck()
"""


def test_only_one_that_does_not_rest_is_ended(tmp_path):
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path / "log")], capture_output=True, text=True)
    assert done.stdout == "rested\n"
    assert done.returncode == 1
    assert "in stuck" in (tmp_path / "log").read_text()
