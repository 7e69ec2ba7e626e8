"""Retrieval at length: the modules of bench_long_retrieval.py."""
