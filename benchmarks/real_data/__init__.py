"""The comparison on real data that `benchmarks/uncertainty.py` runs: data, settings, methods, tables."""
