"""Trains the runs of a sweep in this process: the real loop, checkpoints and forks, without Ray and transformers."""

import threading
from pathlib import Path

import numpy as np

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.errors import DivergedError
from raygpt.runs import RECIPE
from raygpt.sweep.runner import Runner
from raygpt.testing.session import LocalSession
from raygpt.training import prepared
from raygpt.training.loop import Loop

SMALL = {
    "model": {"layers": 1, "heads": 2, "width": 32, "context": 16},
    "data": {"tokenizer": "bytes"},
    "training": {"steps": 120, "batch_tokens": 64, "eval_every": 1000, "checkpoint_every": 10, "log_every": 10},
}


class Bigrams:
    """An engine: logits of a letter after a letter, learned by Adam with the recipe's rate and schedule."""

    context, device_count, micro_rows = 16, 1, 16

    def __init__(self, recipe):
        self._recipe, self.rows = recipe, list(range(recipe.rows))

    def start(self):
        return {"step": np.array(0), **{name: np.zeros((26, 26)) for name in ("logits", "mean", "square")}}

    def restore(self, folder):
        return dict(np.load(Path(folder, "state.npz")))

    def save(self, state, folder):
        Path(folder).mkdir(parents=True)
        np.savez(Path(folder, "state.npz"), **state)

    def wait_for_save(self):
        pass

    def put(self, windows):
        return windows

    def step(self, state, batch):
        before, after = batch[:, :-1].ravel() - 97, batch[:, 1:].ravel() - 97
        likely, step = _likely(state["logits"]), int(state["step"])
        gradient = np.zeros((26, 26))
        np.add.at(gradient, before, likely[before])
        np.add.at(gradient, (before, after), -1.0)
        gradient /= len(before)
        mean, square = 0.9 * state["mean"] + 0.1 * gradient, 0.95 * state["square"] + 0.05 * gradient**2
        rate = 10 * self._recipe.optimizer.learning_rate
        rate *= float(self._recipe.schedule.fraction(step, self._recipe.steps, np))
        logits = state["logits"] - rate * (mean / (np.sqrt(square) + 1e-8))
        with np.errstate(divide="ignore"):  # a rate that is much too high
            loss = float(-np.log(likely[before, after]).mean())
        return {"step": np.array(step + 1), "logits": logits, "mean": mean, "square": square}, loss

    def read(self, metrics):
        return {"loss": metrics, "grad_norm": 0.5, "lr": 0.1, "skipped": 0.0, "spikes": 0.0}

    def spikes(self, state):
        return 0.0

    def window_losses(self, state, windows):
        likely = _likely(state["logits"])
        return -np.log(likely[windows[:, :-1] - 97, windows[:, 1:] - 97]).mean(1)

    def prefill(self, state, ids):
        return np.zeros((len(ids), 257)), None

    def decode(self, state, ids, start, cache):
        return np.zeros((len(ids), 257)), None

    def describe(self):
        return {"device": "cpu", "devices": "1", "precision": "fp32"}


def _likely(logits):
    raised = np.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


class Killed(BaseException):
    """The process was killed."""


def write_text(folder):
    """Letters, each after one of the letters that are likely after it."""
    random = np.random.default_rng(0)
    likely = np.cumsum(random.dirichlet(np.full(26, 0.2), 26), axis=1)
    letters = [0]
    for draw in random.random(24000):
        letters.append(min(25, int(np.searchsorted(likely[letters[-1]], draw))))
    tokens = np.array(letters, "<u2") + 97
    folder.mkdir()
    tokens[:21000].tofile(folder / "train.bin")
    tokens[21000:].tofile(folder / "val.bin")
    return folder


class Here:
    """Trains runs; after `killed_after` of them the process dies in the middle of the next."""

    def __init__(self):
        self.trained = []  # name and last step of each leg
        self.killed_after = None

    def train(self, recipe, watch, until):
        """The error, if any, as a Runner expects it."""
        run = prepared.prepare_run(recipe, lambda progress: None, False, spare_cpus=lambda: 0)
        folder, name = run.totals.run_folder, run.recipe.run.name
        storage.write_bytes(storage.join(folder, RECIPE), run.original.to_yaml().encode())
        tokenizers.save(run.corpus.tokenizer, folder)
        is_killed = self.killed_after is not None and len(self.trained) == self.killed_after
        spec = run.spec(None, until if not is_killed else run.after + 7)
        session = LocalSession()
        try:
            Loop(spec, Bigrams(run.recipe), session).run()
        except DivergedError as error:
            return error
        if is_killed:
            raise Killed
        self.trained.append((name, until or run.recipe.steps))
        for event in session.events:
            watch(event)
        return None


def make_runner(folder, here, at_once=1):
    """A Runner of this process."""
    return Runner(folder, at_once, lambda leg, event: None, lambda: None, threading.Event(), here.train)
