"""The loss as the constraint, density as the objective: a callback for the Trainer."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_entmax.training.callbacks import _inner
from hf_entmax.training.conversion import ConversionCallback
from hf_entmax.training.density import LossBudget
from hf_entmax.training.parameters import trained_alphas


class LossBudgetCallback(ConversionCallback):
    r"""Makes attention as sparse as a budget on the loss allows while the Trainer trains.

        min  mean_h D_h      subject to      loss - reference <= budget          (nats per token)

    The model's loss becomes ``loss + lam mean_h max(D_tau_h, floor)`` with the stand-in `soft_density` and the multiplier of
    `LossBudget`, moved after every optimiser step: it grows while the loss is within the budget and falls by factors when it
    is overshot. What is trained is up to the parameters that take gradients: weights and alphas, alphas alone (freeze the
    others), or adapters and alphas (PEFT with ``modules_to_save=["entmax_norm"]``).

    With each report of the training loss come ``loss_budget/rise`` (moving average of loss - reference),
    ``loss_budget/multiplier``, ``loss_budget/task`` (the loss without the pressure) and ``loss_budget/density`` (share of
    nonzero weights in the last step). Training goes on from a checkpoint with the multiplier that it had.

    Args:
        budget: how far the loss may rise, nats per token, at least 0.
        reference: ``"softmax"`` compares each batch with the original, the same model with softmax attention and the weights
            that it has when the Trainer is made: a frozen copy where weights are trained, the model itself where only alphas
            or adapters are. It costs one more forward pass per batch. Any ``PreTrainedModel`` may serve instead, or a fixed
            loss.
        tau: attention weight that counts half in `soft_density`.
        floor: density below which a head is not pushed any further, in [0, 1).
        rate: largest change of ``log lam`` in a step.
        start: the first ``lam``; None takes the budget.
        memory: share of the moving average that a step keeps, in [0, 1).

    Raises:
        ValueError: if an argument is out of range; when training starts, if the model is not patched, none of its alphas
            is trained, gradients are checkpointed, or the original is gone because the callback was not given to the
            Trainer's constructor; in a step whose batch has no labels, or a Trainer that computes the loss itself.
    """

    prefix = "loss_budget"

    def __init__(
        self,
        budget: float,
        reference: str | float | PreTrainedModel = "softmax",
        *,
        tau: float = 0.01,
        floor: float = 0.0,
        rate: float = 0.05,
        start: float | None = None,
        memory: float = 0.9,
    ) -> None:
        super().__init__(LossBudget(budget, rate, start=start, memory=memory), reference, tau=tau, floor=floor)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that alphas learn, and begin as any conversion."""
        if not trained_alphas(_inner(kwargs["model"])):
            raise ValueError(
                "LossBudgetCallback moves density by learned alphas, and none is trained here: patch with alpha='learned', let "
                "them take gradients, and inside PEFT name them in modules_to_save=['entmax_norm']."
            )
        super().on_train_begin(args, state, control, **kwargs)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        constraint: Any = self.constraint
        reference = self.reference if isinstance(self.reference, (str, float, int)) else "softmax"
        args = {"budget": constraint.budget, "reference": reference, "tau": self.tau, "floor": self.floor}
        args |= {"rate": constraint.rate, "memory": constraint.memory}
        return {**super().state(), "args": args}
