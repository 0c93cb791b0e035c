"""The command line: verbs that parse their arguments, call the function that does the work, and print the result."""

import errno
import io
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raygpt.errors import RaygptError, StoppedError

if TYPE_CHECKING:
    from raygpt.config import Data
    from raygpt.jobs import Job, JobServer

app = typer.Typer(
    help="Pre-train language models on Ray Train: one recipe, JAX or PyTorch, laptop to cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="List the shipped recipes, show one, or list all keys.", invoke_without_command=True)
data_app = typer.Typer(help="Look at text and token stores.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
OnCluster = Annotated[
    str | None,
    typer.Option("--cluster", metavar="ADDRESS", help="Find runs by name on this Ray cluster, e.g. http://head:8265."),
]


def main() -> None:
    """Run a verb; an error that the user can fix is one line and status 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know all characters, e.g. with LC_ALL=C
    try:
        app()
    except RaygptError as error:
        from raygpt.show import console

        is_stopped = isinstance(error, StoppedError)
        (console.note if is_stopped else console.fail)(str(error))
        sys.exit(130 if is_stopped else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        from raygpt.show import console

        console.fail("standard output cannot be written, its disk is full; free some space and run the command again")
        sys.exit(1)


UNKNOWN_AS_KEYS = {"ignore_unknown_options": True}  # they are refused as keys, with what to write instead


@app.command(context_settings=UNKNOWN_AS_KEYS)
def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A name that `raygpt recipes` lists, or a YAML file.")
    ] = "tiny",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="What to change in it, e.g. training.steps=500; `raygpt recipes keys` lists them all.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Resume a run although the recipe has changed.")] = False,
    profile: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Trace these steps, e.g. 20:25, for ui.perfetto.dev.")
    ] = None,
    unattended: Annotated[
        bool,
        typer.Option(
            "--unattended",
            help="For jobs that a scheduler restarts: wait for nodes and for a dead driver's lock; "
            "`raygpt stop` ends them with status 0.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model: prepare its corpus if needed, then run the recipe, or resume its run."""
    from raygpt.recipes import load_recipe
    from raygpt.show import console, data, training
    from raygpt.training.prepared import check
    from raygpt.training.profiling import parse_steps
    from raygpt.training.ray import launch

    loaded = load_recipe(recipe, overrides or [], console.note)
    traced = parse_steps(profile) if profile else None
    check(loaded, force)
    with launch.on_cluster(loaded):
        with data.preparing() as progress:
            run = launch.prepare_run(loaded, progress, force)
        if as_json:
            result = launch.train(run, training.show_message, traced, unattended)
            outcome = {"path": result.path, "metrics": result.metrics, "stopped": result.stopped}
            _print_json({**outcome, "plan": run.plan.as_dict()})
        elif run.is_finished:
            result = launch.train(run)
            training.show_finished(run)
        else:
            training.show_plan(run)
            with training.live_progress(run.plan.steps) as watch:
                result = launch.train(run, watch, traced, unattended)
            if result.stopped is not None:
                training.show_stopped(result)
            elif not result.error:
                training.show_result(result, watch.events)
    if result.error:
        raise result.error
    if result.stopped is not None:
        is_wanted = unattended and not result.by_signal  # a scheduler must not start again what `raygpt stop` ended
        raise typer.Exit(0 if is_wanted else 130)  # 130 as after any Ctrl-C: the run is not finished


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
    price: Annotated[float | None, typer.Option(min=0, help="Per device and hour, to say what the run costs.")] = None,
    peak: Annotated[
        float | None, typer.Option(min=0, metavar="TFLOPS", help="bf16 peak of a device that is not in the table.")
    ] = None,
    memory: Annotated[float | None, typer.Option(min=0, metavar="GIB", help="Its memory.")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=0, metavar="GB/S", help="Of that memory.")] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Ask the compiler too: of a TPU slice, or of this machine's devices.")
    ] = False,
    find: Annotated[
        bool, typer.Option("--find", help="Search mesh, remat and accumulation for the fastest, and write the recipe.")
    ] = False,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where --find writes it.")] = "NAME-found.yaml",
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Also draw memory and time by kind.")] = None,
    as_json: Json = False,
) -> None:
    """Say before a run whether it fits, how long it takes, what it costs, and which loss to expect."""
    from raygpt.planning.compiler import ask_compiler
    from raygpt.planning.forecast import forecast
    from raygpt.planning.search import fastest, helpful_changes
    from raygpt.planning.target import parse_target
    from raygpt.recipes import load_recipe
    from raygpt.show import console, planning

    loaded, target = load_recipe(recipe, overrides or [], console.note), parse_target(on, peak, memory, bandwidth)
    found = forecast(loaded, target)
    if find:
        best = fastest(found.recipe, target, found.corpus)
        file = best.write(out.replace("NAME", str(loaded.run.name)))
        found = best.forecast
    changes = helpful_changes(found)
    answer = ask_compiler(found) if compile_ else None
    if svg:
        planning.write_picture(svg, found.as_dict(price))
    if as_json:
        others = [{"keys": dict(change.keys), **change.forecast.as_dict(price)} for change in changes]
        _print_json(
            {
                **found.as_dict(price),
                "changes": others,
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
    from raygpt.show import console, data
    from raygpt.show import sweep as shown
    from raygpt.show.sweep_page import sweep_page
    from raygpt.sweep import grid
    from raygpt.sweep.runner import prepare_corpus
    from raygpt.sweep.values import divide
    from raygpt.training import prepared
    from raygpt.training.ray import launch

    axes, overrides = divide(words)
    if not axes:
        raise RaygptError("sweep: there is nothing to try; write e.g. optimizer.learning_rate=1e-3,2e-3,4e-3")
    base = grid.base_of(recipe, overrides, "sweep")
    grid.check_values(recipe, overrides, axes)
    prepared.check(base)
    with launch.on_cluster(base):
        with data.preparing() as progress:
            corpus = prepare_corpus(base, progress)
        planned = grid.plan_sweep(recipe, overrides, axes, corpus.windows, whole)
        grid.claim(planned.folder, grid.definition_of(planned))
        with shown.running(planned.folder, base, as_json) as runs:
            if not as_json:
                shown.show_plan(planned, runs.at_once)
            answer = grid.run_sweep(planned, runs, console.note)
    grid.write_answer(planned, answer)
    page = storage.join(planned.folder, "sweep.html")
    storage.write_bytes(page, sweep_page(planned, answer).encode())
    if as_json:
        _print_json(grid.as_dict(answer))
    else:
        shown.show_answer(planned, answer, page)


@app.command(context_settings=UNKNOWN_AS_KEYS)
def scaling(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What to change in it, as for train.")
    ] = None,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="How much of the run's compute the small models may take.")
    ] = 0.1,
    as_json: Json = False,
) -> None:
    """Predict a run's loss: train small models of its family, and fit a law in parameters and tokens."""
    from raygpt import storage
    from raygpt.show import data
    from raygpt.show import scaling as shown
    from raygpt.show.scaling_page import scaling_page
    from raygpt.show.sweep import running
    from raygpt.sweep import scaling as ladders
    from raygpt.sweep.grid import base_of
    from raygpt.sweep.ladder import check_length
    from raygpt.sweep.runner import prepare_corpus
    from raygpt.training import prepared
    from raygpt.training.plan import in_steps
    from raygpt.training.ray import launch

    base = base_of(recipe, overrides or [], "scaling")
    check_length(base)
    prepared.check(base)
    with launch.on_cluster(base):
        with data.preparing() as progress:
            corpus = prepare_corpus(base, progress)
        in_full = in_steps(base, corpus.windows(base.model.context))
        ladder = ladders.plan_ladder(in_full, corpus.tokenizer.vocab, share)
        ladders.claim_ladder(ladder)
        with running(ladder.folder, base, as_json) as runs:
            if not as_json:
                shown.show_plan(ladder, runs.at_once)
            answer = ladders.run_ladder(ladder, runs)
    ladders.write_law(ladder, answer)
    page = storage.join(ladder.folder, "scaling.html")
    storage.write_bytes(page, scaling_page(ladder, answer).encode())
    if as_json:
        _print_json(ladders.as_dict(ladder, answer))
    else:
        shown.show_answer(ladder, answer, page)


