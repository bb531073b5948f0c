"""Longer than trained on: see `recipes.lab.length.__main__`."""
