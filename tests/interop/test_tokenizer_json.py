"""Our tokenizers as Hugging Face's read them: the same ids, and the way back."""

import json

import numpy as np
import pytest
import tokenizers as theirs

from raygpt.corpus import tokenizers
from raygpt.corpus.tokenizers import Bpe, Bytes, Char, Gpt2, byte_lengths
from raygpt.interop.tokenizer_json import from_json, to_json

ODD = [
    "Hello world, it's 12345 o'clock!",
    "  leading and trailing  \n\n\t tabs\r\n",
    "naïve café Ångström ﬁ ß İ \u00ad\u200b\u2028",
    "日本語 العربية עברית हिन्दी 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \U0001f600",
    "\x00\x01\x1b[0m\x7f \ufeff \ufffd",
    "def f(x):\n    return {'a': x**2}  # 3.14e-10",
    "",
]


@pytest.fixture(scope="module", params=["gpt2", "bytes", "char", "bpe"])
def ours(request):
    if request.param == "gpt2":
        return Gpt2.from_files()
    if request.param == "bytes":
        return Bytes()
    if request.param == "char":
        return Char("".join(ODD))
    return Bpe.train(iter(ODD * 5), 400)


def test_texts_with_odd_characters_have_the_same_ids(ours):
    made = theirs.Tokenizer.from_str(json.dumps(to_json(ours)))
    for text, ids in zip(ODD, ours.encode(ODD), strict=True):
        found = made.encode(text, add_special_tokens=False).ids
        assert found == ids.tolist(), text
        assert made.decode(found) == ours.decode(found) == text
    assert made.token_to_id("<|endoftext|>") == ours.end_of_text
    assert made.get_vocab_size() == ours.vocab


def test_the_way_back_is_the_same_tokenizer(ours):
    again = from_json(json.loads(json.dumps(to_json(ours))), "here")
    assert type(again) is type(ours)
    assert tokenizers.fingerprint(again) == tokenizers.fingerprint(ours)


def test_older_files_write_merges_as_one_text():
    ours = Gpt2.from_files()
    saved = to_json(ours)
    saved["model"]["merges"] = [" ".join(pair) for pair in saved["model"]["merges"]]
    saved["model"]["vocab"]["<|endoftext|>"] = 50256  # as the Hub's GPT-2 has it
    assert isinstance(from_json(saved, "here"), Gpt2)


def test_another_vocabulary_is_not_taken_for_gpt2s():
    saved = to_json(Bytes())
    saved["model"]["vocab"]["a"], saved["model"]["vocab"]["b"] = 98, 97
    again = from_json(saved, "here")
    assert isinstance(again, Bpe)
    assert again.encode(["ab"])[0].tolist() == [98, 97]


def test_a_character_that_is_not_known_is_an_error_there_too():
    made = theirs.Tokenizer.from_str(json.dumps(to_json(Char("abc"))))
    with pytest.raises(Exception, match="UNK"):
        made.encode("abd")


def test_bytes_of_all_ids_add_up_to_the_texts(ours):
    lengths = np.array(byte_lengths(ours))
    assert len(lengths) == ours.vocab
    assert lengths[ours.end_of_text] == 0
    for text, ids in zip(ODD, ours.encode(ODD), strict=True):
        assert lengths[ids].sum() == len(text.encode()), text
