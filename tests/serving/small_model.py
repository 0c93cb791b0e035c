"""A small random model of an engine in this process, for tests that need neither Ray nor training."""

from importlib import import_module

import numpy as np

from raygpt.config import Model
from raygpt.corpus.tokenizers import Bytes
from raygpt.engines import make_slots
from raygpt.models import describe
from raygpt.serving.batching import Batch, Served

VOCAB, CONTEXT = Bytes().vocab, 80
MODEL = Model(layers=2, heads=4, width=32, context=CONTEXT, precision="fp32")
MODERN = Model(
    preset="qwen3",  # RMSNorm, RoPE, SwiGLU, QK-norm
    layers=3,  # the one between has no value embedding
    heads=4,
    kv_heads=2,
    head_size=16,
    width=32,
    context=CONTEXT,
    embedding_norm=True,
    value_embeddings=1,
    x0_mixing=True,
    head_gates=True,
    softcap=5.0,
    precision="fp32",
)


def parameters(seed=0, model=MODEL):
    """Random ones whose next token is uncertain, but not evenly so."""
    random = np.random.default_rng(seed)
    return {
        name: (random.normal(size=shape) * 0.35 + ("gain" in name)).astype(np.float32)
        for name, shape in describe(model, VOCAB).shapes.items()
    }


def reader_of(engine, model=MODEL):
    return import_module(f"raygpt.engines.{engine}.reader").Reader(model, VOCAB)


def batch_of(engine, reader, served, slots=4, **options):
    return Batch(make_slots(engine, reader, slots), CONTEXT, Bytes(), served, **options)


def served(reader, seed=0, step=7, model=MODEL):
    return Served(step, reader.load(parameters(seed, model)))


def answers(batch, texts):
    """The pieces of each text, by its options, when all are submitted at once."""
    pieces = [[] for _ in texts]
    for options, own in zip(texts, pieces, strict=True):
        batch.submit(options, own.append)
    while batch.turn():
        pass
    return pieces


def ids(pieces):
    return [token.id for piece in pieces for token in piece.tokens]


def text(pieces):
    return "".join(piece.text for piece in pieces)
