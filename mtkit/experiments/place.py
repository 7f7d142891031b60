"""The place that runs the trials of a comparison: processes on this machine, or a Ray cluster."""

from dataclasses import dataclass

import torch

from mtkit.device import find_device
from mtkit.errors import MtkitError
from mtkit.experiments.children import Children
from mtkit.experiments.cluster import Cluster
from mtkit.experiments.folder import Folder
from mtkit.experiments.setup import data_folders
from mtkit.experiments.trials import Plan


@dataclass(frozen=True)
class Place:
    """The device of each trial, its threads, and the trials at the same time."""

    device: str = "auto"
    threads: int | None = None
    """None: the cores divided by `jobs`; on a cluster, as in `Cluster`."""
    jobs: int = 1
    """Trials at the same time on this machine."""
    ray: str | None = None
    """Address of a Ray cluster, or "auto"; None: this machine."""

    def __post_init__(self) -> None:
        """Raises: MtkitError for numbers below 1, several jobs on a cluster, and a device that this machine lacks."""
        for name, number in (("jobs", self.jobs), ("threads", self.threads)):
            if number is not None and number < 1:
                raise MtkitError(f"{name} = {number}: give 1 or more")
        if self.ray is None:
            find_device(self.device)
        elif self.jobs > 1:
            raise MtkitError("a Ray cluster runs as many trials as it has room for; leave out jobs (--jobs)")

    def runner(self, folder: Folder, plan: Plan) -> Cluster | Children:
        """Return the runner of a plan's trials, to be used as a context. Raises: MtkitError if Ray is not installed."""
        if self.ray is not None:
            return Cluster(folder, self.device, self.threads, self.ray, data_folders(plan))
        threads = self.threads or max(torch.get_num_threads() // self.jobs, 1)
        return Children(folder, str(find_device(self.device)), threads, self.jobs)
