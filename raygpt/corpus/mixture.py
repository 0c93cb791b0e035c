"""The corpus of a recipe: a token store for each source, prepared if necessary, all with one tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raygpt import storage
from raygpt.config import Data
from raygpt.corpus import nanogpt, prepare, tokenizers
from raygpt.corpus.documents import check_beginnings
from raygpt.corpus.feed import Feed
from raygpt.corpus.growing import GrowingStore
from raygpt.corpus.index import INDEX
from raygpt.corpus.prepare import Background, Job, Watch
from raygpt.corpus.sources import Source, is_path, resolve
from raygpt.corpus.store import PLAN, TokenStore, TokenStream, is_complete, open_store
from raygpt.errors import RaygptError

VAL_SAMPLE, TRAIN_SAMPLE = 2**16, 2**20  # tokens whose frequencies are counted


@dataclass(frozen=True)
class Mixture:
    """Stores and the weight of each; most recipes have one."""

    stores: tuple[TokenStore, ...]
    weights: tuple[float, ...]
    growing: Background | None = None  # the job that still writes the store, if training started before it was complete

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        return self.stores[0].tokenizer

    @property
    def train_tokens(self) -> int | None:
        """None while the store is still being written."""
        return None if self.growing else sum(len(store.train) for store in self.stores)

    @property
    def val_tokens(self) -> int:
        return sum(len(store.val) for store in self.stores)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token stands for, by the first tokens of the validation text; 0 if there is none."""
        return float(self._val_shares @ tokenizers.byte_lengths(self.tokenizer))

    @property
    def unigram_loss(self) -> float:
        """The validation loss of a model that only knows how frequent each token is in the text to train on."""
        counts = [self._counts(store.train, TRAIN_SAMPLE) for store in self.stores]
        known = np.array(self.weights) @ np.array(counts) + 1.0  # no token is impossible
        return float(-self._val_shares @ np.log(known / known.sum()))

    @cached_property
    def _val_shares(self) -> NDArray[np.float64]:
        """Each token's share of the validation text, by its first tokens; zeros if there is none."""
        streams = [store.val for store in self.stores if len(store.val)]
        counts = [self._counts(stream, VAL_SAMPLE) for stream in streams]
        shares = [found / found.sum() * len(stream) for found, stream in zip(counts, streams, strict=True)]
        total: NDArray[np.float64] = np.sum([np.zeros(self.tokenizer.vocab), *shares], axis=0)
        return np.divide(total, max(1.0, float(total.sum())))

    def _counts(self, stream: TokenStream, most: int) -> NDArray[np.float64]:
        """How often each token is among the first of a stream."""
        sample = stream.windows([0], min(len(stream), most)).ravel()
        return np.bincount(sample, minlength=self.tokenizer.vocab).astype(np.float64)

    def windows(self, context: int) -> int:
        """Number of windows of all stores: an epoch."""
        return sum(store.train.window_count(context) for store in self.stores)

    def feed(self, *, context: int, batch_rows: int, order: str, seed: int) -> Feed:
        """The reader of the rows of batch N."""
        streams = [store.train for store in self.stores]
        return Feed(streams, context=context, batch_rows=batch_rows, order=order, seed=seed, weights=self.weights)

    def close(self) -> None:
        """Stop the job that still writes a store, if any, and reading."""
        if self.growing:
            self.growing.stop()
        for store in self.stores:
            store.train.close()


def growing_text(data: Data, stores: str) -> tuple[Job, str] | None:
    """The job and folder of a corpus that can be trained on while it is tokenised; None if it must be complete first.

    Its order must not depend on its length, and its validation text must not be spread over all of it.
    """
    (first, *others), val = data.sources, data.val
    if data.order != "sequential" or others or not isinstance(val, str) or is_prepared(first.source):
        return None
    (job,) = _jobs(data, [resolve(first.source, data.column, data.limit)])
    folder = _folder(job, stores)
    return None if is_complete(folder) else (job, folder)


def open_growing(job: Job, folder: str, watch: Watch = lambda progress: None, cpus: float | None = None) -> Mixture:
    """Start to tokenise a text on `cpus` CPUs. Returns as soon as its validation tokens are complete."""
    background = Background(job, folder, watch, cpus)
    try:
        return Mixture((GrowingStore(folder),), (1.0,), background)
    except BaseException:
        background.stop()
        raise


