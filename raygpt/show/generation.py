"""Console output of `raygpt generate`: one text as it is generated, several texts, or a conversation."""

import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from rich.markup import escape

from raygpt.errors import RaygptError
from raygpt.inference.generate import Sample, SamplingOptions, generate, generate_in_groups
from raygpt.inference.loaded import LoadedModel
from raygpt.inference.sampling import encode_prompt
from raygpt.show.console import err, fail, out, printable


def seed(given: int | None) -> int:
    """The given seed, or a random one; it is printed in either case."""
    return secrets.randbelow(2**31) if given is None else given


def write(loaded: LoadedModel, prompt: str | None, options: SamplingOptions, samples: int) -> None:
    """Print one text as it is generated; several a group at a time."""
    started = time.perf_counter()
    notes: list[str] = []
    if samples == 1:
        tokens = len(_written(loaded, prompt, options, notes).ids)
    else:
        tokens = 0
        for number, text in enumerate(_with_progress(loaded, prompt, options, samples, notes), start=1):
            out.print(f"[bold cyan]sample {number}[/]")
            _put(f"{prompt or ''}{text.text}\n")
            tokens += len(text.ids)
    for note in notes:
        _note(note)
    _note(f"{_which(loaded)}; {tokens} tokens in {time.perf_counter() - started:.1f} s; seed {options.seed}")


def _written(loaded: LoadedModel, prompt: str | None, options: SamplingOptions, notes: list[str]) -> Sample:
    encode_prompt(loaded.tokenizer, prompt)  # refuse a bad prompt before anything is printed
    _put(prompt or "")
    (text,) = generate(loaded, prompt, options, show=_put, note=notes.append)
    _put("\n")
    return text


def _with_progress(
    loaded: LoadedModel, prompt: str | None, options: SamplingOptions, samples: int, notes: list[str]
) -> Iterator[Sample]:
    """The samples. While a group of them is generated, a terminal shows how far it is."""
    with err.status("") as status:

        def show_progress(done: int, tokens: int) -> None:
            status.update(
                f"{done} of {samples} samples; the next ones have {tokens} of at most {options.tokens} tokens"
            )

        for texts in generate_in_groups(loaded, prompt, options, samples, note=notes.append, progress=show_progress):
            status.stop()
            yield from texts
            status.start()


def converse(loaded: LoadedModel, options: SamplingOptions, first: str | None) -> None:
    """Read one prompt per line until an empty line; a bad prompt is reported, and the next one read."""
    _note(f"{_which(loaded)}; a prompt a line, an empty one ends")
    notes: list[str] = []  # not printed: that the context is full is normal here
    prompt = first if first is not None else _ask()
    while prompt:
        try:
            _written(loaded, prompt, options, notes)
        except RaygptError as error:
            fail(str(error))
        options = replace(options, seed=options.seed + 1)  # the same prompt again gives another text
        prompt = _ask()


def as_json(loaded: LoadedModel, prompt: str | None, options: SamplingOptions, samples: int) -> dict[str, Any]:
    """The texts with everything that determined them."""
    notes: list[str] = []
    texts = _with_progress(loaded, prompt, options, samples, notes)
    written = [{"text": text.text, "tokens": len(text.ids), "ended": text.ended_early} for text in texts]
    about = {"run": loaded.run.folder, "step": loaded.checkpoint.step, "val_loss": loaded.val_loss}
    return {**about, "prompt": prompt, **asdict(options), "samples": written, "notes": notes}


def _ask() -> str:
    try:
        return input("> ")
    except (EOFError, RuntimeError):  # standard input has ended, or was closed from the start
        return ""


def _put(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _note(text: str) -> None:
    err.print(f"[dim]({escape(text)})[/]", soft_wrap=True)


def _which(loaded: LoadedModel) -> str:
    loss = "" if loaded.val_loss is None else f", validation loss {loaded.val_loss:.4f}"
    return f"checkpoint of step {loaded.checkpoint.step}{loss}"
