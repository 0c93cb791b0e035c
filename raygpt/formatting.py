"""Numbers and values as text. Imports nothing of raygpt, so every module may use it."""

import json
import time
from typing import Any


def size(count: float) -> str:
    """Bytes in a readable unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def network_address(host: str, port: int) -> str:
    """As in a URL: localhost:8000, [::1]:8000."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ago(moment: float | None, now: float | None = None) -> str:
    """How long ago a time is: '5 s ago', '3 min ago', '2 h ago', '4 days ago'."""
    if moment is None:
        return "never"
    seconds = max(0.0, (now or time.time()) - moment)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (unit == "min" and seconds >= length):
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def duration(seconds: float) -> str:
    """As a clock shows it: 0:05, 12:05, 1:00:05, 2 days 1:00:05."""
    minutes, rest = divmod(int(seconds), 60)
    days, hours = divmod(minutes // 60, 24)
    clock = f"{hours}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
    return f"{days} {'day' if days == 1 else 'days'} {clock}" if days else clock


def time_span(seconds: float) -> str:
    """A time in the unit that suits it: 12.0 ms, 0.4 s, 12 s, 3.5 min, 2.1 h, 9,349.3 days."""
    if 0 < seconds < 0.05:  # would be 0.0 s
        return short_time(seconds)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def short_time(seconds: float) -> str:
    """A short time in ms, µs or ns: 1,234.5 ms, 12.3 ms, 45.6 µs, 0.3 ns; from 10 s on as `time_span`."""
    if seconds >= 10:
        return time_span(seconds)
    for unit, length in (("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= length or not seconds:
            return f"{seconds / length:,.1f} {unit}"
    return f"{1e9 * seconds:.1f} ns"


def ratio_text(value: float) -> str:
    """20.3, 0.039"""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def number_text(value: float | None, form: str) -> str:
    """A number by a format such as '.4f', or a dash if there is none."""
    return "–" if value is None else format(value, form)


def value_text(value: Any) -> str:
    """As a recipe writes it: null, true, 0.1, text."""
    return value if isinstance(value, str) else json.dumps(value)
