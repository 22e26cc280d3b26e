"""Benchmarks for a user's own machine: each figure beside the limit measured in the same run."""
