"""The cores, the memory and the loopback addresses of this machine or container."""

import contextlib
import ipaddress
import os
from pathlib import Path

MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of cgroups v2 and v1


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_loopback(host: str) -> bool:
    """Whether a name or an address, of IPv6 also in brackets, can only mean this machine."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_memory() -> int:
    """Bytes of memory that this machine has, or this container may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file; "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


def memory_for_work() -> int:
    """Bytes that all CPU workers together may use: freed memory is not returned immediately, and Ray kills workers when
    95 % of the machine's memory is in use."""
    return host_memory() * 2 // 3


def free_memory() -> int:
    """Bytes that a process may still take: what Linux calls available; elsewhere half of all."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(1024 * int(line.split()[1]), host_memory())
    return host_memory() // 2
