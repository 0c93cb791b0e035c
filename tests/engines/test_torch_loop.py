"""The training loop with the PyTorch engine: it learns, saves, and goes on where it was interrupted."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

from raygpt.corpus import tokenizers  # noqa: E402
from raygpt.corpus.feed import Feed  # noqa: E402
from raygpt.corpus.nanogpt import open_nanogpt  # noqa: E402
from raygpt.engines.torch.engine import TorchEngine  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402
from raygpt.testing.session import LocalSession  # noqa: E402
from raygpt.training.events import Resumed, StepLogged, Validated  # noqa: E402
from raygpt.training.loop import Loop  # noqa: E402
from raygpt.training.spec import RunSpec  # noqa: E402

CONTEXT, ROWS = 16, 4
PATTERN = np.frombuffer(b"the cat sat on the mat; ", dtype=np.uint8)


@pytest.fixture
def train(tmp_path):
    """Train to a step in a run directory, from where that stands: {step: loss}, and the events."""
    np.resize(PATTERN, 2000).astype("<u2").tofile(tmp_path / "train.bin")
    np.resize(PATTERN, 10 * CONTEXT + 9).astype("<u2").tofile(tmp_path / "val.bin")
    opened = open_nanogpt(str(tmp_path), "bytes")

    def run(name, steps):
        (tmp_path / name).mkdir(exist_ok=True)
        tokenizers.save(opened.tokenizer, str(tmp_path / name))
        recipe = load_recipe(
            "gpt2-tiny",
            {
                "engine": "torch",
                "model": {"layers": 1, "heads": 2, "width": 32, "context": CONTEXT, "dropout": 0.1},
                "optimizer.learning_rate": 0.01,
                "schedule": {"kind": "constant", "warmup_steps": 0},
                "training": {"batch_tokens": ROWS * CONTEXT, "steps": steps, "log_every": 1, "checkpoint_every": 10},
            },
        )
        feed = Feed([opened.train], context=CONTEXT, batch_rows=ROWS, seed=recipe.training.seed)
        spec, session = RunSpec(recipe, feed, (opened.val,), str(tmp_path / name)), LocalSession()
        Loop(spec, TorchEngine(recipe, spec.tokenizer.vocab, device="cpu"), session).run()
        return {event.step: event.loss for event in session.events if isinstance(event, StepLogged)}, session.events

    return run


def test_it_learns_and_goes_on_bit_for_bit_where_it_was_interrupted(train):
    whole, events = train("whole", 40)
    assert whole[1] == pytest.approx(np.log(257), rel=0.05)
    assert whole[40] < 2
    assert [event.val_loss for event in events if isinstance(event, Validated)][-1] < 2
    before, _ = train("in two parts", 20)
    after, events = train("in two parts", 40)
    assert 20 in [event.step for event in events if isinstance(event, Resumed)]
    assert min(after) == 21
    assert {**before, **after} == whole
