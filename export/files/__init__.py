"""Predictions for lines of standard input and of files of any length. An output appears complete or
not at all, so a killed run resumes."""
