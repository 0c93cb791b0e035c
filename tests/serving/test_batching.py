"""Continuous batching: what a text says does not depend on what else is in the batch."""

from dataclasses import replace

import numpy as np
import pytest
from small_model import CONTEXT, MODEL, MODERN, VOCAB, answers, batch_of, ids, parameters, reader_of, served, text

from raygpt.corpus.tokenizers import Bytes
from raygpt.engines import make_slots
from raygpt.inference.sampling import sample
from raygpt.serving.batching import Batch, BusyError
from raygpt.serving.texts import TextOptions

pytestmark = pytest.mark.usefixtures("compiled_quickly", "one_thread")


@pytest.fixture(scope="module", params=["jax", "torch"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def reader(engine):
    return reader_of(engine)


@pytest.fixture(scope="module")
def checkpoint(reader):
    return served(reader)


@pytest.fixture(scope="module")
def slots(engine, reader):
    """Shared by all tests: their programs are compiled once, and no text may depend on what was in a slot before."""
    return make_slots(engine, reader, 4)


@pytest.fixture
def batch(slots, checkpoint):
    return Batch(slots, CONTEXT, Bytes(), checkpoint)


def prompt(length, seed=0):
    return tuple(np.random.default_rng(seed).integers(0, 255, length).tolist())


def various(count, seed=0):
    """Texts of all kinds: prompts of one and of several parts, greedy and not, with and without limits."""
    random = np.random.default_rng(seed)
    made = []
    for n in range(count):
        length = int(random.integers(1, CONTEXT - 1))
        made.append(
            TextOptions(
                prompt(length, n),
                int(random.integers(1, min(20, CONTEXT - length) + 1)),
                temperature=float(random.choice([0, 0.7, 1.3])),
                top_k=int(random.choice([0, 5, 50])),
                top_p=float(random.choice([1, 0.8])),
                seed=int(random.integers(0, 2**40)),
                bias={65: 3.0} if n % 5 == 0 else {},
                alternatives=int(random.choice([0, 5])),
                score_prompt=n % 7 == 0,
            )
        )
    return made


def test_a_text_is_the_same_alone_as_in_a_full_batch(batch):
    texts = various(18)
    together = answers(batch, texts)
    assert len({tuple(ids(pieces)) for pieces in together}) == len(texts), "texts worth comparing"
    for options, pieces in zip(texts, together, strict=True):
        alone = answers(batch, [options])[0]
        assert ids(alone) == ids(pieces)
        assert [token.logprob for piece in alone for token in piece.tokens] == [
            token.logprob for piece in pieces for token in piece.tokens
        ]


@pytest.fixture(scope="module")
def modern(engine):
    """A reader, a checkpoint and a batch of a model with the keys that GPT-2 lacks."""
    reader = reader_of(engine, MODERN)
    checkpoint = served(reader, model=MODERN)
    return reader, checkpoint, batch_of(engine, reader, checkpoint)


def test_a_modern_models_texts_and_log_probabilities_are_those_of_the_reader(modern):
    reader, checkpoint, batch = modern
    lengths = (33, 40, 70)  # in parts of prompts, together, each at positions of its own
    texts = [TextOptions(prompt(n, n), 8, temperature=0, score_prompt=True, alternatives=1) for n in lengths]
    for options, pieces in zip(texts, answers(batch, texts), strict=True):
        given = np.array([options.prompt], np.int32)
        expected = sample(reader, checkpoint.state, given, 8, temperature=0)[0]
        assert ids(pieces) == expected[: [*expected, VOCAB - 1].index(VOCAB - 1)].tolist() != []
        found = [token.logprob for piece in pieces for token in (*piece.prompt, *piece.tokens)]
        whole = np.array([[*options.prompt, *ids(pieces)]], np.int32)
        np.testing.assert_allclose(found[1:], reader.token_logprobs(checkpoint.state, whole)[0][0], atol=1e-4)


@pytest.mark.extended
def test_a_modern_models_texts_are_the_same_alone_as_in_a_full_batch_too(modern):
    batch, texts = modern[2], various(8, seed=1)
    together = [ids(pieces) for pieces in answers(batch, texts)]
    assert [ids(answers(batch, [options])[0]) for options in texts] == together


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 70, CONTEXT - 1])
def test_greedy_texts_are_those_of_the_reader(reader, checkpoint, batch, length):
    given = prompt(length, 3)
    more = min(12, CONTEXT - length)
    expected = sample(reader, checkpoint.state, np.array([given], np.int32), more, temperature=0)[0]
    ended = np.flatnonzero(expected == VOCAB - 1)
    expected = expected[: ended[0]] if len(ended) else expected
    assert ids(answers(batch, [TextOptions(given, more, temperature=0)])[0]) == expected.tolist()


