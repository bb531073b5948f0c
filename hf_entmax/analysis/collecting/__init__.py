"""Collecting: models run over data, observed, and measured."""
