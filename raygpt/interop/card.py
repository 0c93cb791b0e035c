"""The model card: what was trained on what, how well, and how to use it."""

from raygpt.inference.loaded import CheckpointWeights
from raygpt.interop.family import Family
from raygpt.models import describe
from raygpt.runs import checkpoints
from raygpt.show.report import loss_picture

CURVE = "loss.svg"


def files(found: CheckpointWeights, family: Family) -> dict[str, str]:
    """README.md, and the loss curve if there is one to draw."""
    is_logged = any("loss" in line for line in found.run.metrics)
    drawn = {CURVE: loss_picture([found.run])} if is_logged else {}
    return {"README.md": _card(found, family, bool(drawn)), **drawn}


def _card(found: CheckpointWeights, family: Family, with_curve: bool) -> str:
    recipe, vocab = found.recipe, found.tokenizer.vocab
    model = recipe.model
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            f"tags: [{family.model_type}, raygpt]",
            "---",
            "",
            f"# {found.run.name}",
            "",
            f"A {family.name}-style model of {describe(model, vocab).count:,} parameters ({model.layers} layers, "
            f"{model.heads} heads, width {model.width}, context {model.context}, {vocab:,} tokens), trained by raygpt "
            f"with the {found.engine} engine; this is its checkpoint of step {found.checkpoint.step:,}.",
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
            "```",
            "",
            "## Data",
            "",
            *_data(found),
            "",
            "## Losses",
            "",
            *_losses(found),
            *(["", f"![training and validation loss over the steps]({CURVE})"] if with_curve else []),
            "",
            "## Recipe",
            "",
            "```yaml",
            recipe.to_yaml().rstrip(),
            "```",
            "",
        ]
    )


def _data(found: CheckpointWeights) -> list[str]:
    data = found.recipe.data
    if not checkpoints.facts(found.checkpoint)["data"]:
        return ["Weights that were made elsewhere, and not trained further here."]
    sources = [
        f"- `{part.source}`" + (f", weight {part.weight:g}" if len(data.sources) > 1 else "") for part in data.sources
    ]
    val = f"`{data.val}`" if isinstance(data.val, str) else f"a fraction of {data.val:g} ({data.split})"
    return [*sources, f"- validation: {val}", f"- tokenizer: `{data.tokenizer}`"]


def _losses(found: CheckpointWeights) -> list[str]:
    last = {key: line[key] for line in found.run.metrics for key in ("loss", "tokens") if key in line}
    rows = []
    if found.val_loss is not None:
        rows.append(f"| validation loss at step {found.checkpoint.step:,} | {found.val_loss:.4f} |")
    if "loss" in last:
        rows.append(f"| training loss of the last batch that was logged | {last['loss']:.4f} |")
    if "tokens" in last:
        rows.append(f"| tokens of the whole run | {last['tokens']:,} |")
    return ["| | |", "|---|---|", *rows] if rows else ["None were recorded."]
