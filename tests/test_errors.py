"""What others raise, as part of a line of ours."""

import pytest

from raygpt.errors import first_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("no route", "no route"),
        ("\n  404 Not Found \r\n\nURL: …\n", "404 Not Found"),
        ("", "OSError"),
        (" \n", "OSError"),
    ],
)
def test_the_first_line_that_says_something_else_the_kind_of_error(text, line):
    assert first_line(OSError(text)) == line
