"""Verbs before a run: what it will take, which values to choose, its text."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from raygpt.cli.app import UNKNOWN_AS_KEYS, Json, app, data_app, print_json
from raygpt.errors import RaygptError

if TYPE_CHECKING:
    from raygpt.config import Data, Recipe
    from raygpt.planning.target import Target
    from raygpt.sweep.values import Axis

MOST_PRICE = 1e6


@app.command(context_settings=UNKNOWN_AS_KEYS)
def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What to change in it, as for train.")
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            metavar="TARGET", help="here, h200, 8xh100, 4x8xa100-80 (nodes × GPUs), v6e:4x4, 2*v5p:4x4x4 (slices)."
        ),
    ] = "here",
    price: Annotated[
        float | None, typer.Option(help="Price of a device for an hour, to say what the run costs.")
    ] = None,
    peak: Annotated[
        float | None, typer.Option(metavar="TFLOPS", help="Peak in bf16 of a device that is not in the table.")
    ] = None,
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="Memory of that device.")] = None,
    bandwidth: Annotated[float | None, typer.Option(metavar="GB/S", help="Memory bandwidth of that device.")] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Ask the compiler too: of a TPU slice, or of this machine's devices.")
    ] = False,
    find: Annotated[
        bool, typer.Option("--find", help="Search mesh, remat and accumulation for the fastest, and write the recipe.")
    ] = False,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where --find writes the recipe; else to NAME-found.yaml.")
    ] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Also draw memory and time by kind.")] = None,
    as_json: Json = False,
) -> None:
    """Say before a run whether it fits, how long it takes, what it costs, and which loss to expect.

    With several values of a key it says what a sweep will take.
    """
    from raygpt.planning.target import parse_target
    from raygpt.sweep.values import divide

    _check_options(price, find, out, svg)
    target = parse_target(on, peak, memory, bandwidth)
    axes, single = divide(overrides or [])
    if not axes:
        _plan_run(recipe, single, target, price, compile_, find, out, svg, as_json)
    elif compile_ or find or svg:
        raise RaygptError("--compile, --find and --svg: are for one run; leave them out, or give each key one value")
    else:
        _plan_sweep(recipe, axes, single, target, price, as_json)


def _check_options(price: float | None, find: bool, out: str | None, svg: str | None) -> None:
    if price is not None and not 0 <= price <= MOST_PRICE:  # neither inf nor nan, which JSON does not have
        raise RaygptError(f"--price {price:g}: is no price; write what a device costs for an hour, e.g. --price 2.5")
    for option, file in (("--out", out), ("--svg", svg)):
        if file == "":
            raise RaygptError(f"{option}: is empty; write the file's name, or leave the option out")
    if out and not find:
        raise RaygptError("--out: is where --find writes the recipe; add --find, or leave --out out")


def _plan_run(
    recipe: str,
    overrides: list[str],
    target: "Target",
    price: float | None,
    compile_: bool,
    find: bool,
    out: str | None,
    svg: str | None,
    as_json: bool,
) -> None:
    from raygpt.planning.compiler import ask_compiler
    from raygpt.planning.forecast import forecast
    from raygpt.planning.search import fastest, helpful_changes
    from raygpt.recipes import load_recipe
    from raygpt.show import console, planning

    loaded = load_recipe(recipe, overrides, console.note)
    found = forecast(loaded, target)
    if find:
        best = fastest(found)
        file = best.write(out or f"{loaded.run.name}-found.yaml")
        found = best.forecast
        _note_left_out(loaded, file)
    changes = helpful_changes(found)
    answer = ask_compiler(found) if compile_ else None
    if svg:
        planning.write_picture(svg, found.as_dict(price))
    if as_json:
        others = [
            {"keys": dict(change.keys), "same_run": change.is_same_run, **change.forecast.as_dict(price)}
            for change in changes
        ]
        print_json(
            {
                **found.as_dict(price),
                "changes": others,
                "unused": found.unused,
                "notes": found.notes,
                **({"written": file} if find else {}),
                **({"compiled": answer.as_dict()} if answer else {}),
            }
        )
        return
    if find:
        planning.show_found(best, file)
    planning.show_forecast(found, price, changes)
    if answer:
        planning.show_compiled(answer)


def _note_left_out(recipe: "Recipe", file: str) -> None:
    """Say what a recipe's file does not have."""
    from raygpt.show import console

    if recipe.cluster.runtime_env:
        path = console.relative_path(file)
        console.note(f"{path} has no cluster.runtime_env, which may contain secrets; give it again to raygpt train")


