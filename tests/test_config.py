"""Recipes: what is accepted, what it becomes, and the one line that says what is wrong."""

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
from raygpt.recipes.explain import OTHER_NAMES, keys


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
    assert refusal("xyz") == f"no recipe is called 'xyz'; {listing}"
    assert refusal("TINY") == f"no recipe is called 'TINY'; did you mean 'tiny'? {listing}"
    for path in ("./tiny", "tiny.yaml", "recipes/tiny.yaml"):
        remedy = "write tiny for the one that comes with raygpt"
        assert refusal(path) == f"recipe '{path}': there is no such file; {remedy}"
    with pytest.raises(RaygptError, match="no recipe is called"):
        recipe_text("../config")


# Errors, each as the whole line after "recipe 'gpt2-tiny': "

UNKNOWN_KEYS = [
    ("training.step", "training.steps"),
    ("training.learning_rate", "optimizer.learning_rate"),
    ("learning_rate", "optimizer.learning_rate"),
    ("trainer.steps", "training.steps"),
    ("cluster.context", "cluster.mesh.context"),
    ("cluster.mesh.tensors", "cluster.mesh.tensor"),
    ("engin", "engine"),
    ("optim", "optimizer"),
    ("lr", "optimizer.learning_rate"),
    ("n_layer", "model.layers"),
    ("model.n_embd", "model.width"),
    ("block_size", "model.context"),
    ("batch_size", "training.batch_tokens"),
    ("max_iters", "training.steps"),
    ("dataset", "data.source"),
    ("eval_iters", "training.eval_rows"),
    ("device", "cluster.accelerator"),
    ("lr_decay_iters", "training.steps"),
    ("decay_lr", "schedule.kind"),
    ("init_from", "run.start_from"),
    ("wandb_log", "track.wandb"),
    ("wandb_project", "track.wandb"),
]


@pytest.mark.parametrize(("key", "meant"), UNKNOWN_KEYS)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(key: str, meant: str) -> None:
    assert refusal("gpt2-tiny", [f"{key}=3"]) == f"recipe 'gpt2-tiny': unknown key '{key}'; did you mean '{meant}'?"


@pytest.mark.parametrize(
    ("option", "example"),
    [
        ("--max_iters=5", "training.steps=5"),
        ("--block-size=64", "model.context=64"),
        ("--steps", "training.steps=…"),
        ("--training.steps=7", "training.steps=7"),
        ("-x", "training.steps=20"),
    ],
)
def test_an_option_as_in_other_programs_is_answered_with_the_key(option: str, example: str) -> None:
    answer = refusal("gpt2-tiny", [option])
    assert answer == refusal(option)
    assert answer.startswith(f"{option.partition('=')[0]}: is no option, `--help` lists them; ")
    assert answer.endswith(f"; a key is written without dashes, e.g. {example}")


def test_an_unknown_key_of_a_part_is_answered_with_the_keys_of_the_part() -> None:
    assert refusal("gpt2-tiny", ["schedule.zzz=1"]) == (
        "recipe 'gpt2-tiny': unknown key 'schedule.zzz'; the keys of schedule are kind, warmup_steps, end, decay_share"
    )


def test_every_name_from_another_trainer_hints_at_a_key_that_exists() -> None:
    assert set(OTHER_NAMES.values()) <= {key.name for key in keys()}


def test_an_unknown_key_like_no_other_is_answered_with_the_parts() -> None:
    assert refusal("gpt2-tiny", ["qqq=1"]) == (
        "recipe 'gpt2-tiny': unknown key 'qqq'; the parts of a recipe are "
        "engine, model, data, optimizer, schedule, training, cluster, run, track"
    )


