"""Console output of prepare."""

from raygpt.corpus.prepare import Progress
from raygpt.show.data import preparing


def test_without_a_terminal_progress_has_no_line_at_the_end_where_the_result_follows(capsys):
    with preparing() as watch:
        for done in (250, 500, 1000):
            watch(Progress(documents=1, tokens=done, text_bytes=done, source_bytes=done, source_total=1000, seconds=1))
    assert capsys.readouterr().err == "preparing  25%  1 documents  250 tokens  0.0 MB/s\n"


def test_before_the_first_part_it_says_what_it_waits_for(capsys):
    with preparing() as watch:
        watch(Progress(source_total=1000))
    assert capsys.readouterr().err == "preparing   0%  waiting for Ray to read and tokenise the first part\n"


def test_scattering_is_the_last_fifth_and_the_time_left_is_said(capsys):
    tokenised = Progress(documents=1, tokens=9, text_bytes=9, source_bytes=1000, source_total=1000, seconds=90)
    with preparing() as watch:
        watch(tokenised._replace(scattered=0.5))
        watch(tokenised._replace(scattered=1.0))
    assert capsys.readouterr().err == "preparing  90%  1 documents  9 tokens  scattering 50%  0:00:10 left\n"
