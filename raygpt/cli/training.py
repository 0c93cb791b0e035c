"""Verbs that train, here or on a cluster, and what runs there."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from raygpt.cli.app import UNKNOWN_AS_KEYS, Json, OnCluster, app, print_json
from raygpt.errors import NOT_RETRIED, RaygptError, TransientError

if TYPE_CHECKING:
    from raygpt.jobs import Job, JobServer


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
            "`raygpt stop` ends them with status 0, an error that no retry helps with 78.",
        ),
    ] = False,
    kuberay: Annotated[
        bool,
        typer.Option(
            "--kuberay",
            help="As --unattended, in a RayJob: an error that no retry helps stops the job, since KubeRay retries "
            "every job that failed.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model: prepare its corpus if needed, then run the recipe, or resume its run."""
    unattended = unattended or kuberay
    with _not_retried(kuberay) if unattended else contextlib.nullcontext():
        _train(recipe, overrides or [], force, profile, unattended, as_json)


@contextlib.contextmanager
def _not_retried(kuberay: bool) -> Iterator[None]:
    """After an error that no retry helps, end so that schedulers know."""
    from raygpt.show import console

    try:
        yield
    except TransientError:
        raise
    except RaygptError as error:
        console.fail(str(error))
        console.note("a retry would end the same way, so there is none; correct this, then start the job again")
        if kuberay:
            from raygpt.jobs import stop_this_job

            stop_this_job()
        raise typer.Exit(NOT_RETRIED) from None


def _train(
    recipe: str, overrides: list[str], force: bool, profile: str | None, unattended: bool, as_json: bool
) -> None:
    from raygpt.recipes import load_recipe
    from raygpt.show import console, data, training
    from raygpt.training.prepared import check
    from raygpt.training.profiling import parse_steps
    from raygpt.training.ray import launch

    loaded = load_recipe(recipe, overrides, console.note)
    traced = parse_steps(profile) if profile else None
    check(loaded, force)
    with launch.on_cluster(loaded):
        with data.preparing() as progress:
            run = launch.prepare_run(loaded, progress, force, console.note if unattended else None)
        if as_json:
            result = launch.train(run, training.show_message, traced, unattended)
            outcome = {"path": result.path, "metrics": result.metrics, "stopped": result.stopped}
            print_json({**outcome, "plan": run.totals.as_dict()})
        elif run.is_finished:
            result = launch.train(run)
            training.show_finished(run)
        else:
            training.show_plan(run)
            with training.live_progress(run.totals.steps) as watch:
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
def submit(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a YAML file.")],
    cluster: Annotated[str, typer.Option(metavar="ADDRESS", help="The cluster's dashboard, e.g. http://head:8265.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What to change in it, as for train.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the run, but say how to.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Resume a run although the recipe has changed.")] = False,
    as_json: Json = False,
) -> None:
    """Train on a Ray cluster: send the recipe and this raygpt to its job server, and follow the run."""
    from dataclasses import asdict

    from raygpt.jobs import JobServer
    from raygpt.recipes import load_recipe
    from raygpt.show import console, results

    loaded = load_recipe(recipe, overrides or [], console.note)
    server = JobServer(cluster)
    job = server.submit(loaded, force)
    if as_json:
        print_json(asdict(job))
    else:
        results.show_submitted(job, server.address)
        if detach:
            results.show_left_running(job, server.address)
        else:
            console.out.print()
            _follow(server, job)


@app.command()
def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory or name; on a cluster also its job.")],
    cluster: OnCluster = None,
    follow: Annotated[bool, typer.Option(help="Stay until the run ends; Ctrl-C leaves it running.")] = True,
) -> None:
    """Print a run's progress from its beginning, and follow it: of a submitted run all that it prints."""
    if cluster is None:
        from raygpt.show.progress import show_progress

        with contextlib.suppress(KeyboardInterrupt):
            if show_progress(run, follow) == "failed":
                raise typer.Exit(1)
        return
    from raygpt.jobs import JobServer

    server = JobServer(cluster)
    job = server.find(run)
    if follow:
        _follow(server, job)
    else:
        print(server.logs(job), end="")


