"""What the recipes measured: the jobs that measure it, and the pages, verdicts and figures made from their rows.

``python -m recipes.evidence --help``, from the root of the checkout.
"""
