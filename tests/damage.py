"""JSON files in all the ways in which a kill, a disk or an editor leaves them."""

import copy
import json
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

from mtkit.errors import MtkitError

NO_OBJECT = (b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000, b"\0" * 100)
WRONG = (None, "x", -1, 10**30, 0.5, True, [], {}, ["x"], {"x": -1})


def check_damages(
    path: Path, use: Callable[[], object], *, names: Path | None = None, whole_keys: Container[str] = ()
) -> int:
    """`use` reads the JSON file at `path`: with any damage it works all the same, or says in one line what is wrong.

    Gives how many damages were refused. A refusal names the file, or `names`; what is no object at all is refused.
    What stands under `whole_keys` is left alone.
    """
    whole = path.read_bytes()
    use()
    refused = 0
    for number, content in enumerate([*NO_OBJECT, *_damaged(json.loads(whole), whole_keys)]):
        path.write_bytes(content)
        message = _refusal(use)
        if message is None:
            assert number >= len(NO_OBJECT), f"{content[:200]!r} was taken"
            continue
        refused += 1
        assert str(names or path) in message, f"{content[:200]!r}: {message}"
        assert "\n" not in message
        assert len(message) < 600
    path.write_bytes(whole)
    use()
    return refused


def _refusal(use: Callable[[], object]) -> str | None:
    try:
        use()
    except MtkitError as error:
        return str(error)
    return None


def _damaged(whole: Any, whole_keys: Container[str]) -> Iterator[bytes]:
    for place in _places(whole):
        if any(key in whole_keys for key in place):
            continue
        for wrong in WRONG:
            content = copy.deepcopy(whole)
            *above, last = place
            group = content
            for key in above:
                group = group[key]
            group[last] = wrong
            yield json.dumps(content).encode()
        del group[last]
        yield json.dumps(content).encode()


def _places(group: Any) -> Iterator[list[Any]]:
    """The places of values: keys, and the first items of lists."""
    for key in list(group) if isinstance(group, dict) else list(range(len(group)))[:1]:
        yield [key]
        if isinstance(group[key], dict | list):
            yield from ([key, *place] for place in _places(group[key]))
