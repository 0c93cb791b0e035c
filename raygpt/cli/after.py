"""Verbs on a run directory."""

from typing import Annotated

import typer

from raygpt.cli.app import Json, Latest, OnCluster, Run, Step, app, print_json
from raygpt.errors import RaygptError


def _refuse_two_checkpoints(step: int | None, latest: bool) -> None:
    if latest and step is not None:
        raise RaygptError(f"--latest: --step {step} names a checkpoint already; leave one of the two out")


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; without it a new document begins.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 takes the likeliest token each time.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the N likeliest tokens; 0: from all.")] = 50,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens with this total probability.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Random seed; by default a new one, which is printed.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many texts to generate.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End a text before this string; may be given again.")] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Ask for prompts, one a line.")] = False,
    step: Step = None,
    latest: Latest = False,
    as_json: Json = False,
) -> None:
    """Generate text from a prompt with a trained model."""
    from raygpt.inference.generate import SamplingOptions
    from raygpt.inference.loaded import load
    from raygpt.runs import open_run
    from raygpt.show import generation

    _refuse_two_checkpoints(step, latest)
    if interactive and samples > 1:
        raise RaygptError("--samples: --interactive writes one text after each prompt; leave --samples out")
    if interactive and as_json:
        raise RaygptError("--json: --interactive prints no JSON; leave it out, and write --prompt TEXT")
    if "" in (stop or ()):
        raise RaygptError("--stop: an empty text is before every token; write some text, or leave --stop out")
    if not top_p:
        raise RaygptError("--top-p: 0 leaves no token; write a number above 0, or --temperature 0 for the likeliest")
    loaded = load(open_run(run), step, best=not latest)
    options = SamplingOptions(tokens, temperature, top_k or None, top_p, generation.seed(seed), tuple(stop or ()))
    if interactive:
        generation.converse(loaded, options, prompt)
    elif as_json:
        print_json(generation.as_json(loaded, prompt, options, samples))
    else:
        generation.write(loaded, prompt, options, samples)


@app.command()
def serve(
    run: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Runs, by directory (local or s3://) or name; NAME=RUN gives a name, RUN@STEP another checkpoint.",
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="Load each new checkpoint of a run that is training.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with the API key; or set RAYGPT_API_KEY.")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Texts that a replica generates at once (default: 8, on a GPU 32, if they fit)."),
    ] = None,
    waiting: Annotated[
        int, typer.Option(min=0, help="Texts that may wait to be generated; requests for more get status 429.")
    ] = 64,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of each model.")] = 1,
    gpus: Annotated[
        float | None,
        typer.Option(min=0, help="GPUs of a replica (default: 1 if there are any); 0.3 shares one, and its memory."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that an answer may take.")] = 600.0,
) -> None:
    """Serve models on Ray Serve: OpenAI's completions for every client, and a page to write in."""
    import contextlib

    from raygpt.serving.app import Limits
    from raygpt.serving.cli_options import api_key, models_of
    from raygpt.serving.deployment import Replicas, deployed, listen
    from raygpt.serving.deployment import run as serve_until_interrupted
    from raygpt.show import console, results

    key = api_key(host, api_key_file)
    models = models_of(run, follow, slots=slots, waiting=waiting, gpu_share=min(1.0, gpus or 1.0))
    with contextlib.closing(listen(host, port)) as socket:
        console.note(f"loading {', '.join(models)}" + (", as soon as there is a checkpoint" if follow else ""))
        with deployed(models, Replicas(replicas, gpus), console.note) as backends:
            results.show_serving(list(models), socket.getsockname()[:2], key is not None)
            serve_until_interrupted(backends, [socket], key, Limits(answer_s=timeout), console.note)


@app.command("export")
def export_(
    run: Run,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A new folder for the model.")],
    step: Step = None,
    latest: Latest = False,
    as_json: Json = False,
) -> None:
    """Write a run's model as a folder that transformers opens."""
    from raygpt.inference.loaded import read
    from raygpt.interop.exporting import export
    from raygpt.runs import open_run
    from raygpt.show import results

    _refuse_two_checkpoints(step, latest)
    found = read(open_run(run), step, best=not latest)
    files = export(found, folder)
    if as_json:
        print_json({"run": found.run.folder, "step": found.checkpoint.step, "folder": folder, "files": files})
    else:
        results.show_exported(found, folder, files)


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="DIR|NAME", help="A model that transformers saved, or its name on the Hub.")
    ],
    run: Annotated[str, typer.Argument(metavar="OUT_RUN", help="The run directory to make.")],
    engine: Annotated[str, typer.Option(help="Engine that writes the run, jax or torch; both can train it.")] = "jax",
    context: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="See so many tokens at once, fewer than the model could (RoPE)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn Hugging Face's GPT-2, Llama, Qwen3 or NanoChat into a run at step 0, which run.start_from trains further."""
    from raygpt.interop.importing import import_run
    from raygpt.show import results

    made = import_run(source, run, engine, context)
    if as_json:
        print_json({"run": made.folder, "step": 0, "model": made.recipe.to_dict()["model"]})
    else:
        results.show_imported(made)


