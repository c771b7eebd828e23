"""Which host this is, and which of its addresses and devices a network address means."""

from __future__ import annotations

import functools
import ipaddress
import os
from pathlib import Path

import psutil

from trtpd.errors import TransferError
from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.pool_file import SHM_DIR

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """Equal for two processes that see one /dev/shm: this boot of this kernel, and which file system is there."""
    stat = os.stat(SHM_DIR)
    return f"{_BOOT_ID.read_text().strip()}:{stat.st_dev}:{stat.st_ino}"


def is_loopback(address: str) -> bool:
    """False for what is not an IP address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def network_of(listen: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network that `transfer.listen` names, that of one address included. Raises TransferError."""
    try:
        return ipaddress.ip_network(listen, strict=False)
    except ValueError as error:
        raise TransferError(f"transfer.listen {listen!r} is neither an IP address nor a network: {error}") from error


def own_address(listen: str) -> str:
    """The address of this host that `listen` means: an IP address it has, or a network (10.0.0.0/8) it has an
    address in. Raises TransferError, naming the addresses there are."""
    network = network_of(listen)
    addresses = {address for address, _ in _addresses()}
    for address in sorted(addresses):
        if ipaddress.ip_address(address) in network:
            return address
    if network.num_addresses == 1 and network.is_loopback:
        return str(network.network_address)
    raise TransferError(
        f"transfer.listen {listen!r}: this host has no such address (it has {', '.join(sorted(addresses))})"
    )


def data_address(settings: TransferSettings) -> str:
    """Where ports of the data plane are opened. Raises TransferError where strangers could reach them."""
    host = own_address(settings.listen)
    if not is_loopback(host) and not settings.secret:
        raise TransferError(
            f"transfer.listen {settings.listen!r} is not loopback and there are no keys: anyone could read KV there;"
            " give a folder made by `trtpd keys` (--keys DIR), or use 127.0.0.1"
        )
    return host


def device_of(address: str) -> str:
    """The network device that has an address. Raises TransferError."""
    for own, device in _addresses():
        if own == address or (is_loopback(address) and is_loopback(own)):
            return device
    raise TransferError(f"no network device of this host has the address {address}")


def _addresses() -> list[tuple[str, str]]:
    """(address, device) of this host, without the link-local ones of IPv6."""
    return [
        (entry.address, device)
        for device, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family.name in ("AF_INET", "AF_INET6") and "%" not in entry.address
    ]
