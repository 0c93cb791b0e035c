"""The picture of a run's losses: every point is where it belongs."""

import re
from xml.etree import ElementTree

import pytest

from raygpt.show.curve import _ticks, draw, losses

SVG = "{http://www.w3.org/2000/svg}"


def test_the_curves_are_the_runs_metrics():
    events = [
        {"step": 0, "val_loss": 8.0},
        {"step": 1, "loss": 7.9, "lr": 0.1},
        {"step": 2, "loss": 6.5},
        {"step": 2, "val_loss": 6.6},
    ]
    left_out = {"step": 3, "loss": float("nan")}
    assert losses([*events, left_out]) == ([(1, 7.9), (2, 6.5)], [(0, 8.0), (2, 6.6)])


def test_points_lie_at_their_step_and_loss():
    tree = ElementTree.fromstring(draw("a run", [(0, 8.0), (50, 6.0), (100, 4.0)], [(0, 8.0), (100, 5.0)]))
    blue, orange = (line.get("points") for line in tree.iter(f"{SVG}polyline"))
    x, y = zip(*(map(float, point.split(",")) for point in blue.split()), strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1])
    assert y[1] - y[0] == pytest.approx(y[2] - y[1])  # equal falls, equal distances
    assert y[0] < y[1] < y[2]  # down the page
    assert orange.split()[0] == blue.split()[0]
    labels = {text.text: float(text.get("y")) for text in tree.iter(f"{SVG}text")}
    assert labels["8"] - 4 == pytest.approx(y[0], abs=0.1)
    assert labels["4"] - 4 == pytest.approx(y[2], abs=0.1)
    assert re.search("training loss", draw("a run", [(0, 1.0), (1, 0.5)], []))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (4.0, 8.0, [4, 5, 6, 7, 8]),
        (2.9, 11.1, [2, 4, 6, 8, 10, 12]),
        (1.0, 1.0, [1.0, 1.0000000002]),
        (0.1, 0.42, None),
    ],
)
def test_ticks_are_round_and_reach_around_the_losses(low, high, ticks):
    got = _ticks(low, high)
    assert got[0] <= low <= high <= got[-1]
    assert 2 <= len(got) <= 9
    if ticks:
        assert got == pytest.approx(ticks, abs=1e-9)