def _follow(server: "JobServer", job: "Job") -> None:
    """Print what a run prints until it ends; Ctrl-C leaves it running."""
    from raygpt.show import console, results

    try:
        ended = server.follow(job, lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        results.show_left_running(job, server.address)
        return
    if ended.status == "STOPPED":
        console.note(f"job {job.id} was stopped; submitted again, the run resumes")
        raise typer.Exit(130)  # as `train`: the run is not finished
    if ended.status == "FAILED":
        is_final = ended.exit_code == NOT_RETRIED
        remedy = "correct the error above, then submit it again" if is_final else "submitted again, the run resumes"
        raise RaygptError(f"job {job.id} failed; {remedy}")


@app.command()
def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run that is being trained: its directory or name.")],
    cluster: OnCluster = None,
) -> None:
    """Ask a run to save and stop, from anywhere that sees its directory or its cluster."""
    from raygpt.runs import find_folder
    from raygpt.training.stopping import ask_to_stop

    if cluster is not None:
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
    out: Annotated[str, typer.Option(metavar="DIR", help="Where to write the files.", show_default="deploy-NAME")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Explain each block, and write nothing.")] = False,
    image: Annotated[
        str | None,
        typer.Option(help="Image of the pods, in a registry; a Dockerfile for it is written (default: raygpt:latest)."),
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace in Kubernetes; by default that of kubectl.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Put workers on spot machines; the head never.")] = False,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a pod or node (default: 1).")] = None,
    cpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPUs of a pod or node (default: for each worker in it 8 with a GPU, 20 with a TPU, 4 with neither).",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a pod or node, e.g. 64Gi (default: for each worker in it 32Gi with a GPU, 40Gi with a TPU, "
            "8Gi with neither; with slurm what it gives)."
        ),
    ] = None,
    prepare_nodes: Annotated[
        int, typer.Option(min=0, help="CPU-only nodes to add at most while text is tokenised.")
    ] = 0,
    volume: Annotated[
        str | None, typer.Option(metavar="CLAIM", help="A volume claim that all pods mount at /storage.")
    ] = None,
    volume_size: Annotated[str | None, typer.Option(help="Make that claim, with so much space, e.g. 500Gi.")] = None,
    secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A Secret whose keys become variables; may be given again.")
    ] = None,
    service_account: Annotated[
        str | None, typer.Option(metavar="NAME", help="Service account of the pods, e.g. for S3.")
    ] = None,
    node_selector: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label of the workers' nodes; may be given again.")
    ] = None,
    retries: Annotated[
        int | None, typer.Option(min=0, help="How often a failed job is started again, and resumes (default: 5).")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit of a slurm job; it requeues itself before (default: 24:00:00).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write what runs a recipe on a cluster: a RayJob for KubeRay and a Dockerfile, or a batch script for slurm."""
    from raygpt.deploy import files
    from raygpt.deploy.deployment import plan_deployment
    from raygpt.deploy.options import Options, parse_selector
    from raygpt.recipes import load_recipe
    from raygpt.show import console, results

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
    deployment = plan_deployment(load_recipe(recipe, overrides or [], console.note), options)
    if dry_run:
        blocks = files.explain(deployment)
        if as_json:
            print_json([{"block": block, "why": why} for block, why in blocks])
        else:
            results.show_blocks(blocks)
    else:
        folder = out or f"deploy-{deployment.name}"
        written, steps = files.write(deployment, folder), files.next_steps(deployment, folder)
        if as_json:
            print_json({"files": written, "next": steps})
        else:
            results.show_deployed(written, steps)
    for text in files.left_to_user(deployment):
        console.note(text)