def _plan_sweep(
    recipe: str, axes: list["Axis"], overrides: list[str], target: "Target", price: float | None, as_json: bool
) -> None:
    from raygpt.planning.corpus import look_up
    from raygpt.planning.forecast import with_steps
    from raygpt.show import console
    from raygpt.show import sweep as shown
    from raygpt.sweep import forecast, grid

    base = grid.base_of_sweep(recipe, overrides, axes, console.note)
    corpus = look_up(base.data, base.run.storage, target.is_here)
    with_steps(base, corpus)  # only to refuse epochs of a text of unknown length
    is_whole = base.run.start_from is not None  # as a sweep of such trials has to be
    planned = grid.plan_sweep(recipe, overrides, axes, corpus.windows, is_whole)
    trials = forecast.forecasts(planned, target, corpus)
    seconds = forecast.sweep_seconds(planned, trials, 1)
    cost = None if price is None else price * target.count * seconds / 3600
    if as_json:
        print_json(forecast.as_dict(planned, trials, target, seconds, cost))
        return
    price_text = "" if cost is None else f", {cost:,.2f} at {price:g} per device-hour"
    shown.show_plan(planned, 1, seconds, f" on {target}{price_text}")
    console.show_notes(forecast.notes_of(trials))


@app.command(context_settings=UNKNOWN_AS_KEYS)
def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a YAML file.")],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUES",
            help="What to try, e.g. optimizer.learning_rate=1e-3,2e-3 or log:1e-3..1e-1; one value is an override.",
        ),
    ],
    whole: Annotated[
        bool, typer.Option("--whole", help="Train every trial to its end, not only the best quarter.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the best values of a recipe's keys: train trials, stop the hopeless ones early, and fit the optimum."""
    from raygpt import storage
    from raygpt.planning.corpus import Corpus
    from raygpt.show import console, data
    from raygpt.show import sweep as shown
    from raygpt.show.sweep_page import sweep_page
    from raygpt.sweep import grid
    from raygpt.sweep.forecast import seconds_here
    from raygpt.sweep.runner import prepare_corpus
    from raygpt.sweep.values import FIXED, divide, not_swept
    from raygpt.training import prepared
    from raygpt.training.ray import launch

    axes, overrides = divide(words)
    if not axes:
        for key, _, text in (word.partition("=") for word in overrides):
            if "," in text and key.strip().startswith(FIXED):
                raise not_swept(key)
        raise RaygptError("sweep: there is nothing to try; write e.g. optimizer.learning_rate=1e-3,2e-3,4e-3")
    base = grid.base_of_sweep(recipe, overrides, axes, console.note)
    grid.check_start(base, whole)
    grid.check_trials(recipe, overrides, axes)
    prepared.check(base)
    with launch.on_cluster(base):
        with data.preparing() as progress:
            corpus = prepare_corpus(base, progress)
        planned = grid.plan_sweep(recipe, overrides, axes, corpus.windows, whole)
        grid.claim(planned.folder, grid.definition_of(planned))
        with shown.running(planned.folder, base, as_json) as runs:
            if not as_json:
                known = Corpus(corpus.tokenizer.vocab, corpus.train_tokens, corpus.val_tokens)
                shown.show_plan(planned, runs.at_once, seconds_here(planned, known, runs.at_once))
            answer = grid.run_sweep(planned, runs, console.note)
    grid.write_answer(planned, answer)
    _note_left_out(base, storage.join(planned.folder, grid.BEST))
    page = storage.join(planned.folder, "sweep.html")
    storage.write_bytes(page, sweep_page(planned, answer).encode())
    if as_json:
        print_json(grid.as_dict(answer))
    else:
        shown.show_answer(planned, answer, page)


@app.command(context_settings=UNKNOWN_AS_KEYS)
def scaling(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What to change in it, as for train.")
    ] = None,
    share: Annotated[
        float, typer.Option(help="How much of the run's compute the small models may take, above 0 and at most 1.")
    ] = 0.1,
    as_json: Json = False,
) -> None:
    """Predict a run's loss: train small models of its family, and fit a law in parameters and tokens."""
    from raygpt import storage
    from raygpt.recipes.lengths import in_steps
    from raygpt.show import console, data
    from raygpt.show import scaling as shown
    from raygpt.show.scaling_page import scaling_page
    from raygpt.show.sweep import running
    from raygpt.sweep import scaling as ladders
    from raygpt.sweep.grid import base_of
    from raygpt.sweep.ladder import check_recipe
    from raygpt.sweep.runner import prepare_corpus
    from raygpt.training import prepared
    from raygpt.training.ray import launch

    if not 0 < share <= 1:  # a range of click's lets nan pass, which would train the cheapest ladder
        raise RaygptError(
            f"--share {share:g}: is no share of the run's compute; write more than 0 and at most 1, e.g. --share 0.1"
        )
    base = base_of(recipe, overrides or [], "scaling", console.note)
    check_recipe(base)
    prepared.check(base)
    with launch.on_cluster(base):
        with data.preparing() as progress:
            corpus = prepare_corpus(base, progress)
        in_full = in_steps(base, corpus.windows(base.model.context))
        ladder = ladders.plan_ladder(
            in_full, corpus.tokenizer.vocab, share, corpus.bytes_per_token, corpus.unigram_loss
        )
        ladders.claim_ladder(ladder)
        with running(ladder.folder, base, as_json) as runs:
            if not as_json:
                shown.show_plan(ladder, runs.at_once)
            answer = ladders.run_ladder(ladder, runs)
    ladders.write_law(ladder, answer)
    page = storage.join(ladder.folder, "scaling.html")
    storage.write_bytes(page, scaling_page(ladder, answer).encode())
    if as_json:
        print_json(ladders.as_dict(ladder, answer))
    else:
        shown.show_answer(ladder, answer, page)


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="stdlib, a file, folder or glob, hf:OWNER/NAME, or a known name, e.g. wikitext-103."
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder or s3:// address of the token store.")],
    tokenizer: Annotated[str, typer.Option(help="gpt2, bytes, char, bpe:N, or where one is saved.")] = "gpt2",
    val: Annotated[str, typer.Option(help="Fraction held out for validation, or a separate source.")] = "0.05",
    split: Annotated[
        str, typer.Option(help="How the fraction is held out: documents, tail or huggingface.")
    ] = "documents",
    split_seed: Annotated[int, typer.Option(help="Decides which documents are held out.")] = 2357,
    column: Annotated[str, typer.Option(help="The field of jsonl and parquet that holds the text.")] = "text",
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Read only the first N rows: lines of text, rows of a table."),
    ] = None,
    scatter: Annotated[
        bool | None,
        typer.Option("--scatter/--no-scatter", help="Spread documents over shards at random; by default from 1 GB up."),
    ] = None,
    dedup: Annotated[
        str | None, typer.Option(metavar="exact", help="Remove copies of documents; also scatters.")
    ] = None,
    nanogpt: Annotated[bool, typer.Option("--nanogpt", help="Also write nanoGPT's train.bin and val.bin.")] = False,
    as_json: Json = False,
) -> None:
    """Turn text into a token store; if it is killed, the same command continues."""
    from raygpt.corpus.nanogpt import write_nanogpt
    from raygpt.corpus.prepare import prepare as run
    from raygpt.recipes import check_part
    from raygpt.show.data import preparing, show_prepared

    if not out:
        raise RaygptError("--out: is empty; write a new folder for the token store, e.g. --out store")
    keys: dict[str, Any] = {"tokenizer": tokenizer, "val": val, "split": split, "split_seed": split_seed}
    keys |= {"column": column, "limit": limit, "scatter": scatter, "dedup": dedup}
    data: Data = check_part("data", {"source": source, **keys})
    with preparing() as watch:
        store = run(source, out, watch=watch, **{key: getattr(data, key) for key in keys})
    if nanogpt:
        write_nanogpt(store)
    if as_json:
        print_json(store.index.summary() | {"folder": store.folder})
    else:
        show_prepared(store)


@data_app.command("show")
def data_show(
    what: Annotated[str, typer.Argument(metavar="SOURCE|DIR", help="A source of text, or a token store.")],
    rows: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 3,
    column: Annotated[str, typer.Option(help="The field of jsonl and parquet that holds the text.")] = "text",
    tokenizer: Annotated[str, typer.Option(help="What nanoGPT's train.bin and val.bin were made with.")] = "gpt2",
    page: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page about a store's documents, with histograms.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print schema and raw rows of a source, or counts, a summary of the documents and decoded rows of a store."""
    from raygpt.corpus import overview
    from raygpt.show import data

    shown = overview.overview(what, rows=rows, column=column, tokenizer=tokenizer)
    if page:
        data.write_page(shown, page)
    if as_json:
        print_json(shown)
    else:
        data.show_data(shown)
