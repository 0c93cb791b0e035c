"""Samples from fixed prompts: what is written, how it is kept and shown, and which prompts are refused."""

import numpy as np
import pytest

from raygpt.corpus.tokenizers import Bytes, Char
from raygpt.errors import RaygptError
from raygpt.inference.sampling import sample
from raygpt.recipes import load_recipe
from raygpt.runs import open_run
from raygpt.runs.records import keep_sample, read_samples
from raygpt.show import training
from raygpt.show.page import page
from raygpt.training import samples
from raygpt.training.events import Sampled

CONTEXT, VOCAB = 12, 257


class Counting:
    """Writes the byte after the last one, and notes what it is asked to read."""

    context = CONTEXT

    def __init__(self):
        self.read = []

    def prefill(self, state, ids):
        self.read.append(bytes_of(ids))
        return self._next(ids), None

    def decode(self, state, ids, start, cache):
        return self._next(ids), None

    def _next(self, ids):
        logits = np.full((len(ids), VOCAB), -1e9)
        logits[np.arange(len(ids)), (ids[:, -1] + 1) % 256] = 0
        return logits


def bytes_of(ids):
    return [bytes(row.astype(np.uint8)) if row.max() < 256 else "a document begins" for row in ids]


def test_each_prompt_is_written_on_from_and_those_of_one_length_in_one_batch():
    model = Counting()
    texts = samples.write(model, None, Bytes(), ["abc", "A", "klm", "0"], seed=0)
    assert texts == ["abcdefghijkl", "ABCDEFGHIJKL", "klmnopqrstuv", "0123456789:;"]
    assert model.read == [[b"A", b"0"], [b"abc", b"klm"]]


def test_without_prompts_a_document_begins():
    model = Counting()
    (text,) = samples.write(model, None, Bytes(), [], seed=0)
    assert model.read == [["a document begins"]]
    assert text == bytes(range(1, CONTEXT)).decode()  # as far as the context reaches


def test_the_same_seed_draws_the_same_text_as_sampling_by_hand():
    class Even(Counting):
        def _next(self, ids):
            return np.zeros((len(ids), 128))

    (text,) = samples.write(Even(), None, Bytes(), ["ab"], seed=5)
    drawn = sample(Even(), None, np.array([[97, 98]], dtype=np.int32), CONTEXT, seed=5)
    assert text == "ab" + bytes(drawn[0].tolist()).decode()


def test_a_recipe_has_one_prompt_or_several_and_none_is_empty():
    assert load_recipe("tiny").training.prompts == ()
    assert load_recipe("tiny", ["training.prompts=To be: or"]).training.prompts == ("To be: or",)
    assert load_recipe("tiny", ["training.prompts=['1984', a]"]).training.prompts == ("1984", "a")
    with pytest.raises(RaygptError, match=r"training\.prompts: one of them is empty; write some text, or none at all"):
        load_recipe("tiny", {"training.prompts": ["a", ""]})


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "message"),
    [
        (
            Char("abc"),
            "ad",
            "training.prompts: 'ad' cannot be read: the character 'd' (U+0064) is not among the 3 that this char "
            "tokenizer was made from; leave it out",
        ),
        (
            Bytes(),
            "a" * CONTEXT,
            "training.prompts: 'aaaaaaaaaaaa' has 12 tokens, and the model sees 12; shorten it",
        ),
    ],
)
def test_a_prompt_that_cannot_be_written_on_from_is_refused_in_one_line(tokenizer, prompt, message):
    with pytest.raises(RaygptError) as caught:
        samples.encode(tokenizer, ["a", prompt], CONTEXT)
    assert str(caught.value) == message


def test_samples_are_kept_with_their_prompts_and_a_restart_undoes_all_of_a_step(tmp_path):
    for step, texts in [(0, ["a1", "b1"]), (10, ["a2", "b2"]), (20, ["a3", "b3"]), (10, ["a4", "b4"])]:
        keep_sample(str(tmp_path), step, *texts, prompts=["a", "b"])
    assert read_samples(str(tmp_path)) == [
        {"step": step, "prompt": text[0], "text": text} for step, text in [(0, "a1"), (0, "b1"), (10, "a4"), (10, "b4")]
    ]


def test_the_page_shows_each_prompts_samples_beside_each_other(tmp_path):
    from raygpt.corpus import tokenizers

    folder = tmp_path / "run"
    tokenizers.save(Bytes(), str(folder))
    (folder / "recipe.yaml").write_text(load_recipe("tiny", {"training.prompts": ["I <am", "we"]}).to_yaml())
    for step in (0, 10):
        keep_sample(str(folder), step, f"I <am at {step}", f"we at {step}", prompts=["I <am", "we"])
    first, second = page([open_run(str(folder))]).split('<q class="prompt">')[1:]
    assert first.startswith("I &lt;am</q>")
    assert "<pre><b>I &lt;am</b> at 0</pre>" in first
    assert first.index(" at 0</pre>") < first.index(" at 10</pre>")
    assert "we" not in first.partition("</div></div>")[0]
    assert "<pre><b>we</b> at 0</pre>" in second
    assert "<pre><b>we</b> at 10</pre>" in second


def test_the_terminal_shows_the_last_sample_of_each_prompt(capsys):
    said = [("one", 0), ("two", 0), ("one", 9), ("two", 9)]
    training._show_samples([Sampled(step, f"{word} [b]at {step}", word) for word, step in said])
    out = capsys.readouterr().out
    assert out == (
        "\na sample of what it writes now from 'one'\none [b]at 9\n"
        "\na sample of what it writes now from 'two'\ntwo [b]at 9\n"
    )
    training._show_samples([Sampled(9, "alone")])
    assert capsys.readouterr().out == "\na sample of what it writes now\nalone\n"
