"""Patched models in the continuous-batching engine of Transformers: `generate_batch`, its manager and its server."""