MIXTURE = "write e.g. data.source: [{source: stdlib, weight: 1}]"
BPE = "write e.g. data.tokenizer: bpe:4096"
BETAS = "write e.g. optimizer.betas: [0.9, 0.95]"
PATTERN = "is not 1 to 128 of A-Z a-z 0-9 . _ - without a '.' in front; write e.g. run.name: my-run"
BAD_VALUES = [
    ("model.layers=four", "model.layers: 'four' is not a whole number; write e.g. model.layers: 4"),
    ("track.wandb=true", "track.wandb: true is no name of a project; write e.g. track.wandb: my-project, or null"),
    (
        "run.storage=s3://",
        "run.storage: 's3://' is neither a folder nor an address on S3; write e.g. run.storage: s3://bucket/runs",
    ),
    (
        "run.storage=gs://bucket/runs",
        "run.storage: 'gs://bucket/runs' is neither a folder nor an address on S3; "
        "write e.g. run.storage: s3://bucket/runs",
    ),
    ("model.layers=true", "model.layers: 'true' is not a whole number; write e.g. model.layers: 4"),
    ("model.layers=4.5", "model.layers: '4.5' is not a whole number; write e.g. model.layers: 4"),
    (
        "training.steps=99999999999999999999",
        "training.steps: '99999999999999999999' should be less than 2147483648; write e.g. training.steps: 1000",
    ),
    ("model.layers=0", "model.layers: '0' should be greater than 0; write e.g. model.layers: 4"),
    ("model.dropout=1", "model.dropout: '1' should be less than 1; write e.g. model.dropout: 0.0"),
    (
        "model.dropout=nan",
        "model.dropout: 'nan' should be a finite number; write e.g. model.dropout: 0.0",
    ),
    ("model.bias=perhaps", "model.bias: 'perhaps' is not true or false; write e.g. model.bias: true"),
    (
        "model.precision=bf61",
        "model.precision: 'bf61' is none of auto, bf16, fp16, fp32, fp64; did you mean 'bf16'?",
    ),
    ("engine=jaxx", "engine: 'jaxx' is none of jax, torch; did you mean 'jax'?"),
    ("engine=mlx", "engine: 'mlx' is none of jax, torch; write e.g. engine: jax"),
    ("data.source=", "data.source: null is not text; write e.g. data.source: stdlib"),
    ("data.source=[]", "data.source: the mixture is empty; write e.g. data.source: stdlib"),
    ("data.source=[a]", f"data.source[0]: 'a' is not a mapping of keys; {MIXTURE}"),
    ("data.source=[{source: a}]", f"data.source[0].weight is missing; {MIXTURE}"),
    (
        "data.source=[{source: a, weight: 0}]",
        f"data.source[0].weight: '0' should be greater than 0; {MIXTURE}",
    ),
    (
        "data.source=[{source: a, wait: 1}]",
        "unknown key 'data.source[0].wait'; a text of a mixture has the keys source and weight (and 1 more)",
    ),
    ("data.val=1.5", "data.val: '1.5' is not a fraction between 0 and 1; write e.g. data.val: 0.05"),
    ("data.val=0", "data.val: '0' is not a fraction between 0 and 1; write e.g. data.val: 0.05"),
    ("data.val=", "data.val: null is not a fraction between 0 and 1; write e.g. data.val: 0.05"),
    (
        "data.tokenizer=bpe:257",
        f"data.tokenizer: 'bpe:257' is not bpe:N with a whole N from 258 to 1000000; {BPE}",
    ),
    (
        "data.tokenizer=bpe:99999999",
        f"data.tokenizer: 'bpe:99999999' is not bpe:N with a whole N from 258 to 1000000; {BPE}",
    ),
    (
        "data.tokenizer=bpe",
        f"data.tokenizer: 'bpe' is not bpe:N with a whole N from 258 to 1000000; {BPE}",
    ),
    (
        "data.tokenizer=gpt4",
        f"data.tokenizer: 'gpt4' is not gpt2, bytes, char, bpe:N, a .json file or a ./folder; {BPE}",
    ),
    (
        "data.split_seed=-1",
        "data.split_seed: '-1' should be greater than or equal to 0; write e.g. data.split_seed: 2357",
    ),
    (
        "optimizer.learning_rate=fast",
        "optimizer.learning_rate: 'fast' is not a number; write e.g. optimizer.learning_rate: 0.001",
    ),
    (
        "run.start_from=s3://KEY:SECRET@bucket/run",
        "run.start_from: an address with a password in it would be written into the run; write s3://BUCKET/…, and "
        "give the credentials by environment variables or your cloud's profile",
    ),
    (
        "training.eval_tasks=lambada=s3://KEY:SECRET@bucket/items.jsonl",
        "training.eval_tasks: an address with a password in it would be written into the run; write s3://BUCKET/…, and "
        "give the credentials by environment variables or your cloud's profile",
    ),
    ("training.eval_items=5", "training.eval_items: does nothing without eval_tasks; write e.g. eval_tasks: lambada"),
    (
        "training.spike_sigmas=3",
        "training.spike_sigmas: does nothing while on_spike is ignore; write e.g. on_spike: warn",
    ),
    ("optimizer.betas=0.9", f"optimizer.betas: '0.9' is not a list; {BETAS}"),
    ("optimizer.betas=[0.9]", f"optimizer.betas[1] is missing; {BETAS}"),
    ("optimizer.betas=[0.9, 1]", f"optimizer.betas[1]: '1' should be less than 1; {BETAS}"),
    (
        "optimizer.betas=[0.1, 0.2, 0.3]",
        f"optimizer.betas: ['0.1', '0.2', '0.3'] has too many items; {BETAS}",
    ),
    ("optimizer.clip=0", "optimizer.clip: '0' should be greater than 0; write e.g. optimizer.clip: 1.0"),
    (
        "training.seed=4294967296",
        "training.seed: '4294967296' should be less than 4294967296; write e.g. training.seed: 1337",
    ),
    (
        "training.steps.more=1",
        "training.steps: {'more': '1'} is not a whole number; write e.g. training.steps: 1000",
    ),
    ("cluster.workers=0", "cluster.workers: '0' asks for none; write e.g. cluster.workers: 1"),
    ("cluster.workers=0..2", "cluster.workers: '0..2' asks for none; write e.g. cluster.workers: 1"),
    ("cluster.workers=4..2", "cluster.workers: '4..2' has min above max; write cluster.workers: 2..4"),
    (
        "cluster.workers=1-4",
        "cluster.workers: '1-4' is neither a whole number nor min..max; write e.g. cluster.workers: 1..4",
    ),
    (
        "cluster.mesh.fsdp=0",
        "cluster.mesh.fsdp: 0 is no number of devices; write 1 or more, or -1 for what is left",
    ),
    ("cluster.mesh=4", "cluster.mesh: '4' is not a mapping of keys; write its keys below it, indented"),
    ("run.name=stores", "run.name: 'stores' is the folder of prepared tokens; write e.g. run.name: my-run"),
    ("run.name=Stores", "run.name: 'Stores' is the folder of prepared tokens; write e.g. run.name: my-run"),
    ("run.name=../up", f"run.name: '../up' {PATTERN}"),
    ("run.name=..", f"run.name: '..' {PATTERN}"),
    ("run.name=a/b", f"run.name: 'a/b' {PATTERN}"),
    ("run.name=''", f"run.name: '' {PATTERN}"),
    ("run.name=größe", f"run.name: 'größe' {PATTERN}"),
]


