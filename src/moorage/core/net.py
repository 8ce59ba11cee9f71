"""Addresses: ports, bind hosts, and what to advertise for them."""

from __future__ import annotations

import os
import socket

WILDCARDS = frozenset({"", "*", "0.0.0.0", "::"})


def find_free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free on `host` a moment ago. Prefer binding to port 0 where possible."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        return probe.getsockname()[1]


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could bind `host:port` now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def advertised_host(bind_host: str) -> str:
    """The host that others should use to reach a server bound to `bind_host`.

    A wildcard is never advertised: it becomes the address of the interface that the default route uses,
    or loopback on a machine without one.
    """
    if bind_host not in WILDCARDS:
        return bind_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: chooses a route, sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def node_name() -> str:
    """The short name of this machine, as used in address and log file names."""
    return os.environ.get("MOORAGE_NODE") or socket.gethostname().split(".")[0] or "node"


def format_url(host: str, port: int, scheme: str = "http") -> str:
    """`scheme://host:port`, with IPv6 hosts in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
