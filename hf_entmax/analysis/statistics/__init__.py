"""Summing up: exact sums of every site, and the numbers derived from them."""

from hf_entmax.analysis.statistics.result import AttentionStatistics
from hf_entmax.analysis.statistics.site import SiteStatistics

__all__ = ["AttentionStatistics", "SiteStatistics"]
