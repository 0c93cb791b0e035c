"""Recipes: what is accepted, what it becomes, and files that are none."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from raygpt.config import Model, Optimizer, Recipe, Schedule
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe, recipe_text, shipped_recipes
from raygpt.recipes.explain import keys


def refusal(name: str | Path, overrides: Any = ()) -> str:
    """The line with which a recipe is refused."""
    with pytest.raises(RaygptError) as caught:
        load_recipe(name, overrides)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """Writes a recipe and gives its path."""

    def write(text: str | bytes, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# The model's arithmetic


def test_a_preset_gives_only_the_sizes_that_are_not_set() -> None:
    model = Model(preset="gpt2-medium", context=256)
    assert (model.layers, model.heads, model.width, model.context) == (24, 16, 1024, 256)


def test_a_preset_in_an_override_replaces_the_sizes_of_the_file_but_not_its_context() -> None:
    model = load_recipe("gpt2-tiny", ["model.preset=gpt2", "model.layers=6"]).model
    assert (model.layers, model.heads, model.width, model.context) == (6, 12, 768, 128)


@pytest.mark.parametrize("preset", ["llama", "qwen3", "nanochat"])
def test_a_family_without_sizes_has_a_depth_of_12_also_where_the_depth_is_null(preset: str) -> None:
    for model in (Model.model_validate({"preset": preset}), Model.model_validate({"preset": preset, "depth": None})):
        assert (model.depth, model.layers, model.heads, model.width) == (12, 12, 6, 768)
    whole = Model.model_validate({"preset": preset, "depth": None, "layers": 2, "heads": 2, "width": 32})
    assert (whole.depth, whole.layers, whole.heads, whole.width) == (None, 2, 2, 32)


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["model.preset=gpt2-medium"], (None, 24, 16, 1024)),
        (["model.preset=gpt2-medium", "model.depth=6"], (6, 6, 3, 384)),
        (["model.preset=gpt2-medium", "model.depth=null"], (None, 24, 16, 1024)),
        (["model.preset=llama"], (18, 18, 9, 1152)),
        (["model.preset=null"], (18, 18, 9, 1152)),
    ],
)
def test_a_preset_with_a_size_in_an_override_replaces_the_files_depth_and_a_family_does_not(
    overrides: list[str], sizes: tuple[int | None, ...]
) -> None:
    model = load_recipe("modern-350m", overrides).model
    assert (model.depth, model.layers, model.heads, model.width) == sizes


def test_a_preset_in_an_override_replaces_the_family_of_a_recipe_that_writes_every_key(file: Any) -> None:
    whole = file(load_recipe("tiny", ["model.dropout=0.1"]).to_yaml())
    assert load_recipe(whole, ["model.preset=gpt2"]).model == Model(preset="gpt2", context=128, dropout=0.1)
    llama = load_recipe(whole, ["model.preset=llama", "model.depth=6"]).model
    assert llama == Model(preset="llama", depth=6, context=128, dropout=0.1)


# The optimizer's defaults


def test_muon_has_defaults_of_its_own_which_a_recipe_may_replace() -> None:
    muon = Optimizer(kind="muon", weight_decay=0.3)
    assert (muon.learning_rate, muon.betas, muon.epsilon, muon.clip) == (0.02, (0.8, 0.95), 1e-10, None)
    assert (muon.weight_decay, muon.cautious, muon.momentum_warmup) == (0.3, True, 100)
    adamw = Optimizer()
    assert (adamw.learning_rate, adamw.betas, adamw.epsilon, adamw.clip) == (1e-3, (0.9, 0.95), 1e-8, 1.0)
    assert (adamw.weight_decay, adamw.cautious) == (0.1, False)


def test_another_optimizer_in_an_override_replaces_the_files_rates(file: Any) -> None:
    assert load_recipe("gpt2-tiny", ["optimizer.kind=muon", "optimizer.gain_rate=0.1"]).optimizer == Optimizer(
        kind="muon", gain_rate=0.1
    )
    text = "optimizer: {kind: muon, momentum: 0.9, learning_rate: 0.1}"
    assert load_recipe(file(text), ["optimizer.kind=adamw"]).optimizer == Optimizer()
    assert load_recipe(file(text), ["optimizer.kind=muon"]).optimizer.momentum == 0.9


def test_another_schedule_in_an_override_replaces_the_files_shape_but_not_its_warm_up(file: Any) -> None:
    text = "schedule: {kind: wsd, end: 0, decay_share: 0.5, warmup_steps: 7}"
    assert load_recipe(file(text), ["schedule.kind=constant"]).schedule == Schedule(kind="constant", warmup_steps=7)
    assert load_recipe(file(text), ["schedule.kind=wsd"]).schedule.decay_share == 0.5


WARM = "schedule: {kind: cosine, warmup_steps: 20}"


@pytest.mark.parametrize(
    ("text", "overrides", "warmup"),
    [
        (f"{WARM}\ntraining: {{steps: 200}}", ["training.steps=12"], 1),  # a tenth of the run, as before
        (f"{WARM}\ntraining: {{steps: 40}}", {"training": {"steps": 12}}, 6),
        (f"{WARM}\ntraining: {{epochs: 3}}", ["training.steps=12"], 1),
        (f"{WARM}\ntraining: {{steps: 200}}", ["training.steps=20"], 20),  # fits
        (f"{WARM}\ntraining: {{steps: 40}}", ["training.steps=22", "schedule.kind=wsd"], 11),
        (f"{WARM}\ntraining: {{steps: 21}}", ["training.steps=10", "schedule.kind=wsd"], 8),  # 2 of 10 fall
    ],
)
def test_a_warm_up_of_the_file_follows_steps_that_are_too_few_for_it_with_a_note(
    file: Any, text: str, overrides: Any, warmup: int
) -> None:
    notes: list[str] = []
    recipe = load_recipe(file(text), overrides, notes.append)
    assert recipe.schedule.warmup_steps == warmup
    said = f"schedule.warmup_steps: {warmup} instead of 20, to fit training.steps {recipe.training.steps}"
    assert notes == ([said] if warmup != 20 else [])


def test_a_warm_up_that_the_user_wrote_is_refused_if_it_is_too_long(file: Any) -> None:
    line = "schedule.warmup_steps: 20 is more than training.steps 12; write 12 or less"
    assert line in refusal(file(WARM), ["training.steps=12", "schedule.warmup_steps=20"])
    assert line in refusal(file(f"{WARM}\ntraining: {{steps: 12}}"), [])


@pytest.mark.parametrize(
    ("settings", "decaying"),
    [
        ({}, {"matrix", "embedding", "head"}),
        ({"kind": "muon"}, {"matrix"}),
        ({"kind": "muon", "decay": "all"}, {"matrix", "embedding", "head", "gain", "bias"}),
    ],
)
def test_what_decays_follows_from_the_role(settings: dict[str, Any], decaying: set[str]) -> None:
    roles = ("matrix", "embedding", "head", "gain", "bias")
    assert {role for role in roles if Optimizer(**settings).decays(role)} == decaying


# Overrides


def test_overrides_are_text_from_the_command_line_or_a_mapping() -> None:
    from_text = load_recipe("gpt2-tiny", ["training.steps=20", "data.source=my.txt", "cluster.workers=1..4"])
    dotted = load_recipe("gpt2-tiny", {"training.steps": 20, "data.source": "my.txt", "cluster.workers": "1..4"})
    nested = load_recipe(
        "gpt2-tiny",
        {"training": {"steps": 20}, "data": {"source": Path("my.txt")}, "cluster": {"workers": "1..4"}},
    )
    assert from_text == dotted == nested
    assert (from_text.training.steps, from_text.data.source) == (20, "my.txt")
    assert from_text.training.batch_tokens == load_recipe("gpt2-tiny").training.batch_tokens


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 0.001),
        ("optimizer.clip=null", "optimizer.clip", None),
        ("optimizer.clip=", "optimizer.clip", None),
        ("optimizer.betas=[0.8, 9e-1]", "optimizer.betas", [0.8, 0.9]),
        ("training.batch_tokens=524_288", "training.batch_tokens", 524_288),
        ("model.bias=false", "model.bias", False),
        ("data.val=0.25", "data.val", 0.25),
        ("data.val=val.txt", "data.val", "val.txt"),
        ("data.source=*.txt", "data.source", "*.txt"),
        ("data.source=s3://bucket/key=1", "data.source", "s3://bucket/key=1"),
        ("data.source='null'", "data.source", "null"),
        ("cluster.workers=4", "cluster.workers", 4),
        ("run.name=007", "run.name", "007"),
        ("run.name=2024-01-01", "run.name", "2024-01-01"),
        ("run.name=1e3", "run.name", "1e3"),
        ("run.name=on", "run.name", "on"),
        ("training.steps = 30", "training.steps", 30),
    ],
)
def test_the_type_of_the_key_decides_what_an_override_means(override: str, key: str, value: Any) -> None:
    part, name = key.split(".")
    assert load_recipe("gpt2-tiny", [override]).to_dict()[part][name] == value


def test_one_override_may_be_given_without_a_list() -> None:
    assert load_recipe("gpt2-tiny", "training.steps=20").training.steps == 20


def test_a_number_given_to_a_text_key_becomes_text() -> None:
    assert load_recipe("gpt2-tiny", {"run.name": 123}).run.name == "123"


def test_a_mixture_is_a_list_of_sources_with_weights() -> None:
    data = load_recipe("gpt2-tiny", ["data.source=[{source: a.txt, weight: 3}, {source: b.txt, weight: 1}]"]).data
    assert [(part.source, part.weight) for part in data.sources] == [("a.txt", 3.0), ("b.txt", 1.0)]


def test_a_single_source_is_a_mixture_of_one() -> None:
    assert [(part.source, part.weight) for part in load_recipe("gpt2-tiny").data.sources] == [("stdlib", 1.0)]


@pytest.mark.parametrize(("workers", "least", "most"), [("3", 3, 3), ("1..4", 1, 4), ("2..2", 2, 2)])
def test_workers_are_a_number_or_a_range(workers: str, least: int, most: int) -> None:
    cluster = load_recipe("gpt2-tiny", [f"cluster.workers={workers}"]).cluster
    assert (cluster.min_workers, cluster.max_workers) == (least, most)


@pytest.mark.parametrize(
    ("engine", "cluster", "accelerator", "counts"),
    [
        ("torch", {"workers": "2..7", "mesh": {"fsdp": 2}}, "cpu", [2, 4, 6]),
        ("torch", {"workers": "1..8", "mesh": {"tensor": -1}}, "gpu", [1, 2, 4]),  # of 4 heads
        ("jax", {"workers": "3..9", "mesh": {"tensor": 4}}, "gpu", [4, 8]),
        ("jax", {"workers": "1..4", "mesh": {"fsdp": 4}, "resources_per_worker": {"GPU": 2}}, "gpu", [2, 4]),
        ("jax", {"workers": "1..3", "mesh": {"fsdp": 2}}, "cpu", [1, 2, 3]),  # each has the cores of its node
        ("torch", {"workers": 3, "mesh": {"fsdp": 2}}, "gpu", [3]),
    ],
)
def test_an_elastic_run_has_as_many_workers_as_fill_its_mesh(
    engine: str, cluster: dict[str, Any], accelerator: str, counts: list[int]
) -> None:
    recipe = load_recipe("gpt2-tiny", {"engine": engine, "cluster": cluster})
    assert list(recipe.worker_counts(accelerator)) == counts


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        ("{}", [-1, 1, 1, 1]),
        ("{fsdp: 2}", [-1, 2, 1, 1]),
        ("{fsdp: -1}", [1, -1, 1, 1]),
        ("{data: 2, tensor: 4}", [2, 1, 4, 1]),
        ("{context: 8}", [-1, 1, 1, 8]),
    ],
)
def test_the_data_axis_takes_what_is_left_unless_told_otherwise(mesh: str, sizes: list[int]) -> None:
    recipe = load_recipe("gpt2-tiny", [f"cluster.mesh={mesh}"])
    assert recipe.cluster.mesh.sizes() == dict(zip(["data", "fsdp", "tensor", "context"], sizes, strict=True))


# Files


def test_a_part_without_keys_is_all_defaults(file: Any) -> None:
    recipe = load_recipe(file("engine: torch\ntraining:\n  # steps: 5\nmodel.layers: 2\n"))
    assert (recipe.engine, recipe.training, recipe.model.layers) == ("torch", Recipe().training, 2)


def test_a_file_may_begin_with_a_byte_order_mark_and_use_anchors(file: Any) -> None:
    path = file("\ufeffschedule: {warmup_steps: &n 7}\ntraining: {log_every: *n}\n")
    assert load_recipe(path).training.log_every == 7


@pytest.mark.parametrize(
    ("name", "run"), [("mine.yaml", "mine"), ("My recipe, 2.yml", "My-recipe-2"), (".hidden.yaml", "hidden")]
)
def test_a_run_is_named_after_its_recipe(file: Any, name: str, run: str) -> None:
    assert load_recipe(file("engine: jax", name)).run.name == run


def test_a_shipped_recipe_gives_its_own_name_to_the_run() -> None:
    assert load_recipe("gpt2-124m-openwebtext").run.name == "gpt2-124m-openwebtext"


FILE_ERRORS = [
    ("", "is empty; begin with a copy of one that `raygpt recipes` lists"),
    ("# only a comment\n", "is empty; begin with a copy of one that `raygpt recipes` lists"),
    ("- a\n- b\n", "['a', 'b'] is not a mapping of keys; write e.g. engine: jax"),
    ("engine", "'engine' is not a mapping of keys; write e.g. engine: jax"),
    (b"engine: \xff", "is not UTF-8 text; save it as UTF-8"),
    (
        "engine: jax\ntraining: {steps: 1",
        "line 2, column 20: not YAML (expected ',' or '}', but got '<stream end>'); fix it there",
    ),
    (
        "model:\n\tlayers: 4",
        "line 2, column 1: not YAML (found character '\\t' that cannot start any token); fix it there",
    ),
    (
        "engine: jax\nengine: torch",
        "line 2, column 1: not YAML ('engine' is given twice); fix it there",
    ),
    ("model: &m {layers: *m}", "a key contains itself; write its value out"),
    ("run: 5", "run: '5' is not a mapping of keys; write its keys below it, indented"),
    ("training: 5", "training: '5' is not a mapping of keys; write its keys below it, indented"),
    (
        "training:\n  steps:",
        "training.steps: null leaves the run without a length; write e.g. training.steps: 1000, or training.epochs: 5",
    ),
]


@pytest.mark.parametrize(("text", "line"), FILE_ERRORS)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(file: Any, text: str | bytes, line: str) -> None:
    path = file(text, "x.yaml")
    assert refusal(path) == f"recipe '{path}': {line}"


@pytest.mark.parametrize("tag", ["!!int x", "!!timestamp x", "!!bool x", "!!python/name:os.system x"])
def test_a_tag_that_yaml_would_turn_into_an_object_is_refused(file: Any, tag: str) -> None:
    assert "line 1, column 9: not YAML (could not determine a constructor" in refusal(file(f"engine: {tag}"))


def test_a_key_that_is_given_twice_in_two_forms_is_refused(file: Any) -> None:
    written = file("training: {steps: 5}\ntraining.steps: 6\n")
    assert refusal(written) == f"recipe '{written}': 'training.steps' is given twice; leave one of the two out"


def test_a_file_nested_too_deep_is_refused(file: Any) -> None:
    assert "not YAML (maximum recursion depth exceeded" in refusal(file("[" * 10_000))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / ("deep" * 30) / "no.yaml"  # a path is told whole
    assert refusal(missing) == f"recipe '{missing}': there is no such file; check the path"
    assert refusal(tmp_path) == f"recipe '{tmp_path}': is a folder; name the YAML file in it"


def test_an_unknown_name_is_answered_with_the_nearest_shipped_one() -> None:
    listing = "`raygpt recipes` lists them; a file ends in .yaml"
    assert refusal("tny") == f"no recipe is called 'tny'; did you mean 'tiny'? {listing}"
    assert refusal("shake") == f"no recipe is called 'shake'; did you mean 'shakespeare-char'? {listing}"
    assert refusal("training.steps=20") == (
        "'training.steps=20' is a key, not a recipe; write the recipe first, e.g. tiny training.steps=20"
    )
    assert refusal("xyz") == f"no recipe is called 'xyz'; {listing}"
    assert refusal("TINY") == f"no recipe is called 'TINY'; did you mean 'tiny'? {listing}"
    for path in ("./tiny", "tiny.yaml", "recipes/tiny.yaml"):
        remedy = "write tiny for the one that comes with raygpt"
        assert refusal(path) == f"recipe '{path}': there is no such file; {remedy}"
    with pytest.raises(RaygptError, match="no recipe is called"):
        recipe_text("../config")


# The recipe as an object


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_recipe("gpt2-tiny").training.steps = 5  # type: ignore[misc]


def test_a_key_is_described_by_type_default_and_a_sentence() -> None:
    described = {key.name: key for key in keys()}
    assert described["engine"].type == "jax | torch"
    assert described["optimizer.betas"].type == "[float, float]"
    assert described["optimizer.clip"].type == "float | null"
    assert described["run.name"].type == "text | null"
    assert described["cluster.workers"].type == "int or min..max"
    assert described["model.bias"].default == "true"
    assert described["model.norm_epsilon"].default == "1e-05"
    assert all(key.description.endswith(".") and len(key.description) <= 90 for key in described.values())


def test_the_default_of_each_key_can_be_written_as_it_is_described(file: Any) -> None:
    text = "\n".join(f"{key.name}: {key.default}" for key in keys())
    assert load_recipe(file(text)) == load_recipe(file("engine: jax"))


def test_config_imports_neither_ray_nor_jax_nor_torch() -> None:
    code = "import sys, raygpt.config; print(sorted({'ray', 'jax', 'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Properties

unhurried = settings(deadline=None)  # a loaded machine is no failure


def test_a_length_in_one_unit_replaces_the_files_in_the_other() -> None:
    tiny, wikitext = (
        load_recipe("gpt2-tiny", ["training.epochs=2"]),
        load_recipe("gpt2-124m-wikitext103", "training.steps=9"),
    )
    assert (tiny.training.steps, tiny.training.epochs) == (None, 2)
    assert (wikitext.training.steps, wikitext.training.epochs) == (9, None)
    with pytest.raises(RaygptError, match="is no number of steps before its corpus is known"):
        _ = tiny.steps


names = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,4}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
overrides_by_key = st.fixed_dictionaries(
    {},
    optional={
        "engine": st.sampled_from(["jax", "torch"]),
        "model.preset": st.sampled_from([None, "gpt2", "gpt2-xl"]),
        "model.dropout": st.floats(0, 0.99),
        "model.norm_epsilon": st.floats(1e-12, 1e-3),
        "data.source": texts,
        "data.val": st.floats(0.001, 0.999),
        "data.column": texts,
        "optimizer.learning_rate": st.floats(1e-12, 10),
        "optimizer.kind": st.sampled_from(["adamw", "muon"]),
        "optimizer.betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
        "optimizer.clip": st.none() | st.floats(1e-6, 100),
        "schedule.kind": st.sampled_from(["cosine", "linear", "wsd"]),
        "schedule.end": st.floats(0, 1),
        "training.steps": st.integers(100, 2**31 - 1),
        "training.eval_every": st.integers(1, 10**9) | st.just("epoch"),
        "training.batch_tokens": st.integers(1, 1000).map(lambda rows: rows * 128),
        "training.seed": st.integers(0, 2**32 - 1),
        "cluster.workers": st.integers(1, 99) | st.integers(1, 99).map(lambda low: f"{low}..{2 * low}"),
        "run.name": names,
        "run.storage": texts,
    },
)


@given(overrides_by_key)
@example({"data.source": "\x85", "run.storage": "Übung\u2028"})  # line breaks to PyYAML
@unhurried
def test_a_resolved_recipe_loads_again_to_an_equal_one(tmp_path_factory: Any, overrides: Any) -> None:
    recipe = load_recipe("gpt2-tiny", overrides)
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_text(recipe.to_yaml(), "utf-8")
    assert load_recipe(path) == recipe
    assert load_recipe("shakespeare-char", recipe.to_dict()) == recipe


def complaint(name: str | Path, overrides: Any = ()) -> str:
    """The line with which a recipe is refused, or nothing where it is taken."""
    try:
        load_recipe(name, overrides)
    except RaygptError as error:
        return str(error)
    return ""


@given(st.text() | st.sampled_from([recipe_text(name) for name in shipped_recipes()]), st.text(max_size=5))
@unhurried
def test_any_text_is_a_recipe_or_refused_in_one_line(tmp_path_factory: Any, text: str, insert: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    middle = len(text) // 2
    path.write_bytes((text[:middle] + insert + text[middle:]).encode("utf-8", "surrogatepass"))
    assert len(complaint(path).splitlines()) <= 1


@given(st.sampled_from([key.name for key in keys()]), st.text())
@unhurried
def test_any_override_is_taken_or_refused_in_one_line(key: str, text: str) -> None:
    assert len(complaint("gpt2-tiny", [f"{key}={text}"]).splitlines()) <= 1