@app.command(context_settings=UNKNOWN_AS_KEYS)
def submit(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a YAML file.")],
    cluster: Annotated[str, typer.Option(metavar="ADDRESS", help="The cluster's dashboard, e.g. http://head:8265.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What to change in it, as for train.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the run.")] = False,
    as_json: Json = False,
) -> None:
    """Train on a Ray cluster: send the recipe and this raygpt to its job server, and follow the run."""
    from dataclasses import asdict

    from raygpt.jobs import JobServer
    from raygpt.recipes import load_recipe
    from raygpt.show import results

    loaded = load_recipe(recipe, overrides or [])
    server = JobServer(cluster)
    job = server.submit(loaded)
    if as_json:
        _print_json(asdict(job))
    else:
        results.show_submitted(job, server.address)
        if not detach:
            _follow(server, job)


@app.command()
def logs(
    run: Annotated[str, typer.Argument(metavar="NAME", help="A run that was submitted, by its name or job.")],
    cluster: Annotated[str, typer.Option(metavar="ADDRESS", help="The cluster's dashboard, e.g. http://head:8265.")],
    follow: Annotated[bool, typer.Option(help="Stay until the run ends; Ctrl-C leaves it running.")] = True,
) -> None:
    """Print what a submitted run prints, from its beginning, and follow it."""
    from raygpt.jobs import JobServer

    server = JobServer(cluster)
    job = server.find(run)
    if follow:
        _follow(server, job)
    else:
        print(server.logs(job), end="")


