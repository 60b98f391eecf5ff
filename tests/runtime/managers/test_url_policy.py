from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.multimodal_gen.runtime.managers.url_policy import (
    UrlPolicy,
    UrlRefused,
    check_url,
    embedded,
    is_public,
    resolve,
)

POLICY = UrlPolicy()


def named(*addresses: str):
    """A look-up that finds these addresses."""
    return lambda host, port: [(0, 0, 0, "", (address, port)) for address in addresses]


@pytest.mark.parametrize(
    ("url", "host", "port", "target", "authority"),
    [
        ("https://example.com", "example.com", 443, "/", "example.com"),
        ("http://EXAMPLE.com:80/a?b=c#d", "example.com", 80, "/a?b=c", "example.com"),
        ("https://bücher.example/x", "xn--bcher-kva.example", 443, "/x", "xn--bcher-kva.example"),
        ("https://example.com./", "example.com", 443, "/", "example.com"),
        ("http://[2606:4700::1]/x", "2606:4700::1", 80, "/x", "[2606:4700::1]"),
        ("http://example.com:443/", "example.com", 443, "/", "example.com:443"),
    ],
)
def test_a_url_in_parts(url, host, port, target, authority):
    checked = check_url(url, POLICY)
    assert (checked.host, checked.port, checked.target) == (host, port, target)
    assert checked.authority == authority


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("file:///etc/passwd", "scheme"),
        ("ftp://example.com/x", "scheme"),
        ("gopher://example.com", "scheme"),
        ("javascript:alert(1)", "scheme"),
        ("data:text/plain,x", "scheme"),
        ("//example.com/x", "scheme"),
        ("/etc/passwd", "scheme"),
        ("", "scheme"),
        ("http:///x", "form"),
        ("http://", "form"),
        ("http://user@example.com/", "user"),
        ("http://user:pw@example.com/", "user"),
        ("http://example.com@127.0.0.1/", "user"),
        ("http://127.0.0.1\\@example.com/", "form"),
        ("http://exa mple.com/", "form"),
        ("http://example.com/\r\nX: y", "form"),
        ("http://example.com/\0", "form"),
        ("http://exam%70le.com/", "form"),
        ("http://[::1/", "form"),
        ("http://[fe80::1%25eth0]/", "form"),
        ("http://" + "a" * 64 + ".com/", "form"),
        ("http://example.com:99999/", "form"),
        ("http://example.com:22/", "port"),
        ("http://example.com:6379/", "port"),
        ("http://example.com/" + "x" * 5000, "length"),
    ],
)
def test_a_url_that_breaks_a_rule(url, rule):
    with pytest.raises(UrlRefused) as caught:
        resolve(check_url(url, POLICY), POLICY, named("8.8.8.8"))
    assert caught.value.rule == rule
    assert not url or len(url) < 4 or url not in str(caught.value)


FORBIDDEN = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1",
    "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.9", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "168.63.129.16", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1",
    "::ffff:169.254.169.254", "::ffff:10.1.1.1", "::ffff:0:10.1.1.1", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a9fe:a9fe::1",
    "2001:0:1:2:3:4:5:6", "2001:db8::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1",
    "ff02::1", "100::1", "3fff::1", "5f00::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "2606:4700:4700::1111", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", FORBIDDEN)
def test_an_address_that_is_not_fetched_from(address):
    assert not POLICY.allows(ipaddress.ip_address(address))
    with pytest.raises(UrlRefused, match="address that is not fetched from") as caught:
        resolve(check_url("http://example.com/", POLICY), POLICY, named(address))
    assert address not in str(caught.value)
    literal = f"http://[{address}]/" if ":" in address else f"http://{address}/"
    with pytest.raises(UrlRefused):
        resolve(check_url(literal, POLICY), POLICY, named(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_that_is(address):
    found = resolve(check_url("http://example.com/", POLICY), POLICY, named(address))
    assert str(found) == address


@pytest.mark.parametrize(
    "host", ["127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0x7f000001", "localhost", "①②⑦.0.0.1"]
)
def test_loopback_under_other_names(host):
    with pytest.raises(UrlRefused) as caught:
        resolve(check_url(f"http://{host}/", POLICY), POLICY, socket.getaddrinfo)
    assert caught.value.rule in ("address", "lookup", "form")


def test_one_forbidden_address_among_others_is_enough():
    url = check_url("http://example.com/", POLICY)
    for found in (("8.8.8.8", "127.0.0.1"), ("127.0.0.1", "8.8.8.8"), ("8.8.8.8", "fe80::1%eth0")):
        with pytest.raises(UrlRefused):
            resolve(url, POLICY, named(*found))
    with pytest.raises(UrlRefused, match="no address"):
        resolve(url, POLICY, named())


def test_what_flags_allow():
    inside = UrlPolicy(networks=("10.1.0.0/16", "fd00:1::/32"), ports=())
    assert inside.allows(ipaddress.ip_address("10.1.2.3"))
    assert inside.allows(ipaddress.ip_address("fd00:1::7"))
    assert not inside.allows(ipaddress.ip_address("10.2.0.1"))
    assert not inside.allows(ipaddress.ip_address("::ffff:10.2.0.1"))
    assert check_url("http://example.com:9000/", inside).port == 9000
    only = UrlPolicy(hosts=("example.com",))
    assert check_url("https://img.example.com/x", only).host == "img.example.com"
    for url in ("https://badexample.com/", "https://example.com.evil.net/"):
        with pytest.raises(UrlRefused) as caught:
            check_url(url, only)
        assert caught.value.rule == "host"
    with pytest.raises(UrlRefused, match="must be https"):
        check_url("http://example.com/", UrlPolicy(schemes=("https",)))


def test_the_connection_goes_to_the_address():
    url = check_url("https://example.com/a?b", POLICY)
    assert url.at(ipaddress.ip_address("8.8.8.8")) == "https://8.8.8.8:443/a?b"
    assert url.at(ipaddress.ip_address("2606:4700::1")) == "https://[2606:4700::1]:443/a?b"


@given(st.ip_addresses(v=4))
def test_an_address_within_another_is_judged_as_itself(address):
    for text in (f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}"):
        outer = ipaddress.ip_address(text)
        assert embedded(outer) == address
        if not is_public(address):
            assert not POLICY.allows(outer)


@given(st.text(max_size=60))
def test_no_text_is_more_than_refused(text):
    for url in (text, "http://" + text, "https://example.com" + text):
        try:
            check_url(url, POLICY)
        except UrlRefused:
            continue
