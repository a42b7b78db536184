"""The benchmarks run and print every row. No test checks a time."""
