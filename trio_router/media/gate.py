"""Whether a plan may be forwarded to workers: schemes, hosts, numbers and sizes, all before anything is sent.

Real workers take several wrong things without a word, so that what is not refused here may come back as a wrong answer.
Messages name parts, schemes and hosts; never a URL. It must not resolve names: it returns those that somebody has to.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import BadRequest, TooLarge
from .hosts import MALFORMED, REFUSED, Host, check_length, host_of, is_listed, is_local_name, is_public, refused_host
from .items import Form, MediaItem, MediaPlan, Modality
from .mode import WorkerMedia
from .specs import ModelSpec

MIB: Final = 1024 * 1024
DEFAULT_INPUT_BYTES: Final = 256 * MIB
USUAL_SCHEMES: Final = frozenset({"http", "https", "data"})
"""What is accepted where no worker says what it can fetch."""

_WEB: Final = frozenset({"http", "https"})
# Type and subtype with parameters, as far as they have no comma in them.
_MEDIA_TYPE: Final = re.compile(r"([a-z]+)/[a-z0-9.+_-]+(?:;[^,;]*)*", re.IGNORECASE)
_LONGEST_MEDIA_TYPE: Final = 256
# Moving pictures are often images to those who send them: GIF, WebP, or frames as JPEG.
_MEDIA_TYPES: Final = {
    Modality.IMAGE: frozenset({"image"}),
    Modality.VIDEO: frozenset({"video", "image"}),
    Modality.AUDIO: frozenset({"audio"}),
}
_BASE64: Final = ";base64"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """What an operator allows. Bytes are of a data: URL's content, decoded.

    `allowed_domains`: if there are any, hosts must be among them, and those that are need not be public ones. An entry
    with a dot in front allows everything below it. `image_limit`: of one request, besides the model's and the workers'.
    """

    allow_private_hosts: bool = False
    allowed_domains: tuple[str, ...] = ()
    image_limit: int | None = None
    max_image_bytes: int = DEFAULT_INPUT_BYTES
    max_video_bytes: int = DEFAULT_INPUT_BYTES


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A host name whose addresses have to be judged with `check_addresses`, and the first part that has it."""

    host: str
    part: str


def check_plan(
    plan: MediaPlan, *, spec: ModelSpec, workers: Sequence[WorkerMedia], policy: MediaPolicy
) -> tuple[Unresolved, ...]:
    """Check all that can be checked without asking anybody; returns the names to resolve, each once.

    Raises BadRequest, and TooLarge for a data: URL over its limit; each names the part.
    """
    _check_counts(plan, limits=item_limits(spec, workers=workers, policy=policy))
    schemes = fleet_schemes(workers)
    found: dict[str, Unresolved] = {}
    for item in plan:
        _check_scheme(item, accepted=schemes)
        if item.scheme == "data":
            _check_data(item, policy=policy)
        elif item.scheme in _WEB:
            host = host_of(item.url, part=item.part)
            if _check_host(host, item=item, policy=policy):
                found.setdefault(host.name, Unresolved(host.name, item.part))
        else:
            check_length(item.url, part=item.part)
    return tuple(found.values())


# Schemes.


def parse_schemes(text: str) -> frozenset[str] | None:
    """A worker's comma list of schemes; None where it does not say, which constrains nothing."""
    return frozenset(word.strip().lower() for word in text.split(",") if word.strip()) or None


def accepted_schemes(legs: Iterable[frozenset[str] | None]) -> frozenset[str]:
    """What all legs of a request can fetch: the intersection of what they say. A leg that says nothing does not
    constrain; if none says anything, the usual ones.
    """
    said = [leg for leg in legs if leg is not None]
    return frozenset.intersection(*said) if said else USUAL_SCHEMES


def fleet_schemes(workers: Iterable[WorkerMedia]) -> frozenset[str]:
    """What some choice of workers, one for each leg, can fetch. The choice itself has to be checked once it is made."""
    legs: dict[str, frozenset[str] | None] = {}
    for worker in workers:
        known = legs.get(worker.leg, frozenset())
        legs[worker.leg] = None if known is None or worker.schemes is None else known | worker.schemes
    return accepted_schemes(legs.values())


