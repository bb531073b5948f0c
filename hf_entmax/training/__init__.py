"""Training patched models: parameter groups, callbacks, schedules, losses for the Trainer."""

from hf_entmax.training.callbacks import AlphaLoggingCallback, AlphaScheduleCallback
from hf_entmax.training.losses import SmoothedEntmaxLoss
from hf_entmax.training.parameters import alpha_parameter_groups

__all__ = ["AlphaLoggingCallback", "AlphaScheduleCallback", "SmoothedEntmaxLoss", "alpha_parameter_groups"]
