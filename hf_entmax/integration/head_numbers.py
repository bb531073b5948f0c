"""What the heads of a patched model have: alphas, options of other mappings, length scalings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_entmax.alpha import FixedAlpha, LearnedAlpha, MappingOptions, TiedAlpha
from hf_entmax.integration.attach import heads_of
from hf_entmax.integration.discovery import AttentionSite, attention_sites
from hf_entmax.integration.patching import entmax_config, update_config
from hf_entmax.integration.scaled_query import length_scaling_of
from hf_entmax.integration.softmax_blocks import runs_softmax


def alphas(model: PreTrainedModel, *, detach: bool = True) -> dict[str, Tensor]:
    """Return the alpha of every head.

    Args:
        model: a patched model.
        detach: return copies on the CPU; False keeps them in the autograd graph, for a regulariser.

    Returns:
        site -> float32 ``[layers, heads]``. Attention that was left alone is softmax and shows as 1. Where the
        layers of a site differ in their number of heads, missing heads are NaN.

    Raises:
        ValueError: if the model is not patched, or its mapping has no alpha.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> import hf_entmax
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=10))
        >>> hf_entmax.alphas(hf_entmax.patch_model(model, alpha=1.5))
        {'decoder_self': tensor([[1.5000, 1.5000]])}
    """
    mapping = entmax_config(model).mapping
    if mapping != "entmax":
        raise ValueError(
            f"This model uses mapping={mapping!r}, which has no alpha; see hf_entmax.mapping_options(model)."
        )
    rows: dict[str, list[Tensor]] = {}
    for site in attention_sites(model):
        rows.setdefault(site.site, []).append(_alpha_row(site))
    table = {site: _padded(values) for site, values in rows.items()}
    return {site: values.detach().cpu() for site, values in table.items()} if detach else table


def set_alphas(model: PreTrainedModel, values: float | Mapping[str, Tensor | float]) -> None:
    """Set the alphas of a patched model in place.

    Args:
        model: a patched model.
        values: one number for all heads, or site -> number or ``[layers, heads]``, as `alphas` returns them: what stands
            where there is no head, or a softmax, is not read. A fixed alpha takes one number for the whole model, which is
            written to the configuration too.

    Raises:
        ValueError: if the model is not patched, a site is unknown, a shape does not fit, or a number is out of range.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> import hf_entmax
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=10))
        >>> import torch
        >>> model = hf_entmax.patch_model(model)
        >>> hf_entmax.set_alphas(model, {"decoder_self": torch.tensor([[1.25, 1.75]])})
        >>> hf_entmax.alphas(model)
        {'decoder_self': tensor([[1.2500, 1.7500]])}
    """
    config = entmax_config(model)
    if config.alpha != "learned":
        if isinstance(values, Mapping):
            raise ValueError(
                "This model has one fixed alpha: give set_alphas one number, or patch with alpha='learned'."
            )
        update_config(model, alpha=float(values))
        for module in model.modules():
            if isinstance(module, FixedAlpha):
                module.set_(float(values))
        return
    every = attention_sites(model)
    sites = [s for s in every if isinstance(heads_of(s), (LearnedAlpha, TiedAlpha))]
    present = sorted({s.site for s in sites})
    by_site = values if isinstance(values, Mapping) else dict.fromkeys(present, values)
    if unknown := sorted(set(by_site) - set(present)):
        raise ValueError(f"set_alphas was given sites {unknown}; this model has learned alphas at {present}.")
    lo, hi = config.alpha_range
    planned = []
    for name, given in by_site.items():
        tensor = torch.as_tensor(given, dtype=torch.float32)
        own = [s for s in sites if s.site == name]
        depth = max(s.layer for s in every if s.site == name) + 1
        width = max(s.num_heads for s in every if s.site == name)
        if tensor.ndim and tuple(tensor.shape) != (depth, width):
            raise ValueError(
                f"alphas of {name!r} have shape {tuple(tensor.shape)}; one number or ({depth}, {width}) = (layers, heads) is allowed."
            )
        rows = [(s, tensor if not tensor.ndim else tensor[s.layer, : s.num_heads]) for s in own]
        read = torch.cat([row.reshape(-1) for _, row in rows])
        if not bool(((read >= lo) & (read <= hi)).all()):
            raise ValueError(
                f"alphas of {name!r} must lie between {lo} and {hi} (alpha_range); given were {read.min():.4g} to {read.max():.4g}."
            )
        planned += rows
    for site, row in planned:
        heads = heads_of(site)
        if isinstance(heads, LearnedAlpha) and heads.a.numel() == 1 and row.ndim:
            row = row.mean()
        if isinstance(heads, LearnedAlpha):
            heads.set_(row)


def mapping_options(model: PreTrainedModel) -> dict[str, dict[str, Tensor]]:
    """Return the options of a mapping other than entmax: option -> site -> float32 ``[layers, heads]``, detached; NaN as in `alphas`.

    Raises:
        ValueError: if the model is not patched or uses entmax.
    """
    if entmax_config(model).mapping == "entmax":
        raise ValueError("This model uses entmax, which has no mapping options; see hf_entmax.alphas(model).")
    table: dict[str, dict[str, list[Tensor]]] = {}
    for site in attention_sites(model):
        heads = heads_of(site)
        if isinstance(heads, MappingOptions):
            for name, value in heads().items():
                row = torch.as_tensor(value, dtype=torch.float32).detach().cpu().expand(site.num_heads)
                table.setdefault(name, {}).setdefault(site.site, []).append(row)
    return {name: {site: _padded(rows) for site, rows in sites.items()} for name, sites in table.items()}


def length_scalings(model: PreTrainedModel) -> dict[str, dict[str, Tensor]]:
    """Return the learned numbers of the length scaling of every head.

    Returns:
        site -> name -> float32 copies on the CPU. ``"constant"`` and ``"log"`` have ``s`` ``[layers, heads]``;
        ``"adaptive"`` has ``beta_weight`` and ``gamma_weight`` ``[layers, heads, d]``. Heads that are not scaled are NaN.
        Without length scaling the result is empty.

    Raises:
        ValueError: if the model is not patched.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> import hf_entmax
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=10))
        >>> hf_entmax.length_scalings(hf_entmax.patch_model(model, length_scaling="log"))
        {'decoder_self': {'s': tensor([[0., 0.]])}}
    """
    entmax_config(model)
    sites = attention_sites(model)
    scalings = [(site, length_scaling_of(heads_of(site))) for site in sites]
    table: dict[str, dict[str, Tensor]] = {}
    for site, scaling in scalings:
        for name, values in scaling.named_parameters() if scaling is not None else ():
            own = [s for s in sites if s.site == site.site]
            shape = (len(own), max(s.num_heads for s in own), *values.shape[1:])
            rows = table.setdefault(site.site, {}).setdefault(name, torch.full(shape, float("nan")))
            rows[site.layer, scaling.heads] = values.detach().float().cpu()  # type: ignore[union-attr]
    return table


def _alpha_row(site: AttentionSite) -> Tensor:
    heads = heads_of(site)
    value = 1.0 if heads is None or runs_softmax(site.module) else heads()
    if isinstance(value, Tensor):
        return value
    return torch.full((site.num_heads,), float(value))


def _padded(rows: list[Tensor]) -> Tensor:
    """Stack rows of heads to ``[layers, heads]`` on the device of the first; NaN for heads that a layer does not have."""
    rows = [row.to(rows[0].device) for row in rows]
    if len({len(row) for row in rows}) == 1:
        return torch.stack(rows)  # also of a sharded model, whose rows cannot be padded
    return pad_sequence(rows, batch_first=True, padding_value=float("nan"))
