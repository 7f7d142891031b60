"""Values of numpy become Python's; others stay what they are."""

from typing import Any

import numpy as np
import pytest

from mtkit.storage.records import as_python


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.int64(5), 5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        ([np.int8(1), 2], [1, 2]),
        ((np.int8(1), 2), (1, 2)),
        ({"positions": {"name": "relative", "clip": np.uint16(3)}}, {"positions": {"name": "relative", "clip": 3}}),
        ("band", "band"),
        (None, None),
        (True, True),
    ],
)
def test_values_are_pythons_own(value: Any, wanted: Any) -> None:
    found = as_python(value)
    assert repr(found) == repr(wanted)  # 1 == np.int8(1) == True
