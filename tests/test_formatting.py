"""Numbers as text."""

import pytest

from raygpt.formatting import short_time, time_span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 ms"),
        (3e-10, "0.3 ns"),
        (45.6e-6, "45.6 µs"),
        (0.0123, "12.3 ms"),
        (1.2345, "1,234.5 ms"),
        (9.99, "9,990.0 ms"),
        (10.0, "10 s"),
        (195.3828, "3.3 min"),
        (2.1e7, "243.1 days"),
    ],
)
def test_the_time_of_a_step_is_in_milliseconds_or_less_up_to_10_s(seconds, text):
    assert short_time(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.012, "12.0 ms"), (0.4, "0.4 s"), (12, "12 s"), (210, "3.5 min"), (7560, "2.1 h"), (807779520, "9,349.3 days")],
)
def test_a_time_span_is_in_the_unit_that_suits_it(seconds, text):
    assert time_span(seconds) == text
