"""Over which address and interface this node reaches the others."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Route:
    """This node's end of the way to the first node."""

    address: str
    interface: str
    """Empty where no interface has the address."""

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback

    def __str__(self) -> str:
        """ "10.0.0.7 (eth0)"."""
        return f"{self.address} ({self.interface or 'no interface'})"


def route_to(host: str) -> Route | None:
    """By which address and interface packets to a host leave; nothing is sent. None where there is no way, or its name
    is not known."""
    try:
        family, kind, *_, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address = probe.getsockname()[0]
    except OSError:
        return None
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return Route(address, interface)
    return Route(address, "")


def prefer(route: Route | None) -> None:
    """Let gloo listen where the other nodes can reach this one, unless the user has chosen.

    gloo takes the address that this host's own name has. On Debian's kin that is 127.0.1.1 where nobody changed
    /etc/hosts, and no other node comes in there. NCCL looks for interfaces itself, and is left alone.
    """
    if route is not None and route.interface and not route.is_loopback:
        os.environ.setdefault(GLOO_INTERFACE, route.interface)
