"""What a run says while Ray has no workers for it yet; without a cluster."""

from types import SimpleNamespace

import pytest
import ray

from raygpt.recipes import check_part
from raygpt.training.events import BatchSplit, FaultHandled
from raygpt.training.ray import scaling, waiting
from raygpt.training.ray.scaling import Workers
from raygpt.training.ray.waiting import StartWait

OURS = {"CPU": 1.0, "memory": 2.0 * 2**30}


@pytest.fixture
def cluster(monkeypatch):
    """A cluster as Ray describes it, and a clock, which the tests change."""
    now = SimpleNamespace(seconds=0.0, group="PENDING", bundle=OURS, starting=0, is_stopping=False)
    other = {"state": "PENDING", "bundles": {0: {"CPU": 8.0}}}
    actor = {"ActorClassName": "RayTrainWorker", "JobID": "01"}
    fakes = {
        "placement_group_table": lambda: {
            "a": other,
            "b": {"state": now.group, "bundles": {0: now.bundle, 1: now.bundle}},
        },
        "actors": lambda actor_state_name: dict(enumerate([actor] * now.starting + [{**actor, "JobID": "02"}])),
        "time": SimpleNamespace(monotonic=lambda: now.seconds),
    }
    for name, instead in fakes.items():
        monkeypatch.setattr(waiting, name, instead)
    monkeypatch.setattr(scaling, "_nodes", lambda: [{"CPU": 4.0, "GPU": 1.0}])
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 3.0, "memory": 2.0**30, "GPU": 1.0})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01"))
    return now


@pytest.fixture
def wait(cluster):
    """`wait(seconds, runtime_env)`: what was said after each second of waiting; `wait.start` is the StartWait."""
    said = []
    mailbox = SimpleNamespace(is_stopping=SimpleNamespace(remote=lambda: cluster.is_stopping))

    def start(**keys):
        workers = Workers(check_part("cluster", {"workers": 2, **keys}), "cpu", memory=2 * 2**30)
        return StartWait(workers, mailbox, lambda event: said.append((cluster.seconds, event.text)))

    def until(started, seconds):
        while cluster.seconds < seconds:
            started.poll()
            cluster.seconds += 1
        return said

    return SimpleNamespace(start=start, until=until)


def test_workers_that_have_no_room_yet_are_said_to_wait_ever_more_rarely(wait):
    text = "waiting for 2 × 1 CPU, 2.0 GiB memory: the cluster has 3 CPU, 1.0 GiB memory left, the rest is in use"
    assert wait.until(wait.start(), 1000) == [(10, text), (40, text), (160, text), (640, text)]


def test_workers_of_a_kind_wait_for_it_like_others(wait, cluster):
    # Ray adds `accelerator_type:H100: 0.001` to what each of them needs.
    cluster.bundle = {**OURS, "accelerator_type:H100": 0.001}
    assert [when for when, _ in wait.until(wait.start(), 50)] == [10, 40]


def test_what_ray_does_before_a_worker_has_a_process_is_said(wait, cluster):
    cluster.group, cluster.starting = "CREATED", 2
    assert wait.until(wait.start(), 30) == [(10, "waiting for Ray to start 2 workers")]
    started = wait.start(runtime_env={"pip": ["numpy"]})
    cluster.starting = 1
    assert wait.until(started, 60)[1:] == [(40, "waiting for Ray to set up cluster.runtime_env for 1 worker")]


def test_nothing_is_said_of_workers_that_are_there(wait, cluster):
    cluster.group = "CREATED"
    assert wait.until(wait.start(), 1000) == []


def test_an_event_of_the_workers_ends_the_wait_and_a_fault_begins_another(wait, cluster):
    started = wait.start()
    started.on_event(BatchSplit("32 rows"))
    assert wait.until(started, 100) == []
    started.on_event(FaultHandled("a node was lost; the workers start again"))
    assert [when for when, _ in wait.until(started, 150)] == [110, 140]


def test_a_run_that_is_stopped_before_it_has_workers_ends_since_none_could_save(wait, cluster):
    started = wait.start()
    cluster.is_stopping, cluster.group = True, "CREATED"
    started.poll()  # they are there, and save
    for cluster.group, cluster.starting in (("PENDING", 0), ("CREATED", 1)):
        with pytest.raises(KeyboardInterrupt):
            started.poll()
