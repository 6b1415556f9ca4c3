"""Admission of a request's media, before anything is chosen or sent: who processes them, and may they be fetched.

The decisions are `media`'s; here they get their facts: the fleet's, the operator's, and the addresses behind names. It
must not know HTTP, nor prompts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from ..media.gate import Unresolved, check_plan
from ..media.hosts import check_addresses, unresolved_host
from ..media.items import MediaPlan
from ..media.mode import Side, WorkerMedia, resolve, unavailable
from ..media.specs import ModelFacts, ModelSpec, spec_for
from ..observe.hooks import Observer
from ..offload import Offload
from ..rpc.resolve import resolve as resolve_host
from ..rpc.resolve import resolver_threads
from .seams import MediaFacts, ModelFactsOf
from .settings import MediaSettings

AddressesOf = Callable[[str], Awaitable[Sequence[str]]]
"""For a host name: its addresses as text, none when it has none."""


async def system_addresses(host: str, *, offload: Offload = resolver_threads) -> list[str]:
    """What the system's resolver says."""
    try:
        return [str(target.address[0]) for target in await resolve_host(host, port=0, offload=offload)]
    except (OSError, UnicodeError):
        return []


def only_its_name(model: str) -> ModelFacts:
    """For models whose workers are not asked."""
    return ModelFacts(name=model)


def no_workers(model: str) -> tuple[WorkerMedia, ...]:
    """For fleets that know nothing of media."""
    return ()


class MediaDesk:
    """Admits media to one fleet, whose facts are asked for anew by each request: what a worker can process changes."""

    def __init__(
        self,
        model_facts: ModelFactsOf = only_its_name,
        media_facts: MediaFacts = no_workers,
        *,
        settings: MediaSettings | None = None,
        observer: Observer | None = None,
        addresses: AddressesOf = system_addresses,
    ) -> None:
        self._model_facts = model_facts
        self._media_facts = media_facts
        self._settings = settings or MediaSettings()
        self._observer = observer or Observer()
        self._addresses = addresses

    def __repr__(self) -> str:
        return f"<MediaDesk {self._settings.mode}>"

    def spec(self, model: str) -> ModelSpec | None:
        """What is known of the model's family; None for a model of text."""
        return spec_for(self._model_facts(model))

    async def admit(self, plan: MediaPlan, *, model: str) -> None:
        """Return when the plan may be forwarded to the workers of the model.

        Raises BadRequest and TooLarge for what may not, Unsupported for what this router would have to process.
        """
        spec = self.spec(model)
        workers = self._media_facts(model)
        found = resolve(plan, spec=spec, workers=workers, mode=self._settings.mode)
        self._observer.media_resolved(model=model, mode=found.side.value, reason=found.reason.value)
        if found.side is Side.ROUTER or spec is None:
            raise unavailable(plan, reason=found.reason)
        names = check_plan(plan, spec=spec, workers=workers, policy=self._settings.policy)
        if names:
            await self._check_names(names)

    async def _check_names(self, names: Sequence[Unresolved]) -> None:
        answers: dict[str, Sequence[str]] = {}

        async def ask(host: str) -> None:
            answers[host] = await self._addresses(host)

        with trio.move_on_after(self._settings.resolve_seconds):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(partial(ask, name.host))
        for name in names:
            if name.host not in answers:
                raise unresolved_host(name.host, part=name.part)
            check_addresses(name.host, answers[name.host], part=name.part)
