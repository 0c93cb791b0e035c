"""Text from a model: what is certain is shown, what stops it is left out, and the cache changes nothing."""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

from raygpt.config import Model
from raygpt.corpus.tokenizers import Bytes, Char
from raygpt.engines import make_slots
from raygpt.engines.base import Drawn
from raygpt.engines.token_sampling import draw
from raygpt.errors import RaygptError
from raygpt.inference import generate as module
from raygpt.inference.generate import Sample, SamplingOptions, generate, generate_in_groups
from raygpt.inference.sampling import encode_prompt, sample
from raygpt.interop.gpt2 import from_hugging_face
from raygpt.models import describe


def written(text, stop=()):
    """A sample that got a text byte by byte: the sample, and what became certain with each."""
    grown = Sample(Bytes(), stop)
    return grown, [grown.add(byte) for byte in text.encode()]


def test_a_character_is_shown_when_all_its_bytes_are_there():
    grown, shown = written("aé€")
    assert shown == ["a", "", "é", "", "", "€"]
    assert grown.text == "aé€"


def test_bytes_that_never_become_a_character_show_in_the_end():
    grown = Sample(Bytes())
    assert [grown.add(ord("a")), grown.add(0xC3), grown.finish()] == ["a", "", "�"]


def test_what_may_become_a_stop_string_is_held_back_until_it_is_known():
    grown, shown = written("a EN END b", stop=("END",))
    assert shown == ["a", " ", "", "", "EN ", "", "", "", "", ""]
    assert (grown.text, grown.ended, grown.ended_early) == ("a EN ", True, True)


def test_the_first_of_several_stop_strings_counts():
    assert written("one, two; three", stop=(";", ","))[0].text == "one"


def test_a_document_that_ends_ends_the_text():
    grown, _ = written("over")
    grown.add(Bytes.end_of_text)
    grown.add(ord("x"))
    assert (grown.text, grown.ended, grown.ids) == ("over", True, list(b"over"))


def test_what_was_held_back_is_shown_when_nothing_follows():
    grown, _ = written("the E", stop=("END",))
    assert (grown.text, grown.finish(), grown.text) == ("the ", "E", "the E")


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "message"),
    [
        (Bytes(), "", "the prompt is empty; write some text, or leave it out to begin as a document does"),
        (Bytes(), "\udcff", "the prompt is not UTF-8 text; write it in UTF-8"),
        (
            Char("abc"),
            "abé",
            "the prompt cannot be read: the character 'é' (U+00E9) is not among the 3 that this char tokenizer was "
            "made from; leave it out",
        ),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(tokenizer, prompt, message):
    with pytest.raises(RaygptError) as caught:
        encode_prompt(tokenizer, prompt)
    assert str(caught.value) == message


def test_without_a_prompt_a_document_begins():
    assert encode_prompt(Bytes(), None).tolist() == [256]


# Beyond the context


class Counting:
    """Slots of a model that writes the number of tokens that it sees; they note what is read."""

    part, count = 4, 1

    def __init__(self):
        self.read_parts = []

    def read(self, state, slot, ids, start):
        self.read_parts.append((ids.tolist(), start))
        return start

    def begin(self, state, slot, hidden, last, rows, top):
        return Drawn(np.array([hidden + last + 1]), None, None, None)

    def step(self, state, rows, top):
        return Drawn(rows.positions + 1, None, None, None)

    def fetch(self, drawn):
        return drawn


@pytest.fixture
def counting():
    """(tokens that follow a prompt, what was read, the numbers of tokens that were read again) in a context of 8."""
    slots, told = Counting(), []
    loaded = SimpleNamespace(reader=SimpleNamespace(context=8), state=None)

    def follow(prompt, count):
        draws = module._draws(loaded, slots, prompt, SamplingOptions(temperature=0), 1, told.append)
        return [int(next(draws)[0]) for _ in range(count)], slots.read_parts, told

    return follow


def test_past_the_context_the_last_half_is_read_again(counting):
    found, read, told = counting([11, 12, 13], 12)
    assert found == [3, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4]
    assert read == [([11, 12, 13, 0], 0), ([5, 6, 7, 8], 0), ([5, 6, 7, 8], 0)]
    assert told == [4, 4]


def test_many_samples_are_generated_in_groups_each_with_other_draws(monkeypatch):
    class Even(Counting):
        """All tokens are as likely."""

        count = 3

        def begin(self, state, slot, hidden, last, rows, top):
            return Drawn(draw(np.zeros((1, 256), np.float32), 0, rows.of(slot), np), None, None, None)

        def step(self, state, rows, top):
            return Drawn(draw(np.zeros((3, 256), np.float32), 0, rows, np), None, None, None)

    monkeypatch.setattr(module, "GROUP", 3)
    monkeypatch.setattr(module, "make_slots", lambda *arguments: Even())
    reader, seen = SimpleNamespace(context=8), []
    model = SimpleNamespace(engine="", tokenizer=Bytes(), reader=reader, state=None)
    options = SamplingOptions(tokens=5, top_k=None, seed=1)
    groups = list(generate_in_groups(model, "a", options, 7, progress=lambda *so_far: seen.append(so_far)))
    assert [len(group) for group in groups] == [3, 3, 1]
    assert len({tuple(text.ids) for group in groups for text in group}) == 7
    assert [text.ids for text in generate(model, "a", options, 7)] == [text.ids for group in groups for text in group]
    assert seen[:6] == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (3, 1)]