def _check_scheme(item: MediaItem, *, accepted: Collection[str]) -> None:
    if item.form is Form.REFERENCE and item.scheme not in accepted:
        told = f"the scheme {item.scheme[:16]!r}" if item.scheme else "no scheme"
        known = ", ".join(sorted(accepted)) or "none that all of them do"
        raise BadRequest(
            f"{item.part}: its URL has {told}; the workers of this model accept {known}",
            code="media_ref_scheme_not_accepted",
        )


# Hosts.


def _check_host(host: Host, *, item: MediaItem, policy: MediaPolicy) -> bool:
    """Whether its addresses have yet to be judged."""
    if policy.allowed_domains:
        if not is_listed(host.name, domains=policy.allowed_domains):
            raise BadRequest(
                f"{item.part}: the host {host.name} is not among those that media may come from"
                " (--mm-allowed-media-domains)",
                code=REFUSED,
            )
        return False
    if policy.allow_private_hosts:
        return False
    if is_local_name(host.name) or (host.address is not None and not is_public(host.address)):
        raise refused_host(host.name, part=item.part)
    return host.address is None


# Numbers.


def item_limits(
    spec: ModelSpec, *, workers: Iterable[WorkerMedia], policy: MediaPolicy
) -> Mapping[Modality, tuple[int, str]]:
    """The strictest limit on items of each modality, and whose it is. Any worker may be chosen, so each one counts."""
    limits = {kind: [(limit, "the model's")] for kind, limit in spec.limits.items()}
    for worker in workers:
        for kind, limit in parse_item_limits(worker.item_limits).items():
            limits.setdefault(kind, []).append((limit, "a worker's"))
    if policy.image_limit is not None:
        limits.setdefault(Modality.IMAGE, []).append((policy.image_limit, "the operator's"))
    return {kind: min(found) for kind, found in limits.items()}


def parse_item_limits(text: str) -> dict[Modality, int]:
    """A worker's limits, like "image=8,video=2". What is no modality and number is passed over."""
    found: dict[Modality, int] = {}
    for word in text.split(","):
        name, _, number = word.partition("=")
        if name.strip() in _MODALITIES and number.strip().isascii() and number.strip().isdigit():
            found[Modality(name.strip())] = int(number[:9])
    return found


_MODALITIES: Final = frozenset(kind.value for kind in Modality)


def _check_counts(plan: MediaPlan, *, limits: Mapping[Modality, tuple[int, str]]) -> None:
    for kind, count in plan.counts.items():
        limit, whose = limits.get(kind, (0, "the model's"))
        if count > limit:
            # The first one too many.
            part = [item.part for item in plan if item.modality is kind][limit]
            raise BadRequest(
                f"{part}: the request has {count} {kind}{'s' * (count > 1)}, {whose} limit is {limit}",
                code="invalid_multimodal_request",
            )


# data: URLs.


def _check_data(item: MediaItem, *, policy: MediaPolicy) -> None:
    url = item.url
    comma = url.find(",", 0, _LONGEST_MEDIA_TYPE)
    head = url[len("data:") : comma] if comma > 0 else ""
    if not head.lower().endswith(_BASE64):
        raise BadRequest(
            f"{item.part}: a data: URL must be data:TYPE;base64,CONTENT, with the media type first", code=MALFORMED
        )
    kind = _MEDIA_TYPE.fullmatch(head[: -len(_BASE64)])
    if kind is None or kind[1].lower() not in _MEDIA_TYPES[item.modality]:
        wanted = " or ".join(f"{kind}/..." for kind in sorted(_MEDIA_TYPES[item.modality]))
        raise BadRequest(f"{item.part}: the media type of its data: URL must be {wanted}", code=MALFORMED)
    characters = len(url) - comma - 1
    if not characters:
        raise BadRequest(f"{item.part}: its data: URL is empty", code=MALFORMED)
    limit = policy.max_video_bytes if item.modality is Modality.VIDEO else policy.max_image_bytes
    if characters > base64_length(limit):
        raise TooLarge(
            f"{item.part}: its data: URL holds more than the limit of {limit} bytes for {item.modality}s",
            code="media_ref_too_large",
        )


def base64_length(size: int) -> int:
    """How many characters of base64 so many bytes have, padding included."""
    return -(-size // 3) * 4
