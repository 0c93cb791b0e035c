"""The Typer app and the options that several verbs share."""

import json
from typing import Annotated, Any

import typer

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
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, local or s3://, or the name of a run in ./runs.")
]
Step = Annotated[
    int | None, typer.Option(min=0, help="Step of the checkpoint to use (default: the best by validation loss).")
]
Latest = Annotated[bool, typer.Option("--latest", help="Use the newest checkpoint instead of the best.")]
UNKNOWN_AS_KEYS = {"ignore_unknown_options": True}  # they are refused as keys, with what to write instead


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from raygpt import __version__

        print(f"raygpt {__version__}")
        raise typer.Exit


def print_json(value: Any) -> None:
    """What --json prints. What JSON has no number for, such as the loss of a run that diverged, is null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    print(json.dumps(finite, indent=2, ensure_ascii=False, allow_nan=False))