def test_of_a_prompt_longer_than_the_context_the_end_is_read(counting):
    assert counting(list(range(9)), 1) == ([4], [([5, 6, 7, 8], 0)], [4])


def test_a_full_context_is_read_whole_in_parts(counting):
    assert counting(list(range(8)), 1) == ([8], [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 4)], [])


# top-p


class Fixed:
    """Probabilities 0.5, 0.3, 0.15 and 0.05, whatever it reads."""

    context = 10**6

    def prefill(self, state, ids):
        return np.tile(np.log([0.15, 0.5, 0.05, 0.3]), (len(ids), 1)), None

    def decode(self, state, ids, start, cache):
        return self.prefill(state, ids)


@pytest.mark.parametrize(
    ("top_p", "temperature", "top_k", "expected"),
    [
        (0.79, 1.0, None, [0, 0.5 / 0.8, 0, 0.3 / 0.8]),
        (0.81, 1.0, None, [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95]),
        (0.4, 1.0, None, [0, 1, 0, 0]),
        (1.0, 1.0, None, [0.15, 0.5, 0.05, 0.3]),
        (0.7, 0.5, None, [0, 0.25 / 0.34, 0, 0.09 / 0.34]),  # 0.5² of 0.365 are 0.68 of the whole
        (0.6, 1.0, 2, [0, 1, 0, 0]),  # of the two that top-k leaves, the first has 0.625
    ],
)
def test_top_p_draws_from_the_fewest_that_have_the_share(top_p, temperature, top_k, expected):
    prompt = np.zeros((4000, 1), dtype=np.int32)
    drawn = sample(Fixed(), None, prompt, 5, temperature=temperature, top_k=top_k, top_p=top_p, seed=3)
    shares = np.bincount(drawn.ravel(), minlength=4) / drawn.size
    np.testing.assert_allclose(shares, expected, atol=0.015)
    assert not shares[np.array(expected) == 0].any()


# With a real model


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_greedy_text_is_the_uncached_models_and_hugging_faces(engine):
    import torch
    import transformers

    torch.manual_seed(1)
    vocab, context = 100, 40
    config = transformers.GPT2Config(
        vocab_size=vocab, n_positions=context, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    model = Model(layers=2, heads=4, width=32, context=context, precision="fp32")
    reader = import_module(f"raygpt.engines.{engine}.reader").Reader(model, vocab)
    arrays = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    state = reader.load(from_hugging_face(arrays, describe(model, vocab)))
    prompt = np.random.default_rng(0).integers(0, vocab, (3, 7)).astype(np.int32)
    found = sample(reader, state, prompt, 33, temperature=0.0)
    assert len(np.unique(found)) > 10, "a text worth comparing"
    expected = theirs.generate(torch.tensor(prompt).long(), max_new_tokens=33, do_sample=False, pad_token_id=0)
    np.testing.assert_array_equal(found, expected[:, 7:].numpy())
    ids = prompt
    for _ in range(33):  # without a cache: all is read again for every token
        ids = np.concatenate([ids, reader.prefill(state, ids)[0].argmax(1)[:, None].astype(np.int32)], axis=1)
    np.testing.assert_array_equal(found, ids[:, 7:])


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_what_is_generated_is_what_is_served_for_the_same_seed(engine, compiled_quickly):
    """Beyond the context too, whose last half is read again as a new prompt would be."""
    from raygpt.serving.batching import Batch, Served
    from raygpt.serving.texts import TextOptions

    model = Model(layers=2, heads=2, width=16, context=48, precision="fp32")
    random = np.random.default_rng(5)
    shapes = describe(model, 257).shapes
    parameters = {name: random.normal(size=shape).astype(np.float32) * 0.4 for name, shape in shapes.items()}
    reader = import_module(f"raygpt.engines.{engine}.reader").Reader(model, 257)
    loaded = SimpleNamespace(engine=engine, reader=reader, state=reader.load(parameters), tokenizer=Bytes())
    notes = []
    options = SamplingOptions(tokens=80, temperature=0.9, top_k=20, top_p=0.95, seed=11)
    texts = generate(loaded, "a cat sat on a mat", options, 2, note=notes.append)
    assert (len(notes), "the last 24 are read again" in notes[0]) == (1, True)
    batch = Batch(make_slots(engine, reader, 2), 48, Bytes(), Served(0, loaded.state))
    for number, text in enumerate(texts):
        pieces, more = [], min(30, len(text.ids))
        asked = TextOptions(tuple(b"a cat sat on a mat"), more, 0.9, 20, 0.95, 11 + number)
        batch.submit(asked, pieces.append)
        while batch.turn():
            pass
        assert [token.id for piece in pieces for token in piece.tokens] == text.ids[:more]
