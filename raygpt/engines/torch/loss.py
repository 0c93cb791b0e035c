"""Cross-entropy without the logits of a whole batch: in chunks of tokens, its gradient computed in the same pass.

A chunk's logits live only until its loss, and when training its share of the gradients, are summed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from raygpt.engines.base import Positions
from raygpt.engines.chunks import IN_PLACE_LOGITS, chunk_count, chunk_logits
from raygpt.engines.torch.devices import accurate
from raygpt.engines.torch.kernels.loss import loss_and_gradient
from raygpt.engines.torch.layers import full, logits, product
from raygpt.engines.torch.model import GPT
from raygpt.engines.torch.tensor_parallel import own_time


def chunk_tokens(tokens: int, vocab: int, on_gpu: bool, training: bool = False) -> int:
    """Tokens in a chunk, all chunks having as many."""
    limit = IN_PLACE_LOGITS if training and on_gpu else chunk_logits(vocab, not on_gpu)
    return tokens // chunk_count(tokens, vocab, limit)


def cross_entropy(
    hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor, vocab: int, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(sum over tokens of weight · loss, loss of each row), a row's loss being the sum over its tokens.

    Only the sum has gradients, for hidden and table. `cap` is `model.softcap`.
    hidden [rows, time, width], table [padded vocabulary, width], targets and weights [rows, time].
    """
    if torch.is_grad_enabled():
        return _CrossEntropy.apply(hidden, table, targets, weights, vocab, cap)
    kernel = table.to(hidden.dtype)
    size = chunk_tokens(targets.numel(), len(table), hidden.is_cuda)
    parts = zip(hidden.flatten(0, 1).split(size), targets.flatten().split(size), strict=True)
    losses = torch.cat([_nll(h, kernel, y, vocab, cap) for h, y in parts]).view(targets.shape)
    return (losses * weights).sum(), losses.sum(1)


class _CrossEntropy(torch.autograd.Function):
    """As above, with the gradients of the first result for hidden and table, while the logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor, vocab: int, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        kernel = table.to(hidden.dtype)
        size = chunk_tokens(targets.numel(), len(table), hidden.is_cuda, training=True)
        chunks = zip(*(part.flatten(0, 1).split(size) for part in (hidden, targets, weights)), strict=True)
        losses, dhidden, dtable = [], [], torch.zeros_like(table)
        for h, y, w in chunks:
            nll, dlogits = loss_and_gradient(product(h, kernel), y, w, vocab, cap)  # dlogits [chunk, vocabulary]
            _add_product(dtable, dlogits, h)
            dhidden.append(dlogits @ kernel)
            losses.append(nll)
        ctx.save_for_backward(torch.cat(dhidden).view(hidden.shape), dtable)
        by_token = torch.cat(losses).view(targets.shape)
        by_row = by_token.sum(1)
        ctx.mark_non_differentiable(by_row)  # no view: PyTorch 2.11's compiler would differentiate it
        return (by_token * weights).sum(), by_row

    @staticmethod
    def backward(ctx: Any, total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dtable = ctx.saved_tensors
        return dhidden * total.to(dhidden.dtype), dtable * total.to(dtable.dtype), None, None, None, None


@torch.library.custom_op("raygpt::add_product", mutates_args=("total",))
def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total += xᵀ · y. On a GPU the product of 16-bit operands adds to an fp32 total itself: nothing is rounded before,
    and no pass of its own adds. PyTorch 2.11's compiler cannot trace that product, so this is an operator to it."""
    if total.is_cuda and total.dtype == torch.float32 and x.element_size() == 2:
        torch.ops.aten.addmm.dtype_out(total, x.T, y, torch.float32, out=total)
    else:
        total += x.T @ y


@_add_product.register_fake
def _add_product_fake(total: Tensor, x: Tensor, y: Tensor) -> None:
    pass


def _nll(hidden: Tensor, table: Tensor, targets: Tensor, vocab: int, cap: float | None) -> Tensor:
    """Loss of each token, in fp32 at least; ids that only pad the table are impossible."""
    exact = logits(hidden, table, cap)[:, :vocab].to(accurate(hidden.dtype))  # [tokens, vocabulary]
    return exact.logsumexp(1) - exact.gather(1, targets[:, None].long())[:, 0]


def token_logprobs(
    hidden: Tensor, table: Tensor, targets: Tensor, vocab: int, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Each target's log-probability in fp32 at least, and whether it is the likeliest: [rows, time]."""
    logprobs, hits, kernel = [], [], table.to(hidden.dtype)
    for h, y in zip(hidden, targets.long(), strict=True):  # by rows: logits are large
        exact = logits(h, kernel, cap)[:, :vocab].to(accurate(h.dtype))  # [time, vocabulary]
        logprobs.append(exact.gather(1, y[:, None])[:, 0] - exact.logsumexp(1))
        hits.append(exact.argmax(1) == y)
    return torch.stack(logprobs), torch.stack(hits)


class Objective(nn.Module):
    """A model with its loss: what is trained, and wrapped to be trained together with other processes."""

    def __init__(self, gpt: GPT, vocab: int):
        super().__init__()
        self.gpt, self.vocab = gpt, vocab
        self.tensor: DeviceMesh | None = None  # the processes that share its matrices
        self._loss = cross_entropy

    def forward(self, inputs: Tensor, targets: Tensor, weights: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """(sum over tokens of weight · loss, loss of each row) of inputs, targets and weights [rows, time].

        Where processes share the matrices, each gives the part of its time; theirs sum up to the whole.
        """
        hidden = self.gpt(inputs, keys)
        if self.tensor:
            hidden, targets, weights = (own_time(x, self.tensor) for x in (hidden, targets, weights))
        return self._loss(hidden, full(self.gpt.table), targets, weights, self.vocab, self.gpt.softcap)

    def next_logits(self, ids: Tensor, start: Positions, cache: Any) -> Tensor:
        """Logits [rows, vocabulary] of what follows ids [rows, time], which follow `start` earlier ones."""
        hidden = self.gpt.extend(ids, start, cache)[:, -1]
        return logits(hidden, full(self.gpt.table), self.gpt.softcap)[:, : self.vocab]

    def token_logprobs(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Each target's log-probability, and whether it is the likeliest: [rows, time]."""
        return token_logprobs(self.gpt(inputs), full(self.gpt.table), targets, self.vocab, self.gpt.softcap)

    def compile_parts(self) -> None:
        """Compile block by block, not the whole: gradients of late blocks travel while early ones are computed."""
        for block in self.gpt.blocks:
            block.compile()
        self._loss = torch.compile(cross_entropy)
