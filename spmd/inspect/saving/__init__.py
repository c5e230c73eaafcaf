"""Saving plans to files, and restoring them."""
