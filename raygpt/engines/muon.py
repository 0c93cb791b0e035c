"""What both engines share of Muon: momentum, and the orthogonal matrix next to a direction.

Plain arithmetic on arrays of JAX or PyTorch. Each engine decides where a matrix is computed.
"""

from typing import Any

from raygpt.config import Optimizer
from raygpt.config.optimizer import FIRST_MOMENTUM

# a, b, c of the polynomials a·x + b·x³ + c·x⁵ that bring a matrix's singular values near 1, one after another. These
# are Polar Express's (arXiv 2505.16932), the best five for values from 0.001 to 1; the result's are 0.86 to 1.14. With
# five times Newton–Schulz's usual 3.4445, -4.775, 2.0315 they are 0.68 to 1.20, at the same cost.
POLYNOMIALS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SAFETY = 1.02  # the largest singular value must not round to more than 1


def precision_of(run: str) -> str:
    """Of the products in a run of that precision. fp16's range ends at 6e-8, and squares of small values are less."""
    return "fp32" if run == "fp16" else run


def momentum_at(settings: Optimizer, updates: Any) -> Any:
    """The decay rate of the running mean in the update that follows `updates` others, an array without axes: it rises
    linearly to `optimizer.momentum`."""
    first, warmup = min(FIRST_MOMENTUM, settings.momentum), max(1, settings.momentum_warmup)
    share = (updates / warmup).clip(max=1) if settings.momentum_warmup else 1.0
    return first + (settings.momentum - first) * share


def running_mean(mean: Any, value: Any, decay: Any) -> Any:
    """One step of an exponential moving average. Of a gradient's new average and the same gradient it gives Nesterov's
    direction."""
    return decay * mean + (1 - decay) * value


def orthogonalise(matrices: Any) -> Any:
    """U·V of each matrix U·S·V [..., rows, columns], nearly, computed in its dtype.

    Rows should not be more than columns: half of the products are of [rows, rows].
    """
    norms = (matrices * matrices).sum((-2, -1))[..., None, None] ** 0.5
    x = matrices / (SAFETY * norms + 1e-6)
    for a, b, c in POLYNOMIALS:
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x


def update_of(directions: Any) -> Any:
    """Orthogonal matrices [..., rows, columns] next to the directions, all columns of one norm.

    With more columns than rows the columns of an orthogonal matrix differ: an MLP's hidden units would learn at
    different paces. Made equal, the loss of a model of 124 M parameters was 0.01 lower. NorMuon (arXiv 2510.05491)
    divides by running means of these norms, which would be one more slot.
    """
    x = orthogonalise(directions)
    rows, columns = x.shape[-2:]
    if rows == columns:
        return x
    norms = (x * x).sum(-2)[..., None, :] ** 0.5
    return x * ((rows / columns) ** 0.5 / (norms + 1e-6))


def shape_factor(fan_in: int, fan_out: int) -> float:
    """What the orthogonal update of a matrix is multiplied by: with more outputs than inputs, each output's share of
    it is smaller."""
    return max(1.0, fan_out / fan_in) ** 0.5


def decayed(update: Any, weight: Any, decay: float, cautious: bool) -> Any:
    """A matrix's update with its weight decay; if that is cautious, only where both go the same way."""
    if not decay:
        return update
    return update + decay * (weight * (update * weight > 0) if cautious else weight)
