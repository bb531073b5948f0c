"""What did each head learn? Statistics, roles, figures and a report for any Transformers model."""

from hf_entmax.analysis import circuits, metrics, plots
from hf_entmax.analysis.collecting.collect import AnalysisError, AnalysisInterrupted, collect
from hf_entmax.analysis.metrics import *  # noqa: F403 - the names of the metrics stand there alone
from hf_entmax.analysis.metrics.registry import RoleInputs, measure, register_role, register_statistic
from hf_entmax.analysis.one_head import HeadView, ablated, head
from hf_entmax.analysis.report import write_report
from hf_entmax.analysis.statistics.result import AttentionStatistics

__all__ = [
    "AnalysisError",
    "AnalysisInterrupted",
    "AttentionStatistics",
    "HeadView",
    "RoleInputs",
    "ablated",
    "circuits",
    "collect",
    "head",
    "measure",
    "plots",
    "register_role",
    "register_statistic",
    "write_report",
]
__all__ += metrics.__all__
