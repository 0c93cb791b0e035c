"""A Triton kernel for the loss on a GPU: each token's loss, and the gradient of its logits in their own memory.

A program owns a token: it reads its logits once for the maximum and the sum, again (100 KB, from the L2 cache) for the
gradient, and writes that over them. The cache is asked to keep what is read again and nothing else: 4.3 ms instead of
4.8 for 65,536 tokens of GPT-2 on an H200, where memory alone would take 3.1, and PyTorch's compiler's kernel for the
plain function 9.0.
"""

import torch
from torch import Tensor

from raygpt.engines.torch.devices import accurate

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

WARPS = 16
TILE = 256 * WARPS  # columns: 8 values of each thread, one load of 16 bytes
UNROLL = 4  # tiles that share one rescaling of the sum
LOWEST = -1e30  # stands for a logit that is not there; unlike -inf, its differences are numbers


def loss_and_gradient_plain(
    logits: Tensor, targets: Tensor, scales: Tensor, vocab: int, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The kernel's function in plain PyTorch, which also writes over the logits: allocating memory is slow on a CPU."""
    exact = logits.to(accurate(logits.dtype))
    if cap is not None:
        tanh = exact.div_(cap).tanh_()
        exact = tanh * cap
    exact[:, vocab:] = -torch.inf
    target, scale = targets[:, None].long(), scales[:, None].to(exact.dtype)
    shifted = exact.sub_(exact.amax(1, keepdim=True))
    picked = shifted.gather(1, target)
    exponentials = shifted.exp_()
    total = exponentials.sum(1, keepdim=True)
    gradient = exponentials.mul_(scale / total)
    gradient.scatter_(1, target, gradient.gather(1, target) - scale)
    if cap is not None:
        gradient.addcmul_(gradient, tanh.square_(), value=-1)  # the slope of cap · tanh(x / cap) is 1 - tanh²
    return (total.log() - picked)[:, 0], gradient.to(logits.dtype)


def loss_and_gradient(
    logits: Tensor, targets: Tensor, scales: Tensor, vocab: int, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(each token's loss, `scale · (softmax - onehot)`), the second in the memory of the logits [tokens, padded].

    Columns from `vocab` on only pad: their probability and their gradient are zero. With a cap the softmax is that of
    `cap · tanh(logits / cap)`, and the gradient that of the logits before.
    """
    if not can_run(logits):
        return loss_and_gradient_plain(logits, targets, scales, vocab, cap)
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _kernel[(len(logits),)](
        logits,
        targets,
        scales,
        losses,
        vocab=vocab,
        padded=logits.shape[1],
        tile=TILE,
        unroll=UNROLL,
        lowest=LOWEST,
        cap=cap or 0.0,
        rough=logits.element_size() == 2 and logits.is_cuda,
        num_warps=WARPS,
    )
    return losses, logits


def can_run(logits: Tensor) -> bool:
    """On a GPU, in 16 or 32 bits, with rows of whole 16 bytes."""
    return triton is not None and logits.is_cuda and logits.element_size() <= 4 and logits.shape[1] % 8 == 0


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _capped(x, cap: tl.constexpr, rough: tl.constexpr):  # type: ignore[no-untyped-def]  # cap * tanh(x / cap)
        if cap > 0 and rough:  # one instruction, with an error of 5e-4: a bf16 logit's is 4e-3
            x = cap * tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=f,f", [x * (1 / cap)], dtype=tl.float32, is_pure=True, pack=1
            )
        elif cap > 0:  # by an exponential: a few instructions, where CUDA's tanh is a long function
            x = cap - 2 * cap / (1 + tl.exp2(x * (2 * 1.4426950408889634 / cap)))
        return x

    @triton.jit  # type: ignore[untyped-decorator]
    def _uncapped(gradient, capped, cap: tl.constexpr):  # type: ignore[no-untyped-def]  # of the logit before
        if cap > 0:
            tanh = capped * (1 / cap)
            gradient *= 1 - tanh * tanh
        return gradient

    @triton.jit  # type: ignore[untyped-decorator]
    def _kernel(  # type: ignore[no-untyped-def]  # PyTorch's compiler runs this text where only tl is known: no Any
        logits,
        targets,
        scales,
        losses,
        vocab: tl.constexpr,
        padded: tl.constexpr,
        tile: tl.constexpr,
        unroll: tl.constexpr,
        lowest: tl.constexpr,
        cap: tl.constexpr,  # 0: none
        rough: tl.constexpr,  # whether the hardware's own tanh will do
    ):
        log2e: tl.constexpr = 1.4426950408889634
        main: tl.constexpr = vocab // (tile * unroll) * tile * unroll  # from here on with masks
        token = tl.program_id(0)
        row = logits + token.to(tl.int64) * padded
        target = tl.load(targets + token)
        scale = tl.load(scales + token).to(tl.float32)
        lanes = tl.arange(0, tile)
        # Read before the barrier of the reductions, after which the row changes.
        picked = _capped(tl.load(row + target).to(tl.float32), cap, rough)
        # No capped logit exceeds the cap: as long as exp(-2 · cap) is a number, it stands for the highest one.
        fixed: tl.constexpr = cap > 0 and cap <= 40
        peak = tl.zeros([tile], tl.float32) + (cap if fixed else picked)
        total = tl.zeros([tile], tl.float32)
        for start in range(0, main if fixed else 0, tile):
            x = tl.load(row + start + lanes, eviction_policy="evict_last")  # for it is read again
            total += tl.exp2((_capped(x.to(tl.float32), cap, rough) - cap) * log2e)
        for start in range(0, 0 if fixed else main, tile * unroll):
            higher = peak
            for j in tl.static_range(unroll):
                x = tl.load(row + start + j * tile + lanes, eviction_policy="evict_last")
                higher = tl.maximum(higher, _capped(x.to(tl.float32), cap, rough))
            total *= tl.exp2((peak - higher) * log2e)
            for j in tl.static_range(unroll):
                x = tl.load(row + start + j * tile + lanes, eviction_policy="evict_last")
                x = _capped(x.to(tl.float32), cap, rough)
                total += tl.exp2((x - higher) * log2e)
            peak = higher
        for start in tl.static_range(main, padded, tile):
            columns = start + lanes
            x = _capped(tl.load(row + columns, mask=columns < padded, other=lowest).to(tl.float32), cap, rough)
            x = tl.where(columns < vocab, x, lowest)
            higher = tl.maximum(peak, x)
            total = total * tl.exp2((peak - higher) * log2e) + tl.exp2((x - higher) * log2e)
            peak = higher
        top = tl.max(peak, 0)
        log_total = top * log2e + tl.log2(tl.sum(total * tl.exp2((peak - top) * log2e), 0))
        tl.store(losses + token, log_total / log2e - picked)
        for start in range(0, main, tile):
            columns = start + lanes
            x = _capped(tl.load(row + columns, eviction_policy="evict_first").to(tl.float32), cap, rough)
            slope = tl.exp2(x * log2e - log_total) * scale - tl.where(columns == target, scale, 0.0)
            slope = _uncapped(slope, x, cap).to(logits.dtype.element_ty)
            tl.store(row + columns, slope, cache_modifier=".cs")  # read by the next product, not by this kernel
        for start in tl.static_range(main, padded, tile):
            columns = start + lanes
            x = _capped(tl.load(row + columns, mask=columns < padded, other=lowest).to(tl.float32), cap, rough)
            real = tl.where(columns < vocab, x, lowest)
            slope = tl.exp2(real * log2e - log_total) * scale - tl.where(columns == target, scale, 0.0)
            tl.store(row + columns, _uncapped(slope, x, cap).to(logits.dtype.element_ty), mask=columns < padded)
