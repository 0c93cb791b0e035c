"""Reads and writes nanoGPT's `train.bin` and `val.bin`: uint16 ids without a header."""

import hashlib

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.corpus.extents import Extent
from raygpt.corpus.index import Index
from raygpt.corpus.store import TokenStore
from raygpt.errors import RaygptError

FILES = {"train": "train.bin", "val": "val.bin"}


def is_nanogpt(folder: str) -> bool:
    """Whether a folder has nanoGPT's files."""
    return storage.exists(storage.join(folder, FILES["train"]))


def open_nanogpt(folder: str, tokenizer: str) -> TokenStore:
    """A folder of nanoGPT's files as a store; they do not say which tokenizer made them, so the recipe must."""
    made = tokenizers.ready_made(tokenizer)
    if made is None:
        raise RaygptError(
            f"{folder} has nanoGPT's bare files, which do not say how they were made; set data.tokenizer to gpt2, "
            f"bytes or a saved tokenizer ({tokenizer} would be made from text that is not here)"
        )
    names = storage.sizes(folder)
    train, val = (_extent(folder, name, names) for name in FILES.values())
    index = Index(
        fingerprint=_fingerprint(folder, names),
        source=folder,
        tokenizer=tokenizers.fingerprint(made),
        vocab=made.vocab,
        end_of_text=made.end_of_text,
        dtype="<u2",
        documents=0,  # not recorded there
        text_bytes=0,
        train=(train,),
        val=(val,),
    )
    store = TokenStore(folder, index)
    store.tokenizer = made
    return store


def _extent(folder: str, name: str, names: dict[str, int]) -> Extent:
    if name not in names:
        raise RaygptError(f"{folder} has no {name}; write both files, as nanoGPT's prepare.py does")
    if names[name] % 2:
        raise RaygptError(
            f"{folder}/{name} has an odd number of bytes: truncated, or not nanoGPT's uint16; copy it again"
        )
    return Extent(name, 0, names[name] // 2)


def _fingerprint(folder: str, names: dict[str, int]) -> str:
    """Computed from both files' sizes and their first and last megabyte, so that 18 GB need not be read."""
    digest = hashlib.blake2b(digest_size=8)
    for name in FILES.values():
        with storage.open_read(storage.join(folder, name)) as stream:
            digest.update(str(names[name]).encode() + stream.read(2**20))
            stream.seek(max(0, names[name] - 2**20))
            digest.update(stream.read())
    return digest.hexdigest()


def write_nanogpt(store: TokenStore) -> None:
    """Write train.bin and val.bin beside the shards, for nanoGPT and everything else that reads its format."""
    if store.index.dtype != "<u2":
        raise RaygptError(
            f"nanoGPT's files are uint16 and this store has {store.index.vocab} ids; use a smaller tokenizer"
        )
    for name, stream in ((FILES["train"], store.train), (FILES["val"], store.val)):
        with storage.atomic_write(storage.join(store.folder, name)) as path, path.open("wb") as file:
            for ids in stream.runs():
                file.write(ids.data)