@pytest.mark.parametrize(("override", "line"), BAD_VALUES)
def test_a_wrong_value_is_refused_with_its_key_and_what_to_write(override: str, line: str) -> None:
    assert refusal("gpt2-tiny", [override]) == f"recipe 'gpt2-tiny': {line}"


NOT_ROWS = "is not a multiple of model.context 128, and a batch is whole rows"
BAD_COMBINATIONS = [
    (
        {"model.width": 130},
        "model.width: 130 does not divide into model.heads 4 equal heads; write 128 or 132",
    ),
    (
        {"data.limit": 5, "data.split": "huggingface"},
        "data.limit: 5 is not for data.split huggingface, which draws from all rows; write data.split: documents",
    ),
    (
        {"data.dedup": "exact", "data.scatter": False},
        "data.scatter: false leaves copies far apart, but data.dedup: exact brings them together; leave data.scatter "
        "out",
    ),
    (
        {"data.scatter": True, "data.order": "sequential"},
        "data.scatter: true changes the order of the text, which data.order: sequential keeps; write data.order: "
        "shuffled",
    ),
    (
        {"training.batch_tokens": 1000},
        f"training.batch_tokens: 1000 {NOT_ROWS}; write 896 or 1024",
    ),
    (
        {"training.batch_tokens": 100},
        f"training.batch_tokens: 100 {NOT_ROWS}; write 128",
    ),
    (
        {"training": {"steps": 100, "epochs": 2.5}},
        "training.epochs: 2.5 is a second length beside training.steps 100; "
        "write training.steps: null, or leave training.epochs out",
    ),
    (
        {"training.eval_tasks": ["lambada", "squad"]},
        "training.eval_tasks: 'squad' is no task; write hellaswag or lambada, or e.g. lambada=FILE.jsonl",
    ),
    (
        {"training.eval_tasks": "lambada="},
        "training.eval_tasks: 'lambada=' is no task; write hellaswag or lambada, or e.g. lambada=FILE.jsonl",
    ),
    (
        {"training.eval_every": "epochs"},
        "training.eval_every: 'epochs' is neither a number of steps nor epoch; write e.g. training.eval_every: 100",
    ),
    (
        {"training.checkpoint_every": 0},
        "training.checkpoint_every: 0 is neither a number of steps nor epoch; "
        "write e.g. training.checkpoint_every: 100",
    ),
    (
        {"training.steps": 100, "schedule.warmup_steps": 101},
        "schedule.warmup_steps: 101 is more than training.steps 100; write 100 or less",
    ),
    (
        {"training.steps": 100, "schedule": {"kind": "wsd", "warmup_steps": 81}},
        "schedule.warmup_steps: 81 reaches into the last 20 of training.steps 100, "
        "in which schedule.decay_share lets the rate fall; write 80 or less",
    ),
    (
        {"schedule.decay_share": 0.5},
        "schedule.decay_share: 0.5 has no effect with schedule.kind cosine; "
        "write schedule.kind: wsd, or leave schedule.decay_share at 0.2",
    ),
    (
        {"schedule.end": 0, "schedule.kind": "constant"},
        "schedule.end: 0.0 has no effect with schedule.kind constant; "
        "write e.g. schedule.kind: cosine, or leave schedule.end at 0.1",
    ),
    (
        {"optimizer.momentum": 0.8},
        "optimizer.momentum: 0.8 has no effect with optimizer.kind adamw; "
        "write optimizer.kind: muon, or leave optimizer.momentum at 0.9",
    ),
    (
        {"optimizer.cautious": True},
        "optimizer.cautious: true has no effect with optimizer.kind adamw; "
        "write optimizer.kind: muon, or leave optimizer.cautious at false",
    ),
    (
        {"engine": "torch", "model.implementation": "huggingface", "optimizer.kind": "muon"},
        "optimizer.kind: muon is not for transformers' GPT-2, whose queries, keys and values are one matrix; "
        "write model.implementation: raygpt",
    ),
    (
        {"data.val": "v.txt", "data.split": "tail"},
        "data.split: tail needs a fraction, but data.val is the source 'v.txt'; "
        "write e.g. data.val: 0.05, or data.split: documents",
    ),
    (
        {"data.val": "v.txt", "data.split": "huggingface"},
        "data.split: huggingface needs a fraction, but data.val is the source 'v.txt'; "
        "write e.g. data.val: 0.05, or data.split: documents",
    ),
    (
        {"data.val": "stdlib"},
        "data.val: 'stdlib' is also trained on; write e.g. data.val: 0.05",
    ),
    (
        {"data.source": [{"source": "a", "weight": 1}, {"source": "a", "weight": 2}]},
        "data.source: 'a' is in the mixture twice; write it once",
    ),
    (
        {"cluster.mesh": {"data": -1, "fsdp": -1}},
        "cluster.mesh: data, fsdp are -1, and only one axis can be; write e.g. cluster.mesh.data: 1",
    ),
    (
        {"cluster.mesh.data": 2, "cluster.workers": "1..2"},
        "cluster.mesh: every axis is fixed, but cluster.workers is 1..2; "
        "write cluster.mesh.data: -1, or one number of workers",
    ),
    ({"cluster.mesh.tensor": 3}, "cluster.mesh.tensor: 3 does not divide model.heads 4; write 1"),
    (
        {"cluster.mesh.tensor": 4, "model.kv_heads": 2},
        "cluster.mesh.tensor: 4 does not divide model.kv_heads 2; write 2",
    ),
    (
        {"cluster.mesh.tensor": 4, "model.hidden": 50},
        "cluster.mesh.tensor: 4 does not divide model.hidden 50; write 2",
    ),
    (
        {"cluster.mesh.context": 24},
        "cluster.mesh.context: 24 does not divide model.context 128; write 8",
    ),
    (
        {"engine": "torch", "cluster.mesh.context": 2},
        "cluster.mesh.context: 2 is not for engine torch; write cluster.mesh.tensor instead, or engine: jax",
    ),
    (
        {"engine": "torch", "model.implementation": "huggingface", "cluster.mesh.tensor": 2},
        "cluster.mesh.tensor: 2 is not for transformers' GPT-2; "
        "write cluster.mesh.fsdp instead, or model.implementation: raygpt",
    ),
    (
        {"engine": "torch", "cluster.accelerator": "tpu"},
        "cluster.accelerator: tpu is not for engine torch, which knows no TPU; write engine: jax",
    ),
    (
        {"engine": "torch", "cluster.topology": "4x4", "cluster.accelerator_type": "TPU-V6E"},
        "cluster.topology: 4x4 is not for engine torch, which knows no TPU; write engine: jax",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), BAD_COMBINATIONS)
