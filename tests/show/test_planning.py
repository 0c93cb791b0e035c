"""What `raygpt plan` prints."""

import re

import pytest


@pytest.fixture
def plan(raygpt, tmp_path, monkeypatch):
    """Print the plan of a recipe: its lines, each with single spaces."""
    monkeypatch.setenv("COLUMNS", "200")

    def lines(*words):
        status, out, err = raygpt("plan", *words, f"run.storage={tmp_path}")
        assert status == 0, err
        return [" ".join(line.split()) for line in out.splitlines()]

    return lines


def changes_in(lines):
    start = lines.index("changes that would help most") + 1
    return [line for line in lines[start:] if not line.startswith("note:")]


def test_changes_of_a_plan_that_does_not_fit_say_whether_they_do_and_not_how_much_faster_they_are(plan):
    (engine,) = changes_in(plan("modern-1.5b", "--on", "l4"))
    assert re.fullmatch(r"engine=torch [\d,]+ tokens/s, 3\d\.\d GiB; does not fit either", engine)
    (mesh,) = changes_in(plan("modern-1.5b", "--on", "v5e:4x4", "cluster.mesh.data=-1", "cluster.mesh.fsdp=1"))
    assert re.fullmatch(r"cluster.mesh.data=1 cluster.mesh.fsdp=16 [\d,]+ tokens/s, \d\.\d GiB", mesh)


def test_changes_of_a_plan_that_fits_say_how_much_faster_they_are(plan):
    changes = changes_in(plan("gpt2-124m", "--on", "8xh100"))
    assert changes
    for change in changes:
        assert re.fullmatch(r"\S.*=\S+ [\d,]+ tokens/s \(\+\d+%\), \d+\.\d GiB(; another run)?", change)
