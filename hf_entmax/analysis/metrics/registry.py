"""Statistics and roles by name: those that fit one rule of the package, and those that users register.

A statistic here is a number per query, averaged over the queries of a head. Adding one takes the function and its entry: the sums,
tables, findings and the report follow from the entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.roles import ROLE_NAMES, ROLE_PHRASES
from hf_entmax.analysis.metrics.sparsity import firing
from hf_entmax.analysis.metrics.weights import DenseWeights, HeadWeights, keep_pairs
from hf_entmax.config import check_new_name


@dataclass(frozen=True)
class QueryStatistic:
    """A number per query.

    Attributes:
        function: from the weights [B, H, T_q, T_k], in either form, and the possible pairs, bool [B, T_q, T_k], to [B, H, T_q].
        label: its name in tables.
        sites: where it means something.
    """

    function: Callable[[HeadWeights, Tensor], Tensor]
    label: str
    sites: tuple[str, ...] = ("encoder_self", "cross", "decoder_self")


@dataclass(frozen=True)
class RoleInputs:
    """What a role may be found by: one batch at one site.

    Attributes:
        site: "encoder_self", "cross" or "decoder_self".
        pairs: bool [B, T_q, T_k], what a query may look at; False for padding.
        query_ids: token ids long [B, T_q], None where the site has no tokens.
        key_ids: token ids long [B, T_k], or None.
        words: number of each token's word, long [B, T_q], -1 for none; None in cross-attention and without a tokenizer.
    """

    site: str
    pairs: Tensor
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    words: Tensor | None = None


#: Statistics of the package that are one number per query, and those that were registered.
STATISTICS: dict[str, QueryStatistic] = {
    "firing": QueryStatistic(firing, "Queries that fire", ("encoder_self", "decoder_self")),
}
#: Roles that were registered.
ROLES: dict[str, Callable[[RoleInputs], Tensor | None]] = {}
_OWN_STATISTICS, _OWN_ROLES = frozenset(STATISTICS), frozenset(ROLE_NAMES)


def register_statistic(
    name: str, function: Callable[[Tensor, Tensor], Tensor], label: str = "", *, exist_ok: bool = False
) -> None:
    """Register a statistic of your own: `collect` and ``analyze`` measure it for every head from then on.

    ``function(weights, pairs)`` gets the weights ``[B, H, T_q, T_k]`` (float32 or better, zero where ``pairs`` is False) and the
    possible pairs, bool ``[B, T_q, T_k]``; it returns one number per query, ``[B, H, T_q]``. Its mean over the queries that may look
    at a key is the statistic of the head. It stands in the tables and the findings, colours the maps of the report, and can be
    read as ``statistics.sites[site].statistic(name)``, ``[layers, heads]``.

    Args:
        name: column of the tables, a Python identifier.
        function: on one batch and one layer.
        label: its name in the report; by default ``name`` with blanks.
        exist_ok: replace what was registered under this name before. Statistics of this package are never replaced.

    Raises:
        TypeError: if ``function`` cannot be called so.
        ValueError: if the name is taken or no identifier, or the function fails a check: the shape, finite numbers, no influence
            of other heads, other sentences or padding, weights left as they were.

    Examples:
        >>> import hf_entmax.analysis as analysis
        >>> analysis.register_statistic("second", lambda weights, pairs: weights.topk(2, -1).values[..., 1], "Second largest weight")
    """
    check_new_name(name, "statistic", _OWN_STATISTICS, STATISTICS, exist_ok)
    _check_call(function, "function(weights, pairs)", 2)
    spec = QueryStatistic(lambda weights, pairs: function(weights.dense(), pairs), label or name.replace("_", " "))
    _check_statistic(name, function)
    STATISTICS[name] = spec


def register_role(
    name: str,
    function: Callable[[RoleInputs], Tensor | None],
    label: str = "",
    looks_at: str = "",
    *,
    exist_ok: bool = False,
) -> None:
    """Register a role of your own: heads that put their weight on certain keys are explained by it from then on.

    ``function(inputs)`` gets a `RoleInputs` and returns the pairs of the role, bool ``[B, T_q, T_k]``; or None where it has no
    meaning (a site, a batch without tokens). The role counts where a query has a key of it, against the chance of an even head.
    Where it explains a head as well as a role of the package, yours names it.

    Args:
        name: as in the tables, a Python identifier.
        function: marks pairs; what is outside ``inputs.pairs`` does not count.
        label: its name in the report; by default ``name`` with blanks.
        looks_at: ends the sentence "explained by looking at ..."; by default the label.
        exist_ok: replace what was registered under this name before. Roles of this package are never replaced.

    Raises:
        TypeError: if ``function`` cannot be called so.
        ValueError: if the name is taken or no identifier, or the function fails a check: None or a bool tensor of the shape of
            ``inputs.pairs``, no influence of other sentences or of padding, inputs left as they were.

    Examples:
        >>> import hf_entmax.analysis as analysis
        >>> def before_last(inputs):
        ...     return None if inputs.site == "cross" else inputs.pairs.tril(-2) & ~inputs.pairs.tril(-3)
        >>> analysis.register_role("before_last", before_last, "two back", "the token two places back")
    """
    check_new_name(name, "role", _OWN_ROLES, ROLES, exist_ok)
    _check_call(function, "function(inputs)", 1)
    _check_role(name, function)
    ROLES[name] = function
    ROLE_NAMES[name] = label or name.replace("_", " ")
    ROLE_PHRASES[name] = looks_at or ROLE_NAMES[name]


def role_targets(name: str, inputs: RoleInputs) -> Tensor | None:
    """Return the pairs of a registered role in a batch, bool [B, T_q, T_k].

    Raises:
        ValueError: if the function returns something else than it may.
    """
    found = ROLES[name](inputs)
    if found is not None:
        _check_pairs(name, found, inputs.pairs)
        found = found & inputs.pairs
    return found


def query_sums(spec: QueryStatistic, weights: HeadWeights, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of a statistic over the queries that have a key, float64 [H], and how many these are."""
    counted = pairs.any(-1)
    values = spec.function(weights, pairs).double().masked_fill(~counted.unsqueeze(1), 0.0)
    return values.sum(dim=(0, 2)), counted.sum()


