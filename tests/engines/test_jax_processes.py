"""JAX processes that compute together: what each compiled is there when it starts again."""

import json
import os
import socket
import subprocess
import sys

import pytest

from raygpt.engines.jax import processes
from raygpt.recipes import check_part

LIMIT = "XLA_PYTHON_CLIENT_MEM_FRACTION"
SCRIPT = """
import sys
from raygpt.engines.jax.processes import join, leave
join(sys.argv[2], 2, int(sys.argv[1]), gpus=[], cores=1)
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
said = []
jax.monitoring.register_event_listener(lambda event, **_: said.append(event.rpartition("/")[2]))
both = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",)), jax.sharding.PartitionSpec("data"))
table = jax.jit(lambda: jnp.arange(8.0).reshape(2, 4), out_shardings=both)()
assert float(jax.jit(jnp.sum)(table)) == 28.0  # over both
told = [said.count("cache_hits"), said.count("cache_misses")]
leave()
print(told)
"""


@pytest.fixture
def start(tmp_path):
    """Start both processes: how many programs each found compiled, and how many not."""

    def start():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(tmp_path),
            "http_proxy": "http://127.0.0.1:9",  # which does not know them; gRPC would ask it, and wait
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [sys.executable, "-c", SCRIPT]
        both = [
            subprocess.Popen([*command, str(rank), address], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            return [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in both]
        finally:
            for process in both:
                process.kill()

    return start


def test_what_every_process_compiled_is_there_at_the_next_start(start):
    first, again = start(), start()
    programs = [hits + misses for hits, misses in first]
    assert min(programs) >= 2
    assert [misses for _, misses in first] == programs
    assert again == [[count, 0] for count in programs]


@pytest.mark.parametrize(
    ("resources", "own", "fraction"),
    [({}, {}, "0.92"), ({"GPU": 0.5}, {}, "0.46"), ({"GPU": 0.5}, {LIMIT: "0.3"}, "0.3")],
)
def test_a_worker_takes_its_share_of_a_gpus_memory(resources, own, fraction, monkeypatch):
    cluster = check_part("cluster", {"resources_per_worker": resources})
    for name in ("use_cores", "enable_compilation_cache"):
        monkeypatch.setattr(processes, name, lambda *asked: None)
    monkeypatch.setattr("os.environ", dict(own))
    processes.join("", 1, 0, gpus=["0"], cores=1, gpu_share=cluster.gpu_share)
    assert os.environ[LIMIT] == fraction


def test_without_a_home_that_can_be_written_nothing_is_cached_and_nothing_said(tmp_path):
    script = "from raygpt.engines.jax.processes import enable_compilation_cache\nenable_compilation_cache()\n"
    script += "import jax, jax.numpy as jnp\nprint(jax.jit(lambda x: jnp.sin(x).sum())(jnp.ones(2)).shape)"
    (tmp_path / "file").touch()
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "file"),  # no folder can be made in it
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("()\n", "")
