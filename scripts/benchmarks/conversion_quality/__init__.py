"""Parts of scripts/benchmarks/bench_conversion.py: students, texts, what is measured of them, the card."""
