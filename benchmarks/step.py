"""The bare training step of an engine on random tokens: tokens per second, MFU, peak memory, time to compile.

    python benchmarks/step.py                                    # JAX with its kernels, GPT-2 124M, 64 × 1024 tokens
    python benchmarks/step.py --plain --engine jax torch         # and JAX without kernels, and PyTorch
    python benchmarks/step.py --nanogpt ~/nanoGPT/model.py       # and nanoGPT's model, for the ratio
    python benchmarks/step.py --before ../before --turns 2       # and the engines of another checkout, in turns
    python benchmarks/step.py --engine jax torch --nanogpt ~/nanoGPT/model.py --turns 5 --batch 12 --context 64 \
        --vocab 65 --steps 100 model.layers=4 model.heads=4 model.width=128 model.bias=false         # on a CPU
    python benchmarks/step.py --record                           # and put the figures into `raygpt bench`'s table

Each is measured in a process of its own, one after another: GPUs of one kind differ by 5 %, so only ratios within one
call decide. A figure is the median of rounds of ten steps, with no wait in between, after 15 to warm up.
"""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import processes
import record
from rich.console import Console
from rich.table import Table

from raygpt import bench
from raygpt.bench import BATCHES, Steps, Work

ROOT = Path(__file__).parents[1]
SPEEDS = ROOT / "raygpt/speeds.json"
BEFORE = " before"  # behind an engine's name: that of another checkout


def main() -> None:
    arguments = _arguments()
    if arguments.case:
        print(json.dumps(measured(arguments.case, arguments)))
        return
    figures: dict[str, Any] = {}
    for case in cases(arguments) * arguments.turns:
        found = in_a_process(case, arguments.before)
        if found is None:  # the others still count
            continue
        print(f"{case}: {found['ms']:.1f} ms, first losses {found['losses']}", flush=True)
        figures[case] = bench.together(figures[case], found) if case in figures else found
    for case, figure in figures.items():
        if "nanoGPT" in figures:
            figure["of_nanogpt"] = figure["tokens_per_s"] / figures["nanoGPT"]["tokens_per_s"]
        if f"{case}{BEFORE}" in figures:
            figure["of_before"] = figure["tokens_per_s"] / figures[f"{case}{BEFORE}"]["tokens_per_s"]
    if not figures:
        sys.exit(1)
    Console(width=140).print(_table(figures, arguments))
    usual = f"step-{arguments.preset or 'small'}-{arguments.batch}x{arguments.context}"
    path = record.save(arguments.name or usual, figures)
    print(f"written to {path.relative_to(ROOT)}")
    if arguments.record:
        remember(json.loads(path.read_text()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the recipe, e.g. model.bias=false")
    parser.add_argument("--engine", nargs="+", choices=["jax", "torch"], default=["jax"])
    parser.add_argument("--preset", help="gpt2 unless model.width is overridden")
    parser.add_argument("--batch", type=int, default=64, help="rows")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=bench.GPT2_VOCAB)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=1, help="how often each has its turn: on a noisy machine, several")
    parser.add_argument("--plain", action="store_true", help="JAX also without its kernels")
    parser.add_argument("--nanogpt", help="path of nanoGPT's model.py, to be measured beside")
    parser.add_argument("--before", help="path of another checkout, whose engines are measured beside")
    parser.add_argument("--name", help="of the results file; step-PRESET-ROWSxCONTEXT if not given")
    parser.add_argument("--record", action="store_true", help="put the figures into the table of raygpt bench")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what one process measures
    arguments = parser.parse_intermixed_args()
    if arguments.preset is None and not any(word.startswith("model.width=") for word in arguments.overrides):
        arguments.preset = "gpt2"
    return arguments


def cases(arguments: argparse.Namespace) -> list[str]:
    """What is measured, in order."""
    plain = ["jax plain"] if arguments.plain else []
    before = [f"{engine}{BEFORE}" for engine in arguments.engine] if arguments.before else []
    return arguments.engine + before + plain + (["nanoGPT"] if arguments.nanogpt else [])


