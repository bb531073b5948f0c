"""What a configuration asks of a model's training loss.

The other half of ``output_alpha``, sparse probabilities in ``generate()``, needs nothing on the model: the hook in
``hf_entmax.generation`` reads the configuration.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_entmax import _registration
from hf_entmax.config import EntmaxConfig
from hf_entmax.integration.output_loss import check_output_head, install_output_loss, remove_output_loss


def check_output(model: PreTrainedModel, config: EntmaxConfig) -> None:
    """Raise where an output option cannot be honoured by this model, before anything is changed.

    Raises:
        ValueError: if the model computes no loss from labels, or another loss than the option replaces.
    """
    if config.output_alpha is not None or config.output_mapping is not None:
        check_output_head(model, alpha=config.output_alpha, mapping=config.output_mapping)


def install_output(model: PreTrainedModel, config: EntmaxConfig) -> None:
    """Install the loss that the configuration asks for.

    Raises:
        ImportError: if ``generate()`` could not be hooked, so that it would go on to sample from a softmax.
    """
    if config.output_alpha is not None:
        _registration.ensure()
    if config.output_alpha is not None or config.output_mapping is not None:
        install_output_loss(model, alpha=config.output_alpha, mapping=config.output_mapping)


def remove_output(model: PreTrainedModel) -> None:
    """Remove what ``install_output`` installed; nothing happens where nothing was."""
    remove_output_loss(model)
