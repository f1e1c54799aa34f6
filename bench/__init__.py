"""Benchmarks: numbers with their environment, peers beside ours in one run. Never imported by kgen."""
