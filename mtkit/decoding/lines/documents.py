"""Whether the lines of a document are translated together, and how many pieces they may have."""

from collections.abc import Sequence

from mtkit.errors import MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.terminal import Say


def document_pieces(runs: Sequence[Run]) -> int | None:
    """Return the maximum number of pieces in joined lines for these runs; None if one was not trained on documents."""
    known = [run.document_pieces or 0 for run in runs]
    return min(known) or None


def joins_documents(
    runs: Sequence[Run],
    requested: bool | None,
    settings: DecodingSettings,
    *,
    ids: bool = False,
    scores: bool = False,
    prefixes: bool = False,
    glossary: bool = False,
    forced: bool = False,
    say: Say,
) -> bool:
    """Return whether lines of a document are translated together: as `requested`; None: if all runs were trained so.

    `ids` is whether the documents have ids. Given translations (`forced`) are scored after the lines that precede them.
    `say` gets a message if the settings or the options rule out the default.

    Raises: MtkitError if they rule out the request, or if documents or their ids are given and a run was not trained on
    documents.
    """
    trained = document_pieces(runs) is not None
    if not trained and (requested or (ids and requested is None)):
        option = "--document-ids" if ids else "--documents"
        raise MtkitError(f"{option} needs a run trained on documents (data.documents in its recipe); leave it out")
    if not trained or requested is False:
        for name in ("context", "document_pieces"):
            if value := getattr(settings, name):
                reason = "leave out --sentences" if trained else "the run was not trained on documents"
                raise MtkitError(f"decoding.{name} = {value} is for lines of a document: {reason}")
        return False
    if forced:
        return True
    single = {"--scores": scores, "--prefix": prefixes, "--glossary": glossary}
    single["--n-best above 1"] = settings.n_best > 1
    for option, applies in single.items():
        if applies and requested:
            raise MtkitError(f"{option} needs lines that are translated one by one; give --sentences too")
        if applies:
            say(f"with {option}, lines are translated one by one, not by documents")
            return False
    return True
