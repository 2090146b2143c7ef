"""Text of values for people: durations, latencies, ages, sizes, counts, and text from other machines.

A value that would be rounded up to the next unit is shown in that unit.
"""


def duration_text(seconds: float) -> str:
    """Return a duration: 12 ms, 3.4 s, 2 min 05 s, 3 h 10 min."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def latency_text(seconds: float) -> str:
    """Return a latency: 31.2 µs, 4.56 ms, 1.23 s."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def age_text(seconds: float) -> str:
    """Return an age in its largest unit: 5 s, 12 min, 3 h, 31 days."""
    seconds = max(seconds, 0.0)
    days = int(seconds // 86400)
    if days:
        return count_text(days, "day")
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def size_text(size: float) -> str:
    """Return a size in bytes: 1.2 GB, 12.3 MB, 4.5 kB, 678 B."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale * 0.99995:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 stage, 2 stages, 0 entries."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error, or its type: TVM puts its stack trace before the message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def printable(text: str) -> str:
    """Return text from another machine or a shared store without its control characters."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def excerpt(text: str, limit: int = 120) -> str:
    """Return text from a file on one line and of limited length, as a message can show it."""
    short = text if len(text) <= limit else f"{text[:limit]}…"
    return short if short.isprintable() else repr(short)


def quoted(text: str) -> str:
    """Return an excerpt of the text in quotes."""
    short = excerpt(text)
    return short if short[-1:] == "'" else f"'{short}'"
