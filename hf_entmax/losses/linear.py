"""The entmax loss of a linear output layer, without ever holding all logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_entmax.losses.blocks import alpha_minus_one
from hf_entmax.losses.core import RowLosses, dense_residual, row_losses, sparse_residual, subtract_target_
from hf_entmax.losses.fenchel_young import reduce_losses
from hf_entmax.losses.targets import Reduction, check_alpha, check_floating, check_labels, check_options
from hf_entmax.ops.solve import compute_dtype, exact_dtype

# How many logits exist at a time when the caller does not say: 64 MiB of float32 on a CPU, and up to twice that where the
# weight, whose gradient every chunk goes through, is larger still.
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
# Gradients go through the columns in use as long as these are at most this share of the vocabulary.
COLUMN_SHARE = 0.25


@dataclasses.dataclass
class _Layer:
    """The output layer and the options of the loss, as every chunk needs them."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    smoothing: float
    number: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


class _Gradients:
    """Gradients of the loss in hidden states, weight and bias, summed over the chunks."""

    def __init__(self, layer: _Layer, rows: int, needs: tuple[bool, bool, bool]) -> None:
        weight = layer.weight
        wide = compute_dtype(weight.dtype)
        self.layer = layer
        self.hidden = weight.new_zeros(rows, weight.shape[1]) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        self.bias = weight.new_zeros(weight.shape[0], dtype=wide) if needs[2] else None
        # With label smoothing p - q is a sparse part plus a constant, whose share of the gradients has rank one.
        self.weight_total = weight.sum(0, dtype=wide) if layer.smoothing and needs[0] else None
        self.hidden_total = weight.new_zeros(weight.shape[1], dtype=wide)
        self.mass_total = weight.new_zeros((), dtype=wide)

    def add(
        self, block: slice, hidden: Tensor, logits: Tensor, result: RowLosses, target: Tensor, weight: Tensor, u: Any
    ):
        """Add the gradients of one chunk; ``weight`` ``[n, 1]`` is what its losses are multiplied by."""
        layer, smoothing, classes = self.layer, self.layer.smoothing, self.layer.weight.shape[0]
        weight = weight.masked_fill(result.dead[:, None], 0.0)
        capped = layer.softcap
        if result.solution.rows is not None and target.dim() == 1 and not (smoothing and capped is not None):
            row, column, value = sparse_residual(result, target, smoothing)
            used, column = column.unique(return_inverse=True)
            if used.numel() <= COLUMN_SHARE * classes:
                value = value * weight[row, 0]
                if capped is not None:
                    value = value * _softcap_slope(logits[row, used[column]].to(value.dtype), capped)
                residual = value.new_zeros(hidden.shape[0], used.numel())
                residual[row, column] = value
                self._add(block, hidden, residual, used)
                if smoothing:
                    self._add_constant(block, hidden, weight * (-smoothing / classes))
                return
        solution = result.solution
        if solution.rows is None:
            residual = subtract_target_(solution.probs.mul_(weight), target, weight, result.dead, smoothing)
        else:
            residual = torch.empty(logits.shape, dtype=solution.maximum.dtype, device=logits.device)
            solved = (solution.maximum, solution.shift, solution.scale)
            dense_residual(logits, solved, u, target, weight, result.dead, smoothing, out=residual)
        if capped is not None:
            residual.mul_(_softcap_slope(logits.to(residual.dtype), capped))
        self._add(block, hidden, residual, None)

    def _add(self, block: slice, hidden: Tensor, residual: Tensor, columns: Tensor | None) -> None:
        narrow = residual.to(hidden.dtype)
        if self.hidden is not None:
            weight = self.layer.weight if columns is None else self.layer.weight[columns]
            self.hidden[block] = narrow @ weight
        if self.weight is not None:
            if columns is not None:
                self.weight.index_add_(0, columns, (narrow.t() @ hidden).to(self.weight.dtype))
            elif self.weight.dtype == hidden.dtype:
                self.weight.addmm_(narrow.t(), hidden)
            else:
                self.weight.add_(narrow.t() @ hidden)
        if self.bias is not None:
            total = residual.sum(0)
            self.bias.add_(total) if columns is None else self.bias.index_add_(0, columns, total)

    def _add_constant(self, block: slice, hidden: Tensor, weight: Tensor) -> None:
        if self.hidden is not None and self.weight_total is not None:
            self.hidden[block] += (weight * self.weight_total).to(self.hidden.dtype)
        self.hidden_total += (weight * hidden).sum(0)
        self.mass_total += weight.sum()

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients, in the dtype of what they are gradients of."""
        dtype = self.layer.weight.dtype
        if self.layer.smoothing:
            if self.weight is not None:
                self.weight += self.hidden_total
            if self.bias is not None:
                self.bias += self.mass_total
        weight = None if self.weight is None else self.weight.to(dtype)
        return self.hidden, weight, None if self.bias is None else self.bias.to(dtype)


def _softcap_slope(capped: Tensor, softcap: float) -> Tensor:
    return 1.0 - (capped / softcap).square_()


class LinearEntmaxLossFunction(torch.autograd.Function):
    """Loss of a linear layer in chunks of rows.

    With ``scale`` (the factor of every loss in a sum or a mean) the gradients are found on the way, in the forward
    pass; without it the losses are returned one by one, and the backward pass computes the logits once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        alpha: Tensor | None,
        layer: _Layer,
        chunk: int,
        scale: Tensor | None,
    ) -> Tensor:
        """Take ``hidden`` ``[N, D]``, ``weight`` ``[V, D]``, ``target`` ``[N]`` or ``[N, V]``: rows to keep only."""
        rows = hidden.shape[0]
        needs, need_slope = ctx.needs_input_grad[:3], ctx.needs_input_grad[4]
        losses = torch.empty(rows, dtype=exact_dtype(hidden), device=hidden.device)
        slopes = torch.empty_like(losses) if need_slope else None
        gradients = _Gradients(layer, rows, needs) if scale is not None and any(needs) else None
        for block, u, logits in _chunks(hidden, alpha, layer, chunk):
            options = {"smoothing": layer.smoothing, "need_alpha_slope": need_slope}
            result = row_losses(logits, target[block], u, keep=None, **options)
            losses[block] = result.losses
            if slopes is not None:
                slopes[block] = result.alpha_slopes  # type: ignore[assignment]
            if gradients is not None:
                factor = scale.to(result.solution.maximum.dtype).expand(logits.shape[0], 1)  # type: ignore[union-attr]
                gradients.add(block, hidden[block], logits, result, target[block], factor, u)
        ctx.layer, ctx.chunk, ctx.reduced = layer, chunk, scale is not None
        if scale is None:
            ctx.save_for_backward(slopes, hidden, weight, bias, target, alpha)
            return losses
        found = gradients.finish() if gradients is not None else (None, None, None)
        if slopes is not None:
            slopes = slopes * scale
            slopes = slopes if layer.number is None else slopes.sum()
            slopes = slopes.to(alpha.dtype)  # type: ignore[union-attr]
        ctx.save_for_backward(slopes, *found)
        return losses.sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass found, or go through the chunks once more with one weight per row."""
        (grad,) = grad_outputs
        if ctx.reduced:
            slopes, *found = ctx.saved_tensors
            # Another device would have to be waited for, which takes longer than to multiply by 1.
            one = grad.device.type == "cpu" and bool(grad == 1)
            hidden, weight, bias, slopes = (
                tensor if tensor is None or one else tensor * grad.to(tensor.dtype) for tensor in (*found, slopes)
            )
            return hidden, weight, bias, None, slopes, None, None, None
        slopes, hidden, weight, bias, target, alpha = ctx.saved_tensors
        layer = dataclasses.replace(ctx.layer, weight=weight, bias=bias)
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = _Gradients(layer, hidden.shape[0], ctx.needs_input_grad[:3])
            for block, u, logits in _chunks(hidden, alpha, layer, ctx.chunk):
                result = row_losses(logits, target[block], u, keep=None, smoothing=layer.smoothing)
                factor = grad[block, None].to(result.solution.maximum.dtype)
                gradients.add(block, hidden[block], logits, result, target[block], factor, u)
            found = gradients.finish()
        if slopes is not None:
            slopes = slopes * grad if layer.number is None else (slopes * grad).sum()
            slopes = slopes.to(alpha.dtype)
        return *found, None, slopes, None, None, None


def _chunks(hidden: Tensor, alpha: Tensor | None, layer: _Layer, chunk: int):
    for start in range(0, hidden.shape[0], chunk):
        block = slice(start, min(start + chunk, hidden.shape[0]))
        logits = layer.logits(hidden[block])
        yield block, alpha_minus_one(layer.number, alpha, block, compute_dtype(logits.dtype)), logits


def linear_entmax_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Compute the entmax loss of a linear output layer in chunks of rows, so that the logits never exist as a whole.

        L(z, q) = (p - q).z + H(p) - H(q),     z = W h + b     (z <- softcap * tanh(z / softcap), if given)

    Equal to ``entmax_loss(F.linear(hidden, weight, bias), labels, alpha, ...)``. The gradients in ``hidden``,
    ``weight`` and ``bias`` are accumulated chunk by chunk during the forward pass, and only through the rows of
    ``weight`` whose class has mass: where the probabilities are sparse, the backward pass is almost free. Ignored rows
    cost nothing. (With ``reduction="none"`` the gradients need one weight per row, which is known in the backward pass
    only: there the logits are computed a second time, chunk by chunk.)

    Args:
        hidden: ``[..., D]``, the states before the output layer; floating point. Under autocast, ``hidden``, ``weight``
            and ``bias`` are cast like the operands of a linear layer.
        weight: ``[V, D]``, of the dtype of ``hidden``.
        labels: class indices ``[...]``, or distributions ``[..., V]`` of a floating dtype.
        alpha: ``>= 1``; a number, a scalar tensor, or one per row, broadcastable to ``[...]``.
        bias: ``[V]`` or None.
        ignore_index: rows with this class index contribute neither loss nor gradient.
        reduction: ``"none"``, ``"sum"`` or ``"mean"`` over the rows that are not ignored (0 if there are none).
        chunk_size: rows per chunk, at least 1. By default as many as make 64 MiB of float32 logits on a CPU, 512 MiB on
            a GPU, or half the size of ``weight`` if that is more, but not more than twice as many.
        softcap: logits are squashed into ``(-softcap, softcap)`` as in Gemma 2; None leaves them alone.
        label_smoothing: share of the target mass spread evenly over the classes, in [0, 1].

    Returns:
        float32 (float64 for float64): a scalar, or ``[...]`` for ``"none"``. Once differentiable in ``hidden``,
        ``weight``, ``bias`` and ``alpha``.

    Raises:
        ValueError: for shapes that do not fit, a chunk size below 1, a softcap that is not positive, and what
            ``entmax_loss`` refuses.
        TypeError: for dtypes that do not fit.

    Examples:
        >>> import torch
        >>> from hf_entmax.losses import linear_entmax_loss
        >>> hidden, weight = torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 4.0], [1.0, 1.0]])
        >>> linear_entmax_loss(hidden, weight, torch.tensor([0, 2]), alpha=1.5)
        tensor(1.5000)

    Reference:
        Peters, Niculae, Martins 2019, eq. 11-12.
    """
    check_options(reduction, label_smoothing)
    hidden, weight, bias = _like_linear(hidden, weight, bias)
    shape, classes = hidden.shape[:-1], weight.shape[0]
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} is not allowed: it must be positive, or None for no cap.")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size={chunk_size!r} is not allowed: it is a number of rows, at least 1, or None.")
    number, per_row = check_alpha(alpha, shape)
    target, keep = check_labels(labels.to(hidden.device), shape, classes, ignore_index)
    learned = alpha.reshape(()) if number is not None and isinstance(alpha, Tensor) and alpha.requires_grad else None
    flat_alpha = learned if per_row is None else per_row.reshape(-1)
    rows = hidden.reshape(-1, hidden.shape[-1])
    total = rows.shape[0]
    kept = None
    if keep is not None and not bool(keep.all()):
        kept = keep.nonzero().squeeze(-1)
        rows, target = rows[kept], target[kept]
        flat_alpha = flat_alpha[kept] if per_row is not None else flat_alpha  # type: ignore[index]
    chunk = chunk_size or _rows_per_chunk(weight)
    scale = None
    if reduction != "none":
        count = max(rows.shape[0], 1) if reduction == "mean" else 1
        scale = torch.full((), 1.0 / count, dtype=exact_dtype(hidden), device=hidden.device)
    layer = _Layer(weight.detach(), None if bias is None else bias.detach(), softcap, float(label_smoothing), number)
    with torch.autocast(hidden.device.type, enabled=False):
        result = LinearEntmaxLossFunction.apply(rows, weight, bias, target, flat_alpha, layer, chunk, scale)
    dtype = compute_dtype(hidden.dtype)
    if reduction != "none":
        return result.to(dtype)  # type: ignore[union-attr]
    if kept is not None:
        result = result.new_zeros(total).index_put((kept,), result)  # type: ignore[union-attr]
    return reduce_losses(result, keep, "none", shape, dtype)  # type: ignore[arg-type]


def _rows_per_chunk(weight: Tensor) -> int:
    elements = CHUNK_ELEMENTS.get(weight.device.type, 1 << 24)
    return max(1, min(max(elements, weight.numel() // 2), 2 * elements) // weight.shape[0])


def _like_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check the operands, and cast them under autocast as ``F.linear`` would."""
    given = {"hidden": hidden, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, tensor in given.items():
        check_floating(name, tensor)
    if weight.dim() != 2 or hidden.dim() == 0 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} and weight of shape {tuple(weight.shape)} do not fit: expected "
            "[..., D] and [V, D] with V >= 1."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} does not fit weight of shape {tuple(weight.shape)}: expected [V]."
        )
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        if hidden.dtype != torch.float64:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in given.items())
        raise TypeError(f"hidden, weight and bias must have one dtype, but have: {dtypes}.")
    return hidden, weight, bias
