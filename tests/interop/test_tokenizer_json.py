"""Our tokenizers as Hugging Face's read them: the same ids, and the way back."""

import itertools
import json
import unicodedata
from string import ascii_lowercase

import numpy as np
import pytest
import tokenizers as theirs
import transformers
from conftest import CHECKOUT

from raygpt.corpus import tokenizers
from raygpt.corpus.shards import dtype_for
from raygpt.corpus.tokenizers import Bpe, Bytes, Char, Gpt2, byte_lengths
from raygpt.errors import RaygptError
from raygpt.interop.exporting import _tokenizer_config
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


# Tokenizers of other families

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEXTS = [*ODD, (CHECKOUT / "README.md").read_text(), "DON'T you'LL 1234567 <think>\n\n \r\n  Ångström's</think>"]
START, END = "<|begin_of_text|>", "<|end_of_text|>"


def byte_level(words, special, ignore_merges=False):
    """As Llama 3 and Qwen have it: words by a pattern, then the bytes of each."""
    made = theirs.Tokenizer(theirs.models.BPE(ignore_merges=ignore_merges))
    split = theirs.pre_tokenizers.Split(theirs.Regex(words), "isolated")
    as_bytes = theirs.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = theirs.pre_tokenizers.Sequence([split, as_bytes])
    made.decoder = theirs.decoders.ByteLevel()
    alphabet = theirs.pre_tokenizers.ByteLevel.alphabet()
    trainer = theirs.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens([theirs.AddedToken(name, special=True, normalized=False) for name in special])
    return made


def qwen():
    made = byte_level(QWEN_WORDS, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.normalizer = theirs.normalizers.NFC()
    made.add_tokens([theirs.AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")])
    return made


def llama3():
    made = byte_level(LLAMA3_WORDS, [START, END, "<|eot_id|>"], ignore_merges=True)
    starts = theirs.processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, made.token_to_id(START))]
    )
    made.post_processor = theirs.processors.Sequence([theirs.processors.ByteLevel(trim_offsets=False), starts])
    return made


def opened(folder, made, **names):
    """transformers' own tokenizer of a tokenizer.json."""
    folder.mkdir()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("make", "family", "chat_end", "end"),
    [(qwen, "qwen3", "<|im_end|>", "<|endoftext|>"), (llama3, "llama", "<|eot_id|>", END)],
)
def test_a_familys_tokenizer_has_transformers_ids_and_is_the_same_behind_an_export(
    tmp_path, make, family, chat_end, end
):
    made = make()
    reference = opened(tmp_path / "theirs", made, eos_token=chat_end)
    saved = json.loads((tmp_path / "theirs" / "tokenizer.json").read_text())
    ours = from_json(saved, "here", made.token_to_id(chat_end))
    assert (ours.decode([ours.end_of_text]), ours.vocab) == (end, len(reference))
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(to_json(ours)))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(ours, 100_000)))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    exported = transformers.AutoTokenizer.from_pretrained(folder)
    assert (exported.eos_token, exported.eos_token_id) == (end, ours.end_of_text)
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        plain, started = ({"add_special_tokens": start} for start in (False, True))
        assert ids.tolist() == reference(text, **plain)["input_ids"] == exported(text, **plain)["input_ids"], text
        assert exported(text, **started)["input_ids"] == reference(text, **started)["input_ids"]
        assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if made.normalizer else text)
    assert end not in exported.convert_ids_to_tokens(ours.encode([end])[0])  # a literal one is plain text
    again = from_json(json.loads((folder / "tokenizer.json").read_text()), "here", ours.end_of_text)
    assert tokenizers.fingerprint(again) == tokenizers.fingerprint(ours)
    tokenizers.save(ours, str(tmp_path))
    assert tokenizers.fingerprint(tokenizers.load(str(tmp_path))) == tokenizers.fingerprint(ours)


def test_a_token_that_a_text_can_hold_has_bytes():
    ours = from_json(json.loads(qwen().to_str()), "here")
    lengths = np.array(byte_lengths(ours))
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert lengths[ids].sum() == len(unicodedata.normalize("NFC", text).encode()), text
    assert ours.encode(["<think>"])[0].tolist() == [ours.vocab - 2]
    assert lengths[ours.vocab - 3 :].tolist() == [0, 7, 8]  # <|im_end|>, <think>, </think>


def test_ids_beyond_65535_are_kept(tmp_path):
    """Bytes, 676 pairs of letters, and words of two such pairs."""
    alphabet = sorted(theirs.pre_tokenizers.ByteLevel.alphabet())
    pairs = [*itertools.product(ascii_lowercase, repeat=2)]
    words = [*itertools.islice(itertools.product(map("".join, pairs), repeat=2), 70_000)]
    pieces = [*alphabet, *("".join(parts) for parts in (*pairs, *words))]
    made = theirs.Tokenizer(theirs.models.BPE({piece: n for n, piece in enumerate(pieces)}, [*pairs, *words]))
    made.pre_tokenizer = theirs.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = theirs.decoders.ByteLevel()
    made.add_special_tokens([END])
    reference = opened(tmp_path / "theirs", made, eos_token=END)
    ours = from_json(json.loads(made.to_str()), "here")
    text = "\n".join("".join(parts) for parts in words[::-100])
    ids = ours.encode([text])[0]
    assert ids.tolist() == reference(text)["input_ids"]
    assert ids[0] == ours.end_of_text - 1 == len(pieces) - 1 > 65_536
    assert dtype_for(ours.vocab) == np.dtype("<u4")
    again = from_json(to_json(ours), "here")
    assert tokenizers.fingerprint(again) == tokenizers.fingerprint(ours)


def test_another_token_that_ends_texts_is_known_by_its_id():
    made = byte_level(QWEN_WORDS, ["</s>"])
    saved = json.loads(made.to_str())
    ours = from_json(saved, "here", made.token_to_id("</s>"))
    assert ours.decode([ours.end_of_text]) == "</s>"
    again = tokenizers.from_description(json.loads(json.dumps(ours.describe())), "here")
    assert (again.end_of_text, tokenizers.fingerprint(again)) == (ours.end_of_text, tokenizers.fingerprint(ours))
    for unusable in (None, 5, 100_000):  # 5 is a byte
        with pytest.raises(RaygptError, match=r"here: this tokenizer has no special token <\|endoftext\|>, which sep"):
            from_json(saved, "here", unusable)


def test_a_tokenizer_that_adds_spaces_is_refused():
    spaced = byte_level(QWEN_WORDS, ["<|endoftext|>"])
    spaced.pre_tokenizer = theirs.pre_tokenizers.ByteLevel(add_prefix_space=True)
    pieces = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "▁a": 4}
    llama2 = theirs.Tokenizer(theirs.models.BPE(pieces, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    llama2.normalizer = theirs.normalizers.Sequence(
        [theirs.normalizers.Prepend("▁"), theirs.normalizers.Replace(" ", "▁")]
    )
    llama2.decoder = theirs.decoders.Sequence(
        [theirs.decoders.Replace("▁", " "), theirs.decoders.Fuse(), theirs.decoders.Strip(" ", 1, 0)]
    )
    llama2.add_special_tokens(["</s>"])
    for made in (spaced, llama2):
        with pytest.raises(
            RaygptError, match="here: this tokenizer is not byte-level as GPT-2's, Llama 3's and Qwen's"
        ):
            from_json(json.loads(made.to_str()), "here", 1)
