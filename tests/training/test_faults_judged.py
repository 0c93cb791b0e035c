"""Which faults end a run, and which do not count: by the policy alone, without a cluster."""

import errno
from types import SimpleNamespace

import pytest
import ray
from ray.train import FailureConfig
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from raygpt.errors import RaygptError, StorageError
from raygpt.training.ray import recovery, trainer
from raygpt.training.ray.recovery import Recovery


@pytest.fixture
def judge(monkeypatch):
    """What becomes of faults at step 7, one after another; before each the nodes that are there may change."""
    monkeypatch.setattr(ray, "get", lambda beat: (7, 0.0))
    monkeypatch.setattr(recovery, "STORAGE_PAUSE_S", 0)
    said = []
    mailbox = SimpleNamespace(
        last_beat=SimpleNamespace(remote=lambda: None), put=SimpleNamespace(remote=lambda event: said.append(event))
    )

    def decide(*faults, nodes=None, limit=10):
        there = iter(nodes or [{"a"}] * (len(faults) + 1))
        monkeypatch.setattr(recovery, "_nodes", lambda: next(there))
        policy = Recovery(FailureConfig(max_failures=limit), mailbox, None)
        return [policy.make_decision(WorkerGroupError("failed", {1: fault})) for fault in faults], said

    return decide


GO_ON, END = FailureDecision.RETRY, FailureDecision.RAISE


def test_the_third_fault_at_one_step_is_no_accident(judge):
    decisions, said = judge(*[RuntimeError("odd")] * 3)
    assert decisions == [GO_ON, GO_ON, END]
    assert said[-1].text.startswith("the same fault came 3 times after step 7")


def test_a_fault_without_a_word_is_told_by_its_kind(judge):
    _, said = judge(RuntimeError(" \n"))
    assert "worker 1 failed (RuntimeError) after" in said[0].text
    assert str(recovery.root_cause(WorkerGroupError("failed", {1: RaygptError("")}))) == "RaygptError"


def test_nodes_that_go_one_by_one_while_workers_start_are_accidents(judge):
    nodes = [{"a", "b", "c", "d"}, {"a", "b", "c"}, {"a", "b"}, {"a"}, {"a"}]
    assert judge(*[RuntimeError("died")] * 4, nodes=nodes)[0] == [GO_ON] * 4


@pytest.mark.parametrize("fault", [StorageError("no answer"), OSError(errno.EROFS, "Read-only file system")])
def test_a_storage_that_fails_has_nothing_to_do_with_the_step(judge, fault):
    assert judge(*[fault] * 4)[0] == [GO_ON] * 4


def test_there_is_a_limit_to_all_of_them_and_what_the_user_has_to_mend_ends_it_at_once(judge):
    decisions, said = judge(*[StorageError("no answer")] * 3, limit=2)
    assert decisions == [GO_ON, GO_ON, END]
    assert said[1].text.endswith("(fault 2 of at most 2)")
    assert judge(RaygptError("write something else"))[0] == [END]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (
            "Traceback\nERROR: first\n  ERROR: No matching distribution found for nopackage\n",
            "No matching distribution",
        ),
        ("[Errno 2] No such file: 'environment.yml'", "[Errno 2] No such file: 'environment.yml'"),
    ],
)
def test_a_runtime_env_that_cannot_be_set_up_is_one_line_with_the_installers_reason(said, complaint):
    error = recovery.root_cause(ControllerError(ray.exceptions.RuntimeEnvSetupError(said)))
    assert isinstance(error, RaygptError)
    assert str(error).startswith(f"cluster.runtime_env: Ray cannot set it up ({complaint}")
    assert str(error).endswith("); correct it")
    assert "\n" not in str(error)


def test_where_ray_loses_what_carries_events_the_run_ends_with_what_to_do():
    ended = []
    driven = SimpleNamespace(fit=lambda: None, end=lambda: ended.append(True))

    def poll():
        raise ray.exceptions.RayActorError

    error = trainer._fit_in_thread(driven, poll)
    assert isinstance(error, RaygptError)
    assert str(error).endswith("the same command resumes it")
    assert ended == [True]
