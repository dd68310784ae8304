"""Rows that join and leave a running batch, in workers."""
