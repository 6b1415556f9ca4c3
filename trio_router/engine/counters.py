"""What a worker counts. Plain numbers that only grow, except where they say otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts since the worker started; the reference worker's own service tells them to anyone who asks."""

    generates: int = 0
    """Generate calls that passed validation."""
    refused: int = 0
    """Generate calls that did not."""
    aborts: int = 0
    """Requests ended by Abort, by a cancelled call or by a lost connection."""
    finished: int = 0
    """Choices that came to their own end: stop, length or error."""
    steps: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    computed_prompt_tokens: int = 0
    """Prompt tokens this worker computed, whatever its role."""
    recomputed_prompt_tokens: int = 0
    """Prompt tokens computed although a handoff should have brought them: on a decode worker, or for a request that
    offered a handoff."""
    prefix_hit_tokens: int = 0
    """Prompt tokens found in this worker's own cache."""
    pulls: int = 0
    """Handoffs whose state came over from a prefill worker."""
    pulled_tokens: int = 0
    failed_pulls: int = 0
    """Handoffs that could not be loaded; their requests ended with finish reason "error"."""
    pinned: int = 0
    """Handoffs this worker gave out."""
    pulled: int = 0
    """Of those, how many a decode worker has pulled."""
    released: int = 0
    """How many were given back without a pull."""
    lease_expired: int = 0
    """How many nobody came for."""
    stray_notices: int = 0
    """Notices about a handoff that was not held (any more)."""
    media_fetches: int = 0
    """Items of media that this worker went for: over the web, in a file or in a data: URL."""
    media_items_processed: int = 0
    """Items it decoded and measured."""
    identities: int = 0
    """Requests whose media it told a decode worker about."""
    notices_sent: int = 0
    """Releases this worker sent to prefill workers."""
