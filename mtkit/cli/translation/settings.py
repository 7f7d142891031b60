"""What `mtkit translate` is asked to do, from its options and the runs' recipes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtkit.cli.translation.notes import note
from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.recipe import DecodingSettings, Recipe
    from mtkit.runs import Run

ONLY_WITH = {
    "beam": ("beam", "coverage_penalty"),
    "sample": ("temperature", "top_k", "top_p", "seed"),
}
"""Settings that say nothing with another method."""


def joins_documents(
    runs: "Sequence[Run]", asked: bool | None, settings: "DecodingSettings", *, scores: bool, forced: bool
) -> bool:
    """Whether lines of a document are translated together: as asked, or else where all runs were trained that way."""
    from mtkit.decoding.translator import document_pieces

    trained = document_pieces(runs) is not None
    if asked and not trained:
        raise MtkitError(
            "--documents needs a run that was trained on documents (data.documents in its recipe); leave it out"
        )
    if not trained or asked is False:
        return False
    single = {"--scores": scores, "--target": forced, "--n-best above 1": settings.n_best > 1}
    for option, given in single.items():
        if given and asked:
            raise MtkitError(f"{option} is for lines that are translated one by one; give --sentences with it")
        if given:
            note(f"with {option}, lines are translated one by one, not by documents")
            return False
    return True


def recipe_of(run: "Run", path: Path | None, given: dict[str, Any]) -> "Recipe":
    """The recipe at `path`, or else the run's, with the decoding settings given on the command line."""
    from mtkit.recipe import load_recipe, make_recipe, merged

    overrides = {"decoding": given}
    recipe = load_recipe(path, overrides) if path else make_recipe(merged(run.recipe.model_dump(), overrides))
    for method, settings in ONLY_WITH.items():
        for setting in settings:
            if setting in given and recipe.decoding.method != method:
                option = setting.replace("_", "-")
                raise MtkitError(
                    f"--{option} says nothing with --method {recipe.decoding.method}; add --method {method}"
                )
    return recipe
