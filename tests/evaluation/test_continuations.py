"""Continuations and tasks, beside plain arithmetic on Hugging Face's GPT-2 and NanoChat."""

import io
import json
import math
from importlib import import_module
from types import SimpleNamespace

import pytest
from corpus.hub import served

from raygpt import config
from raygpt.config import Model
from raygpt.corpus.tokenizers import Bytes, Char
from raygpt.errors import RaygptError
from raygpt.evaluation import continuations, tasks
from raygpt.evaluation.continuations import Likelihood, Pair, encode, likelihoods
from raygpt.models import describe
from raygpt.recipes import load_recipe
from raygpt.show.training import live_progress
from raygpt.training.events import Validated

CONTEXT, VOCAB = 24, 257


@pytest.fixture(scope="module", params=["gpt2", "nanochat"])
def reference(request):
    """A model of transformers, and its keys and parameters as raygpt has them."""
    import torch
    import transformers

    torch.manual_seed(2)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = Model(preset=request.param, layers=2, heads=2, width=32, context=CONTEXT, precision="fp32")
    if request.param == "gpt2":
        sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
        config = transformers.GPT2Config(vocab_size=VOCAB, initializer_range=0.2, **sizes, **ends)
        theirs = transformers.GPT2LMHeadModel(config).eval()
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        more = {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.2}
        config = transformers.NanoChatConfig(vocab_size=VOCAB, **sizes, **more, **ends)
        theirs = transformers.NanoChatForCausalLM(config).eval()
    arrays = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    interop = import_module(f"raygpt.interop.{request.param}")
    ours = interop.from_hugging_face(arrays, describe(model, VOCAB))
    return SimpleNamespace(theirs=theirs, model=model, parameters=ours)


@pytest.fixture(scope="module", params=["jax", "torch"])
def loaded(request, reference):
    reader = import_module(f"raygpt.engines.{request.param}.reader").Reader(reference.model, VOCAB)
    return SimpleNamespace(reader=reader, state=reader.load(reference.parameters), tokenizer=Bytes())


def by_hand(reference, context, continuation):
    """One pair at a time, one token at a time."""
    import torch

    ids = list((context + continuation).encode()) if context else [256, *continuation.encode()]
    total, greedy = 0.0, True
    for place in range(len(ids) - len(continuation.encode()), len(ids)):
        seen = ids[max(0, len(ids) - 1 - CONTEXT) : place]
        with torch.no_grad():
            logs = reference.theirs(torch.tensor([seen])).logits[0, -1].log_softmax(0)
        total, greedy = total + float(logs[ids[place]]), greedy and int(logs.argmax()) == ids[place]
    return total, greedy


PAIRS = [
    Pair("one", " two"),
    Pair("a longer text", " x"),
    Pair("", "alone"),
    Pair("cut off on the left, as it is too long", " to be seen"),
    Pair("é", " ü€"),
]


def test_continuations_are_as_likely_as_hugging_face_finds_them(loaded, reference, monkeypatch):
    monkeypatch.setattr(continuations, "TOKENS", 2 * CONTEXT)  # several batches
    watched = []
    found = likelihoods(loaded, PAIRS, lambda done, total: watched.append((done, total)))
    for pair, (log_probability, greedy) in zip(PAIRS, found, strict=True):
        expected = by_hand(reference, *pair)
        assert log_probability == pytest.approx(expected[0], abs=1e-3), pair
        assert greedy == expected[1]
    assert watched == [(2, 5), (4, 5), (5, 5)]


def test_a_continuation_of_the_likeliest_tokens_is_greedy(loaded, reference):
    import torch

    letters = [chr(code) for code in range(ord("A"), ord("z"))]
    with torch.no_grad():
        likeliest = reference.theirs(torch.tensor([[ord(c)] for c in letters])).logits[:, -1].argmax(1).tolist()
    pairs = [Pair(c, chr(token)) for c, token in zip(letters, likeliest, strict=True) if 33 <= token < 127]
    assert len(pairs) > 3
    others = [Pair(c, chr(ord(after) - 1)) for c, after in pairs]
    assert [found.greedy for found in likelihoods(loaded, pairs + others)] == [True] * len(pairs) + [False] * len(pairs)


