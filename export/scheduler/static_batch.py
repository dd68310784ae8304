"""Static batching, for exports without a step graph. Requests of similar length run together. The
next batch starts when all rows of the current batch are finished."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..inference.decoder import Decoder, GenerationRequest
from ..inference.inputs import MAX_PADDING, move_padding, pad_sequences
from ..model import OnnxModel
from .runs import Run


class WholeBatch:
    """A static `Batch` of at most `rows` rows, for any export that generates."""

    def __init__(self, model: OnnxModel, rows: int):
        self.model = model
        self.capacity = rows
        self.running: list[Run] = []
        self.unread: tuple[Run, ...] = ()
        self.rows: list[Run] = []  # by row of the batch, finished sequences included
        self.decoder: Decoder | None = None
        self.logits: np.ndarray | None = None  # of the prefill, until the first step
        # the row that each row continues in the next step, `None` if its own
        self.parents: np.ndarray | None = None

    @property
    def room(self) -> int:
        """Number of rows that can join: none while a batch runs."""
        return 0 if self.running else self.capacity

    def takes(self, run: Run, beside: Sequence[Run]) -> bool:
        """Return whether no batch runs and `run` has a similar length and as many rows."""
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
        """Start a batch of `runs` and prefill their prompts."""
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
        """Generate one token of every sequence. The first one uses the logits of the prefill."""
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
        """Select the first tokens of each sequence, then repeat its row for its beams or
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
            reads = not run.has_begun  # before the first new token all its rows are equal
            parents = run.advance(logits[run.slots[:1] if reads else run.slots])
            if reads and run.samples and run.is_expanded:
                self.share_rows(run)
            elif parents is not None and run.is_expanded:
                if self.parents is None:
                    self.parents = np.arange(len(self.rows))
                self.parents[run.slots] = np.array(run.slots)[parents]

    def share_rows(self, run: Run) -> None:
        """Assign the copies of a row to the samples, after a prompt that was scored."""
        first, *others = run.slots
        run.slots = [first]
        for sample, slot in zip(run.samples, others, strict=True):
            sample.slots = [slot]
            self.rows[slot] = sample
        self.running.extend(run.samples)

    def leave(self, run: Run) -> None:
        """Remove a sequence. Its rows are computed until the whole batch is finished."""
        self.running.remove(run)
        if not self.running and self.decoder is not None:
            self.decoder.close()
            self.decoder = None
            self.rows = []
