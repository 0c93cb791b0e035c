"""Charts as SVG: every point is where it belongs, and the axes have round numbers."""

import math
import re
from xml.etree import ElementTree

import pytest

from raygpt.show.chart import Curve, Frame, Mark, frame_of, picture, plot, short, ticks, x_ticks, y_ticks

SVG = "{http://www.w3.org/2000/svg}"
TRAINING = Curve("training", [(0, 8.0), (50, 6.0), (75, None), (100, 4.0), (120, 3.0)])
VALIDATION = Curve("validation", [(0, 8.0), (120, 5.0)], colour=1, has_dots=True)


def parse(text):
    return ElementTree.fromstring(text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def percent(text):
    return float(text.removesuffix("%"))


def test_a_path_has_the_values_in_powers_of_ten_and_a_gap_where_one_is_missing():
    tree = parse(plot("Loss", "step", frame_of([TRAINING, VALIDATION]), [TRAINING, VALIDATION]))
    training, validation = (path.get("d") for path in tree.iter(f"{SVG}path"))
    assert training == "M0,800L50,600M100,400L120,300"  # in hundredths
    assert validation == "M0,800L120,500"


def test_paths_dots_labels_and_marks_lie_on_the_same_axes():
    frame = frame_of([TRAINING, VALIDATION])
    tree = parse(plot("Loss", "step", frame, [TRAINING, VALIDATION], [Mark(60, "restarted")]))
    box = tree.find(f"{SVG}svg").get("viewBox").split()
    left, top, width, height = map(float, box)
    assert tree.find(f"{SVG}svg").get("data-units") == "1 0.01"
    top, height = top / 100, height / 100
    assert (left, left + width) == (0, 120)
    assert (-top - height, -top) == pytest.approx((3 - 0.2, 8 + 0.2))  # with 4 % of room
    first, last = tree.iter(f"{SVG}circle")
    assert [percent(first.get("cx")), percent(last.get("cx"))] == [0, 100]
    labels = {text.text: text for text in tree.iter(f"{SVG}text")}
    assert labels["8"].get("y") == first.get("cy")
    assert labels["5"].get("y") == last.get("cy")
    assert percent(last.get("cy")) == pytest.approx(100 * (-5 - top) / height, abs=0.01)  # where the path ends
    assert percent(labels["▾"].get("x")) == 50
    assert percent(labels["100"].get("x")) == pytest.approx(100 * 100 / 120, abs=0.01)


def test_a_log_scale_has_the_logarithms_and_labels_of_the_values():
    curve = Curve("training", [(1, 10.0), (2, 1.0), (3, 0.0)])
    frame = frame_of([curve], is_log=True)
    tree = parse(plot("Loss", "step", frame, [curve]))
    assert next(tree.iter(f"{SVG}path")).get("d") == "M100,100L200,0"  # in hundredths; 0 has no logarithm
    assert (frame.low, frame.high) == pytest.approx((-0.04, 1.04))
    assert [label for _, label in y_ticks(frame)] == ["1", "2", "3", "5", "10"]


@pytest.mark.parametrize(("steps", "rate"), [(200, 0.02), (100_000, 6e-4), (5, 1e-9), (3e9, 2e6)])
def test_a_curve_is_a_few_hundred_wide_and_high_whatever_its_values(steps, rate):
    curve = Curve("learning rate", [(0, rate), (steps, rate)])
    tree = parse(plot("Learning rate", "step", frame_of([curve], from_zero=True), [curve]))
    _, _, width, height = map(float, tree.find(f"{SVG}svg").get("viewBox").split())
    assert 100 <= width <= 1000
    assert 100 <= height <= 1000


def test_a_single_point_is_a_dot():
    curves = [Curve("loss", [(5, 7.2)]), Curve("longer", [(0, 8.0), (5, 7.0)])]
    tree = parse(plot("Loss", "step", frame_of(curves), curves))
    assert [path.get("class") for path in tree.iter(f"{SVG}path")] == ["curve single", "curve"]
    assert len(list(tree.iter(f"{SVG}circle"))) == 1


def test_the_first_tenth_can_be_left_out():
    curve = Curve("training", [(0, 100.0), (9, 50.0), (10, 5.0), (100, 3.0)], has_dots=True)
    frame = frame_of([curve], is_late=True)
    assert (frame.left, frame.right) == (10, 100)
    assert (frame.low, frame.high) == pytest.approx((2.92, 5.08))
    tree = parse(plot("Loss", "step", frame, [curve]))
    assert next(tree.iter(f"{SVG}path")).get("d") == "M100,500L1000,300"
    assert len(list(tree.iter(f"{SVG}circle"))) == 2


def test_a_chart_from_zero_begins_there_and_a_flat_curve_has_room():
    assert frame_of([Curve("a", [(1, 5.0)])], from_zero=True).low == 0
    flat = frame_of([Curve("a", [(1, 5.0), (2, 5.0)])])
    assert flat.low < 5 < flat.high
    zero = frame_of([Curve("a", [(0, 0.0)])], from_zero=True)
    assert zero.low < zero.high
    assert zero.left < zero.right


def test_a_picture_is_a_whole_file_that_fetches_nothing():
    text = picture("a <run>", ["training", "validation"], [TRAINING, VALIDATION])
    tree = ElementTree.fromstring(text)
    assert tree.find(f"{SVG}title").text == "a <run>"
    assert [span.text for span in tree.iter(f"{SVG}tspan")] == ["training", "validation"]
    assert [path.get("d") for path in tree.iter(f"{SVG}path")] == [
        "M0,800L50,600M100,400L120,300",
        "M0,800L120,500",
    ]
    assert not re.search(r"url\(|@import|href|<script", text)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (4.0, 8.0, [4, 5, 6, 7, 8]),
        (2.9, 11.1, [4, 6, 8, 10]),
        (0.0, 3e-4, [0, 5e-5, 1e-4, 1.5e-4, 2e-4, 2.5e-4, 3e-4]),
        (0.1, 0.42, [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4]),
    ],
)
def test_ticks_are_round_and_lie_within_the_axis(low, high, expected):
    assert ticks(low, high, 5) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("high", [3e-7, 0.013, 1.0, 2.2, 7.7, 99.0, 12_345.0, 8e12])
def test_there_are_never_too_few_ticks_nor_too_many(high):
    assert 3 <= len(ticks(0, high, 5)) <= 8


def test_the_x_axis_counts_in_whole_steps_in_thousands_and_in_units_of_time():
    assert x_ticks(Frame(0, 3, 0, 1), "step") == [(0, "0"), (1, "1"), (2, "2"), (3, "3")]
    assert x_ticks(Frame(0, 4e6, 0, 1), "tokens")[-1] == (4e6, "4 M")
    for right, label in [(90, "80 s"), (3600, "60 min"), (36_000, "10 h"), (864_000, "10 days")]:
        assert x_ticks(Frame(0, right, 0, 1), "time")[-1][1] == label


def test_numbers_are_short():
    values = [0, 0.0005, 3.25, 999, 819_200, 1.5e9, 2e12, math.pi]
    assert [short(value) for value in values] == ["0", "0.0005", "3.25", "999", "819.2 k", "1.5 G", "2 T", "3.142"]
