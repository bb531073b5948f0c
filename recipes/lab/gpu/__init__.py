"""Everything there is to learn on one GPU, in one command: see `recipes.lab.gpu.__main__`."""