@app.command("eval")
def eval_(
    run: Run,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="validation (the default), hellaswag, lambada, or e.g. hellaswag=FILE.jsonl; may be given again."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Use only the first N items of hellaswag and lambada.")
    ] = None,
    step: Step = None,
    latest: Latest = False,
    as_json: Json = False,
) -> None:
    """Evaluate a run's model: validation loss, perplexity and bits per byte; HellaSwag and LAMBADA."""
    from raygpt.evaluation import suite
    from raygpt.inference.loaded import load
    from raygpt.runs import open_run
    from raygpt.show import results

    _refuse_two_checkpoints(step, latest)
    chosen = suite.choose(task or [suite.VALIDATION])
    if limit and set(chosen) == {suite.VALIDATION}:
        raise RaygptError("--limit: is for hellaswag and lambada, validation takes all of its text; name a --task")
    loaded = load(open_run(run), step, best=not latest)
    with results.evaluating() as watch:
        scores = suite.evaluate(loaded, chosen, limit, watch)
    about = {"run": loaded.run.folder, "step": loaded.checkpoint.step}
    if as_json:
        print_json({**about, "tasks": scores})
    else:
        results.show_scores(loaded, scores)


def _folder(run: str, cluster: str | None) -> str:
    """The directory of a run; on a cluster by the run's name."""
    if cluster is None:
        return run
    from raygpt.jobs import JobServer

    return JobServer(cluster).readable_folder(run)


@app.command()
def runs(
    storage: Annotated[
        str | None,
        typer.Argument(metavar="STORAGE", help="The folder or s3:// address of the runs.", show_default="runs"),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="List what was submitted to this Ray cluster, e.g. http://head:8265."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs: how far they are, how fast, and whether they are running, finished, stopped or failed."""
    from raygpt.runs.status import status_of_all
    from raygpt.show import results

    if cluster is not None:
        if storage is not None:
            raise RaygptError(f"{storage}: a cluster lists the runs of its jobs; leave it out, or leave --cluster out")
        from dataclasses import asdict

        from raygpt.jobs import JobServer

        jobs = JobServer(cluster).jobs()
        if as_json:
            print_json([asdict(job) for job in jobs])
        else:
            results.show_jobs(jobs, cluster)
        return
    found = status_of_all(storage or "runs")
    if as_json:
        print_json(found)
    else:
        results.show_runs(found)


@app.command()
def show(run: Run, cluster: OnCluster = None, as_json: Json = False) -> None:
    """Show a run: recipe, progress, checkpoints and their losses, restarts, its last sample, disk use."""
    from raygpt.runs import open_run
    from raygpt.runs.status import details
    from raygpt.show import results

    facts = details(open_run(_folder(run, cluster)))
    if as_json:
        print_json(facts)
    else:
        results.show_run(facts)


@app.command()
def report(
    run: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Run directories, local or s3://, or names of runs in ./runs.")
    ],
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where to write the page (default: report.html in the first run)."),
    ] = None,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the losses as an SVG picture, for a README.")
    ] = None,
    cluster: OnCluster = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page of a run, or of several compared: curves, samples, recipes, hardware. No network needed."""
    from raygpt.show import results
    from raygpt.show.report import write_report

    files = write_report([_folder(name, cluster) for name in run], out, svg)
    if as_json:
        print_json({"files": files})
    else:
        results.show_report(files)
