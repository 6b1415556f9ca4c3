"""The process's limit of open files: raised as far as it goes, since each connection takes one.

A shell's usual limit of 1024 (macOS: 256) is meant for programs that would not know what to do with more.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

from ..settings import ServiceSettings

_log: Final = logging.getLogger(__name__)


def raise_limit(wanted: int) -> int:
    """Let this process have `wanted` files open, if it may; returns how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    except (ValueError, OSError):  # macOS has a second limit that it does not tell
        return soft
    return reachable


def fit_descriptors(settings: ServiceSettings) -> ServiceSettings:
    """Raise the limit for these settings, or make them modest enough for it, and say so."""
    limit = raise_limit(settings.descriptors)
    fitted = settings.within(limit)
    if fitted is not settings:
        _log.warning(
            "this process may have %d files open and would need %d: at most %d HTTP and %d gRPC connections at a time"
            " (raise it with ulimit -n)",
            limit,
            settings.descriptors,
            fitted.front.http.max_connections,
            fitted.grpc.max_connections,
        )
    return fitted
