"""Whole batches, for exports whose rows cannot join and leave: requests of like length run
together, and the next batch begins when the last row of the one before has ended."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..inference.decoder import Decoder, GenerationRequest
from ..inference.inputs import MAX_PADDING, move_padding, pad_sequences
from ..model import OnnxModel
from .runs import Run


class WholeBatch:
    """The `Batch` of any export that generates, of so many `rows`."""

    def __init__(self, model: OnnxModel, rows: int):
        self.model = model
        self.capacity = rows
        self.running: list[Run] = []
        self.unread: tuple[Run, ...] = ()
        self.rows: list[Run] = []  # of the batch, those that have ended too
        self.decoder: Decoder | None = None
        self.logits: np.ndarray | None = None  # after the prompts, until the first step
        # the row that each continues in the next step, `None` if each its own
        self.parents: np.ndarray | None = None

    @property
    def room(self) -> int:
        """As `Batch`."""
        return 0 if self.running else self.capacity

    def takes(self, run: Run, beside: Sequence[Run]) -> bool:
        """As `Batch`: only what is like the others, and nothing while a batch runs."""
        if self.running:
            return False
        runs = [*beside, run]
        if sum(other.job.rows for other in runs) > self.capacity:
            return False
        first = runs[0]
        if run.job.rows != first.job.rows or (
            run.job.source is not None and len(run.first_tokens) != len(first.first_tokens)
        ):
            return False
        lengths = [len(other.job.source or other.first_tokens) for other in runs]
        return sum(lengths) >= (1 - MAX_PADDING) * len(lengths) * max(lengths)

    def join(self, runs: list[Run]) -> None:
        """As `Batch`."""
        if not runs:
            return
        longest = max(run.job.options.max_new_tokens + len(run.forced) for run in runs)
        options = dataclasses.replace(runs[0].job.options, max_new_tokens=longest)
        fill = options.fill_token_id
        ids, mask = move_padding(
            *pad_sequences([list(run.first_tokens) for run in runs], fill), "left", fill
        )
        sources = [list(run.job.source) for run in runs if run.job.source is not None]
        source = pad_sequences(sources, fill) if sources else None
        self.decoder = self.model.decoders.start(GenerationRequest(options, ids, mask, source))
        self.logits = self.decoder.prefill(ids, mask)[:, -1]
        self.running = list(runs)
        self.rows = list(runs)
        self.parents = None
        for slot, run in enumerate(runs):
            run.slots = [slot]
            run.is_expanded = run.job.rows == 1

    def step(self) -> None:
        """As `Batch`."""
        if self.decoder is None:
            return
        if self.logits is not None:
            self.begin(self.decoder, self.logits)
            self.logits = None
            return
        tokens = np.array([[run.job.options.fill_token_id] for run in self.rows])
        for run in self.running:
            tokens[run.slots, 0] = run.next_tokens
        logits = self.decoder.step(tokens, self.parents)[:, -1]
        self.parents = None
        self.advance(logits)

    def begin(self, decoder: Decoder, logits: np.ndarray) -> None:
        """The first tokens, of one row of each run; then every row becomes those of its beams or
        samples."""
        self.advance(logits)
        if (copies := self.running[0].job.rows) == 1:
            return
        decoder.expand(copies)
        self.rows = [other for run in self.rows for other in (run, *run.others())]
        self.running = list(dict.fromkeys(self.rows))
        for run in self.running:
            run.slots = [slot for slot, other in enumerate(self.rows) if other is run]
            run.is_expanded = True

    def advance(self, logits: np.ndarray) -> None:
        for run in list(self.running):
            if run.is_greedy:
                run.take(int(logits[run.slots[0]].argmax()))
                continue
            reads = not run.has_begun  # until then its rows are copies of one
            parents = run.advance(logits[run.slots[:1] if reads else run.slots])
            if reads and run.samples and run.is_expanded:
                self.share_rows(run)
            elif parents is not None and run.is_expanded:
                if self.parents is None:
                    self.parents = np.arange(len(self.rows))
                self.parents[run.slots] = np.array(run.slots)[parents]

    def share_rows(self, run: Run) -> None:
        """Of a run whose prompt was scored: its copies become those of its samples."""
        first, *others = run.slots
        run.slots = [first]
        for sample, slot in zip(run.samples, others, strict=True):
            sample.slots = [slot]
            self.rows[slot] = sample
        self.running.extend(run.samples)

    def leave(self, run: Run) -> None:
        """As `Batch`. Its rows go on, unread, until the last run has left."""
        self.running.remove(run)
        if not self.running and self.decoder is not None:
            self.decoder.close()
            self.decoder = None
            self.rows = []
