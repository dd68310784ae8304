"""Processes of engines with interpreters of their own, which measure when they are asked."""

import json
import subprocess
from collections.abc import Sequence


class Worker:
    """A process of `command` that prints lines of JSON: first its versions, then the seconds of
    each line of its standard input."""

    def __init__(self, command: Sequence):
        self.process = subprocess.Popen(
            [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions = self.read()

    def read(self):
        """Return the next line of JSON that the process prints; other lines are passed over."""
        while line := self.process.stdout.readline():
            if line[0] in "{0123456789":
                return json.loads(line)
        raise RuntimeError(f"{self.process.args} ended, expected a line of JSON")

    def run(self, line: str = "") -> float:
        """Send `line` to the process and return the seconds that it measured."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.read()
