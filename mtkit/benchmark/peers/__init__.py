"""Other programs that mtkit is compared with if they are installed; mtkit needs none of them."""

from collections.abc import Sequence
from importlib.util import find_spec

from mtkit.errors import MtkitError, did_you_mean, shown

PACKAGES = {
    "huggingface": "transformers",
    "ctranslate2": "ctranslate2",
    "joeynmt": "joeynmt",
    "eole": "eole",
    "sockeye": "sockeye",
}
"""Package of each program."""

INSTALL = {
    "huggingface": "pip install transformers",
    "ctranslate2": "pip install 'mtkit[ctranslate2]'",
    # the requirements of these would replace packages that mtkit needs
    "joeynmt": "pip install --no-deps joeynmt && pip install tensorboard subword-nmt importlib_metadata",
    "eole": "pip install --no-deps eole pyonmttok",
    "sockeye": "pip install --no-deps sockeye",
}
"""Command that installs each program beside mtkit."""


def check_peers(names: Sequence[str], able: Sequence[str], work: str) -> None:
    """Raise MtkitError for a program that is unknown, not installed, or not among those `able` to do the work."""
    for name in names:
        if name not in PACKAGES:
            raise MtkitError(
                f"no program {shown(name)}{did_you_mean(name, list(PACKAGES))}; there are {', '.join(PACKAGES)}"
            )
        if name not in able:
            raise MtkitError(f"{name} does not {work}; --beside takes {', '.join(able)} here")
        if find_spec(PACKAGES[name]) is None:
            raise MtkitError(f"--beside {name} needs the package {PACKAGES[name]}: {INSTALL[name]}")
