"""Which kernels an engine uses on which hardware. Imports neither JAX nor PyTorch: a plan must know it, too."""

from collections.abc import Mapping

from raygpt.config import Model

FEW_LAYERS = 6  # up to this many a CPU, too, compiles unrolled within seconds
CONTEXT_MULTIPLE = 128  # the width of a TPU's vector unit, and of the largest of the Triton kernel's blocks
LANES = 256  # columns that a warp of the fused kernels takes at a time
TILE_ROWS = 16  # the most that a kernel takes at a time; a context of a multiple of it fits with any number of rows


def scans(wanted: str, platform: str, layers: int) -> bool:
    """Whether JAX compiles the layers as one loop. Unrolled they run faster, by 10 % on a CPU, but compile longer."""
    if wanted != "auto":
        return wanted == "scanned"
    return platform == "tpu" or (platform == "cpu" and layers > FEW_LAYERS)


def attention(
    platform: str,
    capability: float,
    precision: str,
    mesh: Mapping[str, int],
    model: Model,
    deterministic: bool = False,
    has_triton: bool = True,
) -> str:
    """JAX's kernel: cuDNN, Triton, Splash or XLA. On a GPU, rows that are divided along `context` need XLA's."""
    context = mesh["context"]
    divides = model.context % (CONTEXT_MULTIPLE * context) == 0 and model.key_heads % mesh["tensor"] == 0
    if platform == "tpu" and divides:
        return "Splash"
    if platform == "gpu" and context == 1 and _cudnn_can(capability, precision, model):
        if not deterministic:
            return "cuDNN"
        if divides and has_triton:
            return "Triton"
    return "XLA"


def _cudnn_can(capability: float, precision: str, model: Model) -> bool:
    """From Ampere on, in 16 bits, with heads of a multiple of 8 up to 128, on Hopper and later up to 256."""
    size = model.size_of_head
    fits = size % 8 == 0 and size <= (256 if capability >= 9 else 128)
    return fits and capability >= 8 and precision in ("bf16", "fp16")


def kernels(
    platform: str,
    capability: float,
    precision: str,
    mesh: Mapping[str, int],
    model: Model,
    scanned: bool,
    has_triton: bool = True,
) -> str:
    """JAX's `fused` kernels where they can compute and pay, `plain` elsewhere.

    That is on NVIDIA from Ampere on, in bf16, with layers one after another, on a mesh that divides only rows, and
    with a JAX that has Triton.
    """
    hardware = platform == "gpu" and capability >= 8 and has_triton
    tiles = not model.bias if model.unlike_gpt2 else model.width % LANES == 0 and model.context % TILE_ROWS == 0
    whole = mesh["fsdp"] == mesh["tensor"] == mesh["context"] == 1  # every device has all parameters
    return "fused" if hardware and tiles and whole and precision == "bf16" and not scanned else "plain"