def _follow(server: "JobServer", job: "Job") -> None:
    """Print what a run prints until it ends; Ctrl-C leaves it running."""
    from raygpt.show import results

    try:
        status = server.follow(job, lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        results.show_left_running(job, server.address)
        return
    if status != "SUCCEEDED":
        raise RaygptError(f"job {job.id} is {status}; the same command resumes the run")


@app.command()
def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run that is being trained: its directory or name.")],
    cluster: OnCluster = None,
) -> None:
    """Ask a run to save and stop, from anywhere that sees its directory or its cluster."""
    from raygpt.runs import find_folder
    from raygpt.training.stopping import ask_to_stop

    if cluster:
        from raygpt.jobs import JobServer

        server = JobServer(cluster)
        job = server.find(run)
        server.stop(job)
        print(f"asked job {job.id} to stop; it saves first")
        return
    driver = ask_to_stop(find_folder(run))
    print(f"asked {driver} to stop; it saves after one of its next steps")


@app.command()
def deploy(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What to change in it, as for train.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="kubernetes (any, with KubeRay), gke, eks, aks, or slurm.")
    ] = "kubernetes",
    out: Annotated[str, typer.Option(metavar="DIR", help="Where to write the files.")] = "deploy-NAME",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Explain each block, and write nothing.")] = False,
    image: Annotated[str, typer.Option(help="Of the pods; a Dockerfile for it is written.")] = "raygpt:latest",
    namespace: Annotated[str | None, typer.Option(help="Of Kubernetes; by default that of kubectl.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Workers on spot machines; the head never.")] = False,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a pod or node.")] = 1,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs of a pod or node (default: 8 for each GPU).")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a pod, e.g. 64Gi (default: 32Gi for each GPU).")] = None,
    prepare_nodes: Annotated[int, typer.Option(min=0, help="CPU-only nodes, at most, while text is tokenised.")] = 0,
    volume: Annotated[
        str | None, typer.Option(metavar="CLAIM", help="A volume claim that all pods mount at /storage.")
    ] = None,
    volume_size: Annotated[str | None, typer.Option(help="Make that claim, with so much space, e.g. 500Gi.")] = None,
    secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A Secret whose keys become variables; may be given again.")
    ] = None,
    service_account: Annotated[str | None, typer.Option(metavar="NAME", help="Of the pods, e.g. for S3.")] = None,
    node_selector: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label of the workers' nodes; may be given again.")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="How often a failed job is started again, and resumes.")] = 5,
    time: Annotated[str, typer.Option(help="Of a slurm job before it is requeued.")] = "24:00:00",
    as_json: Json = False,
) -> None:
    """Write what runs a recipe on a cluster: a RayJob for KubeRay and a Dockerfile, or a batch script for slurm."""
    from raygpt.deploy import files
    from raygpt.deploy.deployment import Options, parse_selector, plan_deployment
    from raygpt.recipes import load_recipe
    from raygpt.show import results

    options = Options(
        target,
        image=image,
        namespace=namespace,
        spot=spot,
        gpus_per_node=gpus_per_node,
        cpus=cpus,
        memory=memory,
        prepare_nodes=prepare_nodes,
        volume=volume,
        volume_size=volume_size,
        secrets=tuple(secret or ()),
        service_account=service_account,
        node_selector=parse_selector(node_selector or []),
        retries=retries,
        time=time,
    )
    deployment = plan_deployment(load_recipe(recipe, overrides or []), options)
    if dry_run:
        blocks = files.explain(deployment)
        if as_json:
            _print_json([{"block": block, "why": why} for block, why in blocks])
        else:
            results.show_blocks(blocks)
        return
    folder = out.replace("NAME", deployment.name)
    written, steps = files.write(deployment, folder), files.next_steps(deployment, folder)
    if as_json:
        _print_json({"files": written, "next": steps})
    else:
        results.show_deployed(written, steps)


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
        int | None, typer.Option(metavar="N", help="Read only the first N rows: lines of text, rows of a table.")
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
    keys: dict[str, Any] = {"source": source, "tokenizer": tokenizer, "val": val}
    keys |= {"split": split, "split_seed": split_seed, "column": column, "limit": limit}
    keys |= {"scatter": scatter, "dedup": dedup}
    data: Data = check_part("data", keys)
    with preparing() as watch:
        store = run(
            source,
            out,
            data.tokenizer,
            val=data.val,
            split=data.split,
            split_seed=data.split_seed,
            column=data.column,
            limit=data.limit,
            scatter=data.scatter,
            dedup=data.dedup,
            watch=watch,
        )
    if nanogpt:
        write_nanogpt(store)
    if as_json:
        _print_json(store.index.summary() | {"folder": store.folder})
    else:
        show_prepared(store)


Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, local or s3://.")]
Step = Annotated[
    int | None, typer.Option(min=0, help="Step of the checkpoint to use (default: the best by validation loss).")
]
Latest = Annotated[bool, typer.Option("--latest", help="Use the newest checkpoint instead of the best.")]


