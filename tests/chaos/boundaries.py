"""A save that is killed before its n-th change to a file, for every n: `python boundaries.py RUN PART COPIES`.

RUN has a whole checkpoint of step 1, and PART is what an engine has written of step 2. Each time a child publishes and
commits it in a copy of the run, and is killed on its way. Prints the step of the newest whole checkpoint of each copy.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from raygpt.config import Run
from raygpt.runs import checkpoints

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


def kill_before(number, folder):
    """Kill this process before its n-th change to a file in a folder."""
    left = [number]

    def watch(event, arguments):
        writes = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
        if (event in CHANGES or writes) and str(arguments[0]).startswith(folder):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(watch)


def save(run, part, marker):
    """What the processes and rank 0 do when the state of step 2 is written."""
    folder = checkpoints.folder_of(run, 2)
    files = checkpoints.publish(Path(part), folder)
    checkpoints.commit(folder, 2, marker, files)
    checkpoints.prune(run, Run(keep=1, keep_best=0), 2)


def main(run, part, copies):
    found = []
    while True:
        copy = str(Path(copies, str(len(found))))
        shutil.copytree(run, copy)
        theirs = checkpoints.parts_folder(copy) / "step-00000002-0"
        shutil.copytree(part, theirs)
        child = os.fork()
        if child == 0:
            kill_before(len(found), copy)
            save(copy, theirs, {"engine": "any"})
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        newest, _ = checkpoints.newest_intact(copy)
        found.append(newest.step if newest else None)
        if status == 0:
            return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
