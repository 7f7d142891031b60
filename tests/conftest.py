"""What every test starts from: one thread, and the same random numbers whatever ran before it."""

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
