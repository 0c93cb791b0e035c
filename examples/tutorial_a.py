"""Ray's GPT-2 tutorial for JAX in one file, on raygpt's parts: tokens, model, step, loop, validation, checkpoints.

python examples/tutorial_a.py TEXT         # GPT-2 small, 32 rows of 1,024 tokens a step
python examples/tutorial_a.py TEXT tiny    # the same for a laptop, in a minute
"""

import sys
from tempfile import TemporaryDirectory

import raygpt
from raygpt.corpus.mixture import open_mixture
from raygpt.recipes import load_recipe


def train(config):
    """What every worker runs."""
    import numpy as np
    from ray.train import Checkpoint, get_checkpoint, report

    from raygpt.corpus.feed import val_windows
    from raygpt.engines.jax.engine import JaxEngine

    recipe, corpus = config["recipe"], config["corpus"]
    context, training = recipe.model.context, recipe.training
    feed = corpus.feed(context=context, batch_rows=recipe.rows, order=recipe.data.order, seed=training.seed)
    engine = JaxEngine(recipe, corpus.tokenizer.vocab)
    saved = get_checkpoint()  # where workers were lost and are started again
    state = engine.restore(saved.path) if saved else engine.start()
    first = int(saved.path.rpartition("-")[2]) + 1 if saved else 1

    for step in range(first, training.steps + 1):
        batch = engine.put(feed.rows(step - 1, engine.rows))  # of the whole batch, only the rows that this worker needs
        state, metrics = engine.step(state, batch)
        if step % training.log_every == 0:
            report({"step": step, "train_loss": engine.read(metrics)["loss"]})
        if step % training.eval_every == 0:
            windows = val_windows([store.val for store in corpus.stores], context, recipe.rows)
            losses = np.concatenate([engine.window_losses(state, some) for some in windows])
            with TemporaryDirectory() as folder:  # for this worker's share; Ray puts those of all together
                engine.save(state, f"{folder}/share")
                engine.wait_for_save()
                share = Checkpoint.from_directory(f"{folder}/share")
                report({"step": step, "val_loss": float(losses.mean())}, share, checkpoint_dir_name=f"step-{step}")


if __name__ == "__main__":
    text, size = (*sys.argv[1:], "gpt2")[:2]
    small = {"training.steps": 40, "training.eval_every": 20, "data.tokenizer": "bytes"}
    recipe = load_recipe("tiny", small) if size == "tiny" else load_recipe("gpt2-124m-openwebtext")
    data = recipe.data.model_copy(update={"source": text, "val": 0.05, "split": "documents"})
    config = {"recipe": recipe, "corpus": open_mixture(data, "runs/stores")}
    watch = lambda said: print(*(f"{name} {value}" for name, value in said.items()), flush=True)  # noqa: E731
    result = raygpt.run(train, config, cluster={"workers": 2, "max_faults": 3}, watch=watch)
    if result.error:
        raise result.error
