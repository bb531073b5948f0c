"""Everything that knows Transformers: the attention interface, patching, persistence, the output hooks.

Importing this package loads nothing; ``hf_entmax`` imports its parts when Transformers' own parts are loaded.
"""
