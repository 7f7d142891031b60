"""Training of a recipe's model in a run folder: everything before and around the training loop."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from mtkit.data.prepared import Prepared
from mtkit.errors import RunError
from mtkit.memory import OOM_ERRORS, is_oom
from mtkit.model.adaptation import train_in_part
from mtkit.model.build import attention_packages, build_model, describe_attention
from mtkit.model.initial_embeddings import InitialEmbeddings
from mtkit.model.network import Network
from mtkit.model.trial import try_packages
from mtkit.recipe import Recipe
from mtkit.runs import Run, can_resume, initial_run
from mtkit.terminal import ProgressBar, Say, quiet, silent
from mtkit.training.interruption import Interruption
from mtkit.training.loop import Training
from mtkit.training.metrics import ignoring_write_errors
from mtkit.training.precision import fast_and_repeatable, fixed_workspaces
from mtkit.training.preview import preview_training
from mtkit.training.progress import Outcome
from mtkit.training.run_folder import (
    check_trained,
    embed_word_vectors,
    init_from_run,
    lock_folder,
    open_folder,
    record,
)
from mtkit.training.world import World


def train(
    recipe: Recipe,
    prepared: Prepared,
    folder: Path,
    *,
    command: Sequence[str],
    device: str = "auto",
    init_from: Run | None = None,
    say: Say = quiet,
    progress: ProgressBar = silent,
    preview: bool = False,
) -> Outcome:
    """Train the recipe's model in the run folder, from the beginning or from its last checkpoint.

    Under torchrun all processes train one model on the same global batches, and the first one writes. `command` is
    recorded; `init_from` is a run whose best weights a new run starts with; `say` prints lines for the user; its
    OSError is ignored. `progress` is for reading word vectors. With `preview`, a new run makes its first updates to
    measure them; the folder is then of no further use.

    Raises: RunError if the run in the folder has other settings, a checkpoint is damaged, the loss is not finite, or
    a limit is reached before the first update; DataError without training pairs; RecipeError and MtkitError if the
    model cannot be built or the device does not exist.
    """
    recipe = prepared.applied_to(recipe).for_task()
    deterministic = recipe.training.deterministic
    with (
        fixed_workspaces(deterministic),
        World(device) as world,
        fast_and_repeatable(world.device, deterministic=deterministic),
        Interruption() as interruption,
    ):
        say, progress = (ignoring_write_errors(say), progress) if world.first else (quiet, silent)
        say(describe_attention(recipe))
        model = build_model(recipe, **prepared.model_sizes)
        if packages := attention_packages(recipe):
            try_packages(model, packages)
        init_from = initial_run(recipe.training.init_from, folder) if init_from is None else init_from
        embedded = _initialise(model, recipe, prepared, init_from, say, progress, resumes=can_resume(folder))
        model = model.to(world.device)
        world.send(model.state_dict().values())  # another run may change while the processes read it
        training = Training(recipe, prepared, folder, model, world, interruption, say)
        # in a preview, each process has a folder of its own
        with lock_folder(folder) if world.first or preview else nullcontext():
            if world.first or preview:
                open_folder(
                    folder,
                    recipe,
                    prepared,
                    too_long=training.too_long,
                    longest=training.longest,
                    command=command,
                    init_from=init_from,
                )
                if embedded:
                    record(folder, "embeddings", [asdict(table) for table in embedded])
            world.agree()  # the others wait until the folder is complete
            try:
                return preview_training(training) if preview else training.run()
            except OOM_ERRORS as error:
                if not is_oom(error):
                    raise
                raise RunError(
                    f"out of memory on {world.device} at update {training.progress.update + 1}; "
                    "halve --batch-tokens and double --accumulate, under another --name"
                ) from error


def _initialise(
    model: Network,
    recipe: Recipe,
    prepared: Prepared,
    init_from: Run | None,
    say: Say,
    progress: ProgressBar,
    *,
    resumes: bool,
) -> list[InitialEmbeddings]:
    """Set a new run's weights from word vectors or another run, and freeze the weights that are not trained.

    Return the tables of embeddings that begin with word vectors.

    Raises: as `embed_word_vectors`, `init_from_run` and `check_trained`.
    """
    embedded, random = list[InitialEmbeddings](), set[str]()
    if not resumes:
        embedded = embed_word_vectors(model, recipe, prepared, init_from, say, progress)
        if init_from is not None:
            random = init_from_run(model, init_from, prepared, say)
    train_in_part(model, recipe.training, recipe.seed)
    if init_from is not None:
        check_trained(model, random, init_from)
    return embedded
