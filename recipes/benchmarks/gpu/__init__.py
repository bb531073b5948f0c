"""Everything there is to learn on one GPU, in one command: see `recipes.benchmarks.gpu.__main__`."""
