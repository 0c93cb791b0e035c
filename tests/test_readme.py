"""The README's commands do what it says."""

import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from conftest import CHECKOUT

from raygpt.config import Recipe
from raygpt.recipes import load_recipe

README = (CHECKOUT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for kind, block in BLOCKS
    if kind == "sh"
    for line in block.splitlines()
    if line.strip()
]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_its_make_targets_exist(command):
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"make train": "raygpt train tiny", "make test": "pytest"}[command] in done.stdout


@pytest.mark.extended
def test_its_raygpt_commands_run_one_after_another(ray_cluster, raygpt, tmp_path):
    shutil.copy(CHECKOUT / "README.md", tmp_path)
    shutil.copytree(CHECKOUT / "docs", tmp_path / "docs")
    commands = [shlex.split(c)[1:] for c in COMMANDS if c.startswith("raygpt ")]
    assert len(commands) >= 6
    for words in commands:
        status, out, err = raygpt(*words)
        assert status == 0, (words, err)
        assert out


def test_it_has_no_other_commands():
    assert {c.split()[0] for c in COMMANDS} == {"make", "raygpt", "."}


def test_its_recipe_is_one_and_equals_the_shipped_one_where_it_speaks(tmp_path):
    (text,) = (block for kind, block in BLOCKS if kind == "yaml")
    assert len([line for line in text.splitlines() if line.strip()]) <= 12
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    mine, tiny = load_recipe(str(path)), load_recipe("tiny", {"run.name": "mine"})
    assert isinstance(mine, Recipe)
    assert mine == tiny
    assert yaml.safe_load(text)["training"]["steps"] == 180


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or (CHECKOUT / link.partition("#")[0]).exists(), link
