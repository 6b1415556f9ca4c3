"""Where media may be fetched from: the host of a URL, and the addresses behind it.

What is judged here is fetched by somebody else, with a parser of its own: a URL that two parsers may read differently
is refused, and only the plain way of writing an address is taken. Addresses are allowed if they are known to be public;
everything else is refused, whatever it may be.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from ..errors import BadRequest

IPAddress = IPv4Address | IPv6Address

MAX_URL_CHARS: Final = 8192
"""Of a URL that is no data: URL; longer ones are refused by most servers."""
MALFORMED: Final = "invalid_multimodal_request"
REFUSED: Final = "media_ref_host_not_allowed"

# Blanks and control characters are dropped by some parsers, wherever they are.
_UNSAFE: Final = re.compile(r"[\x00-\x20\x7f]")
_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_LOOKS_NUMERIC: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_LONGEST_NAME: Final = 253
# Names that mean this machine or this network wherever they are asked for (RFC 6761, 6762, 8375; "internal" is kept for
# private networks, and is where clouds have their metadata).
_LOCAL_NAMES: Final = ("localhost", "localdomain", "local", "internal", "home.arpa")

# The IANA registries of special-purpose addresses, as far as they are not for everybody; and one public address that is
# answered by the machine underneath a virtual one, with its secrets.
_CLOSED_V4: Final = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
            *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32"),
        ),
    )
)
# Global unicast is the one block that public addresses come from. Inside of it: protocol assignments with Teredo,
# documentation, and 6to4, which has an IPv4 address in it.
_OPEN_V6: Final = IPv6Address("2000::"), IPv6Address("3fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
_CLOSED_V6: Final = tuple(map(ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))


@dataclass(frozen=True, slots=True)
class Host:
    """A host as it will be asked for: a name in small letters without a final dot, or an address."""

    name: str
    address: IPAddress | None = None


def check_length(url: str, *, part: str) -> None:
    """Raises BadRequest for a URL, other than a data: URL, that is too long to be one."""
    if len(url) > MAX_URL_CHARS:
        raise _malformed(part, f"its URL has {len(url)} characters, the limit is {MAX_URL_CHARS}")


def host_of(url: str, *, part: str) -> Host:
    """The host of an http or https URL. Raises BadRequest, which names the part and not the URL, for one that is
    malformed or not plain.
    """
    check_length(url, part=part)
    if _UNSAFE.search(url):
        raise _malformed(part, "its URL has blanks or control characters in it; percent-encode them")
    _, _, rest = url.partition(":")
    if not rest.startswith("//"):
        raise _malformed(part, "its URL has no // behind the scheme")
    authority = re.split(r"[/?#]", rest[2:], maxsplit=1)[0]
    if "@" in authority:
        raise _malformed(part, "its URL has a user name in front of the host, which is not passed on")
    name, port = _split(authority, part=part)
    if port and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) <= 65535):
        raise _malformed(part, "its URL has no valid port")
    return _judged(name, part=part)


def _split(authority: str, *, part: str) -> tuple[str, str]:
    """Host and port, the port empty where there is none."""
    if authority.startswith("["):
        host, bracket, port = authority.rpartition("]")
        if not bracket or (port and not port.startswith(":")):
            raise _malformed(part, "its URL has a malformed IPv6 address")
        return f"{host}]", port.removeprefix(":")
    host, _, port = authority.partition(":")
    return host, port


def _judged(host: str, *, part: str) -> Host:
    if host.startswith("["):
        try:
            address = IPv6Address(host[1:-1])
        except ValueError:
            raise _malformed(part, "its URL has a malformed IPv6 address") from None
        if address.scope_id is not None:
            raise _malformed(part, "its URL has an IPv6 address with a zone, which means something on one machine only")
        return Host(str(address), address)
    if not host.isascii():
        raise _malformed(part, "its URL has a host name that is not ASCII; write it in its xn-- form")
    name = host.lower().removesuffix(".")
    if len(name) > _LONGEST_NAME or _NAME.fullmatch(name) is None:
        raise _malformed(part, "its URL has no valid host name")
    # Resolvers read 2130706433, 127.1, 0x7f.0.0.1 and 0177.0.0.1 as addresses, and do not agree on all of them.
    if _LOOKS_NUMERIC.fullmatch(name.rpartition(".")[2]) is None:
        return Host(name)
    try:
        # Leading zeros are not taken: octal to some.
        return Host(name, IPv4Address(name))
    except ValueError:
        raise _malformed(part, "its URL has an address that is not written as four decimal numbers") from None


def is_domain(text: str) -> bool:
    """Whether a text can be an entry of a list of hosts: one that no host is equal to would allow nothing."""
    text = text.lower()
    name = text.removeprefix("*").removeprefix(".")
    try:
        if _NAME.fullmatch(name):
            if _LOOKS_NUMERIC.fullmatch(name.rpartition(".")[2]):
                return str(IPv4Address(text)) == text
            return "*" not in text or text.startswith("*.")
        return str(IPv6Address(text)) == text
    except ValueError:
        return False


def is_listed(name: str, *, domains: Iterable[str]) -> bool:
    """Whether a host is in a list: by its whole name, or below an entry that begins with a dot (or `*.`)."""
    return any(
        name.endswith(entry) if (entry := domain.lower().removeprefix("*")).startswith(".") else name == entry
        for domain in domains
    )


def is_local_name(name: str) -> bool:
    """Whether a name is one of those that never mean a public host."""
    return any(name == local or name.endswith(f".{local}") for local in _LOCAL_NAMES)


def is_public(address: IPAddress) -> bool:
    """Whether an address belongs to the public Internet; an IPv4 address in an IPv6 one is judged as what it is."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        low, high = _OPEN_V6
        return low <= address <= high and not any(address in network for network in _CLOSED_V6)
    return not any(address in network for network in _CLOSED_V4)


def check_addresses(host: str, addresses: Collection[str], *, part: str) -> None:
    """Judge what a name resolves to. Raises BadRequest if there is nothing, or one address that is not public."""
    if not addresses:
        raise BadRequest(f"{part}: the host {host} has no address", code="media_fetch_failed")
    for text in addresses:
        try:
            address = ip_address(text)
        except ValueError:
            raise refused_host(host, part=part) from None
        if not is_public(address):
            # Which address it is would tell a stranger about this network.
            raise refused_host(host, part=part)


def unresolved_host(host: str, *, part: str) -> BadRequest:
    """The error for a name whose addresses nobody could tell in time: it might be anything."""
    return BadRequest(f"{part}: the address of the host {host} could not be found in time", code="media_fetch_failed")


def refused_host(host: str, *, part: str) -> BadRequest:
    """The error for a host that is not public."""
    return BadRequest(
        f"{part}: the host {host} is not a public one; media are fetched from public hosts only, unless"
        " --mm-allowed-media-domains names it or --mm-allow-private-media-hosts is set",
        code=REFUSED,
    )


def _malformed(part: str, what: str) -> BadRequest:
    return BadRequest(f"{part}: {what}", code=MALFORMED)
