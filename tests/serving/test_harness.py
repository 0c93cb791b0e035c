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
ITEMS = 12


@pytest.mark.parametrize("engine", ["jax", pytest.param("torch", marks=pytest.mark.extended)])
def test_the_harness_over_http_scores_every_item_as_raygpt_eval_does(
    engine, tmp_path, harness_tasks, shared_data, monkeypatch, compiled_quickly
):
    import torch
    import transformers

    monkeypatch.setenv("OPENAI_API_KEY", "any")
    torch.manual_seed(3)
    ends = {"bos_token_id": 50256, "eos_token_id": 50256}
    config = transformers.GPT2Config(n_positions=192, n_embd=32, n_layer=2, n_head=4, initializer_range=0.1, **ends)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(to_json(Gpt2.from_files())))
    run = import_run(str(tmp_path / "theirs"), str(tmp_path / "run"), engine)
    model = RunModel(Options(run.folder, slots=4))
    try:
        with serving({"here": model}) as address:
            found = lm_eval.simple_evaluate(
                model="local-completions",
                model_args={
                    "model": "here",
                    "base_url": f"{address}/v1/completions",
                    "tokenizer_backend": "remote",
                    "max_length": 192,
                    "num_concurrent": 3,
                },
                tasks=harness_tasks,
                limit=ITEMS,
                log_samples=True,
                bootstrap_iters=0,
            )
    finally:
        model.close()
    loaded = load(run)
    for name in ("hellaswag", "lambada"):
        file = {"hellaswag": "hellaswag_val.jsonl", "lambada": "lambada_test.jsonl"}[name]
        items = tasks.read_items(name, str(shared_data / "eval" / file), ITEMS)
        ours = tasks.item_likelihoods(loaded, name, items)
        samples = sorted(found["samples"][f"{name}-here"], key=lambda sample: sample["doc_id"])
        for scores, sample in zip(ours, samples, strict=True):
            answers = [response[0] for response in sample["resps"]]
            assert [score.log_probability for score in scores] == pytest.approx(
                [float(answer[0]) for answer in answers], rel=1e-6, abs=1e-4
            )
            assert [score.greedy for score in scores] == [str(answer[1]) == "True" for answer in answers]
