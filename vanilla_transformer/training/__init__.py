"""Tokenizer and training."""