def test_blanks_at_the_end_of_a_context_belong_to_the_continuation():
    (encoded,) = encode(Bytes(), [Pair("ab  ", "c")], 100)
    assert (encoded.ids, encoded.continuation) == (list(b"ab  c"), 3)


# HellaSwag and LAMBADA

ITEM = {"activity_label": "Cooking", "ctx": "A man [step]cuts.", "endings": ["He eats.", "No  [x]."], "label": "1"}


def test_hellaswag_asks_for_each_ending_without_wikihows_marks():
    query = "Cooking: A man cuts."
    assert tasks.hellaswag_pairs(ITEM) == [Pair(query, " He eats."), Pair(query, " No .")]
    halves = {**ITEM, "ctx_a": "A man [title] cuts.", "ctx_b": "the KNIFE"}
    assert tasks.hellaswag_pairs(halves)[0].context == "Cooking: A man.  cuts. The knife".replace("  ", " ")


def test_hellaswag_counts_the_likeliest_ending_and_the_likeliest_by_characters():
    first, second = (
        [Likelihood(-8.0, False), Likelihood(-5.0, False)],
        [Likelihood(-7.9, False), Likelihood(-4.1, False)],
    )
    assert tasks.hellaswag_choices(ITEM, first) == (1, 0)  # -8 / 8 characters against -5 / 4
    items = [ITEM, {**ITEM, "label": 0}]
    found = tasks.hellaswag_result(items, [first, second])
    assert found == pytest.approx({"acc": 0.5, "acc_stderr": 0.5, "acc_norm": 0.5, "acc_norm_stderr": 0.5})


def test_lambada_asks_for_the_last_word():
    assert tasks.lambada_pairs({"text": "I saw  the sign"}) == [Pair("I saw  the", " sign")]


def test_lambada_counts_greedy_words_and_their_perplexity():
    found = tasks.lambada_result(
        [{}] * 3, [[Likelihood(-1.0, True)], [Likelihood(-2.0, False)], [Likelihood(-6.0, False)]]
    )
    assert found["acc"] == pytest.approx(1 / 3)
    assert found["acc_stderr"] == pytest.approx(math.sqrt(2 / 9 / 2))
    assert found["perplexity"] == pytest.approx(math.exp(3))
    assert found["perplexity_stderr"] == pytest.approx(math.exp(3) * math.sqrt(7 / 3))


def test_a_word_that_is_all_but_impossible_has_a_perplexity_all_the_same():
    found = tasks.lambada_result([{}] * 2, [[Likelihood(-900.0, False)], [Likelihood(-700.0, False)]])
    assert found["perplexity"] == pytest.approx(math.exp(700))


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        (
            {"lambada_acc": 0.25, "lambada_perplexity": 1234.567},
            "step  5/20  lambada acc 0.25  lambada perplexity 1235",
        ),
        ({"val_loss": 2.5, "hellaswag_acc_norm": 0.5}, "step  5/20  val loss 2.5000  hellaswag acc norm 0.5"),
        ({"val_loss": 2.5}, "step  5/20  val loss 2.5000"),
    ],
)
def test_the_terminal_shows_scores_with_a_validation_loss_or_without(capsys, scores, line):
    with live_progress(20) as watch:
        watch(Validated(5, scores))
    assert capsys.readouterr().out == f"{line}\n"


def test_items_are_read(tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps({"text": f"word {n}"}) + "\n" for n in range(5)))
    assert [item["text"] for item in tasks.read_items("lambada", str(file), 2)] == ["word 0", "word 1"]


