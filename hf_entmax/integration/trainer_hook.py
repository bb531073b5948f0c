"""What the Trainer must know of patched models: one combination it must refuse, one moment callbacks need."""

from __future__ import annotations

import functools
from typing import Any

from hf_entmax.integration.config_hook import CONFIG_KEY, require


def install() -> None:
    """Hook ``Trainer.__init__`` and ``CallbackHandler.on_log``.

    Raises:
        ImportError: if this version of Transformers has them with other parameters.
    """
    from transformers.trainer import Trainer
    from transformers.trainer_callback import CallbackHandler

    if getattr(Trainer, "_hf_entmax_hooked", False):
        return
    require(Trainer, "__init__", ["self", "model", "args"])
    require(CallbackHandler, "on_log", ["self", "args", "state", "control", "logs"])
    original_init, original_on_log = Trainer.__init__, CallbackHandler.on_log

    @functools.wraps(original_init)
    def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        _refuse_label_smoothing(self)

    @functools.wraps(original_on_log)
    def on_log(self: CallbackHandler, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
        # Trainer puts its reporters before the callbacks of the user: what these add to the logs would come too late.
        for callback in self.callbacks:
            before_report = getattr(callback, "before_report", None)
            if before_report is not None:
                before_report(args, state, logs, model=self.model)
        return original_on_log(self, args, state, control, logs)

    Trainer.__init__ = init
    CallbackHandler.on_log = on_log
    Trainer._hf_entmax_hooked = True  # type: ignore[attr-defined]


def _refuse_label_smoothing(trainer: Any) -> None:
    factor = getattr(trainer.args, "label_smoothing_factor", 0.0)
    entmax = getattr(getattr(trainer.model, "config", None), CONFIG_KEY, None)
    if not factor or entmax is None:
        return
    chosen = {name: entmax.get(name) for name in ("output_alpha", "output_mapping") if entmax.get(name) is not None}
    if not chosen:
        return
    name, value = next(iter(chosen.items()))
    raise ValueError(
        f"TrainingArguments(label_smoothing_factor={factor}) makes the Trainer compute a smoothed cross-entropy and "
        f"would silently replace the loss of {name}={value!r}. Set it to 0. For label smoothing in Fenchel-Young form "
        "give the Trainer compute_loss_func=hf_entmax.training.SmoothedEntmaxLoss(alpha, label_smoothing)."
    )
