"""The loop of a small run, in this process, with an engine that computes nothing: for its tests."""

import time
from pathlib import Path

import numpy as np
import pytest

from raygpt.corpus import tokenizers
from raygpt.corpus.feed import Feed
from raygpt.corpus.nanogpt import open_nanogpt
from raygpt.recipes import load_recipe
from raygpt.testing.session import LocalSession
from raygpt.training.events import (
    Started,
    StepLogged,
    Validated,
)
from raygpt.training.loop import Loop
from raygpt.training.spec import RunSpec

CONTEXT, ROWS, VOCAB = 16, 4, 257
PATTERN = np.frombuffer(b"the cat sat on the mat; ", dtype=np.uint8)  # 24 tokens: no window is like the next


@pytest.fixture
def make_spec(tmp_path_factory):
    """The spec of a run on a text that repeats itself, with a validation part of 10 windows and a rest."""

    def make(feed=None, **changes):
        store, run = (tmp_path_factory.mktemp(name) for name in ("store", "run"))
        np.resize(PATTERN, 2000).astype("<u2").tofile(store / "train.bin")
        np.resize(PATTERN[::-1], 10 * CONTEXT + 9).astype("<u2").tofile(store / "val.bin")
        opened = open_nanogpt(str(store), "bytes")
        tokenizers.save(opened.tokenizer, str(run))
        settings = {
            "model": {"layers": 1, "heads": 2, "width": 32, "context": CONTEXT},
            "optimizer.learning_rate": 0.01,
            "schedule.warmup_steps": 0,
            "training": {"batch_tokens": ROWS * CONTEXT, "steps": 10, "log_every": 3, "eval_every": 4},
        }
        recipe = load_recipe("gpt2-tiny", {**settings, **changes})
        feed = feed or Feed([opened.train], context=CONTEXT, batch_rows=ROWS, seed=recipe.training.seed)
        return RunSpec(recipe, feed, (opened.val,), str(run))

    return make


class FakeEngine:
    """Computes nothing, in its own time, and notes what it is given. A step's metrics are the number of the step."""

    context, device_count = CONTEXT, 1

    def __init__(self, rows=(0, 1, 2, 3), step_s=0.0, micro_rows=4, losses=None, spikes=None):
        self.rows, self._step_s, self.micro_rows = list(rows), step_s, micro_rows
        self.batches, self.scored, self.graded = [], [], []
        self._losses, self._spikes = losses or {}, spikes or {}

    def start(self):
        return 0

    def restore(self, folder):
        return int(Path(folder, "state").read_text())

    def load(self, weights):
        return weights.step

    def save(self, state, folder):
        Path(folder).mkdir(parents=True)
        Path(folder, "state").write_text(str(state))

    def wait_for_save(self):
        pass

    def put(self, windows):
        return windows

    def step(self, state, batch):
        time.sleep(self._step_s)
        self.batches.append(batch)
        return state + 1, state + 1

    def read(self, metrics):
        loss = self._losses.get(metrics, float(metrics))
        return {"loss": loss, "grad_norm": 0.5, "lr": 0.1, "skipped": 0.0, "spikes": self._spikes.get(metrics, 0.0)}

    def spikes(self, state):
        return self._spikes.get(state, 0.0)

    def window_losses(self, state, windows):
        self.scored.append(windows)
        return windows.mean(1) + state

    def token_logprobs(self, state, windows):
        """Every token is as likely as it is large, and the likeliest after it is itself where the state is even."""
        self.graded.append(windows)
        return -windows[:, 1:].astype(float), np.full(windows[:, 1:].shape, state % 2 == 0)

    def prefill(self, state, ids):
        return np.zeros((len(ids), VOCAB)), None

    def decode(self, state, ids, start, cache):
        return np.zeros((len(ids), VOCAB)), None

    def describe(self):
        return {"device": "cpu", "devices": "1", "precision": "fp32"}


def run(spec, engine, orders=()):
    """The events of a run: of the start, of train and of validation; others may come between."""
    session = LocalSession(queued_orders=list(orders))
    Loop(spec, engine, session).run()
    return session.events


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def lines_of(events, kind):
    """As metrics.jsonl has them."""
    return [event.line() for event in of(events, kind)]


def steps_of(events, kind):
    return [event.step for event in of(events, kind)]


def texts_of(events, kind):
    return [event.text for event in of(events, kind)]


def kinds(events):
    """[("train", 3), ("val", 4), …]"""
    told = []
    for event in events:
        match event:
            case Started():
                told.append(("start", None))
            case StepLogged(step):
                told.append(("train", step))
            case Validated(step):
                told.append(("val", step))
    return told


@pytest.fixture
def jax_engine():
    """Of a spec, on one device."""
    jax = pytest.importorskip("jax")
    from raygpt.engines.jax.engine import JaxEngine

    jax.config.update("jax_disable_most_optimizations", True)
    yield lambda spec: JaxEngine(spec.recipe, VOCAB, devices=jax.devices()[:1])
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def make_engine(jax_engine):
    """Of a spec, by its recipe."""

    def make(spec):
        if spec.recipe.engine == "jax":
            return jax_engine(spec)
        pytest.importorskip("torch", reason="needs the extra torch")
        from raygpt.engines.torch.engine import TorchEngine

        return TorchEngine(spec.recipe, vocab=VOCAB)

    return make
