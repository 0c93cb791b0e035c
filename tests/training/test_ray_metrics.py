"""A run's metrics in Ray's Prometheus endpoint, scraped as Prometheus scrapes it; and the Grafana board's names."""

import contextlib
import importlib.util
import json
import re
import time
import urllib.request

import pytest
from conftest import CHECKOUT

from raygpt.training.ray.metrics import RayMetrics


@pytest.fixture
def scrape(ray_cluster):
    """Samples of a run, name -> value, as soon as they are as wanted: Ray's agent collects every few seconds."""
    import ray

    if not all(importlib.util.find_spec(name) for name in ("aiohttp_cors", "opencensus")):
        pytest.skip("needs ray[default], whose agent has the endpoint")
    (node,) = ray.nodes()
    endpoint = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def read(run, wanted):
        deadline, text = time.monotonic() + 120, ""
        while True:
            with contextlib.suppress(OSError):  # it may not listen yet
                text = urllib.request.urlopen(endpoint, timeout=30).read().decode()
            lines = re.findall(r"^ray_raygpt_(\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE)
            found = {name: float(value) for name, labels, value in lines if f'run="{run}"' in labels}
            if found == wanted or time.monotonic() > deadline:
                return found
            time.sleep(0.5)

    return read


def test_prometheus_reads_what_a_worker_recorded(scrape, tmp_path):
    import ray

    folder = tmp_path / "scraped"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 5, "restart": true}\n')

    @ray.remote(num_cpus=0)
    class Worker:
        def record(self):
            from raygpt.training.tracking import Tracking

            told = Tracking({"it": lambda after: RayMetrics(str(folder), after)}, str(folder), print)
            told.begin(5)
            told.record({"step": 5, "restart": True, "time": 1.0})
            told.record({"step": 6, "loss": 2.5, "tokens_per_s": 1e6, "mfu": 0.4, "data_wait_s": 0.25, "time": 2.0})
            told.close()

    worker = Worker.remote()
    ray.get(worker.record.remote())
    wanted = {"step": 6.0, "loss": 2.5, "tokens_per_s": 1e6, "mfu": 0.4, "data_wait_s": 0.25, "restarts": 2.0}
    assert scrape("scraped", wanted) == wanted
    ray.kill(worker)


def test_the_grafana_board_asks_for_metrics_that_exist():
    board = json.loads((CHECKOUT / "deploy" / "grafana" / "raygpt.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"] for name in names(target["expr"])}
    assert asked == {f"ray_raygpt_{name}" for name in RayMetrics.DESCRIPTIONS}
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({(place["x"], place["y"]) for place in places}) == len(places)


def names(expression):
    return re.findall(r"ray_raygpt_\w+", expression)
