"""What makes the claims of the pages of results: jobs, measurements, studies, verdicts, tables and figures.

``python -m recipes.lab --help``, from the root of the checkout. Nothing outside imports this package.
"""

import sys
from pathlib import Path

# Recipes are scripts and find what they share beside them.
sys.path.insert(0, str(Path(__file__).parents[1]))
