"""Loss, perplexity and bits per byte over a run's own validation text."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from raygpt import storage
from raygpt.corpus.feed import val_windows
from raygpt.corpus.mixture import open_mixture
from raygpt.corpus.order import window_count
from raygpt.corpus.store import TokenStore, TokenStream, open_store, stores_of
from raygpt.corpus.tokenizers import byte_lengths
from raygpt.errors import RaygptError
from raygpt.evaluation.continuations import TOKENS, Watch
from raygpt.evaluation.tasks import Figures, standard_error
from raygpt.inference.loaded import LoadedModel
from raygpt.runs import OpenRun, checkpoints


@dataclass(frozen=True)
class Validation:
    """The result of a validation."""

    loss: float  # a mean over tokens, in nats
    loss_stderr: float  # over windows
    perplexity: float
    bits_per_byte: float  # of the text: it compares models with different tokenizers
    tokens: int
    bytes: int


def validate(loaded: LoadedModel, watch: Watch = lambda done, total: None) -> Figures:
    """Evaluate all validation windows, as training does if `training.eval_rows` is not set."""
    streams = val_streams(loaded.run, checkpoints.facts(loaded.checkpoint)["data"])
    context = loaded.reader.context
    total = sum(window_count(len(stream), context) for stream in streams)
    if not total:
        raise RaygptError(
            f"{loaded.run.folder} has no validation window of {context + 1} tokens; name a --task instead"
        )
    lengths, losses, size = np.array(byte_lengths(loaded.tokenizer)), [], 0
    for windows in val_windows(streams, context, max(1, TOKENS // context)):
        logs, _ = loaded.reader.token_logprobs(loaded.state, windows)
        losses += (-logs.mean(1, dtype=np.float64)).tolist()
        size += int(lengths[windows[:, 1:]].sum())
        watch(len(losses), total)
    loss = float(np.mean(losses))
    tokens = total * context
    bits = loss * tokens / math.log(2) / max(1, size)
    return asdict(Validation(loss, standard_error(losses), math.exp(min(loss, 700)), bits, tokens, size))


def val_streams(run: OpenRun, fingerprints: Sequence[str]) -> list[TokenStream]:
    """The validation part of every store that the run was trained on."""
    if not fingerprints:
        raise RaygptError(f"{run.folder} was imported and has no validation text of its own; name a --task instead")
    home = stores_of(run.home)
    prepared = [_prepared(home, fingerprint) for fingerprint in fingerprints]
    known = [store for store in prepared if store]
    if len(known) < len(prepared):
        known = list(open_mixture(run.recipe.data, home).stores)  # may have to tokenise the source again
    found = [store.index.fingerprint for store in known]
    if found != list(fingerprints):
        raise RaygptError(
            f"{run.folder}: its data.source has changed since it was trained, and its tokens are no longer in {home}; "
            "copy them there, or name a --task instead"
        )
    return [store.val for store in known]


def _prepared(stores: str, fingerprint: str) -> TokenStore | None:
    """The store with this fingerprint, wherever its source is now."""
    for name in storage.folders(stores):
        if name.endswith(f"-{fingerprint[:8]}"):
            return open_store(storage.join(stores, name))
    return None
