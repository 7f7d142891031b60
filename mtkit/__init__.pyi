from mtkit.api import load as load
from mtkit.api import prepare as prepare
from mtkit.api import score as score
from mtkit.api import train as train

__version__: str
FUNCTIONS: tuple[str, ...]
