"""Stock lm-evaluation-harness over HTTP gives what `raygpt eval` gives."""

import json

import pytest
from local_server import serving

from raygpt.corpus.tokenizers import Gpt2
from raygpt.evaluation import tasks
from raygpt.inference.loaded import load
from raygpt.interop.importing import import_run
from raygpt.interop.tokenizer_json import to_json
from raygpt.serving.model import Options, RunModel

lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval[api]")
FILES = {"hellaswag": "hellaswag_val.jsonl", "lambada": "lambada_test.jsonl"}
CONTEXT = 256  # no item is cut: the harness would keep one token less than we do


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder with a small random model of GPT-2's vocabulary, as transformers writes it."""
    import torch
    import transformers

    torch.manual_seed(3)
    folder, ends = tmp_path_factory.mktemp("theirs"), {"bos_token_id": 50256, "eos_token_id": 50256}
    config = transformers.GPT2Config(n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, initializer_range=0.1, **ends)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(to_json(Gpt2.from_files())))
    return folder


@pytest.mark.parametrize(
    ("engine", "counts"),
    [
        ("jax", {"hellaswag": 12, "lambada": 12}),
        pytest.param("torch", {"hellaswag": 12, "lambada": 12}, marks=pytest.mark.extended),
        pytest.param("jax", {"hellaswag": 200, "lambada": 500}, marks=pytest.mark.slow),
        pytest.param("torch", {"hellaswag": 200, "lambada": 500}, marks=pytest.mark.slow),
    ],
)
def test_the_harness_over_http_scores_every_item_as_raygpt_eval_does(
    engine, counts, theirs, tmp_path, harness_tasks, shared_data, monkeypatch, compiled_quickly
):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    run = import_run(str(theirs), str(tmp_path / "run"), engine)
    model = RunModel(Options(run.folder, slots=4))
    try:
        with serving({"here": model}) as address:
            samples = evaluated(address, harness_tasks, counts)
    finally:
        model.close()
    loaded, largest = load(run), 0.0
    for name, count in counts.items():
        items = tasks.read_items(name, str(shared_data / "eval" / FILES[name]), count)
        for scores, sample in zip(tasks.item_likelihoods(loaded, name, items), samples[name], strict=True):
            answers = [response[0] for response in sample["resps"]]
            ours, over_http = [score.log_probability for score in scores], [float(answer[0]) for answer in answers]
            largest = max(largest, *(abs(a - b) for a, b in zip(ours, over_http, strict=True)))
            assert over_http == pytest.approx(ours, rel=1e-6, abs=1e-4)
            assert [score.greedy for score in scores] == [str(answer[1]) == "True" for answer in answers]
    print(f"{engine}: log-probabilities differ by {largest:.1e} at most")


def evaluated(address, harness_tasks, counts):
    """The harness's samples of each task, in the order of its items."""
    given = {
        "model": "here",
        "base_url": f"{address}/v1/completions",
        "tokenizer_backend": "remote",
        "max_length": CONTEXT,
        "num_concurrent": 3,
    }
    found = {}
    for name, count in counts.items():
        (task,) = (task for task in harness_tasks if name in str(task))
        results = lm_eval.simple_evaluate(
            "local-completions", given, [task], limit=count, log_samples=True, bootstrap_iters=0
        )
        (samples,) = results["samples"].values()
        found[name] = sorted(samples, key=lambda sample: sample["doc_id"])
    return found
