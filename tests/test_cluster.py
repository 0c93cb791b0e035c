"""The Ray cluster that a process connects to."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import raygpt
from raygpt.cluster import _connect, _have_token
from raygpt.errors import RaygptError


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "ray://127.0.0.1:{}/"])
def test_an_address_at_which_nothing_listens_is_refused_at_once(form):
    with socket.socket() as free:  # bound, so that nobody else takes the port, but nobody listens
        free.bind(("127.0.0.1", 0))
        address, started = form.format(free.getsockname()[1]), time.monotonic()
        with pytest.raises(RaygptError) as refused:
            _connect(address, 1)
    assert str(refused.value) == (
        f"no Ray cluster answers at RAY_ADDRESS={address}; start one with `ray start --head`, or unset RAY_ADDRESS to "
        "use this machine alone"
    )
    assert time.monotonic() - started < 30  # Ray takes two minutes


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n",
            "Version mismatch: The cluster was started with: Ray: 2.50.0; install the versions of the cluster at "
            "RAY_ADDRESS=head",
        ),
        ("no\nsocket", "Ray cannot connect to head: no socket"),
    ],
)
def test_a_cluster_that_ray_cannot_use_is_refused_in_one_line(monkeypatch, said, line):
    monkeypatch.setattr("ray.init", Mock(side_effect=RuntimeError(said)))
    monkeypatch.setattr("raygpt.cluster._present_token", lambda: None)
    with pytest.raises(RaygptError) as refused:
        _connect("head", 1)
    assert str(refused.value) == line


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_home_that_cannot_be_written_needs_no_token_of_rays(tmp_path, monkeypatch, is_writable):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path if is_writable else tmp_path / "missing"))
    _have_token()
    assert ("RAY_AUTH_TOKEN" in os.environ) == (not is_writable)


SIGNALLED = """
import os, signal, ray
from raygpt.cluster import connected

with connected(1):
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
        os.killpg(0, number)
    print(ray.get(ray.remote(lambda: "alive").remote(), timeout=120))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray ends its processes by their group")
def test_a_closed_terminal_or_timeout_does_not_end_a_local_cluster(tmp_path):
    """Both signal the whole process group. How a run is saved then is in training/test_recovery.py."""
    environment = os.environ | {"PYTHONPATH": str(Path(raygpt.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
    )
    assert done.stdout == "alive\n", done.stderr
