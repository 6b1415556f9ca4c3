"""Supported helpers for tests: a whole cluster in one process, on virtual time, run the same way again from its
seed.
"""

from .cluster import Cluster, collect, open_cluster
from .simulation import run_simulation

__all__ = ["Cluster", "collect", "open_cluster", "run_simulation"]
