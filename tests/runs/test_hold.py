"""A run is driven by one at a time."""

import json
import os
import subprocess
import sys
import time

import pytest

from raygpt.errors import RaygptError
from raygpt.runs import hold
from raygpt.runs.hold import held


@pytest.fixture(params=["disk", "s3"])
def run_folder(request, tmp_path):
    if request.param == "disk":
        return str(tmp_path)
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def holder(folder, **changes):
    """Write a hold of somebody else."""
    facts = {
        "user": "ada",
        "host": "elsewhere",
        "process": 7,
        "since": time.time(),
        "renewed": time.time(),
        "token": "x",
    }
    hold.storage.write_bytes(f"{folder}/hold.json", json.dumps(facts | changes).encode())


def test_a_second_driver_is_refused_with_the_firsts_name(run_folder):
    with held(run_folder):
        refusal = pytest.raises(RaygptError, match=rf"is being trained by .+ {os.getpid()}, since 20.*set run.name")
        with refusal, held(run_folder):
            pass
        assert hold._read(f"{run_folder}/hold.json").process == os.getpid()  # the refusal took nothing away
    with held(run_folder):
        pass
    assert hold._read(f"{run_folder}/hold.json") is None


def test_a_holder_elsewhere_that_renews_is_respected_and_one_that_does_not_is_gone(run_folder):
    holder(run_folder, renewed=time.time() - 30)
    with pytest.raises(RaygptError, match="trained by ada on elsewhere, process 7"), held(run_folder):
        pass
    holder(run_folder, renewed=time.time() - 61)
    with held(run_folder):
        pass


def test_one_that_was_taken_over_while_it_slept_ends_and_leaves_the_others_hold(run_folder, monkeypatch):
    monkeypatch.setattr(hold, "RENEWED_S", 0.02)
    with held(run_folder) as still_ours:
        still_ours()

        def taken_over():
            while True:  # until it is noticed
                holder(run_folder)
                time.sleep(0.05)
                still_ours()

        with pytest.raises(RaygptError, match="was taken over by ada on elsewhere, process 7"):
            taken_over()
    assert hold._read(f"{run_folder}/hold.json").token == "x"


def test_a_process_of_this_machine_that_was_killed_holds_nothing(tmp_path):
    code = "\n".join(
        [
            "import sys, time",
            "from raygpt.runs.hold import held",
            "with held(sys.argv[1]):",
            "    print('held', flush=True)",
            "    time.sleep(60)",
        ]
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RaygptError, match=f"process {other.pid}"), held(str(tmp_path)):
            pass
        other.kill()
        other.wait()
        with held(str(tmp_path)):
            pass


def test_a_hold_is_renewed_while_it_lasts(tmp_path, monkeypatch):
    monkeypatch.setattr(hold, "RENEWED_S", 0.05)
    with held(str(tmp_path)):
        first = later = hold._read(str(tmp_path / "hold.json"))
        deadline = time.monotonic() + 60
        while later.renewed == first.renewed and time.monotonic() < deadline:
            time.sleep(0.05)
            later = hold._read(str(tmp_path / "hold.json"))
    assert later.renewed > first.renewed
    assert (later.token, later.since) == (first.token, first.since)


def test_of_two_that_begin_in_the_same_moment_the_last_to_write_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(hold.time, "sleep", lambda seconds: holder(tmp_path))  # the other writes right after us
    with pytest.raises(RaygptError, match="in this very moment by ada"), held(str(tmp_path)):
        pass


def test_a_file_that_is_no_hold_is_written_over(tmp_path):
    (tmp_path / "hold.json").write_text("{")
    with held(str(tmp_path)):
        pass
