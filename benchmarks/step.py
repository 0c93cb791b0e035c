"""The bare training step of an engine on random tokens: tokens per second, MFU, peak memory, time to compile.

    python benchmarks/step.py                                    # JAX with its kernels, GPT-2 124M, 64 × 1024 tokens
    python benchmarks/step.py --plain --engine jax torch         # and JAX without kernels, and PyTorch
    python benchmarks/step.py --nanogpt ~/nanoGPT/model.py       # and nanoGPT's model, for the ratio
    python benchmarks/step.py --batch 2 --context 64 model.layers=2 model.width=256 --steps 10      # on a CPU

Each is measured in a process of its own, one after another: GPUs of one kind differ by 5 %, so only ratios within one
call decide. A figure is the median of rounds of ten steps, with no wait in between, after 15 to warm up.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
from rich.console import Console
from rich.table import Table

from raygpt.config import Recipe
from raygpt.recipes import load_recipe
from raygpt.training.metrics import mfu

VOCAB = 50257
ROUND, FIRST, WARM_UP, BATCHES = 10, 5, 10, 4  # steps: of a round, whose losses are kept, to warm up; batches in turn
ROOT = Path(__file__).parents[1]


def main() -> None:
    arguments = _arguments()
    if arguments.case:
        print(json.dumps(measured(arguments.case, arguments)))
        return
    figures = {}
    for case in cases(arguments):
        figures[case] = in_a_process(case)
        print(f"{case}: {figures[case]['ms']:.1f} ms, first losses {figures[case]['losses']}", flush=True)
    for figure in figures.values():
        if "nanoGPT" in figures:
            figure["of_nanogpt"] = figure["tokens_per_s"] / figures["nanoGPT"]["tokens_per_s"]
    Console(width=140).print(_table(figures, arguments))
    name = f"step-{arguments.preset}-{arguments.batch}x{arguments.context}"
    print(f"written to {record.save(name, figures).relative_to(ROOT)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the recipe, e.g. model.bias=false")
    parser.add_argument("--engine", nargs="+", choices=["jax", "torch"], default=["jax"])
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--batch", type=int, default=64, help="rows")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--plain", action="store_true", help="JAX also without its kernels")
    parser.add_argument("--nanogpt", help="path of nanoGPT's model.py, to be measured beside")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what one process measures
    return parser.parse_intermixed_args()


def cases(arguments: argparse.Namespace) -> list[str]:
    """What is measured, in order."""
    plain = ["jax plain"] if arguments.plain else []
    return arguments.engine + plain + (["nanoGPT"] if arguments.nanogpt else [])


def in_a_process(case: str) -> dict[str, Any]:
    """The figures of one case; what else it prints is shown if it fails."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one case, in this process."""
    recipe = make_recipe(case, arguments)
    windows = np.random.default_rng(0).integers(0, VOCAB, (BATCHES, arguments.batch, arguments.context + 1))
    make = nanogpt_step if case == "nanoGPT" else engine_step
    step, wait, peak, about = make(case, recipe, windows.astype(np.int32), arguments)

    began = time.perf_counter()
    losses = [wait(step(0))]
    compile_s = time.perf_counter() - began
    losses += [wait(step(n)) for n in range(1, FIRST)]
    wait([step(n) for n in range(WARM_UP)][-1])
    rounds = []
    for _ in range(max(1, arguments.steps // ROUND)):
        began = time.perf_counter()
        last = [step(n) for n in range(ROUND)][-1]
        wait(last)
        rounds.append((time.perf_counter() - began) / ROUND)
    speed = arguments.batch * arguments.context / statistics.median(rounds)
    return {
        "ms": 1e3 * statistics.median(rounds),
        "tokens_per_s": speed,
        "mfu": mfu(speed, recipe.model.flops_per_token(VOCAB), about["device"], 1),
        "peak_gib": peak() / 2**30,
        "compile_s": compile_s,
        "rounds_ms": [round(1e3 * seconds, 2) for seconds in rounds],
        "losses": [round(loss, 4) for loss in losses],
        "about": about,
    }


def make_recipe(case: str, arguments: argparse.Namespace) -> Recipe:
    """GPT-2 of a size without dropout, whatever else is overridden."""
    settings = [
        f"engine={'torch' if case == 'torch' else 'jax'}",
        f"model.preset={arguments.preset}",
        f"model.context={arguments.context}",
        f"training.batch_tokens={arguments.batch * arguments.context}",
    ]
    return load_recipe("tiny", [*settings, *arguments.overrides])


Parts = tuple[Callable[[int], Any], Callable[[Any], float], Callable[[], int], dict[str, str]]


def engine_step(case: str, recipe: Recipe, windows: Any, arguments: argparse.Namespace) -> Parts:
    """step(n) takes a step and gives its metrics, wait(metrics) is its loss, peak() the most bytes in use."""
    if recipe.engine == "jax":
        import jax

        from raygpt.engines.jax.engine import JaxEngine

        engine: Any = JaxEngine(recipe, VOCAB, kernels="plain" if case == "jax plain" else None)
        peak = lambda: (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)  # noqa: E731
    else:
        import torch

        from raygpt.engines.torch.engine import TorchEngine, set_up

        set_up()
        engine = TorchEngine(recipe, VOCAB)
        peak = torch.cuda.max_memory_allocated
    state, batches = engine.start(), [engine.put(part) for part in windows]

    def step(number: int) -> Any:
        nonlocal state
        state, metrics = engine.step(state, batches[number % BATCHES])
        return metrics

    return step, lambda metrics: engine.read(metrics)["loss"], peak, engine.describe()


def nanogpt_step(case: str, recipe: Recipe, windows: Any, arguments: argparse.Namespace) -> Parts:
    """nanoGPT's own model and optimizer as its train.py sets them up for one GPU: no biases, bf16, compiled.

    Gradients are not clipped, which ours are: that only makes it faster.
    """
    import torch

    spec = importlib.util.spec_from_file_location("nanogpt", arguments.nanogpt)
    assert spec is not None
    assert spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = theirs
    spec.loader.exec_module(theirs)
    cuda = torch.cuda.is_available()
    device, size = "cuda" if cuda else "cpu", recipe.model
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shape = {"block_size": size.context, "n_layer": size.layers, "n_head": size.heads, "n_embd": size.width}
    config = theirs.GPTConfig(dropout=0.0, bias=False, **shape)  # of 50304 tokens, padded as ours are
    model = theirs.GPT(config).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)
    compiled = torch.compile(model) if cuda else model
    batches = torch.as_tensor(windows, dtype=torch.long, device=device)

    def step(number: int) -> Any:
        batch = batches[number % BATCHES]
        with torch.autocast(device, torch.bfloat16):
            _, loss = compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    about = {"engine": f"nanoGPT, torch {torch.__version__}"}
    about["device"] = torch.cuda.get_device_name() if cuda else "cpu"
    return step, float, torch.cuda.max_memory_allocated, about


def _table(figures: dict[str, Any], arguments: argparse.Namespace) -> Table:
    device = next(iter(figures.values()))["about"]["device"]
    table = Table(title=f"{arguments.preset}, {arguments.batch} × {arguments.context} tokens on one {device}")
    for title in ("", "kernels", "ms", "K tokens/s", "MFU", "peak GiB", "compile s", "of nanoGPT"):
        table.add_column(title, justify="left" if title in ("", "kernels") else "right")
    for case, figure in figures.items():
        numbers = [f"{figure['ms']:.1f}", f"{figure['tokens_per_s'] / 1e3:.1f}"]
        numbers.append("" if figure["mfu"] is None else f"{figure['mfu']:.3f}")
        numbers += [f"{figure['peak_gib']:.1f}", f"{figure['compile_s']:.0f}"]
        ratio = f"{figure['of_nanogpt']:.3f}" if "of_nanogpt" in figure else ""
        table.add_row(case, figure["about"].get("kernels", ""), *numbers, ratio)
    return table


if __name__ == "__main__":
    main()
