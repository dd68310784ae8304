"""The stages of a server's life, which decide whether it takes requests."""

from dataclasses import dataclass


@dataclass
class Lifecycle:
    """The stages of a server. `loading` ends when the models have answered once. `leaving` begins
    with the first signal, so that balancers send requests elsewhere. `draining` means that only
    accepted requests are answered."""

    loading: bool = False
    leaving: bool = False
    draining: bool = False

    @property
    def status(self) -> str:
        return "shutting down" if self.leaving else "loading" if self.loading else "ok"
