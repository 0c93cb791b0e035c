"""The Ray cluster that a process connects to."""

import socket
import time

import pytest

from raygpt.cluster import _connect
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