def test_a_combination_that_cannot_work_is_refused(overrides: dict[str, Any], line: str) -> None:
    assert refusal("gpt2-tiny", overrides) == f"recipe 'gpt2-tiny': {line}"


def test_wsd_takes_a_decay_share_and_a_mixture_may_be_sequential() -> None:
    assert load_recipe("gpt2-tiny", ["schedule.kind=wsd", "schedule.decay_share=0.5"]).schedule.decay_share == 0.5
    mixture = ["data.source=[{source: a, weight: 1}, {source: b, weight: 1}]", "data.order=sequential"]
    assert load_recipe("gpt2-tiny", mixture).data.order == "sequential"


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes", "char", "bpe:258", "my.json", "./folder"])
def test_tokenizers_are_known_by_their_shape(tokenizer: str) -> None:
    assert load_recipe("gpt2-tiny", [f"data.tokenizer={tokenizer}"]).data.tokenizer == tokenizer


@pytest.mark.parametrize("key", [key.name for key in keys() if key.type in ("int", "float", "text")])
def test_true_is_neither_a_number_nor_text(key: str) -> None:
    assert refusal("gpt2-tiny", {key: True}).startswith(f"recipe 'gpt2-tiny': {key}: ")


def test_of_several_problems_the_first_is_told_and_the_others_are_counted() -> None:
    assert refusal("gpt2-tiny", ["training.steps=x", "training.seed=y", "engine=jax2"]) == (
        "recipe 'gpt2-tiny': engine: 'jax2' is none of jax, torch; did you mean 'jax'? (and 2 more)"
    )


@pytest.mark.parametrize("override", ["training.steps", "=5", ""])
def test_an_override_without_a_value_says_what_is_expected(override: str) -> None:
    line = refusal("gpt2-tiny", [override])
    assert line == f"override {override!r}: is not key=value; write e.g. training.steps=20"


def test_an_override_that_is_not_yaml_is_refused() -> None:
    assert refusal("gpt2-tiny", ["data.source=[a"]) == (
        "override 'data.source=[a': line 1, column 3: not YAML "
        "(expected ',' or ']', but got '<stream end>'); fix it there"
    )


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
