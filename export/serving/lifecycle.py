"""The stages of a server, which decide whether it accepts requests."""

from dataclasses import dataclass


@dataclass
class Lifecycle:
    """The stages of a server.

    `loading` ends when all models are loaded and those that generate have run once. `leaving`
    begins with the first signal: load balancers see it and stop sending requests. While `draining`,
    the server finishes the running requests and rejects new ones. `silent` is True while the
    process of the workers does not answer.
    """

    loading: bool = False
    leaving: bool = False
    draining: bool = False
    silent: bool = False

    @property
    def status(self) -> str:
        stages = {
            "shutting down": self.leaving,
            "loading": self.loading,
            "workers do not answer": self.silent,
        }
        return next((name for name, is_now in stages.items() if is_now), "ok")
