"""Cross-entropy that never holds the logits of a whole batch: in chunks of tokens, its gradient taken on the way.

The logits of 32 rows of GPT-2 are 6.6 GB in fp32. Here a chunk's logits live only until its loss, and when training
its share of the gradients, are summed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from raygpt.engines.torch.kernels import loss_and_gradient
from raygpt.engines.torch.model import GPT, accurate
from raygpt.engines.torch.tensor import gathered, own_time

CHUNK_BYTES = 2**30  # of fp32 logits at a time
TRAINING = 4  # times as many on a GPU: there they stay in 16 bits and are overwritten by their gradient
CACHE_BYTES, CACHE_TOKENS = 2**23, 512  # on a CPU what its caches hold; but products of fewer tokens are slow


def chunk_tokens(tokens: int, vocab: int, on_gpu: bool, training: bool = False) -> int:
    """Tokens in a chunk: as many, in chunks of equal size, as keep its logits below what there is room for."""
    room = CHUNK_BYTES * (TRAINING if training else 1)
    if not on_gpu:
        room = min(CHUNK_BYTES, max(CACHE_BYTES, CACHE_TOKENS * vocab * 4))
    chunks = -(-tokens * vocab * 4 // room)
    return -(-tokens // chunks)


def cross_entropy(hidden: Tensor, table: Tensor, targets: Tensor, scale: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """(sum over rows of scale · loss, loss of each row), a row's loss being the sum over its tokens.

    Only the sum has gradients, for hidden and table.
    hidden [rows, time, width], table [padded vocabulary, width], targets [rows, time], scale [rows].
    """
    if torch.is_grad_enabled():
        return _CrossEntropy.apply(hidden, table, targets, scale, vocab)
    weights = table.to(hidden.dtype)
    size = chunk_tokens(targets.numel(), len(table), hidden.is_cuda)
    parts = zip(hidden.flatten(0, 1).split(size), targets.flatten().split(size), strict=True)
    losses = torch.cat([_nll(h, weights, y, vocab) for h, y in parts]).view(targets.shape).sum(1)
    return (losses * scale).sum(), losses


class _CrossEntropy(torch.autograd.Function):
    """As above, with the gradients of the first result for hidden and table, while the logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, scale: Tensor, vocab: int
    ) -> tuple[Tensor, Tensor]:
        weights = table.to(hidden.dtype)
        size = chunk_tokens(targets.numel(), len(table), hidden.is_cuda, training=True)
        scales = scale[:, None].expand(targets.shape)
        losses, dhidden, dtable = [], [], torch.zeros_like(table)
        for h, y, s in zip(*(part.flatten(0, 1).split(size) for part in (hidden, targets, scales)), strict=True):
            nll, dlogits = loss_and_gradient(h @ weights.T, y, s, vocab)  # dlogits [chunk, vocabulary]
            dtable += dlogits.T @ h
            dhidden.append(dlogits @ weights)
            losses.append(nll)
        ctx.save_for_backward(torch.cat(dhidden).view(hidden.shape), dtable)
        rows = torch.cat(losses).view(targets.shape).sum(1)
        ctx.mark_non_differentiable(rows)
        return (rows * scale).sum(), rows

    @staticmethod
    def backward(ctx: Any, total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dtable = ctx.saved_tensors
        return dhidden * total.to(dhidden.dtype), dtable * total.to(dtable.dtype), None, None, None


def _nll(hidden: Tensor, table: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Loss of each token, in fp32 at least; ids that only pad the table are impossible."""
    logits = (hidden @ table.T).to(accurate(hidden.dtype))  # [tokens, vocabulary]
    padding = torch.arange(len(table), device=hidden.device) >= vocab
    logits = logits.masked_fill(padding, -torch.inf)
    return logits.logsumexp(1) - logits.gather(1, targets[:, None].long())[:, 0]


def graded(hidden: Tensor, table: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each target's log-probability in fp32 at least, and whether it is the likeliest: [rows, time]."""
    logs, hits, weights = [], [], table.to(hidden.dtype)
    for h, y in zip(hidden, targets.long(), strict=True):  # by rows: logits are large
        logits = (h @ weights.T).to(accurate(h.dtype))  # [time, vocabulary]
        logs.append(logits.gather(1, y[:, None])[:, 0] - logits.logsumexp(1))
        hits.append(logits.argmax(1) == y)
    return torch.stack(logs), torch.stack(hits)


class Objective(nn.Module):
    """A model with its loss: what is trained, and wrapped to be trained together with other processes."""

    def __init__(self, gpt: GPT, vocab: int):
        super().__init__()
        self.gpt, self.vocab = gpt, vocab
        self.tensor: DeviceMesh | None = None  # the processes that share its matrices
        self._loss = cross_entropy

    def forward(self, inputs: Tensor, targets: Tensor, scale: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """(sum over rows of scale · loss, loss of each row) of inputs and targets [rows, time].

        Where processes share the matrices, each gives the part of its time; theirs sum up to the whole.
        """
        hidden = self.gpt(inputs, keys)
        if self.tensor:
            hidden, targets = own_time(hidden, self.tensor), own_time(targets, self.tensor)
        return self._loss(hidden, gathered(self.gpt.table), targets, scale, self.vocab)

    def extend(self, ids: Tensor, start: int, cache: Any) -> Tensor:
        """Logits [rows, vocabulary] of what follows ids [rows, time], which follow `start` earlier ones."""
        hidden = self.gpt.extend(ids, start, cache)[:, -1]
        return hidden @ gathered(self.gpt.table)[: self.vocab].T.to(hidden.dtype)

    def grade(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Each target's log-probability, and whether it is the likeliest: [rows, time]."""
        hidden, table = self.gpt(inputs), gathered(self.gpt.table)[: self.vocab]
        return graded(hidden, table, targets)

    def compile_parts(self) -> None:
        """Compile block by block, not the whole: gradients of late blocks travel while early ones are computed."""
        for block in self.gpt.blocks:
            block.compile()
        self._loss = torch.compile(cross_entropy)
