"""Certification: whether an export computes on this machine what it should, without torch."""
