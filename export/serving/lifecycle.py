"""Whether the server takes requests."""

from dataclasses import dataclass


@dataclass
class Lifecycle:
    """`loading` until the models have answered once; `leaving` from the first signal on, when
    balancers are to look elsewhere; `draining` when only what was accepted is answered still."""

    loading: bool = False
    leaving: bool = False
    draining: bool = False

    @property
    def status(self) -> str:
        return "shutting down" if self.leaving else "loading" if self.loading else "ok"
