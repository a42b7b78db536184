"""That the benchmarks run and say everything they are to say. How fast anything is, no test asks."""