def test_each_token_has_the_models_log_probability_and_the_likeliest_alternatives(reader, checkpoint, batch):
    given = prompt(40, 5)
    pieces = answers(batch, [TextOptions(given, 8, alternatives=4, score_prompt=True, seed=2)])[0]
    told = [token for piece in pieces for token in (*piece.prompt, *piece.tokens)]
    whole = [*given, *ids(pieces)]
    assert [token.id for token in told] == whole
    expected, likeliest = reader.token_logprobs(checkpoint.state, np.array([whole], np.int32))
    assert told[0].logprob is None
    np.testing.assert_allclose([token.logprob for token in told[1:]], expected[0], atol=1e-4)
    assert [token.id == token.top[0][0] for token in told[1:]] == likeliest[0].tolist()
    for token in told[1:]:
        values = [value for _, value in token.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 4
        assert token.id != token.top[0][0] or token.logprob == token.top[0][1]


def test_a_prompt_as_long_as_the_context_is_scored(reader, checkpoint, batch):
    given = prompt(CONTEXT, 6)
    pieces = answers(batch, [TextOptions(given, 0, score_prompt=True)])[0]
    expected, _ = reader.token_logprobs(checkpoint.state, np.array([given], np.int32))
    np.testing.assert_allclose([token.logprob for token in pieces[0].prompt[1:]], expected[0], atol=1e-4)
    assert (pieces[-1].finish, pieces[-1].drawn) == ("length", 0)


def test_a_bias_bans_and_forces_tokens_of_its_own_text_only(batch):
    free = TextOptions(prompt(5), 10, seed=4)
    forced, as_before = answers(batch, [replace(free, bias={66: 100.0}), free])
    assert set(ids(forced)) == {66}
    assert ids(as_before) == ids(answers(batch, [free])[0]) != ids(forced)
    often = max(set(ids(as_before)), key=ids(as_before).count)
    assert often not in ids(answers(batch, [replace(free, bias={often: -100.0})])[0])


def test_what_is_cancelled_leaves_its_slot_to_those_that_wait(batch):
    first = [batch.submit(TextOptions(prompt(3, n), 40, seed=n), lambda piece: None) for n in range(4)]
    got = []
    batch.submit(TextOptions(prompt(4, 9), 3, seed=9, bias={256: -100.0}), got.append)
    for _ in range(12):
        batch.turn()
    assert (batch.load.running, batch.load.waiting, got) == (4, 1, [])
    for text_ in first:
        batch.cancel(text_)
    while batch.turn():
        pass
    assert got[-1].finish == "length"
    assert (batch.load.running, batch.load.waiting) == (0, 0)


def test_what_is_cancelled_is_not_counted_and_leaves_the_queue_at_once(batch):
    texts = [
        batch.submit(TextOptions(prompt(3, n), 40, seed=n, bias={256: -100.0}), lambda piece: None) for n in range(7)
    ]
    batch.turn()
    assert (batch.load.running, batch.load.waiting) == (4, 3)
    for number in (0, 4, 6):  # one in a slot, two that wait
        batch.cancel(texts[number])
    assert (batch.load.running, batch.load.waiting) == (3, 1)
    assert list(batch._waiting) == [texts[5]], "the others keep no place, prompt or client"
    batch.turn()
    assert (batch.load.running, batch.load.waiting) == (4, 0)
    for text_ in texts:
        batch.cancel(text_)
    while batch.turn():
        pass


def test_as_many_may_wait_as_are_allowed(slots, checkpoint):
    batch = Batch(slots, CONTEXT, Bytes(), checkpoint, most_waiting=3)
    for n in range(7):
        batch.submit(TextOptions(prompt(2, n), 2), lambda piece: None)
    with pytest.raises(BusyError):
        batch.submit(TextOptions(prompt(2), 2), lambda piece: None)
    while batch.turn():
        pass
    batch.submit(TextOptions(prompt(2), 2), lambda piece: None)


def test_a_text_comes_from_one_checkpoint_though_another_is_loaded_meanwhile(reader, batch):
    later = served(reader, seed=1, step=9)
    options = TextOptions(prompt(6), 20, seed=3)
    of_old, of_new = ids(answers(batch, [options])[0]), []
    old, new = [], []
    batch.submit(options, old.append)
    for _ in range(6):
        batch.turn()
    batch.served = later
    batch.submit(options, new.append)
    while batch.turn():
        pass
    assert ids(old) == of_old
    assert {piece.step for piece in old} == {7}
    assert {piece.step for piece in new} == {9}
    of_new = ids(answers(batch, [options])[0])
    assert ids(new) == of_new != of_old


def test_texts_end_at_a_stop_string_and_tell_only_the_tokens_before_it(batch):
    free = TextOptions(prompt(7), 30, seed=8, bias=dict.fromkeys(range(128, 257), -100.0))  # ASCII only
    whole = text(answers(batch, [free])[0])
    stop = whole[10:12]
    pieces = answers(batch, [replace(free, stop=(stop,))])[0]
    assert text(pieces) == whole[: whole.find(stop)]
    assert pieces[-1].finish == "stop"
    assert bytes(ids(pieces)).decode() == text(pieces)


def test_the_end_of_a_document_ends_a_text(batch):
    pieces = answers(batch, [TextOptions(prompt(4), 9, bias={256: 100.0})])[0]
    assert (text(pieces), ids(pieces), pieces[-1].finish, pieces[-1].drawn) == ("", [], "stop", 1)


def test_an_error_of_the_device_ends_its_texts_and_the_next_are_served(batch, monkeypatch):
    import threading

    got, done = [], threading.Event()
    batch.submit(TextOptions(prompt(3), 3), lambda piece: (got.append(piece), piece.finish and done.set()))
    with monkeypatch.context() as broken:
        broken.setattr(batch._slots, "begin", lambda *arguments: (_ for _ in ()).throw(MemoryError("no room")))
        thread = threading.Thread(target=batch.run)
        thread.start()
        assert done.wait(60)
    assert got[-1].finish == "error: no room"
    done.clear()
    batch.submit(
        TextOptions(prompt(3), 3, bias={256: -100.0}), lambda piece: (got.append(piece), piece.finish and done.set())
    )
    assert done.wait(60)
    assert got[-1].finish == "length"
    batch.close()
    thread.join(60)


def test_prompts_are_read_in_the_order_in_which_their_texts_came(batch):
    """Otherwise a slot that is free early, and is filled again and again, would leave the later slots unread."""
    got, ended = {}, []
    for name in range(4):
        batch.submit(TextOptions(prompt(CONTEXT - 2, name), 1), lambda piece, name=name: ended.append(name))
    for name in range(4, 12):
        while len(ended) < name - 3:
            batch.turn()
        batch.submit(TextOptions(prompt(CONTEXT - 2, name), 1), lambda piece, name=name: ended.append(name))
    while batch.turn():
        pass
    assert list(dict.fromkeys(ended)) == list(range(12)), got


def test_a_long_prompt_does_not_hold_up_another_text(batch):
    early = []
    batch.submit(TextOptions(prompt(3), 6, seed=1, bias={256: -100.0}), early.append)
    for _ in range(2):
        batch.turn()
    batch.submit(TextOptions(prompt(CONTEXT - 2, 2), 1), lambda piece: None)  # three parts
    drawn = []
    for _ in range(3):
        batch.turn()
        drawn.append(batch._texts[0].dispatched)
    assert drawn == [drawn[0], drawn[0] + 1, drawn[0] + 2], "a token each turn"


@pytest.mark.parametrize("engine", ["jax"], indirect=True)
def test_a_step_is_two_programs_of_jax_one_array_to_the_device_and_one_back(batch, slots, monkeypatch):
    import jax

    options = TextOptions(prompt(3), 8, bias={256: -100.0})
    answers(batch, [options, replace(options, top_p=0.5)])  # compiles
    calls, sent, got = [], [], []
    for name in ("_read_tokens", "_limit", "_write_tokens", "_read_part", "_read_first", "_keep_first", "_put", "_top"):
        program = getattr(slots, name)
        monkeypatch.setattr(slots, name, lambda *a, name=name, run=program: calls.append(name) or run(*a))
    put, get = jax.device_put, jax.device_get
    monkeypatch.setattr(jax, "device_put", lambda array, device: sent.append(array.shape) or put(array, device))
    monkeypatch.setattr(jax, "device_get", lambda tree: got.extend(jax.tree.leaves(tree)) or get(tree))
    for one, more in ((options, []), (replace(options, top_p=0.5), ["_limit"])):
        batch.submit(one, lambda piece: None)
        for _ in range(3):
            batch.turn()
        for seen in (calls, sent, got):
            seen.clear()
        with jax.transfer_guard("disallow"):  # what is not sent on purpose
            batch.turn()
        assert (calls, sent) == (["_read_tokens", *more, "_write_tokens"], [(7, 4)])
        assert [array.shape for array in got] == [(3, 4)]
        while batch.turn():
            pass


@pytest.mark.parametrize("engine", ["torch"], indirect=True)
def test_a_step_of_pytorch_can_be_captured_for_it_waits_for_no_number_and_writes_where_it_did(batch, slots):
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            names.append(operation.overloadpacket.__name__)
            return operation(*arguments, **(options or {}))

    batch.submit(TextOptions(prompt(3), 8, top_p=0.5, bias={256: -100.0}), lambda piece: None)
    for _ in range(3):
        batch.turn()
    before = [tensor.data_ptr() for tensor in (slots._logits, slots._drawn, slots._tokens, slots._numbers)]
    with Operations():
        batch.turn()
    assert "scaled_dot_product_attention" in " ".join(names)
    assert not {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"} & set(names)
    assert [t.data_ptr() for t in (slots._logits, slots._drawn, slots._tokens, slots._numbers)] == before


@pytest.mark.parametrize("engine", ["torch"], indirect=True)
def test_to_compute_a_step_twice_before_its_tokens_are_kept_changes_nothing(batch, slots, monkeypatch):
    """As when it is captured: a CUDA graph is computed once before."""
    options = TextOptions(prompt(9), 8, seed=5, top_k=9)
    once = ids(answers(batch, [options])[0])
    repeat = slots._repeat
    monkeypatch.setattr(slots, "_repeat", lambda key, compute: [repeat(key, compute) for _ in range(2)])
    assert ids(answers(batch, [options])[0]) == once


def test_matrices_are_kept_in_the_precision_of_the_arithmetic(engine):
    reader = reader_of(engine, MODEL.model_copy(update={"precision": "bf16"}))
    state = reader.load(parameters())
    matrices = (
        [array for layer in state.blocks for array in layer.values() if array.ndim > 1] + [state.top["tokens"]]
        if engine == "jax"
        else [parameter for parameter in state.parameters() if parameter.ndim > 1]
    )
    assert {str(array.dtype).removeprefix("torch.") for array in matrices} == {"bfloat16"}


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["jax"], indirect=True)
def test_after_the_warm_up_no_text_compiles_anything(reader, checkpoint, caplog):
    import jax

    batch = Batch(make_slots("jax", reader, 3), CONTEXT, Bytes(), checkpoint)
    batch.warm_up()
    assert (batch.load.running, batch.load.waiting) == (0, 0)
    with jax.log_compiles():
        answers(batch, various(8))
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []
