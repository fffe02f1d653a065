"""The memory of this process, as Linux counts it."""

from pathlib import Path


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS (resident), RssAnon (without files), VmHWM (the peak)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def reset_peak() -> None:
    """Let VmHWM begin again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
