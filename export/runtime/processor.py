"""The processor that this runs on, and whether it is the one that an export was made for."""

import os
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """`name` in words, and its `instructions` by their names in Linux; none where the system does not say."""

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

    def lacks(self, needs: list[str]) -> list[str]:
        """Those of `needs`, each "a" or "a or b", that it does not have."""
        return [need for need in needs if self.instructions.isdisjoint(need.split(" or "))]


def check_processor(path: str | os.PathLike, needs: list[str], tuned_on: str | None) -> None:
    """Checks that what `path` holds gives the right numbers here. Another processor than `tuned_on` gets a UserWarning.

    Raises:
        OSError: naming the instructions and this processor, if that lacks some of `needs`.
    """
    if not needs and tuned_on is None:
        return
    here = Processor.here()
    if missing := here.lacks(needs):
        found = f"{path} needs a processor with {', '.join(missing)}, and this one is {here.name}, without"
        raise OSError(f"{found}: its numbers would be wrong and nothing runs; export again, tuned on this machine or not tuned")
    if tuned_on not in (None, here.name):
        instead = "it runs as it is, and another export may be faster: tune on this machine"
        warnings.warn(f"{path} was tuned on {tuned_on}, this processor is {here.name}: {instead}", UserWarning, stacklevel=3)