def _check_call(function: object, shown: str, arguments: int) -> None:
    if not callable(function):
        raise TypeError(f"function must be callable as {shown}, not {function!r}.")
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except (TypeError, ValueError) as error:  # builtins have no signature
        raise TypeError(f"function cannot be called as {shown}: {error}.") from None


def _examples() -> list[tuple[Tensor, Tensor]]:
    """Make weights and pairs of two sentences: self-attention, causal and not, and cross-attention; without padding."""
    random = torch.Generator().manual_seed(0)
    examples = []
    for queries, keys, causal in ((5, 5, False), (5, 5, True), (4, 6, False)):
        pairs = torch.ones(2, queries, keys, dtype=torch.bool)
        pairs = pairs.tril() if causal else pairs
        scores = torch.randn(2, 3, queries, keys, generator=random, dtype=torch.float64)
        examples.append((scores.masked_fill(~pairs.unsqueeze(1), -torch.inf).softmax(-1), pairs))
    return examples


def _check_statistic(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    what = f"statistic {name!r}"
    for weights, pairs in _examples():
        before = weights.clone()
        found = function(weights, pairs)
        shape = tuple(weights.shape[:3])
        if not isinstance(found, Tensor) or tuple(found.shape) != shape:
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{what} returned {given} for weights of shape {tuple(weights.shape)}; return {shape}.")
        if not torch.equal(weights, before):
            raise ValueError(f"{what} changes the weights it is given: work on a copy.")
        if not bool(found.double().isfinite().all()):
            raise ValueError(f"{what} returned a number that is not finite.")
        found = found.double()
        padded = torch.nn.functional.pad(weights, (0, 2, 0, 1)), torch.nn.functional.pad(pairs, (0, 2, 0, 1))
        trials = {
            "of the other heads": (function(weights[:, 1:2], pairs), found[:, 1:2]),
            "of the other sentences": (function(weights[1:], pairs[1:]), found[1:]),
            "of padding": (function(*padded)[..., : shape[-1]], found),
        }
        for cause, (again, expected) in trials.items():
            if not torch.allclose(again.double(), expected, rtol=1e-9, atol=1e-9):
                raise ValueError(f"{what} depends on the presence {cause}, which a number of one query may not.")


def _check_role(name: str, function: Callable[[RoleInputs], Tensor | None]) -> None:
    what = f"role {name!r}"
    for site, (_, pairs) in zip(("encoder_self", "decoder_self", "cross"), _examples(), strict=True):
        random = torch.Generator().manual_seed(1)
        keys = torch.randint(5, 9, (2, pairs.shape[2]), generator=random)
        queries = keys if site != "cross" else torch.randint(5, 9, (2, pairs.shape[1]), generator=random)
        words = None if site == "cross" else torch.arange(pairs.shape[1]).expand(2, -1) // 2
        for ids in ((queries, keys), (None, None)):
            given = RoleInputs(site, pairs.clone(), *ids, words if ids[0] is not None else None)
            found = function(given)
            if not torch.equal(given.pairs, pairs):
                raise ValueError(f"{what} changes the pairs it is given: work on a copy.")
            if found is None:
                continue
            _check_pairs(name, found, pairs)
            pad = torch.nn.functional.pad
            longer = [x if x is None else pad(x, (0, 2)) for x in ids]
            longer_words = None if given.words is None else pad(given.words, (0, 2), value=-1)
            wider = RoleInputs(site, pad(pairs, (0, 2, 0, 2)), longer[0], longer[1], longer_words)
            last = [x if x is None else x[1:] for x in (*ids, given.words)]
            one = RoleInputs(site, pairs[1:], last[0], last[1], last[2])
            padded, alone = function(wider), function(one)
            if padded is None or not torch.equal(padded[:, : pairs.shape[1], : pairs.shape[2]] & pairs, found & pairs):
                raise ValueError(f"{what} marks other pairs when there is padding behind a sentence.")
            if alone is None or not torch.equal(alone & pairs[1:], (found & pairs)[1:]):
                raise ValueError(f"{what} marks other pairs when a sentence stands alone in its batch.")


def _check_pairs(name: str, found: object, pairs: Tensor) -> None:
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != pairs.shape:
        given = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"role {name!r} returned {given}; return bool {tuple(pairs.shape)}, as inputs.pairs, or None.")


def measure(name: str, weights: Tensor, pairs: Tensor) -> Tensor:
    """Return a statistic of weights that are at hand, as `collect` would: float64 ``[H]``.

    Args:
        name: of the package or registered.
        weights: ``[B, H, T_q, T_k]``.
        pairs: bool ``[B, T_q, T_k]``.

    Raises:
        ValueError: if no statistic has that name.
    """
    if name not in STATISTICS:
        raise ValueError(f"{name!r} is no statistic; there are {', '.join(STATISTICS)}, and those that you register.")
    kept = keep_pairs(weights, pairs)
    assert isinstance(kept, DenseWeights)
    sums, queries = query_sums(STATISTICS[name], kept, pairs)
    return sums / queries