def in_a_process(case: str, before: str | None) -> dict[str, Any] | None:
    """The figures of one case, if it succeeds."""
    root, environment = ROOT, dict(os.environ)
    if before and case.endswith(BEFORE):
        root, case = Path(before).resolve(), case.removesuffix(BEFORE)
        environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    words = [str(root / "benchmarks" / "step.py"), *_own_words(before), "--case", case]
    return processes.measured(case, words, environment)


def _own_words(before: str | None) -> list[str]:
    """The command's words without `--before PATH`, which an older checkout does not know."""
    words = [word for word in sys.argv[1:] if word != f"--before={before}"]
    if "--before" in words:
        at = words.index("--before")
        del words[at : at + 2]
    return words


def measured(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one case, in this process."""
    work = Work(
        "torch" if case == "torch" else "jax",
        arguments.preset,
        arguments.batch,
        arguments.context,
        arguments.steps,
        "plain" if case == "jax plain" else None,
        arguments.vocab,
        tuple(arguments.overrides),
    )
    return bench.timed(nanogpt_steps(work, arguments.nanogpt), work) if case == "nanoGPT" else bench.measure(work)


def nanogpt_steps(work: Work, path: str) -> Steps:
    """nanoGPT's own model and optimizer as its train.py sets them up for one GPU: no biases, bf16, compiled.

    Gradients are clipped, as by its train.py. On a CPU it is fp32 and not compiled, as its README has it there.
    """
    import torch

    spec = importlib.util.spec_from_file_location("nanogpt", path)
    assert spec is not None
    assert spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = theirs
    spec.loader.exec_module(theirs)
    cuda = torch.cuda.is_available()
    device, size = "cuda" if cuda else "cpu", work.recipe.model
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shape = {"block_size": size.context, "n_layer": size.layers, "n_head": size.heads, "n_embd": size.width}
    vocab = 50304 if work.vocab == bench.GPT2_VOCAB else work.vocab  # as its train.py has them
    config = theirs.GPTConfig(dropout=0.0, bias=False, vocab_size=vocab, **shape)
    model = theirs.GPT(config).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)
    compiled = torch.compile(model) if cuda else model
    batches = torch.as_tensor(work.windows, dtype=torch.long, device=device)

    def take(number: int) -> Any:
        batch = batches[number % BATCHES]
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            _, loss = compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    about = {"engine": f"nanoGPT, torch {torch.__version__}"}
    about["device"] = torch.cuda.get_device_name() if cuda else "cpu"
    return Steps(take, float, torch.cuda.max_memory_allocated, about)


def remember(result: dict[str, Any]) -> None:
    """Put a result's engines into the shipped table, in place of what it said of the same work."""
    same = (*bench.SAME, "rows")
    table = bench.recorded()
    for figures in result["figures"].values():
        if "precision" not in figures["about"]:  # nanoGPT's
            continue
        row = bench.entry(figures)
        package = row["engine"]
        row |= {"date": result["date"], "versions": f"{package} {result['versions'][package]}"}
        table = [old for old in table if any(old[name] != row[name] for name in same)] + [row]
    SPEEDS.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def _table(figures: dict[str, Any], arguments: argparse.Namespace) -> Table:
    device = next(iter(figures.values()))["about"]["device"]
    what = arguments.preset or " ".join(arguments.overrides)
    table = Table(title=f"{what}, {arguments.batch} × {arguments.context} tokens on one {device}")
    for title in ("", "kernels", "ms", "K tokens/s", "MFU", "peak GiB", "compile s", "of nanoGPT", "of before"):
        table.add_column(title, justify="left" if title in ("", "kernels") else "right")
    for case, figure in figures.items():
        numbers = [f"{figure['ms']:.1f}", f"{figure['tokens_per_s'] / 1e3:.1f}"]
        numbers.append("" if figure["mfu"] is None else f"{figure['mfu']:.3f}")
        numbers += [f"{figure['peak_gib']:.1f}", f"{figure['compile_s']:.0f}"]
        ratios = [f"{figure[of]:.3f}" if of in figure else "" for of in ("of_nanogpt", "of_before")]
        table.add_row(case, figure["about"].get("kernels", ""), *numbers, *ratios)
    return table


if __name__ == "__main__":
    main()
