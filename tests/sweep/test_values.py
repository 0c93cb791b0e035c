"""Which values a sweep tries, by what the command line says."""

import pytest

from raygpt.errors import RaygptError
from raygpt.sweep.values import Axis, divide, fork_name, trials_of


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,2e-3,4e-3", ("1e-3", "2e-3", "4e-3")),
        ("log:1e-3..8e-3", ("0.001", "0.002", "0.004", "0.008")),
        ("log:1e-4..1e-2:3", ("0.0001", "0.001", "0.01")),
        ("0..0.2:3", ("0", "0.1", "0.2")),
        ("10..50", ("10", "20", "30", "40", "50")),
        ("log:1..100:3", ("1", "10", "100")),
        (".5..1.5:2", ("0.5", "1.5")),
        ("0.1..0.102:5", ("0.1", "0.1005", "0.101", "0.1015", "0.102")),
        ("0.0001..0.00010001:5", ("0.0001", "0.0001000025", "0.000100005", "0.0001000075", "0.00010001")),
        ("log:1e-300..1e300:3", ("1e-300", "1", "1e+300")),
        ("1..3", ("1", "2", "3")),
    ],
)
def test_lists_and_ranges(text, values):
    assert divide([f"optimizer.learning_rate={text}"]) == ([Axis("optimizer.learning_rate", values)], [])


def test_a_single_value_a_list_in_brackets_and_keys_that_change_no_loss_are_overrides():
    words = ["training.steps=20", "optimizer.betas=[0.9,0.95]", "cluster.workers=1..4", "data.source=a.txt,b.txt"]
    assert divide(words) == ([], words)


def test_lists_are_values_too():
    axes, _ = divide(["optimizer.betas=[0.9,0.95],[0.8,0.95]", "schedule.kind=wsd,cosine"])
    assert [axis.values for axis in axes] == [("[0.9,0.95]", "[0.8,0.95]"), ("wsd", "cosine")]


def test_trials_are_all_combinations_under_names_that_runs_can_have():
    trials = trials_of(divide(["optimizer.betas=[0.9,0.95],[0.8,0.95]", "schedule.kind=wsd,cosine"])[0])
    names = ["betas-0.9-0.95_kind-wsd", "betas-0.9-0.95_kind-cosine", "betas-0.8-0.95_kind-wsd"]
    assert [trial.name for trial in trials[:3]] == names
    assert trials[3].values == {"optimizer.betas": "[0.8,0.95]", "schedule.kind": "cosine"}


def test_names_that_are_too_long_or_alike_are_numbers():
    words = [
        f"model.{key}=0.123456789,0.2" for key in ("dropout", "rope_share", "norm_epsilon", "softcap", "rope_base")
    ]
    assert [trial.name for trial in trials_of(divide(words)[0])][:2] == ["trial-1", "trial-2"]
    assert [trial.name for trial in trials_of(divide(["a.b=[x],{x}"])[0])] == ["trial-1", "trial-2"]


def test_no_trial_has_the_name_of_anothers_fork():
    trials = trials_of(divide(["model.dropout=0,0.05,0.1,0.15"])[0])  # dropout-0.15: dropout-0's fork at step 15
    assert fork_name("dropout-0", 15) == "dropout-0.15"
    assert [trial.name for trial in trials] == ["trial-1", "trial-2", "trial-3", "trial-4"]
    assert [trial.name for trial in trials_of(divide(["model.dropout=0.05,0.1"])[0])] == ["dropout-0.05", "dropout-0.1"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["optimizer.learning_rate=log:0..1"], "log: needs two numbers above 0"),
        (["model.dropout=0.2..0.1"], "the lower number comes first"),
        (["model.dropout=0..0.1:1"], "has 1 value; write 2 to 100, e.g. '0..0.1:5'"),
        (["model.dropout=0..0.1:101"], "has 101 values; write 2 to 100, e.g. '0..0.1:5'"),
        (["model.dropout=0..0.1:" + "9" * 5000], "write 2 to 100, e.g. '0..0.1:5'"),
        (["optimizer.learning_rate=log:1..1e400"], r"'log:1..1e400' reaches beyond the largest number, 1.8e308"),
        (["optimizer.learning_rate=-1..1e400"], r"'-1..1e400' reaches beyond the largest number"),
        (["optimizer.learning_rate=-1e308..1e308"], "reaches beyond the largest number"),
        (["optimizer.learning_rate=log:1e-300..1e300"], "has 1,994 values; write 2 to 100"),
        (["optimizer.learning_rate=log:0.9..1"], "is less than a doubling; write how many values, e.g. log:0.9..1:5"),
        (["optimizer.learning_rate=log:abc"], "'log:abc' is no range; write e.g. log:1e-3..1e-1"),
        (
            ["optimizer.learning_rate=1..1.0000000000000002:5"],
            "is too narrow for 5 different values; write a wider range",
        ),
        (["model.layers=1..3:5"], "rounds to only 3 whole numbers; write 1..3:3"),
        (["model.layers=log:1..8:8"], "rounds to only 6 whole numbers; write log:1..8:5"),
        (["model.dropout=0.1,0.1"], "has a value twice"),
        (["optimizer.learning_rate=1,1.0"], "has a value twice"),
        (["optimizer.betas=[0.9,0.95],[0.90,0.95]"], "has a value twice"),
        (["model.dropout=0,0.1", "model.dropout=0.2"], "is given twice, with several values and with one"),
        (["model.dropout=0.2", "model.dropout=0,0.1"], "is given twice, with several values and with one"),
        (["model.dropout=0,0.1", "model.dropout=0.2,0.3"], "is given twice"),
        (["training.log_every=log:1..8"], "training.log_every: is not swept, as it says where or how a run works"),
    ],
)
def test_what_is_no_range_is_refused(words, error):
    with pytest.raises(RaygptError, match=error):
        divide(words)
