"""The CPU of this machine."""

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """A CPU: its `name`, and its `instructions` by their Linux names, if the system lists them."""

    name: str
    instructions: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> "Processor":
        try:
            first = CPUINFO.read_text().split("\n\n")[0]
        except OSError:
            return cls(platform.processor() or platform.machine())
        pairs = (line.partition(":") for line in first.splitlines())
        facts = {name.strip(): value.strip() for name, _, value in pairs}
        kind = [f"{name} {facts[name]}" for name in ("cpu family", "model") if name in facts]
        name = ", ".join([facts.get("model name") or platform.machine(), *kind])
        return cls(name, frozenset(facts.get("flags", "").split()))
