"""Ray's GPT-2 tutorial for JAX in one file, on raygpt's parts: tokens, model, step, loop, validation, checkpoints.

python examples/tutorial_a.py TEXT         # GPT-2 small, 32 rows of 1,024 tokens a step
python examples/tutorial_a.py TEXT tiny    # the same for a laptop, in a minute
"""

import sys
from pathlib import Path

import raygpt
from raygpt.corpus.mixture import open_mixture
from raygpt.recipes import load_recipe


def train(config):
    """What every worker runs."""
    import numpy as np
    import ray.train

    from raygpt.engines.jax.engine import JaxEngine
    from raygpt.runs.checkpoints import publish
    from raygpt.training.loop import val_windows

    recipe, corpus = config["recipe"], config["corpus"]
    rows = recipe.training.batch_tokens // recipe.model.context
    feed = corpus.feed(context=recipe.model.context, batch_rows=rows, order="shuffled", seed=2357)
    engine = JaxEngine(recipe, corpus.tokenizer.vocab)
    state = engine.start()

    for step in range(1, recipe.training.steps + 1):
        batch = engine.put(feed.rows(step - 1, engine.rows))  # of the whole batch, only the rows that this worker needs
        state, metrics = engine.step(state, batch)
        if step % recipe.training.log_every == 0:
            ray.train.report({"step": step, "train_loss": engine.read(metrics)["loss"]})
        if step % recipe.training.eval_every == 0:
            part = Path(config["folder"], f"part-{ray.train.get_context().get_world_rank()}")
            engine.save(state, str(part))  # this worker's share of parameters and optimizer, in the background
            windows = val_windows([store.val for store in corpus.stores], engine.context, rows)
            losses = np.concatenate([engine.score(state, part) for part in windows])
            engine.wait_for_save()
            publish(part, f"{config['folder']}/step-{step}")
            ray.train.report({"step": step, "val_loss": float(losses.mean())})


if __name__ == "__main__":
    text, size = (*sys.argv[1:], "gpt2")[:2]
    small = {"training.steps": 40, "training.eval_every": 20, "data.tokenizer": "bytes"}
    recipe = load_recipe("tiny", small) if size == "tiny" else load_recipe("gpt2-124m-openwebtext")
    data = recipe.data.model_copy(update={"source": text, "val": 0.05, "split": "documents"})
    corpus = open_mixture(data, "runs/stores")
    result = raygpt.run(
        train,
        {"recipe": recipe, "corpus": corpus, "folder": raygpt.storage.absolute("runs/tutorial")},
        cluster={"workers": 2},
        watch=lambda report: print(*(f"{name} {value}" for name, value in report.items()), flush=True),
    )
    if result.error:
        raise result.error
