"""Recipes that are refused: unknown keys, wrong values, combinations that cannot work, each in one line.

A line is compared as a whole, after "recipe 'gpt2-tiny': ".
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_config import refusal

from raygpt.config import Model, Optimizer
from raygpt.engines import muon
from raygpt.models import describe
from raygpt.recipes import load_recipe
from raygpt.recipes.explain import OTHER_NAMES, keys
from raygpt.runs import open_run

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
        {"model.preset": "llama", "model.layers": 24},
        "model.heads: is missing beside model.layers 24, and preset llama has no size of its own; "
        "write model.depth instead, or all of layers, heads and width",
    ),
    (
        {"model": {"preset": "qwen3", "depth": None, "heads": 4, "width": 256}},
        "model.layers: is missing beside model.heads 4, and preset qwen3 has no size of its own; "
        "write model.depth instead, or all of layers, heads and width",
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
        {"training.eval_tasks": ["lambada", "lambada=x.jsonl"]},
        "training.eval_tasks: lambada is there twice; leave one out",
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
        "schedule.end: 0 has no effect with schedule.kind constant; "
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
        {"model.rope_base": 500},
        "model.rope_base: 500 has no effect with model.position learned; "
        "write model.position: rope, or leave model.rope_base at 10000",
    ),
    (
        {"model.preset": "nanochat", "optimizer": {"kind": "muon", "gain_rate": 0.1}},
        "optimizer.gain_rate: 0.1 has no effect with a model that has no gains, biases or gates; "
        "write e.g. model.norm_gain: true, or leave optimizer.gain_rate at 0.02",
    ),
    (
        {"model": {"preset": "llama", "tied_head": True}, "optimizer": {"kind": "muon", "embedding_rate": 0.1}},
        "optimizer.embedding_rate: 0.1 has no effect with a model whose only table is trained as its head; "
        "write optimizer.head_rate: 0.1, or leave optimizer.embedding_rate at 0.2",
    ),
    (
        {"optimizer": {"kind": "muon", "cautious": False}},
        "optimizer.cautious: false has no effect with optimizer.weight_decay 0; "
        "write e.g. optimizer.weight_decay: 0.1, or leave optimizer.cautious at true",
    ),
    (
        {"optimizer": {"kind": "muon", "decay": "all"}},
        "optimizer.decay: all has no effect with optimizer.weight_decay 0; "
        "write e.g. optimizer.weight_decay: 0.1, or leave optimizer.decay at matrices",
    ),
    (
        {"optimizer": {"kind": "muon", "momentum": 0.85, "momentum_warmup": 50}},
        "optimizer.momentum_warmup: 50 has no effect with optimizer.momentum 0.85, since it can only rise from 0.85; "
        "write e.g. optimizer.momentum: 0.9, or leave optimizer.momentum_warmup at 100",
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
    (
        {"cluster.resources_per_worker": {"GPU": 0.5}, "cluster.workers": "1..2"},
        "cluster.resources_per_worker: with 0.5 of a GPU each, two of cluster.workers 1..2 would be on one GPU, where "
        "they cannot exchange gradients; write cluster.workers: 1, or leave GPU out",
    ),
    (
        {"training.accumulation": 33},
        "training.accumulation: 33 is more than the 32 rows of a batch; write 32 or less",
    ),
    (
        {"engine": "torch", "cluster.mesh.fsdp": 4, "cluster.workers": "5..7"},
        "cluster.workers: no number in 5..7 fills cluster.mesh, data=-1 × fsdp=4; write e.g. cluster.workers: 4..7",
    ),
    (
        {"cluster.accelerator": "gpu", "cluster.mesh.tensor": 4, "cluster.workers": "1..3"},
        "cluster.workers: no number in 1..3 fills cluster.mesh, data=-1 × tensor=4; write e.g. cluster.workers: 1..4",
    ),
    (
        {"engine": "torch", "cluster.mesh.tensor": -1, "cluster.workers": "5..999999999"},
        "cluster.workers: no number in 5..999999999 fills cluster.mesh, tensor=-1; "
        "write cluster.mesh.data: -1 in place of tensor: -1",
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
    (
        {"engine": "torch", "cluster.resources_per_worker": {"GPU": 2}, "cluster.workers": "2..4"},
        "cluster.resources_per_worker: a worker of engine torch uses one GPU, not 2; write cluster.workers: 4..8 and "
        "leave GPU out",
    ),
    (
        {"model.position": "rope", "model.rope_share": 0.01},
        "model.rope_share: 0.01 of a head of 32 is not one pair to rotate; write 0.0625 or more",
    ),
    (
        {"model.position": "rope", "model.rope_share": 0.0208, "model.head_size": 96},
        "model.rope_share: 0.0208 of a head of 96 is not one pair to rotate; write 0.0209 or more",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), BAD_COMBINATIONS)
def test_a_combination_that_cannot_work_is_refused(overrides: dict[str, Any], line: str) -> None:
    assert refusal("gpt2-tiny", overrides) == f"recipe 'gpt2-tiny': {line}"


@pytest.mark.parametrize(
    "changes",
    [
        {"training.accumulation": 32},
        {"cluster.resources_per_worker": {"GPU": 0.6}, "cluster.workers": 2},  # each has a GPU of its own
        {"cluster.resources_per_worker": {"GPU": 0.5}, "cluster.workers": 2, "cluster.placement": "STRICT_SPREAD"},
        {"cluster.resources_per_worker": {"GPU": 0.5}, "cluster.workers": 1},
    ],
)
def test_micro_batches_of_a_row_and_workers_with_a_gpu_for_each_are_possible(changes: dict[str, Any]) -> None:
    load_recipe("gpt2-tiny", changes)


def test_a_run_of_an_earlier_version_is_read_with_settings_that_are_refused_now(tmp_path: Path) -> None:
    recipe = load_recipe("gpt2-tiny").to_dict()
    recipe["training"]["accumulation"] = 33
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert open_run(str(tmp_path)).recipe.training.accumulation == 33


# What the rates of Muon's AdamW are for: each needs one of these.
WITHOUT = {"preset": "nanochat", "depth": 2, "tied_head": True}


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ({"norm_gain": True}, {"gain_rate": 0.1}),
        ({"bias": True}, {"gain_rate": 0.1}),
        ({"x0_mixing": True}, {"gain_rate": 0.1}),
        ({"head_gates": True}, {"gain_rate": 0.1}),
        ({"value_embeddings": 1}, {"gain_rate": 0.1, "embedding_rate": 0.1}),
        ({"tied_head": False}, {"embedding_rate": 0.1}),
        ({"position": "learned"}, {"embedding_rate": 0.1}),
        ({}, {"weight_decay": 0.1, "cautious": False, "decay": "all"}),
        ({}, {"momentum": 0.86, "momentum_warmup": 3}),
        ({}, {"momentum": 0.5, "weight_decay": 0, "gain_rate": 0.02, "embedding_rate": 0.2}),  # the defaults
    ],
)
def test_keys_of_muon_are_taken_with_a_model_that_they_change(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    whole = {**WITHOUT, **model}
    recipe = load_recipe("gpt2-tiny", {"model": whole, "optimizer": {"kind": "muon", **optimizer}})
    roles = {parameter.role for parameter in describe(recipe.model, 300).parameters}
    assert "gain_rate" not in optimizer or optimizer["gain_rate"] == 0.02 or roles & {"gain", "bias", "head_gate"}
    assert "embedding_rate" not in optimizer or optimizer["embedding_rate"] == 0.2 or "embedding" in roles


def test_the_models_without_a_use_for_a_rate_have_no_such_parameters() -> None:
    assert {parameter.role for parameter in describe(Model.model_validate(WITHOUT), 300).parameters} == {
        "matrix",
        "head",
    }


@pytest.mark.parametrize(("momentum", "has_effect"), [(0.85, False), (0.86, True)])
def test_a_momentum_that_does_not_rise_is_that_of_the_engines(momentum: float, has_effect: bool) -> None:
    values = {"kind": "muon", "momentum": momentum}
    found = {muon.momentum_at(Optimizer(**values, momentum_warmup=steps), np.float64(2)) for steps in (3, 100)}
    assert (len(found) == 2) == has_effect
    idle = Optimizer(**values, momentum_warmup=3).without_effect(Model())
    assert (idle is None) == has_effect


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