def _folder(run: str, cluster: str | None) -> str:
    """The directory of a run; on a cluster by the run's name."""
    if not cluster:
        return run
    from raygpt.jobs import JobServer

    return JobServer(cluster).find(run).folder


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
        _print_json(generation.as_json(loaded, prompt, options, samples))
    else:
        generation.write(loaded, prompt, options, samples)


@app.command()
def serve(
    run: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Run directories, local or s3://; NAME=RUN gives a name, RUN@STEP another checkpoint."
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
        str | None, typer.Option(metavar="FILE", help="Holds the API key; or set RAYGPT_API_KEY.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Texts that a replica generates at once.")] = 8,
    waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait for one; more get status 429.")] = 64,
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
    from raygpt.serving.deployment import Replicas, deployed, listen
    from raygpt.serving.deployment import run as serve_until_interrupted
    from raygpt.serving.options import api_key, models_of
    from raygpt.show import console, results

    key = api_key(host, api_key_file)
    models = models_of(run, follow, slots=slots, waiting=waiting, gpu_share=min(1.0, gpus or 1.0))
    with contextlib.closing(listen(host, port)) as socket:
        console.note(f"loading {', '.join(models)}" + (", as soon as there is a checkpoint" if follow else ""))
        with deployed(models, Replicas(replicas, gpus)) as backends:
            results.show_serving(list(models), socket.getsockname()[:2], key is not None)
            serve_until_interrupted(backends, [socket], key, Limits(answer_s=timeout))


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
        _print_json({"run": found.run.folder, "step": found.checkpoint.step, "folder": folder, "files": files})
    else:
        results.show_exported(found, folder, files)


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="DIR|NAME", help="A model that transformers saved, or its name on the Hub.")
    ],
    run: Annotated[str, typer.Argument(metavar="OUT_RUN", help="The run directory to make.")],
    engine: Annotated[str, typer.Option(help="jax or torch writes it; both can train it further.")] = "jax",
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
        _print_json({"run": made.folder, "step": 0, "model": made.recipe.to_dict()["model"]})
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
        int | None, typer.Option(min=1, metavar="N", help="Use only the first N items of each task.")
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
    chosen = suite.choose(task or ["validation"])
    loaded = load(open_run(run), step, best=not latest)
    with results.evaluating() as watch:
        scores = suite.evaluate(loaded, chosen, limit, watch)
    about = {"run": loaded.run.folder, "step": loaded.checkpoint.step}
    if as_json:
        _print_json({**about, "tasks": scores})
    else:
        results.show_scores(loaded, scores)


