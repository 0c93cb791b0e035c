"""A run goes on with the text that it was trained on, or says so."""

import pytest

from raygpt.errors import RaygptError
from raygpt.runs import checkpoints
from raygpt.training.resume import check_text


@pytest.fixture
def run_folder(tmp_path):
    """With a checkpoint of step 10, trained on two stores."""
    folder = checkpoints.folder_of(str(tmp_path), 10)
    checkpoints.commit(folder, 10, {"tokenizer": "bytes-1", "data": ["aa", "bb"]}, {})
    return str(tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "data", "what"),
    [
        ("bytes-1", ["aa", "cc"], "its text"),
        ("bytes-1", ["bb", "aa"], "its text"),
        ("bytes-2", ["aa", "bb"], "its tokenizer"),
    ],
)
def test_a_text_that_changed_under_its_name_is_refused_unless_forced(run_folder, tokenizer, data, what):
    with pytest.raises(RaygptError, match=f"{what} is not what it was trained on up to step 10; .* --force"):
        check_text(run_folder, 10, tokenizer, data, force=False)
    check_text(run_folder, 10, tokenizer, data, force=True)


def test_the_same_text_and_a_new_run_are_not(run_folder):
    check_text(run_folder, 10, "bytes-1", ["aa", "bb"], force=False)
    check_text(run_folder, 0, "bytes-2", ["cc"], force=False)
