"""Run directories to report on, as training would leave them."""

import json

from raygpt.corpus import tokenizers
from raygpt.recipes import load_recipe
from raygpt.runs.records import keep_sample, write_about


def make_run(home, name, lines, settings=None, samples=()):
    """a run of gpt2-tiny with these lines of metrics."""
    folder = home / name
    tokenizers.save(tokenizers.Bytes(), str(folder))
    (folder / "recipe.yaml").write_text(load_recipe("gpt2-tiny", {"run.name": name, **(settings or {})}).to_yaml())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, text in samples:
        keep_sample(str(folder), step, text)
    write_about(str(folder), {"engine": "jax 1.2.3", "device": "some accelerator"})
    return str(folder)


def logged(steps, loss, **more):
    """A line of training for each step, and its time: a second a step."""
    return [
        {"step": step, "loss": loss(step), "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 4096.0, "data_wait_s": 0.0}
        | {"tokens": step * 4096, "time": 1000.0 + step, **more}
        for step in steps
    ]
