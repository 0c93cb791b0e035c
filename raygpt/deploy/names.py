"""What Kubernetes, slurm and registries accept as names, labels, images, quantities and times."""

import re
from decimal import Decimal
from math import ceil

from raygpt.errors import RaygptError

NAME_LENGTH = 47  # of a RayJob: KubeRay adds six characters for the RayCluster, and those names have 53 at most
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # of RFC 1123, as a namespace's name
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"  # as the names of most objects
LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"  # of a node's label: its value, or its key after the prefix
QUANTITY = r"([1-9]\d*(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?"  # of Kubernetes in bytes, as far as a person writes them
UNITS = {unit: Decimal(10**power) for unit, power in zip("kMGT", (3, 6, 9, 12), strict=True)}
UNITS |= {f"{unit}i": Decimal(2**power) for unit, power in zip("KMGT", (10, 20, 30, 40), strict=True)}
MIN_MEBIBYTES = 1024  # no pod or volume of a run has less
TIME = r"((?P<days>\d+)-)?(?P<rest>\d+(:\d+){0,2})"  # of slurm, as --time of sbatch

# An image by the grammar of https://github.com/distribution/reference: HOST:PORT/PATH:TAG@DIGEST.
HOST = r"([A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*|\[[0-9a-fA-F:]+\])(:\d+)?"
PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
REPOSITORY = rf"({HOST}/)?{PART}(/{PART})*"
IMAGE = rf"(?P<repository>{REPOSITORY})(:[A-Za-z0-9_][\w.-]{{0,127}})?(@[A-Za-z][A-Za-z0-9+._-]*:[0-9a-fA-F]{{32,}})?"


def check_namespace(option: str, value: str) -> None:
    """Refuse what cannot be a namespace's name."""
    if len(value) > 63 or not re.fullmatch(LABEL, value):
        raise RaygptError(
            f"{option}: {value!r} is no namespace of Kubernetes, which are 1 to 63 of a-z 0-9 - and begin and end with "
            "a letter or digit"
        )


def check_name(option: str, value: str) -> None:
    """Refuse what cannot be the name of a claim, a Secret or a service account."""
    if len(value) > 253 or not re.fullmatch(SUBDOMAIN, value):
        raise RaygptError(
            f"{option}: {value!r} is no name of Kubernetes, which are 1 to 253 of a-z 0-9 - . and begin and end with a "
            "letter or digit, as does each part between dots"
        )


def check_node_label(option: str, key: str, value: str) -> None:
    """Refuse a key or a value that no node's label can have."""
    prefix, slash, name = key.rpartition("/")
    if (slash and (len(prefix) > 253 or not re.fullmatch(SUBDOMAIN, prefix))) or not _is_label_name(name):
        raise RaygptError(
            f"{option}: {key!r} is no key of a label, which are up to 63 letters, digits - _ . after a domain and / if "
            "they have one; write e.g. example.com/pool=h100"
        )
    if value and not _is_label_name(value):
        raise RaygptError(
            f"{option}: {value!r} is no value of a label, which are up to 63 letters, digits - _ . and begin and end "
            "with a letter or digit"
        )


def _is_label_name(text: str) -> bool:
    return len(text) <= 63 and bool(re.fullmatch(LABEL_NAME, text))


def check_image(option: str, value: str) -> None:
    """Refuse what no registry can have."""
    found = re.fullmatch(IMAGE, value, re.ASCII)
    if not found or len(found["repository"]) > 255:
        raise RaygptError(
            f"{option}: {value!r} is no name of an image; write REGISTRY/NAME:TAG in lower case, e.g. "
            f"{option} ghcr.io/me/raygpt:1"
        )


def check_quantity(option: str, value: str) -> None:
    """Refuse what is no amount of memory or space, and less than 1Gi: 64 or 64m was meant to be 64Gi."""
    if not re.fullmatch(QUANTITY, value):
        raise RaygptError(f"{option}: {value!r} is no amount of memory or space; write e.g. {option} 64Gi")
    if mebibytes(value) < MIN_MEBIBYTES:
        raise RaygptError(f"{option}: {value} is less than 1Gi; write e.g. {option} 64Gi")


def mebibytes(quantity: str) -> int:
    """A quantity of Kubernetes, rounded up.

    >>> mebibytes("64Gi"), mebibytes("1.5G"), mebibytes("1")
    (65536, 1431, 1)
    """
    found = re.fullmatch(QUANTITY, quantity)
    assert found, quantity
    return ceil(Decimal(found[1]) * UNITS.get(found[2], Decimal(1)) / 2**20)


def seconds(option: str, time: str) -> int:
    """A time of slurm: minutes, minutes:seconds, hours:minutes:seconds, or days- and hours, minutes, seconds.

    >>> [seconds("--time", time) for time in ("90", "1:30", "24:00:00", "1-12", "1-0:30")]
    [5400, 90, 86400, 129600, 88200]
    """
    found = re.fullmatch(TIME, time)
    if not found:
        raise RaygptError(f"{option}: {time!r} is no time of slurm; write e.g. {option} 24:00:00")
    parts = [int(part) for part in found["rest"].split(":")]
    units = (3600, 60, 1) if found["days"] or len(parts) == 3 else (60, 1)
    return int(found["days"] or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
