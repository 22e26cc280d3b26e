"""Formats: one file each, and the writer that all of them end in."""
