"""Where a server may listen: for this machine alone, or with keys and encryption."""

import ipaddress

from mint_jax.errors import UserError
from mint_jax.service.keys import Keys


def check_binding(host: str, keys: Keys | None, tls: bool) -> None:
    """Whether a server may listen at a host.

    Args:
        tls: connections are encrypted, by the server or by a proxy before it.

    Raises:
        UserError: other machines could use it without a key, or keys would pass the network in the clear.
    """
    if is_loopback(host):
        return
    if keys is None:
        raise UserError(
            f"the server would listen at {host!r} without keys, for everybody; listen at 127.0.0.1, or make keys with "
            "python -m mint_jax.service.keys add"
        )
    if not tls:
        raise UserError(
            f"keys would be sent to {host!r} in the clear; give the server a certificate, or say that a proxy before it encrypts"
        )


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's alone."""
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
