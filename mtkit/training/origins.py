"""The origin of a run: its training data, the runs that it began with, and the model that it was imported from."""

from pathlib import Path

from mtkit.runs import Origin, Run


def imported_from(run: Run) -> str | None:
    """The model of another library that the run was made of: its name on the hub, or its folder's name."""
    place = run.about.get("imported_from")
    return Path(place).name if place is not None and Path(place).is_absolute() else place


def origins(run: Run) -> list[Origin]:
    """The run whose weights the training began with, then the run that this one began with, and so on."""
    named = run.about.get("init_from")
    unknown = [Origin(run=named, imported_from=None, data=[])] if named else []
    return run.about.get("origins", unknown)


def origin(run: Run) -> Origin:
    """The run as an origin of others."""
    return Origin(run=run.folder.name, imported_from=imported_from(run), data=trained_on(run))


def trained_on(run: Run) -> list[str]:
    """Return the names of the training corpora and the pairs per direction, for people; empty if unknown."""
    data = run.recipe.data
    corpora = [corpus.label for corpus in data.train]
    if not corpora and run.about.get("data") is not None:
        corpora = [f"the built-in corpus of mtkit, seed {data.builtin.seed}"]
    pairs = {way: sum(bin_.pairs for bin_ in its.bins) for way, its in (run.about.get("lengths") or {}).items()}
    return [*corpora, *(f"{way}: {count:,} training pairs" for way, count in pairs.items())]
