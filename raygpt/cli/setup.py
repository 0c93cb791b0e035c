"""Verbs about recipes and this machine."""

from typing import Annotated

import typer

from raygpt.cli.app import Json, app, print_json, recipes_app
from raygpt.errors import RaygptError


@recipes_app.callback()
def recipes(context: typer.Context, as_json: Json = False) -> None:
    """List the shipped recipes, a line each."""
    if context.invoked_subcommand:
        return
    from raygpt.recipes import shipped_recipes
    from raygpt.show import results

    if as_json:
        print_json(shipped_recipes())
    else:
        results.show_recipes(shipped_recipes())


@recipes_app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe that `raygpt recipes` lists.")],
    as_json: Json = False,
) -> None:
    """Print a recipe's commented YAML."""
    from raygpt.recipes import load_recipe, recipe_text

    if as_json:
        print_json(load_recipe(name).to_dict())
    else:
        print(recipe_text(name), end="")


@recipes_app.command("keys")
def recipes_keys(as_json: Json = False) -> None:
    """Every key of a recipe: what it is for, and its default."""
    from dataclasses import asdict

    from raygpt.recipes.explain import keys
    from raygpt.show import results

    if as_json:
        print_json([asdict(key) for key in keys()])
    else:
        results.show_keys(keys())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check what this machine has, and say what to do about what is missing."""
    from raygpt.doctor import examine
    from raygpt.show import results

    findings = examine()
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        results.show_findings(findings)


@app.command()
def bench(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of a recipe to measure with, e.g. training.remat=blocks."),
    ] = None,
    engine: Annotated[str, typer.Option(help="What computes it: jax or torch.")] = "jax",
    preset: Annotated[
        str | None, typer.Option(help="gpt2, gpt2-medium, gpt2-large or gpt2-xl (default: gpt2, smaller on a CPU).")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a batch (default: 64, on a CPU 12).")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a row (default: 1024, on a CPU 64).")] = None,
    steps: Annotated[int, typer.Option(min=10, help="Steps to measure, in tens, after 15 warm-up steps.")] = 50,
    as_json: Json = False,
) -> None:
    """Measure the training step on this hardware, and compare with what was recorded: GPT-2 124M, smaller on a CPU."""
    from dataclasses import replace

    from raygpt import bench as benchmark
    from raygpt.show import results

    if engine not in ("jax", "torch"):
        raise RaygptError(f"--engine: {engine} is neither jax nor torch; write --engine jax")
    usual = benchmark.usual_work(engine, preset, overrides or [])
    work = replace(usual, batch=batch or usual.batch, context=context or usual.context, steps=steps)
    figures = benchmark.measure(work)
    verdict = benchmark.verdict(figures, benchmark.recorded())
    if as_json:
        print_json({**figures, "verdict": verdict})
    else:
        results.show_speed(figures, verdict)
