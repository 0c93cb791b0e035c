"""A function of one's own on the workers that recipes run on."""

import pytest

import raygpt
from raygpt.errors import RaygptError


@pytest.fixture
def look():
    """A function inside another: Ray sends it by value, for its workers cannot import this file."""

    def look(config):
        import os

        import jax
        import ray.train

        ray.train.report({"loss": 1.0, "from": config["word"]})
        ray.train.report({"loss": 0.5, "processes": jax.process_count(), "threads": int(os.environ["NPROC"])})

    return look


def test_the_last_of_each_metric_comes_back_and_every_report_is_seen(ray_cluster, look, tmp_path):
    seen = []
    result = raygpt.run(
        look,
        {"word": "hello"},
        cluster={"workers": 2, "accelerator": "cpu"},
        storage_path=str(tmp_path),
        watch=seen.append,
    )
    assert result.error is None
    assert result.metrics.pop("threads") >= 16  # with one for each core, two all-reduces at once block each other
    assert result.metrics == {"loss": 0.5, "from": "hello", "processes": 2}
    assert [report["loss"] for report in seen] == [1.0, 0.5]
    assert result.path.startswith(str(tmp_path))


def test_what_cannot_be_is_said_before_anything_starts(look):
    with pytest.raises(RaygptError, match=r"unknown key 'cluster\.wrokers'; did you mean 'cluster\.workers'"):
        raygpt.run(look, cluster={"wrokers": 2})
    with pytest.raises(RaygptError, match=r"name: '\.\./x' is no folder name"):
        raygpt.run(look, name="../x")
