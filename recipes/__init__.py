"""Scripts that train, convert and analyse models: run them with ``python recipes/NAME.py`` from the root of the checkout."""
