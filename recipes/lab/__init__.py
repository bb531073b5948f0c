"""What makes the claims of the pages of results: jobs, measurements, studies, verdicts, tables and figures.

``python -m recipes.lab --help``, from the root of the checkout. Nothing outside imports this package.
"""
