"""Hosts of media URLs: nothing that is not public gets through, however it is written."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.errors import BadRequest
from trio_router.media.hosts import (
    MALFORMED,
    MAX_URL_CHARS,
    REFUSED,
    check_addresses,
    host_of,
    is_domain,
    is_listed,
    is_local_name,
    is_public,
)

PART = "messages[0].content[0].image_url"
PRIVATE_V4 = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "255.255.255.255/32"),
]
PRIVATE_V6 = ["::/128", "::1/128", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "64:ff9b::/96", "64:ff9b:1::/48"]


def addresses_in(networks: list[str]) -> st.SearchStrategy:
    return st.sampled_from(networks).flatmap(lambda text: st.ip_addresses(network=text))


def gets_through(url: str) -> bool:
    """Whether a URL with an address in it is accepted as one with a public address, or with a name to be resolved."""
    try:
        host = host_of(url, part=PART)
    except BadRequest:
        return False
    return host.address is None or is_public(host.address)


def spellings(address: IPv4Address) -> list[str]:
    """How a resolver may be made to read an address, beyond the plain way."""
    number = int(address)
    a, b, c, d = address.packed
    low = number & 0xFFFFFF
    dots = ["\u3002", "\uff0e", "\uff61"]
    return [
        str(address),
        f"{address}.",
        str(number),
        hex(number),
        hex(number).upper().replace("X", "x"),
        f"0{number:o}",
        f"{a}.{low}",
        f"{a}.{b}.{c * 256 + d}",
        f"0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}",
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"{a:03d}.{b:03d}.{c:03d}.{d:03d}",
        f"{a}.{b}.{c}.0x{d:x}",
        f"{a}.{b}.{c}.{d}%2e",
        f"[::ffff:{address}]",
        f"[::ffff:{number >> 16:x}:{number & 0xFFFF:x}]",
        f"[::{address}]",
        f"[64:ff9b::{address}]",
        f"[2002:{number >> 16:x}:{number & 0xFFFF:x}::1]",
        f"[::ffff:0:{address}]",
        *(dot.join(map(str, (a, b, c, d))) for dot in dots),
        "".join(chr(ord(char) + 0xFEE0) for char in str(address)),
        f"public.example@{address}",
        f"public.example:80@{address}",
        f"{address}\\.public.example",
        f"{address}\t.public.example",
    ]


class TestAddresses:
    @given(addresses_in(PRIVATE_V4), st.sampled_from(["http", "HTTPS"]), st.sampled_from(["", ":80", "/x", "?q", "#f"]))
    def test_case_b8_no_private_ipv4_address_gets_through_in_any_spelling(self, address, scheme, rest):
        assert not is_public(address)
        for written in spellings(address):
            assert not gets_through(f"{scheme}://{written}{rest}"), written

    @given(addresses_in(PRIVATE_V6))
    def test_case_b8_no_private_ipv6_address_gets_through(self, address):
        assert not is_public(address)
        assert not gets_through(f"http://[{address}]/")
        assert not gets_through(f"http://[{address.exploded}]:80/")

    @given(st.ip_addresses(v=4))
    def test_an_ipv4_address_is_public_no_more_often_than_the_registries_say(self, address):
        assert not is_public(address) or (address.is_global and not address.is_multicast)

    @given(st.ip_addresses(v=6))
    def test_an_ipv6_address_is_public_no_more_often_than_the_registries_say(self, address):
        assert not is_public(address) or (address.is_global and not address.is_multicast)

    @pytest.mark.parametrize("text", ["1.1.1.1", "8.8.8.8", "93.184.215.14", "172.15.0.1", "172.32.0.1", "100.63.0.1"])
    def test_public_ipv4_addresses_are(self, text):
        assert is_public(IPv4Address(text))
        assert host_of(f"https://{text}/x.png", part=PART).address == IPv4Address(text)

    @pytest.mark.parametrize("text", ["2606:4700:4700::1111", "2a00:1450::200e", "::ffff:8.8.8.8", "2000::"])
    def test_public_ipv6_addresses_are(self, text):
        assert is_public(IPv6Address(text))
        assert host_of(f"https://[{text}]:8443/x.png", part=PART).address == IPv6Address(text)

    @pytest.mark.parametrize(
        "text", ["169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254"]
    )
    def test_where_clouds_keep_their_metadata_is_not_public(self, text):
        with pytest.raises(BadRequest):
            check_addresses("metadata.example", [text], part=PART)

    def test_the_edges_of_each_block(self):
        for text in PRIVATE_V4[1:8]:
            block = ip_network(text)
            assert not is_public(block[0])
            assert not is_public(block[-1])


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("https://media.example/a.png", "media.example"),
            ("HTTPS://Media.EXAMPLE:443", "media.example"),
            ("http://media.example./a", "media.example"),
            ("http://a_b.example?x=y@z", "a_b.example"),
            ("http://xn--bcher-kva.example/", "xn--bcher-kva.example"),
            ("http://media.example/a\\b@c", "media.example"),
            ("http://1e100.net", "1e100.net"),
            ("http://host", "host"),
            ("http://media.example:/", "media.example"),
            ("http://media.example:1/", "media.example"),
            ("http://media.example:65535/", "media.example"),
            ("http://" + "a." * 126 + "a", "a." * 126 + "a"),
            ("http://m/" + "x" * (MAX_URL_CHARS - 9), "m"),
        ],
    )
    def test_a_name_comes_back_as_it_will_be_asked_for(self, url, name):
        host = host_of(url, part=PART)
        assert (host.name, host.address) == (name, None)

    @pytest.mark.parametrize(
        "url",
        [
            "http:media.example",
            "http:/media.example",
            "http:///media.example",
            "http://",
            "http://:80",
            "http://.example",
            "http://a..example",
            "http://media.example../",
            "http://user@media.example",
            "http://user:word@media.example",
            "http://media.example:0",
            "http://media.example:65536",
            "http://media.example:80:80",
            "http://media.example:8o",
            "http://media.example:\u0661",
            "http://media\u2024example/",
            "http://b\u00fccher.example/",
            "http://medi%61.example",
            "http://media.example\\@127.0.0.1/",
            "http://127.0.0.1\\@media.example/",
            "http://media.exa\nmple/",
            "http://media.example /",
            " http://media.example/",
            "http://[::1",
            "http://[::1]x",
            "http://[fe80::1%25eth0]/",
            "http://[v1.x]/",
            "http://1.2.3.4.5/",
            "http://256.1.1.1/",
            "http://media.example.0x1/",
            "http://" + "a" * 64 + ".example/",
            "http://" + "a." * 126 + "ab",
            "http://m/" + "x" * (MAX_URL_CHARS - 8),
            "http://media.example:123456",
        ],
    )
    def test_what_two_parsers_may_read_in_two_ways_is_refused(self, url):
        with pytest.raises(BadRequest) as caught:
            host_of(url, part=PART)
        assert caught.value.error_code == MALFORMED
        assert caught.value.message.startswith(f"{PART}: its URL ")
        assert "word" not in caught.value.message

    @pytest.mark.parametrize(
        ("url", "told"),
        [
            ("http://user@media.example", "a user name in front of the host"),
            ("http://b\u00fccher.example/", "a host name that is not ASCII; write it in its xn-- form"),
            ("http://[::1]x", "a malformed IPv6 address"),
            ("http://[fe80::1%25eth0]/", "an IPv6 address with a zone"),
            ("http://[fe80::1%eth0]/", "an IPv6 address with a zone"),
            ("http://m/" + "x" * MAX_URL_CHARS, f"8201 characters, the limit is {MAX_URL_CHARS}"),
        ],
    )
    def test_the_refusal_says_what_is_wrong(self, url, told):
        with pytest.raises(BadRequest) as caught:
            host_of(url, part=PART)
        assert told in caught.value.message

    @given(st.text(max_size=40))
    def test_any_text_behind_the_scheme_is_a_plain_host_or_refused(self, rest):
        try:
            host = host_of(f"http:{rest}", part=PART)
        except BadRequest:
            return
        assert rest[2:].lower().startswith(("[", host.name))
        assert host.address is not None or host.name.isascii()


class TestNames:
    @pytest.mark.parametrize(
        "name", ["localhost", "a.localhost", "metadata.google.internal", "printer.local", "x.home.arpa", "localdomain"]
    )
    def test_names_of_this_machine_or_network_are_known(self, name):
        assert is_local_name(name)

    @pytest.mark.parametrize("name", ["notlocalhost", "local.example", "internal.example", "mylocal"])
    def test_names_that_only_look_like_it_are_not(self, name):
        assert not is_local_name(name)

    @pytest.mark.parametrize(
        ("name", "listed"),
        [
            ("media.example", True),
            ("a.media.example", False),
            ("xmedia.example", False),
            ("below.example", False),
            ("a.below.example", True),
            ("a.b.star.example", True),
            ("10.0.0.1", True),
            ("star.example", False),
        ],
    )
    def test_a_list_has_whole_names_and_what_is_below_a_dot(self, name, listed):
        assert is_listed(name, domains=["Media.example", ".below.example", "*.star.example", "10.0.0.1"]) is listed

    @pytest.mark.parametrize(
        ("text", "good"),
        [
            ("media.example", True),
            ("Media.Example", True),
            (".media.example", True),
            ("*.media.example", True),
            ("10.0.0.1", True),
            ("fd00::1", True),
            ("FD00:0::1", False),
            ("127.1", False),
            ("10.0.0.0/8", False),
            (".0.0.1", False),
            ("*media.example", False),
            ("*", False),
            ("", False),
            ("media.example:80", False),
            ("http://media.example", False),
            ("media.example/", False),
            ("[fd00::1]", False),
        ],
    )
    def test_an_entry_of_the_list_that_no_host_could_equal_is_known(self, text, good):
        assert is_domain(text) is good

    @pytest.mark.parametrize("addresses", [["8.8.8.8"], ["8.8.8.8", "2606:4700:4700::1111"]])
    def test_a_name_with_public_addresses_only_is_fine(self, addresses):
        check_addresses("media.example", addresses, part=PART)

    @pytest.mark.parametrize(
        "addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["8.8.8.8", "::1"], ["fe80::1%eth0"], ["nonsense"]]
    )
    def test_case_b8_one_private_address_among_those_of_a_name_is_enough(self, addresses):
        with pytest.raises(BadRequest) as caught:
            check_addresses("media.example", addresses, part=PART)
        assert caught.value.error_code == REFUSED
        assert "the host media.example is not a public one" in caught.value.message
        assert "10.0.0.1" not in caught.value.message

    def test_a_name_without_addresses_is_refused(self):
        with pytest.raises(BadRequest) as caught:
            check_addresses("media.example", [], part=PART)
        assert caught.value.error_code == "media_fetch_failed"
