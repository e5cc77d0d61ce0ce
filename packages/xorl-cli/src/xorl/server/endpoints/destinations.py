"""The addresses that inference servers may have, and a transport for httpx that connects only to these.

Clients name the servers, and the orchestrator connects to them from inside the operator's network.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpx

# Loopback and private networks, and the shared address space (RFC 6598), which clouds use for pods.
PRIVATE = (
    "127.0.0.0/8",
    "::1/128",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "fc00::/7",
)
# Link-local and other addresses at which clouds serve their machines' credentials: AWS, Google, Oracle, Alibaba, Azure.
_NEVER = tuple(
    map(
        ip_network,
        (
            "169.254.0.0/16",
            "fe80::/10",
            "fd00:ec2::254/128",
            "fd20:ce::254/128",
            "192.0.0.192/32",
            "100.100.100.200/32",
            "168.63.129.16/32",
        ),
    )
)


class Destinations:
    """The permitted hosts of inference servers. allowed: host names, addresses and networks; None means PRIVATE.

    trusted: hosts that the operator has configured; they may have any address.
    """

    def __init__(self, allowed: Sequence[str] | None, trusted: Iterable[str] = ()) -> None:
        self._trusted = frozenset(host.lower() for host in trusted)
        self._names: set[str] = set()
        self._networks = []
        for entry in PRIVATE if allowed is None else allowed:
            try:
                self._networks.append(ip_network(entry))
            except ValueError:
                self._names.add(entry.lower())

    def permits(self, host: str, address: str) -> bool:
        """Whether a server that a client has named `host` may have this address."""
        if host.lower() in self._trusted:
            return True
        if _is_never_allowed(address):
            return False
        numeric = _unmapped(address)
        return host.lower() in self._names or any(numeric in network for network in self._networks)


class DestinationTransport(httpx.AsyncBaseTransport):
    """Resolves the host of each request itself, and connects only to permitted addresses.

    A check before the request would not be enough: a host name can resolve to another address afterwards.
    """

    def __init__(self, destinations: Destinations, limits: httpx.Limits) -> None:
        self._destinations = destinations
        # Ignore proxy variables: endpoints are in the service's own network.
        self._inner = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises httpx.ConnectError if the host has no permitted address."""
        host, port = request.url.host, request.url.port or 80
        found = await _addresses(host, port)
        permitted = [address for address in found if self._destinations.permits(host, address)]
        if not permitted:
            raise httpx.ConnectError(_refusal(host, found), request=request)
        for address in permitted[:-1]:
            try:
                return await self._send(request, address)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._send(request, permitted[-1])

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    async def _send(self, request: httpx.Request, address: str) -> httpx.Response:
        # The header Host keeps the name.
        pinned = httpx.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            extensions=request.extensions,
        )
        return await self._inner.handle_async_request(pinned)


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, in the order in which to try them. Raises httpx.ConnectError if there are none."""
    try:
        return [str(ip_address(host))]
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        raise httpx.ConnectError(f"{host} cannot be resolved: {problem}") from problem
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _refusal(host: str, addresses: Sequence[str]) -> str:
    shown = host if host in addresses else f"{host} ({', '.join(addresses)})"
    reason = f"clients may not register inference servers at {shown}"
    if all(map(_is_never_allowed, addresses)):
        return f"{reason}: link-local addresses and those of a cloud's metadata are never allowed"
    return f"{reason}: add it to allowed_inference_hosts in the service's configuration"


def _is_never_allowed(address: str) -> bool:
    numeric = _unmapped(address)
    return any(numeric in network for network in _NEVER)


def _unmapped(address: str) -> IPv4Address | IPv6Address:
    """Parses an address; an IPv4-mapped IPv6 address becomes the IPv4 address."""
    numeric = ip_address(address)
    return numeric.ipv4_mapped or numeric if isinstance(numeric, IPv6Address) else numeric
