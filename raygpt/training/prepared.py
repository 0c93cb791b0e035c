"""From a recipe to a run that is ready to start: corpus, totals, and every check that is possible before the start."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raygpt import storage
from raygpt.config import Recipe
from raygpt.corpus import tokenizers
from raygpt.corpus.feed import Feed
from raygpt.corpus.mixture import Mixture, check_texts, growing_text, open_growing, open_mixture
from raygpt.corpus.prepare import Watch
from raygpt.corpus.store import stores_of
from raygpt.corpus.tokenizers import Tokenizer
from raygpt.engines import require
from raygpt.errors import RaygptError
from raygpt.evaluation.tasks import Item, check_characters, choose, read_items
from raygpt.recipes.lengths import in_steps
from raygpt.runs import checkpoints
from raygpt.runs.checkpoints import Checkpoint
from raygpt.testing import faults
from raygpt.training import resume, samples, tracking
from raygpt.training.spec import RunSpec
from raygpt.training.totals import Totals, compute_totals


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    recipe: Recipe  # with every length in steps
    original: Recipe  # as it was written, with epochs not converted
    corpus: Mixture
    totals: Totals
    feed: Feed
    after: int  # the step to resume after; 0 for a new run
    start_from: Checkpoint | None
    eval_items: Mapping[str, Sequence[Item]]

    @property
    def is_finished(self) -> bool:
        return self.after >= self.totals.steps and checkpoints.is_evaluated(self.totals.run_folder, self.after)

    def spec(self, profile: tuple[int, int] | None, until: int | None = None) -> RunSpec:
        """What its workers get."""
        folder = self.totals.run_folder
        val, struck = tuple(store.val for store in self.corpus.stores), faults.from_environment(folder)
        return RunSpec(self.recipe, self.feed, val, folder, self.start_from, self.eval_items, profile, until, struck)


def run_folder_of(recipe: Recipe) -> str:
    """The folder of a recipe's run."""
    return storage.join(storage.absolute(recipe.run.storage), str(recipe.run.name))


def check(recipe: Recipe, force: bool = False) -> None:
    """Refuse what can be refused in a second, without a cluster: otherwise an error comes after Ray has started."""
    storage.ensure_writable(storage.absolute(recipe.run.storage))
    _check_start(recipe, force)
    check_texts(recipe.data)


def _check_start(recipe: Recipe, force: bool) -> int:
    """The step to resume after; refuses what is not installed, and a recipe that is not the run's."""
    folder = run_folder_of(recipe)
    tracking.require(recipe.track, folder)
    require(recipe.engine, recipe.model.implementation)
    after = resume.check(folder, recipe, force)
    if not after:
        resume.check_fork(recipe, storage.absolute(recipe.run.storage))
    return after


def prepare_run(recipe: Recipe, watch: Watch, force: bool, spare_cpus: Callable[[], float]) -> Prepared:
    """Prepare the corpus, or start to; compute the totals; refuse what cannot work.

    `spare_cpus` returns how many CPUs the workers leave for tokenising during training.
    """
    home, folder = storage.absolute(recipe.run.storage), run_folder_of(recipe)
    after = _check_start(recipe, force)
    eval_items = _read_eval_items(recipe)
    corpus = _open_corpus(recipe, stores_of(home), watch, spare_cpus)
    try:
        context, seed = recipe.model.context, recipe.training.seed
        feed = corpus.feed(context=context, batch_rows=recipe.rows, order=recipe.data.order, seed=seed)
        feed.rows(0)  # refuses a corpus that is too short, or of another tokenizer
        known = in_steps(recipe, corpus.windows(context))
        totals = compute_totals(
            known,
            vocab=corpus.tokenizer.vocab,
            train_tokens=corpus.train_tokens,
            val_tokens=corpus.val_tokens,
            run_folder=folder,
        )
        samples.encode(corpus.tokenizer, known.training.prompts, context)  # refuses prompts that cannot be continued
        _check_eval_items(corpus.tokenizer, eval_items, context)
        tokenizer = tokenizers.fingerprint(corpus.tokenizer)
        resume.check_text(folder, after, tokenizer, [stream.index.fingerprint for stream in feed.streams], force)
        if after >= totals.steps:  # finished, if its last checkpoint is complete
            found, _ = checkpoints.newest_intact(folder)
            after = found.step if found else 0
        start_from = resume.fork(known, home, tokenizer, after)
    except BaseException:
        corpus.close()
        raise
    return Prepared(known, recipe, corpus, totals, feed, after, start_from, eval_items)


def _open_corpus(recipe: Recipe, stores: str, watch: Watch, spare_cpus: Callable[[], float]) -> Mixture:
    """The complete corpus; or, if its order allows it and a CPU is free, one that is tokenised during training."""
    text = growing_text(recipe.data, stores)
    if text and (key := recipe.training.in_epochs):
        raise RaygptError(
            f"{key} needs the whole corpus, but data.order: sequential trains while it is still being tokenised; "
            "give training.steps, eval_every and checkpoint_every in steps, or write data.order: shuffled"
        )
    if text and (spare := spare_cpus()) >= 1:
        return open_growing(*text, watch, spare)
    return open_mixture(recipe.data, stores, watch)


def _read_eval_items(recipe: Recipe) -> dict[str, Sequence[Item]]:
    """The items of each task to evaluate during training; read before the start, so that a missing file is found."""
    training = recipe.training
    return {name: read_items(name, path, training.eval_items) for name, path in choose(training.eval_tasks).items()}


def _check_eval_items(tokenizer: Tokenizer, items: Mapping[str, Sequence[Item]], context: int) -> None:
    """Refuse items that the tokenizer cannot encode: the workers would find them in their first validation."""
    for name, of_task in items.items():
        try:
            check_characters(tokenizer, name, of_task, context)
        except RaygptError as error:
            raise RaygptError(f"training.eval_tasks: {error}") from None
