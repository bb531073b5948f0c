r"""Losses and predictions for several labels at once, by mappings whose support is the set of labels predicted.

Every loss compares the scores ``z`` of a row with the uniform distribution over its labels, ``eta = y / |y|_1``:

==================  =========================================  ==========================
mapping             loss                                       predicted labels
==================  =========================================  ==========================
``softmax``         log loss ``-sum eta_i log p_i``            ``p_i > threshold``
``sparsemax``       multilabel sparsemax ("Huber") loss        the support of sparsemax
``entmax``          Fenchel-Young loss of alpha-entmax         the support of entmax
``sparsemax_hinge`` hinge loss of eq. 6 at ``lam = 0``         the support of sparsemax
``sparsegen_lin``   hinge loss of eq. 6                        the support of sparsegen-lin
``sparsehourglass`` hinge loss of eq. 7                        the support of sparsehourglass
==================  =========================================  ==========================

A mapping may carry its options in its name, as in ``"entmax(alpha=1.3)"`` or ``"sparsehourglass(q=2)"``, which is how
a configuration gives them.

Rows without any label have no ``eta``, and no mapping to the simplex can answer them with the empty set. By default
they contribute nothing (``empty="ignore"``); ``"uniform"`` pulls them to the uniform distribution over all labels,
``"error"`` refuses them. To *predict* "no label", add a label that says so.

Reference:
    Laha et al. 2018, "On Controllable Sparse Alternatives to Softmax" (L18), section 4; Martins and Astudillo 2016,
    section 3.3, for the multilabel sparsemax loss.
"""

from hf_entmax.losses.multilabel.functions import (
    MultilabelLoss,
    multilabel_loss,
    multilabel_predict,
    multilabel_probabilities,
)
from hf_entmax.losses.multilabel.registry import MULTILABEL_LOSSES, MultilabelSpec, check_mapping, parse_mapping

__all__ = [
    "MULTILABEL_LOSSES",
    "MultilabelLoss",
    "MultilabelSpec",
    "check_mapping",
    "multilabel_loss",
    "multilabel_predict",
    "multilabel_probabilities",
    "parse_mapping",
]
