"""The run lock: a run has one driver at a time."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from raygpt.errors import RaygptError
from raygpt.runs import lock
from raygpt.runs.lock import lock_owner, locked


@pytest.fixture(params=["disk", "s3"])
def run_folder(request, tmp_path):
    if request.param == "disk":
        return str(tmp_path)
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def other_driver(folder, **changes):
    """Write the lock of another driver."""
    facts = {
        "user": "ada",
        "host": "elsewhere",
        "process": 7,
        "since": time.time(),
        "renewed": time.time(),
        "token": "x",
    }
    lock.storage.write_bytes(f"{folder}/hold.json", json.dumps(facts | changes).encode())


def test_a_second_driver_is_refused_with_the_firsts_name(run_folder):
    with locked(run_folder):
        by = rf"is being trained by .+ {os.getpid()}, since 20.* write run.name=[a-z0-9_-]+ to begin another run"
        refusal = pytest.raises(RaygptError, match=by)
        with refusal, locked(run_folder):
            pass
        assert lock._read(f"{run_folder}/hold.json").process == os.getpid()  # the refusal took nothing away
    with locked(run_folder):
        pass
    assert lock._read(f"{run_folder}/hold.json") is None


def test_an_owner_elsewhere_that_renews_is_respected_and_one_that_does_not_is_gone(run_folder):
    other_driver(run_folder, renewed=time.time() - 30)
    with pytest.raises(RaygptError, match="trained by ada on elsewhere, process 7"), locked(run_folder):
        pass
    other_driver(run_folder, renewed=time.time() - 61)
    with locked(run_folder):
        pass


def test_a_restarted_job_waits_for_a_dead_drivers_lock_and_refuses_one_that_is_renewed(run_folder, monkeypatch):
    monkeypatch.setattr(lock, "POLL_S", 0.05)
    other_driver(run_folder, renewed=time.time() - lock.STALE_S + 1)
    with locked(run_folder, wait=True):
        assert lock_owner(run_folder).process == os.getpid()
    other_driver(run_folder)
    threading.Timer(0.3, other_driver, [run_folder], {"renewed": time.time() + 1}).start()
    with pytest.raises(RaygptError, match="trained by ada on elsewhere, process 7"), locked(run_folder, wait=True):
        pass


def test_one_that_was_taken_over_while_it_slept_ends_and_leaves_the_others_lock(run_folder, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_S", 0.02)
    with locked(run_folder) as check_lock:
        check_lock()

        def taken_over():
            while True:  # until it is noticed
                other_driver(run_folder)
                time.sleep(0.05)
                check_lock()

        with pytest.raises(RaygptError, match="was taken over by ada on elsewhere, process 7"):
            taken_over()
    assert lock._read(f"{run_folder}/hold.json").token == "x"


def test_a_process_of_this_machine_that_was_killed_has_no_lock(tmp_path):
    code = "\n".join(
        [
            "import sys, time",
            "from raygpt.runs.lock import locked",
            "with locked(sys.argv[1]):",
            "    print('locked', flush=True)",
            "    time.sleep(60)",
        ]
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RaygptError, match=f"process {other.pid}"), locked(str(tmp_path)):
            pass
        other.kill()
        other.wait()
        with locked(str(tmp_path)):
            pass


def test_a_lock_is_renewed_while_it_lasts(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_S", 0.05)
    with locked(str(tmp_path)):
        first = later = lock._read(str(tmp_path / "hold.json"))
        deadline = time.monotonic() + 60
        while later.renewed == first.renewed and time.monotonic() < deadline:
            time.sleep(0.05)
            later = lock._read(str(tmp_path / "hold.json"))
    assert later.renewed > first.renewed
    assert (later.token, later.since) == (first.token, first.since)


def test_of_two_that_begin_in_the_same_moment_the_last_to_write_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: other_driver(tmp_path))  # the other writes right after us
    with pytest.raises(RaygptError, match="at the same moment by ada"), locked(str(tmp_path)):
        pass


@pytest.mark.parametrize("content", ["{", "[1]", '{"user": "ada", "renewed": null}'])
def test_a_file_that_is_no_lock_is_written_over(tmp_path, content):
    (tmp_path / "hold.json").write_text(content)
    with locked(str(tmp_path)):
        assert lock_owner(str(tmp_path)).process == os.getpid()
    assert not (tmp_path / "hold.json").exists()
