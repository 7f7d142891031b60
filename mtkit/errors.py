"""The errors that a user can cause; `mtkit.cli.app` prints each as one line and exits with code 2."""


class MtkitError(Exception):
    """A user's mistake: the message says what is wrong, where, and what to do, in one line."""


class RecipeError(MtkitError):
    """A setting that does not exist, or a value that it cannot have."""


class DataError(MtkitError):
    """Text or prepared data that cannot be used; the message names the file and, where there is one, the line."""


class RunError(MtkitError):
    """A run folder or checkpoint that is missing, damaged or of another version."""


class DiffersError(DataError, RunError):
    """A folder holds what was made with other settings."""

    def __init__(self, what: str, advice: str) -> None:
        """`what` differs; `advice` is what to do, in terms of the command that makes such a folder."""
        super().__init__(f"{what}; {advice}")
        self.what = what


def did_you_mean(word: str, known: "list[str]") -> str:
    """`" (did you mean 'longformer'?)"` where a known word is near, else the empty string."""
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""
