"""Addresses that a server may listen at, and the host names that it answers to without keys."""

import ipaddress
import re
from collections.abc import Collection, Iterable

from mint_jax.errors import UserError
from mint_jax.service.keys import Keys

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{0,5})?")


def check_binding(host: str, keys: Keys | None, tls: bool) -> None:
    """Raises ``UserError`` if other machines could use a server at this host without a key, or keys
    would pass the network in the clear. ``tls``: it, or a proxy before it, encrypts.
    """
    if _is_loopback(host.strip("[]")):
        return
    if keys is None:
        raise UserError(
            f"the server would listen at {host!r} without keys, for everybody; listen at 127.0.0.1,"
            " or make keys with python -m mint_jax.service.keys add, and set --config.api_keys"
        )
    if not tls:
        raise UserError(
            f"keys would be sent to {host!r} in the clear; set --config.certificate, or"
            " --config.behind_tls=True where a proxy in front of the server encrypts"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _host_of(authority: str) -> str:
    """Returns the host of a Host header, lower case, no port; empty if malformed."""
    found = _AUTHORITY.fullmatch(authority)
    return found[1].strip("[]").lower().removesuffix(".") if found else ""


def is_ours(authority: str, hosts: Collection[str] = ()) -> bool:
    """Returns whether a Host header names loopback or one of ``hosts``."""
    # A page of another site can point its own name at this machine (DNS rebinding) and then read
    # the server's answers. The name in the Host header is still the site's.
    host = _host_of(authority)
    return bool(host) and (_is_loopback(host) or host in hosts)


def check_hosts(names: Iterable[str]) -> frozenset[str]:
    """Returns host names as ``is_ours`` compares them. Raises ``UserError``: not a bare host."""
    hosts = set()
    for name in names:
        # an IPv6 address needs no brackets here
        host = _host_of(name if name.startswith("[") or ":" not in name else f"[{name}]")
        if not host or host != name.strip("[]").lower().removesuffix("."):
            raise UserError(
                f"hosts has {name!r}; expected a host's name or address alone, such as"
                " 'box.example', without scheme or port"
            )
        hosts.add(host)
    return frozenset(hosts)