@pytest.mark.parametrize(
    ("name", "item", "message"),
    [
        ("lambada", {"txt": "a"}, "text must be a text"),
        ("lambada", {"text": None}, "text must be a text"),
        ("lambada", "a", "text must be a text"),
        ("lambada", {"text": "half of a pair \ud83d"}, "text must be a text"),
        ("hellaswag", {**ITEM, "label": ""}, "label must be the number of the true ending, 0 to 1"),
        ("hellaswag", {**ITEM, "label": 2}, "label must be the number of the true ending, 0 to 1"),
        ("hellaswag", {**ITEM, "ctx": None}, "activity_label and ctx, or ctx_a and ctx_b, must be texts"),
        ("hellaswag", {**ITEM, "endings": "He eats."}, "endings must be a list of texts"),
        ("hellaswag", {**ITEM, "endings": []}, "endings must be a list of texts"),
    ],
)
def test_an_item_that_cannot_be_scored_is_refused_by_its_line(tmp_path, name, item, message):
    file = tmp_path / "items.jsonl"
    file.write_text(f"{json.dumps({**ITEM, 'text': 'a word'})}\n\n{json.dumps(item)}\n")
    with pytest.raises(RaygptError) as refused:
        tasks.read_items(name, str(file))
    assert str(refused.value) == f"{file}, line 3: {message}"


@pytest.mark.parametrize(("content", "message"), [("", " has no items"), ("\nword", ", line 2: is not JSON")])
def test_a_file_that_has_no_items_is_refused(tmp_path, content, message):
    file = tmp_path / "items.jsonl"
    file.write_text(content)
    with pytest.raises(RaygptError) as refused:
        tasks.read_items("lambada", str(file))
    assert str(refused.value).startswith(f"{file}{message}")


def test_items_are_fetched_from_the_hub_by_the_tasks_name(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    import pyarrow as pa
    import pyarrow.parquet as pq

    def parquet(rows):
        stream = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), stream)
        return stream.getvalue()

    texts = [{"text": f"word {n}"} for n in range(3)]
    with served() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        there = {"default/test/0000.parquet": parquet(texts), "de/test/0000.parquet": parquet(texts[:1])}
        hub.commit("EleutherAI/lambada_openai", {"data/test.jsonl": b"{}"})
        hub.commit("EleutherAI/lambada_openai", there, branch="refs/convert/parquet")
        hub.commit("Rowan/hellaswag", {f"data/{part}-0.parquet": parquet([ITEM]) for part in ("train", "validation")})
        assert tasks.read_items("lambada", None) == texts
        assert tasks.read_items("lambada", None, 2) == texts[:2]
        assert tasks.read_items("hellaswag", None) == [ITEM]
        assert not any("train" in asked for asked in hub.asked if "/resolve/" in asked)


def test_a_task_that_a_tokenizer_cannot_write_is_refused_in_one_line(loaded):
    small = SimpleNamespace(reader=loaded.reader, state=loaded.state, tokenizer=Char("abc"))
    with pytest.raises(RaygptError) as caught:
        tasks.item_likelihoods(small, "lambada", [{"text": "a d"}])
    assert str(caught.value) == (
        "lambada cannot be evaluated: the character ' ' (U+0020) is not among the 3 that this char tokenizer was made "
        "from; leave it out"
    )


def test_real_items_have_the_keys_that_are_asked_for(shared_data):
    for name, file, count in (("hellaswag", "hellaswag_val.jsonl", 10042), ("lambada", "lambada_test.jsonl", 5153)):
        items = tasks.read_items(name, str(shared_data / "eval" / file))
        assert len(items) == count
        assert all(len(tasks.TASKS[name].pairs(item)) == (4 if name == "hellaswag" else 1) for item in items)


def test_a_recipe_may_name_the_tasks_that_there_are():
    assert set(config.TASKS) == set(tasks.TASKS)
    assert load_recipe("tiny", {"training.eval_tasks": "lambada=a=b.jsonl"}).training.eval_tasks == (
        "lambada=a=b.jsonl",
    )
    assert tasks.choose(["hellaswag", "lambada=a=b.jsonl"]) == {"hellaswag": None, "lambada": "a=b.jsonl"}
