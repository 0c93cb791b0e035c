"""Our scores beside lm-evaluation-harness's, item for item, on a folder that we exported."""

import json

import pytest

from raygpt.corpus.tokenizers import Gpt2
from raygpt.evaluation import tasks
from raygpt.inference.loaded import load, read
from raygpt.interop.exporting import export
from raygpt.interop.importing import import_run
from raygpt.interop.tokenizer_json import to_json

lm_eval = pytest.importorskip("lm_eval")
ITEMS = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A random model with GPT-2's tokenizer, imported."""
    import torch
    import transformers

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("theirs")
    ends = {"bos_token_id": 50256, "eos_token_id": 50256}
    config = transformers.GPT2Config(n_positions=64, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1, **ends)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(to_json(Gpt2.from_files())))
    return import_run(str(folder), str(tmp_path_factory.mktemp("ours") / "run"))


@pytest.fixture(scope="module")
def results(run, tmp_path_factory, harness_tasks):
    """The harness's, on the exported folder, with its own arithmetic and our items."""
    folder = tmp_path_factory.mktemp("export") / "model"
    export(read(run), str(folder))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "device": "cpu", "dtype": "float32"},
        tasks=harness_tasks,
        limit=ITEMS,
        log_samples=True,
        bootstrap_iters=0,
    )
    return found["results"], {name: sorted(s, key=lambda x: x["doc_id"]) for name, s in found["samples"].items()}


@pytest.mark.parametrize("name", ["hellaswag", "lambada"])
def test_every_item_has_the_harness_score(run, results, shared_data, name):
    file = {"hellaswag": "hellaswag_val.jsonl", "lambada": "lambada_test.jsonl"}[name]
    items = tasks.read_items(name, str(shared_data / "eval" / file), ITEMS)
    loaded = load(run)
    ours = tasks.item_likelihoods(loaded, name, items)
    totals, samples = results
    theirs = samples[f"{name}-here"]
    assert len(theirs) == ITEMS
    for item, scores, sample in zip(items, ours, theirs, strict=True):
        answers = [response[0] for response in sample["resps"]]
        assert [score.log_probability for score in scores] == pytest.approx([float(a[0]) for a in answers], abs=2e-3)
        assert [score.greedy for score in scores] == [str(a[1]) == "True" for a in answers]
        if name == "hellaswag":
            right = [choice == int(item["label"]) for choice in tasks.hellaswag_choices(item, scores)]
            assert right == [sample["acc"] == 1, sample["acc_norm"] == 1]
    found = tasks.TASKS[name].result(items, ours)
    for metric in ("acc", "acc_norm") if name == "hellaswag" else ("acc", "perplexity"):
        assert found[metric] == pytest.approx(totals[f"{name}-here"][f"{metric},none"], rel=1e-3)
