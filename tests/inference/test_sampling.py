"""Sampling: the cache changes nothing, and draws follow the model's distribution."""

import numpy as np
import pytest

from raygpt.errors import RaygptError
from raygpt.inference.sampling import sample

LOGITS = np.array([2.0, 1.0, 0.0, -1.0, -2.0, 0.5], dtype=np.float32)


class Fixed:
    """An engine whose next token never depends on the last; it notes what it was asked."""

    def __init__(self, logits=LOGITS, context=64):
        self.context, self._logits, self.read = context, logits, []

    def prefill(self, state, ids):
        self.read.append((ids.tolist(), 0))
        return np.tile(self._logits, (len(ids), 1)), 0

    def decode(self, state, ids, start, cache):
        assert cache == len(self.read) - 1, "the cache of the step before"
        self.read.append((ids.tolist(), start))
        return np.tile(self._logits, (len(ids), 1)), cache + 1


def prompts(rows=1, time=1):
    return np.arange(rows * time, dtype=np.int32).reshape(rows, time)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def chi_square(drawn, probabilities):
    """Of the counts against what the probabilities let one expect."""
    counts = np.bincount(drawn.ravel(), minlength=len(probabilities))
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = drawn.size * probabilities[possible]
    return ((counts[possible] - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "probabilities"),
    [
        (1.0, None, softmax(LOGITS)),
        (1.0, 100, softmax(LOGITS)),  # more than there are
        (0.5, None, softmax(2 * LOGITS)),
        (3.0, None, softmax(LOGITS / 3)),
        (1.0, 3, softmax(np.where(LOGITS >= 0.5, LOGITS, -np.inf))),
        (2.0, 2, softmax(np.where(LOGITS >= 1.0, LOGITS / 2, -np.inf))),
    ],
)
def test_draws_follow_the_softmax_of_the_logits(temperature, top_k, probabilities):
    drawn = sample(Fixed(), None, prompts(rows=500), 40, temperature=temperature, top_k=top_k, seed=7)
    assert drawn.shape == (500, 40)
    assert chi_square(drawn, probabilities) < 20.5  # 5 degrees of freedom exceed it once in 1000


def test_the_chi_square_test_would_notice_another_temperature():
    drawn = sample(Fixed(), None, prompts(rows=500), 40, temperature=1.1, top_k=None, seed=7)
    assert chi_square(drawn, softmax(LOGITS)) > 50


def test_rows_and_positions_are_drawn_independently():
    drawn = sample(Fixed(np.zeros(2)), None, prompts(rows=400), 40, temperature=1.0, seed=3)
    assert abs(drawn.mean() - 0.5) < 0.02
    assert abs((drawn[:-1] == drawn[1:]).mean() - 0.5) < 0.02
    assert abs((drawn[:, :-1] == drawn[:, 1:]).mean() - 0.5) < 0.02


def test_a_seed_repeats_its_draws_and_another_does_not():
    one, same, other = (sample(Fixed(), None, prompts(rows=3), 30, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_temperature_zero_takes_the_likeliest_each_time():
    assert sample(Fixed(), None, prompts(), 5, temperature=0.0).tolist() == [[0] * 5]


def test_top_one_takes_the_likeliest_at_any_temperature():
    assert sample(Fixed(), None, prompts(), 5, temperature=9.0, top_k=1).tolist() == [[0] * 5]


def test_the_model_reads_the_prompt_once_and_then_each_token_where_it_stands():
    engine = Fixed()
    drawn = sample(engine, None, prompts(rows=2, time=3), 4)
    assert engine.read == [
        ([[0, 1, 2], [3, 4, 5]], 0),
        (drawn[:, 0:1].tolist(), 3),
        (drawn[:, 1:2].tolist(), 4),
        (drawn[:, 2:3].tolist(), 5),  # the last token is not read: nothing follows it
    ]


@pytest.mark.parametrize(
    ("time", "tokens", "more"), [(1, 5, 5), (6, 5, 2), (7, 5, 1), (8, 5, 0), (1, 100, 7), (1, 0, 0)]
)
def test_prompt_and_text_together_never_outgrow_the_context(time, tokens, more):
    assert sample(Fixed(context=8), None, prompts(time=time), tokens).shape == (1, more)


def test_a_prompt_longer_than_the_context_is_refused():
    with pytest.raises(RaygptError) as caught:
        sample(Fixed(context=8), None, prompts(time=9), 1)
    assert str(caught.value) == "the prompt has 9 tokens, and the model sees 8; shorten it"


# With the JAX engine

VOCAB = 100  # the table has 128 rows


@pytest.fixture(scope="module")
def trained():
    """A small JAX engine and a state whose logits are far apart."""
    jax = pytest.importorskip("jax")
    from raygpt.engines.jax.engine import JaxEngine
    from raygpt.recipes import load_recipe

    sizes = {"layers": 2, "heads": 4, "width": 32, "context": 24}
    recipe = load_recipe("gpt2-tiny", {"model": sizes, "training.batch_tokens": 4 * 24, "cluster.mesh.fsdp": 2})
    jax.config.update("jax_disable_most_optimizations", True)  # quicker to compile
    engine = JaxEngine(recipe, VOCAB, devices=jax.devices()[:2])
    state = engine.start()
    yield engine, state._replace(parameters=jax.tree.map(lambda leaf: leaf * 10, state.parameters))
    jax.config.update("jax_disable_most_optimizations", False)


def test_greedy_text_is_the_same_with_a_cache_as_without(trained):
    engine, state = trained
    prompt = np.random.default_rng(0).integers(0, VOCAB, (3, 5)).astype(np.int32)
    drawn = sample(engine, state, prompt, 19, temperature=0.0)
    assert drawn.shape == (3, 19)
    assert drawn.dtype == np.int32
    assert len(np.unique(drawn)) > 10, "a text worth comparing"
    np.testing.assert_array_equal(drawn, greedy_without_cache(engine, state, prompt, 19))


def greedy_without_cache(engine, state, prompt, tokens):
    """A whole forward pass for each token; what is behind the last one is masked by causality."""
    import jax
    import jax.numpy as jnp

    from raygpt.engines.jax.attention import xla
    from raygpt.engines.jax.model import GPT

    gpt = GPT(engine.recipe.model, jnp.float32, xla)
    forward = jax.jit(lambda parameters, ids: gpt(parameters, ids) @ parameters["tokens"][:VOCAB].T)
    ids = np.zeros((len(prompt), engine.context), dtype=np.int32)
    ids[:, : prompt.shape[1]] = prompt
    for place in range(prompt.shape[1], prompt.shape[1] + tokens):
        ids[:, place] = np.asarray(forward(state.parameters, ids))[:, place - 1].argmax(-1)
    return ids[:, prompt.shape[1] : prompt.shape[1] + tokens]


def test_ids_that_only_pad_the_table_are_never_drawn(trained):
    engine, state = trained
    table = state.parameters["tokens"]
    loud = table.at[VOCAB:].set(1e3 * table[0])  # first or last of all, were they real
    state = state._replace(parameters={**state.parameters, "tokens": loud})
    drawn = sample(engine, state, np.zeros((40, 1), dtype=np.int32), 23, temperature=5.0, top_k=None)
    assert VOCAB // 2 < drawn.max() < VOCAB
