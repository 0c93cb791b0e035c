"""What `raygpt serve` is asked for: runs by name and step, who may use them."""

import pytest

from raygpt.errors import RaygptError
from raygpt.serving.cli_options import _parts, api_key
from raygpt.show.results import show_serving


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("runs/tiny", ("", "runs/tiny", None)),
        ("runs/tiny@120", ("", "runs/tiny", 120)),
        ("base=runs/tiny", ("base", "runs/tiny", None)),
        ("base=s3://bucket/runs/a@7", ("base", "s3://bucket/runs/a", 7)),
        ("runs/a=b", ("", "runs/a=b", None)),
        ("runs/me@home", ("", "runs/me@home", None)),
    ],
)
def test_a_model_is_a_run_with_a_name_and_a_step_if_one_likes(given, expected):
    assert _parts(given) == expected


def test_others_than_this_machine_need_a_key(monkeypatch, tmp_path):
    monkeypatch.delenv("RAYGPT_API_KEY", raising=False)
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        assert api_key(host, None) is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(RaygptError, match="set RAYGPT_API_KEY or --api-key-file first"):
            api_key(host, None)
    (tmp_path / "key").write_text("from-a-file\n")
    assert api_key("0.0.0.0", str(tmp_path / "key")) == "from-a-file"
    monkeypatch.setenv("RAYGPT_API_KEY", "from-the-environment")
    assert api_key("0.0.0.0", None) == "from-the-environment"


def test_a_key_that_is_too_short_or_not_there_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYGPT_API_KEY", "short")
    with pytest.raises(RaygptError, match="8 ASCII characters or more"):
        api_key("127.0.0.1", None)
    with pytest.raises(RaygptError, match="cannot be read"):
        api_key("127.0.0.1", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://localhost:8000"),
        ("::", "http://localhost:8000"),
        ("10.0.0.1", "http://10.0.0.1:8000"),
        ("fd00::1", "http://[fd00::1]:8000"),
    ],
)
def test_names_and_addresses_are_printed_as_they_are(capsys, host, url):
    show_serving(["tiny", "[red]"], (host, 8000), has_key=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"tiny, [red] at {url}"
    assert [line.split()[-3 if "key" in line else -1] for line in lines[1:3]] == [f"{url}/", f"{url}/v1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is no run"),
        (["nowhere", "--host", "0.0.0.0"], "others could use the model"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(raygpt, monkeypatch, words, message):
    monkeypatch.delenv("RAYGPT_API_KEY", raising=False)
    status, _, said = raygpt("serve", *words)
    assert (status, message in said) == (1, True)