def open_mixture(data: Data, stores: str, watch: Watch = lambda progress: None) -> Mixture:
    """Open the corpus of a recipe; what has to be prepared goes into a folder under `stores`."""
    names = [part.source for part in data.sources]
    opened = {name: open_prepared(name, data.tokenizer) for name in names if is_prepared(name)}
    texts = {name: resolve(name, data.column, data.limit) for name in names if name not in opened}
    if opened and data.limit:
        raise RaygptError(
            f"data.limit: {data.limit} has no effect on {next(iter(opened))}, which is tokens already; "
            "leave data.limit out"
        )
    _check_tokenizers(list(opened.values()), list(texts), data.tokenizer)
    for job in _jobs(data, list(texts.values())):
        job = job if data.scatter or data.dedup else _as_before(job, stores)
        opened[job.source.spec] = prepare.run(job, _folder(job, stores), watch)
    for store in opened.values():
        store.train.cache_bytes = int(data.cache * 1e9) if data.cache else None
    return Mixture(tuple(opened[name] for name in names), tuple(part.weight for part in data.sources))


def _as_before(job: Job, stores: str) -> Job:
    """A large text that was prepared before large ones were scattered keeps its store, so that runs can go on."""
    plain = replace(job, scatter=False)
    return plain if is_complete(_folder(plain, stores)) else job


def check_texts(data: Data) -> None:
    """Refuse files that are not there or cannot be read: this is fast, and needs no cluster."""
    names = [part.source for part in data.sources] + ([data.val] if isinstance(data.val, str) else [])
    for name in names:
        if is_path(name) and not is_prepared(name):
            check_beginnings(resolve(name, data.column, data.limit, digests=False))


def _folder(job: Job, stores: str) -> str:
    return storage.absolute(storage.join(stores, f"{job.source.slug}-{job.fingerprint[:8]}"))


def open_prepared(folder: str, tokenizer: str = "gpt2") -> TokenStore:
    """A store that raygpt or nanoGPT wrote; `tokenizer` is the one of nanoGPT's files."""
    folder = storage.absolute(folder)  # Ray's workers run in other folders
    if not is_complete(folder) and nanogpt.is_nanogpt(folder):
        return nanogpt.open_nanogpt(folder, tokenizer)
    return open_store(folder)


def is_prepared(source: str) -> bool:
    """Whether a source is a folder of tokens, complete or not, rather than text."""
    folder = storage.absolute(source)  # asked by name: a store may have a million files
    return any(storage.exists(storage.join(folder, name)) for name in (INDEX, PLAN, nanogpt.FILES["train"]))


def _jobs(data: Data, texts: list[Source]) -> Iterator[Job]:
    """A job for each text. Separate validation text is prepared once, with the first."""
    val = resolve(data.val, data.column) if isinstance(data.val, str) else data.val
    if isinstance(val, Source) and not texts:
        raise RaygptError(
            f"data.val: {val.spec} has no effect, since data.source is tokens with validation tokens of their own; "
            "leave data.val out"
        )
    together = (*texts, *([val] if isinstance(val, Source) else [])) if len(texts) > 1 else ()
    for number, text in enumerate(texts):
        mine = 0.0 if number and isinstance(val, Source) else val
        job = Job(text, data.tokenizer, mine, data.split, data.split_seed, together, dedup=data.dedup)
        is_asked = data.scatter if data.order == "shuffled" else bool(data.scatter)
        yield replace(job, scatter=prepare.is_scattered(text, is_asked, data.dedup))


def _check_tokenizers(stores: list[TokenStore], texts: list[str], name: str) -> None:
    """Stores that were prepared before keep their tokenizer; a recipe that names or needs another is refused."""
    for store in stores:
        if not _is_made_by(store, name):
            raise RaygptError(
                f"data.tokenizer: {name} does not match {store.folder}, whose tokens were made by a {_kind(store)} "
                f"tokenizer of {store.index.vocab}; write data.tokenizer: {store.folder}"
            )
        if store.index.tokenizer != stores[0].index.tokenizer:
            raise RaygptError(
                f"data.source: {stores[0].folder} and {store.folder} were made by different tokenizers; "
                f"prepare one again with the other's, e.g. --tokenizer {stores[0].folder}"
            )
    if stores and texts and tokenizers.ready_made(name) is None:
        raise RaygptError(
            f"data.tokenizer: {name} would be made anew for {texts[0]}, but {stores[0].folder} has one already; "
            f"write data.tokenizer: {stores[0].folder}"
        )


def _is_made_by(store: TokenStore, name: str) -> bool:
    made = tokenizers.ready_made(name)
    if made:
        return tokenizers.fingerprint(made) == store.index.tokenizer
    if name == "char":
        return _kind(store) == "char"
    return _kind(store) == "bpe" and store.index.vocab <= int(name.removeprefix("bpe:"))


def _kind(store: TokenStore) -> str:
    return str(store.tokenizer.describe()["kind"])
