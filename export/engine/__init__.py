"""Batching of requests: a queue, and workers that each run a batch."""
