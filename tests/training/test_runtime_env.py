"""`cluster.runtime_env` is refused before anything starts where Ray would ignore or refuse it."""

import pytest

import raygpt
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.training.ray.runtime_env import checked


@pytest.mark.parametrize(
    ("written", "refusal"),
    [
        ("{pips: [numpy]}", "'pips' is no field of Ray's runtime environment; did you mean 'pip'?"),
        ("{HF_TOKEN: abc}", "'HF_TOKEN' is no field of Ray's runtime environment; write one of conda, config, "),
        ("{pip: missing.txt}", "Ray refuses it (missing.txt is not a valid file); correct it"),
        ("{env_vars: [A]}", "Ray refuses it (runtime_env['env_vars'] must be of type Dict[str, str], "),
        ("{pip: [a], conda: b}", "Ray refuses it (The 'pip' field, 'uv' field, and 'conda' field of runtime_env "),
    ],
)
def test_what_ray_would_ignore_or_refuse_is_refused_in_one_line(written, refusal):
    recipe = load_recipe("tiny", [f"cluster.runtime_env={written}"])
    with pytest.raises(RaygptError) as refused:
        checked(recipe.cluster.runtime_env)
    assert str(refused.value).startswith(f"cluster.runtime_env: {refusal}")
    assert "\n" not in str(refused.value)


def test_train_and_run_refuse_it_before_a_cluster_starts(monkeypatch, tmp_path):
    monkeypatch.setattr("raygpt.cluster._connect", lambda *asked: pytest.fail("a cluster was started"))
    monkeypatch.chdir(tmp_path)
    for start in (
        lambda: raygpt.train("tiny", **{"cluster.runtime_env": {"pips": ["numpy"]}}),
        lambda: raygpt.run(print, cluster={"runtime_env": {"pips": ["numpy"]}}),
    ):
        with pytest.raises(RaygptError, match=r"^cluster\.runtime_env: 'pips' is no field"):
            start()


def test_numbers_and_booleans_of_its_settings_are_such_and_variables_stay_text():
    written = "{env_vars: {A: 1, B: true}, config: {setup_timeout_seconds: 900, eager_install: false}, pip: [a==1]}"
    assert checked(load_recipe("tiny", [f"cluster.runtime_env={written}"]).cluster.runtime_env) == {
        "env_vars": {"A": "1", "B": "true"},
        "config": {"setup_timeout_seconds": 900, "eager_install": False},
        "pip": ["a==1"],
    }
    written = "{config: {setup_timeout_seconds: -1}, pip: {packages: [a], pip_check: false, pip_version: '24'}}"
    assert checked(load_recipe("tiny", [f"cluster.runtime_env={written}"]).cluster.runtime_env) == {
        "config": {"setup_timeout_seconds": -1},
        "pip": {"packages": ["a"], "pip_check": False, "pip_version": "24"},
    }
