"""Training patched models: parameter groups, callbacks, calibration, schedules, losses, distillation, density targets."""

from hf_entmax.training.calibration import Calibration, calibrate_alphas
from hf_entmax.training.callbacks import (
    AlphaLoggingCallback,
    AlphaSchedule,
    AlphaScheduleCallback,
    SmoothedEntmaxLoss,
)
from hf_entmax.training.conversion import ConversionCallback
from hf_entmax.training.density import DensityTarget, LossBudget, attention_density, soft_density
from hf_entmax.training.distillation import (
    attention_distillation,
    attention_pairs,
    logit_distillation,
    record_attention,
    state_distillation,
)
from hf_entmax.training.loss_budget import LossBudgetCallback
from hf_entmax.training.parameters import alpha_parameter_groups
from hf_entmax.training.sparsify import SparsityReport, sparsify

__all__ = [
    "AlphaLoggingCallback",
    "AlphaSchedule",
    "AlphaScheduleCallback",
    "Calibration",
    "ConversionCallback",
    "DensityTarget",
    "LossBudget",
    "LossBudgetCallback",
    "SmoothedEntmaxLoss",
    "SparsityReport",
    "alpha_parameter_groups",
    "attention_density",
    "attention_distillation",
    "attention_pairs",
    "calibrate_alphas",
    "logit_distillation",
    "record_attention",
    "soft_density",
    "sparsify",
    "state_distillation",
]
