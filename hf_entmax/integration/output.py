"""What a configuration asks of a model's output: its training loss and its probabilities in ``generate()``."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_entmax.config import EntmaxConfig
from hf_entmax.integration.generation_hook import install_generation, remove_generation
from hf_entmax.integration.output_loss import check_output_head, install_output_loss, remove_output_loss


def check_output(model: PreTrainedModel, config: EntmaxConfig) -> None:
    """Raise where an output option cannot be honoured by this model, before anything is changed.

    Raises:
        ValueError: if the model computes no loss from labels, or another loss than the option replaces.
    """
    if config.output_alpha is not None:
        check_output_head(model, alpha=config.output_alpha)
    elif config.output_mapping is not None:
        check_output_head(model, mapping=config.output_mapping)


def install_output(model: PreTrainedModel, config: EntmaxConfig) -> None:
    """Install the loss (and, for ``output_alpha``, the probabilities of ``generate()``) on a head model."""
    if config.output_alpha is not None:
        install_output_loss(model, alpha=config.output_alpha)
        install_generation(model, config.output_alpha)
    elif config.output_mapping is not None:
        install_output_loss(model, mapping=config.output_mapping)


def remove_output(model: PreTrainedModel) -> None:
    """Remove what ``install_output`` installed; nothing happens where nothing was."""
    remove_output_loss(model)
    remove_generation(model)
