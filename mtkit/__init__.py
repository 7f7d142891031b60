"""mtkit: translation models in which the attention mechanism is a choice."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtkit.version import __version__ as __version__

EXPORTS = {
    **dict.fromkeys(("load", "prepare", "train", "score", "compare", "LoadedRun", "TranslatedLine"), "mtkit.api"),
    "translate_file": "mtkit.decoding.files",
    "MtkitError": "mtkit.errors",
    "keep_freed_memory": "mtkit.process",
}
"""{exported name: its module}. Modules are imported at first use, because most of them import PyTorch."""

if TYPE_CHECKING:
    from mtkit.api import LoadedRun as LoadedRun
    from mtkit.api import TranslatedLine as TranslatedLine
    from mtkit.api import compare as compare
    from mtkit.api import load as load
    from mtkit.api import prepare as prepare
    from mtkit.api import score as score
    from mtkit.api import train as train
    from mtkit.decoding.files import translate_file as translate_file
    from mtkit.errors import MtkitError as MtkitError
    from mtkit.process import keep_freed_memory as keep_freed_memory
else:

    def __getattr__(name: str) -> Any:
        if name not in EXPORTS:
            raise AttributeError(f"module 'mtkit' has no attribute '{name}'")
        return getattr(import_module(EXPORTS[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *EXPORTS})
