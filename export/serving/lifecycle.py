"""The stages of a server, which decide whether it accepts requests."""

from dataclasses import dataclass


@dataclass
class Lifecycle:
    """The stages of a server.

    `loading` ends when all models are loaded and those that generate have run once. `leaving`
    begins with the first signal: load balancers see it and stop sending requests. While `draining`,
    the server finishes the running requests and rejects new ones.
    """

    loading: bool = False
    leaving: bool = False
    draining: bool = False

    @property
    def status(self) -> str:
        return "shutting down" if self.leaving else "loading" if self.loading else "ok"
