"""The name and the instructions of this machine's CPU."""

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class CpuInfo:
    """A CPU: its `name`, and the Linux names of its `instructions`, empty if they are unknown."""

    name: str
    instructions: frozenset[str] = frozenset()

    @classmethod
    def detect(cls) -> "CpuInfo":
        """Return the CPU of this machine."""
        try:
            first = CPUINFO.read_text().split("\n\n")[0]
        except OSError:
            return cls(platform.processor() or platform.machine())
        pairs = (line.partition(":") for line in first.splitlines())
        facts = {name.strip(): value.strip() for name, _, value in pairs}
        kind = [f"{name} {facts[name]}" for name in ("cpu family", "model") if name in facts]
        name = ", ".join([facts.get("model name") or platform.machine(), *kind])
        return cls(name, frozenset(facts.get("flags", "").split()))
