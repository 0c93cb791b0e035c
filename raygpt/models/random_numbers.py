"""Random numbers as a function of (seed, name, index), for initial values: the same in both engines, on any mesh.

Everything up to the uniform draw is 32-bit integer arithmetic on arrays of any library (NumPy, JAX, PyTorch): an
element's number depends on its own index alone, so every device draws its shard and nothing is gathered. Indices count
the description's axes, one layer at a time, without the padding of the vocabulary.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.models.parameter import InitialValues, Parameter


def mix(x: Any) -> Any:
    """int32 to int32, one to one, every bit of the result depending on every bit of x (Wellons' lowbias32)."""
    x = x ^ (x >> 16 & 0xFFFF)  # >> repeats the sign; the mask makes it zeros
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * -0x7B935975  # 0x846CA68B as an int32
    return x ^ (x >> 16 & 0xFFFF)


def keys(parameter: Parameter, seed: int, layers: int) -> NDArray[np.int32]:
    """Two int32 for each layer's array: [layers, 2]; [1, 2] for a parameter outside the layers."""
    names = [f"{parameter.name} {layer}" for layer in range(layers)] if parameter.is_stacked else [parameter.name]
    digests = [hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest() for name in names]
    return np.array([np.frombuffer(digest, "<i4") for digest in digests], dtype=np.int32)


def draw(initial: InitialValues, index: Any, key: tuple[Any, Any], xp: Any) -> Any:
    """fp32 values at int32 indices; `xp` is numpy, jax.numpy or torch.

    Uniform ones are the same everywhere bit for bit. Normal ones, by Box and Muller, are the same to the last digits of
    a library's log and cos: 1e-6 of the deviation. (By erfinv they would differ by 3e-5 of it in the tails.)
    """
    even = uniform(mix(mix(index ^ key[0]) + key[1]), xp)
    if initial.kind == "uniform":
        return even * initial.size
    share = (uniform(mix(mix(index ^ key[1]) + key[0]), xp) + 1) / 2  # in (0, 1), exact as well
    return xp.sqrt(-2 * xp.log(share)) * xp.cos(math.pi * even) * initial.size


def uniform(bits: Any, xp: Any) -> Any:
    """In (-1, 1): odd / 2**23 with |odd| < 2**23, which fp32 holds exactly; symmetric, never 0 and never ±1."""
    return xp.asarray((bits >> 9 & 0x7FFFFF) * 2 + (1 - 2**23), dtype=xp.float32) * 2.0**-23
