"""Events that are metrics give the lines of metrics.jsonl, byte for byte."""

import json
import pickle

import pytest

from raygpt.training.events import FaultHandled, Metrics, Restarted, StepLogged, Validated, Warned


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            StepLogged(3, {"loss": 2.5, "grad_norm": 0.5, "lr": 0.1, "tokens": 192, "data_wait_s": 0.0}, time=7.125),
            '{"step": 3, "loss": 2.5, "grad_norm": 0.5, "lr": 0.1, "tokens": 192, "data_wait_s": 0.0, "time": 7.125}',
        ),
        (Validated(4, {"val_loss": 2.5, "lambada_acc": 0.25}), '{"step": 4, "val_loss": 2.5, "lambada_acc": 0.25}'),
        (Restarted(5, time=8.0), '{"step": 5, "restart": true, "time": 8.0}'),
    ],
)
def test_a_line_is_what_is_written(event: Metrics, line: str):
    assert json.dumps(event.line()) == line
    assert pickle.loads(pickle.dumps(event)) == event  # as it goes from a worker to the driver


def test_messages_of_two_kinds_are_not_the_same():
    assert Warned("late") == Warned("late") != FaultHandled("late")
    assert repr(Warned("late")) == "Warned(text='late')"
