"""Numbers as people read them."""

import math


def short(value: float) -> str:
    """Three significant digits and a suffix: 982, 41.2k, 1.23M, 4.56G, 7.89T."""
    suffixes = ["k", "M", "G", "T"]
    suffix = ""
    while value >= 999.5 and suffixes:
        value, suffix = value / 1000, suffixes.pop(0)
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}{suffix}" if suffix else f"{value:.0f}"


def fixed(value: float, width: int) -> str:
    """As many decimals, at most width - 2, as the width has room for; right-aligned."""
    if not math.isfinite(value):
        return f"{value}".rjust(width)
    for decimals in range(width - 2, -1, -1):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text.rjust(width)
    return f"{value:.0e}"


def clock(seconds: float) -> str:
    """Minutes and seconds, 3:07; with hours, 2:03:07; from a hundred hours on days and hours, 11d13h."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d{hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