@app.command()
def runs(
    storage: Annotated[
        str, typer.Argument(metavar="STORAGE", help="The folder or s3:// address of the runs.")
    ] = "runs",
    cluster: OnCluster = None,
    as_json: Json = False,
) -> None:
    """List runs: how far they are, how fast, and whether they are running, finished, stopped or failed."""
    from raygpt.runs.status import status_of_all
    from raygpt.show import results

    if cluster:
        from dataclasses import asdict

        from raygpt.jobs import JobServer

        jobs = JobServer(cluster).jobs()
        if as_json:
            _print_json([asdict(job) for job in jobs])
        else:
            results.show_jobs(jobs, cluster)
        return
    found = status_of_all(storage)
    if as_json:
        _print_json(found)
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
        _print_json(facts)
    else:
        results.show_run(facts)


@app.command()
def report(
    run: Annotated[list[str], typer.Argument(metavar="RUN", help="Run directories, local or s3://.")],
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
        _print_json({"files": files})
    else:
        results.show_report(files)


@data_app.command("show")
def data_show(
    what: Annotated[str, typer.Argument(metavar="SOURCE|DIR", help="A source of text, or a token store.")],
    rows: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 3,
    column: Annotated[str, typer.Option(help="The field of jsonl and parquet that holds the text.")] = "text",
    tokenizer: Annotated[str, typer.Option(help="What nanoGPT's train.bin and val.bin were made with.")] = "gpt2",
    as_json: Json = False,
) -> None:
    """Print schema and raw rows of a source, or header, counts and decoded rows of a store."""
    from raygpt.corpus import look
    from raygpt.show import data

    shown = look.look(what, rows=rows, column=column, tokenizer=tokenizer)
    if as_json:
        _print_json(shown)
    else:
        data.show_data(shown)


@recipes_app.callback()
def recipes(context: typer.Context, as_json: Json = False) -> None:
    """List the shipped recipes, a line each."""
    if context.invoked_subcommand:
        return
    from raygpt.recipes import shipped_recipes
    from raygpt.show import results

    if as_json:
        _print_json(shipped_recipes())
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
        _print_json(load_recipe(name).to_dict())
    else:
        print(recipe_text(name), end="")


@recipes_app.command("keys")
def recipes_keys(as_json: Json = False) -> None:
    """Every key of a recipe: what it is for, and its default."""
    from dataclasses import asdict

    from raygpt.recipes.explain import keys
    from raygpt.show import results

    if as_json:
        _print_json([asdict(key) for key in keys()])
    else:
        results.show_keys(keys())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check what this machine has, and say what to do about what is missing."""
    from raygpt.doctor import examine
    from raygpt.show import results

    findings = examine()
    if as_json:
        _print_json([finding._asdict() for finding in findings])
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
        _print_json({**figures, "verdict": verdict})
    else:
        results.show_speed(figures, verdict)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from raygpt import __version__

        print(f"raygpt {__version__}")
        raise typer.Exit


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
