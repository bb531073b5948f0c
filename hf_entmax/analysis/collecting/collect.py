"""Streaming over data: exact sums of attention statistics, one layer's weights at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_entmax.analysis.reading.conllu import UNIVERSAL_RELATIONS
from hf_entmax.analysis.reading.words import INTERROGATIVE_WORDS, TokenTable, table_or_note
from hf_entmax.analysis.statistics.accumulate import GROUPS, SiteSums, SumOptions
from hf_entmax.analysis.statistics.context import SiteContext, build_context
from hf_entmax.analysis.statistics.result import SITES, AttentionStatistics, describe_device, gather_collection
from hf_entmax.analysis.statistics.sentences import SentenceExtremes
from hf_entmax.analysis.statistics.site import LayerInfo, SiteStatistics
from hf_entmax.batches.prepare import BatchInfo, evaluation_mode, prepare_batch
from hf_entmax.integration.card import scaling_in_words
from hf_entmax.integration.discovery import AttentionSite, attention_sites
from hf_entmax.integration.interface import HEADS_MODULE
from hf_entmax.integration.observe import AttentionCall, observe_attention
from hf_entmax.integration.patching import is_patched

if TYPE_CHECKING:
    from accelerate import Accelerator

#: Batches between two clean-ups of remembered sentences.
_PRUNE_EVERY = 16


class AnalysisError(ValueError):
    """An analysis that broke off; what had been measured until then is in :attr:`statistics`.

    Attributes:
        statistics: the statistics of all batches before the one that failed.
    """

    def __init__(self, message: str, statistics: AttentionStatistics) -> None:
        super().__init__(message)
        self.statistics = statistics


class AnalysisInterrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of an analysis; what had been measured until then is in :attr:`statistics`.

    Attributes:
        statistics: the statistics of all batches before the one that was interrupted.
    """

    def __init__(self, statistics: AttentionStatistics) -> None:
        super().__init__()
        self.statistics = statistics


def collect(
    model: Any,
    batches: Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    groups: Sequence[str] | None = None,
    sites: Sequence[str] | None = None,
    accelerator: Accelerator | None = None,
    interrogatives: Iterable[str] = INTERROGATIVE_WORDS["en"],
    max_distance: int = 10,
    alignment_threshold: float = 0.1,
    density_threshold: float = 0.0,
    on_error: str = "raise",
    progress: bool = False,
    total: int | None = None,
    name: str | None = None,
) -> AttentionStatistics:
    """Measure what the heads of a model do on a stream of batches.

    Works for any model that :func:`hf_entmax.patch_model` supports, patched or plain softmax. Sums are exact (float64),
    ratios are taken at the end: the result does not depend on batch size, order or number of processes beyond the
    rounding of the model itself. Memory does not grow with the data. Padding never counts. The model is put in
    evaluation mode for the time of the call and is not changed.

    Where the backend that computes a module's attention works on sparse rows (the CPU kernel) and few weights are
    nonzero, the sums are taken over those rows; dense weights are formed for all other modules, softmax ones among them.

    Args:
        model: a Transformers ``PreTrainedModel``.
        batches: dicts of tensors as a data collator returns them: ``input_ids`` [B, T], ``attention_mask`` [B, T],
            for encoder-decoder models ``labels`` (-100 = padding) or ``decoder_input_ids``, and
            ``decoder_attention_mask``. May also hold ``word_ids`` [B, T] (-1 = no word), and gold annotation:
            ``dependency_heads`` [B, W], ``dependency_relations`` [B, W] (index into the universal relations),
            ``source_words``, ``target_words`` [B, T], ``sure_links`` and ``possible_links`` bool [B, W_t, W_s].
        tokenizer: makes statistics of words, special tokens and questions possible.
        groups: subset of "sparsity", "diversity", "position", "roles", "statistics" (`firing`, and what was registered), "words",
            "dependency", "alignment"; default: all that the batches allow.
        sites: subset of "encoder_self", "cross", "decoder_self"; default: all that the model has.
        accelerator: shards the batches over its processes (every process must get the same stream, not prepared by
            Accelerate) and adds up the sums, so that all return the same statistics.
        interrogatives: words that ask, lower case.
        max_distance: distances kept apart in the distance profile, in tokens, at least 1.
        alignment_threshold: weight above which the method "threshold" sees a link, in [0, 1).
        density_threshold: count weights above it as nonzero, in [0, 1); 0 counts every nonzero weight.
        on_error: "raise" stops at a batch that cannot be used (with the results so far in the exception), "skip" notes
            it and goes on.
        progress: show a progress bar on the main process.
        total: number of batches, for the bar, where ``batches`` has no length.
        name: what to call the model; default: its name or path.

    Raises:
        TypeError: ``batches`` or one of them has a wrong type.
        ValueError: an unknown option, attention that cannot be seen, no data at all.
        AnalysisError: a batch that cannot be used, with ``on_error="raise"``; a ``ValueError`` with ``.statistics``.
        AnalysisInterrupted: Ctrl-C; a ``KeyboardInterrupt`` with ``.statistics``. With several processes a plain one.

    Reference:
        Correia, Niculae, Martins 2019, section 5.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_entmax import patch_model
        >>> from hf_entmax.analysis import collect
        >>> config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, intermediate_size=8)
        >>> model = patch_model(BertModel(config), alpha=1.5)
        >>> batch = {"input_ids": torch.randint(1, 20, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
        >>> collect(model, [batch]).density["encoder_self"].shape  # layers, heads
        torch.Size([2, 4])
    """
    _check_options(groups, sites, max_distance, alignment_threshold, density_threshold, on_error)
    if isinstance(batches, Mapping):
        raise TypeError("batches must be an iterable of dicts; for a single batch pass [batch].")
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    if world > 1 and type(batches).__name__ in ("DataLoaderShard", "DataLoaderDispatcher"):
        raise ValueError(
            "pass the DataLoader as it was before accelerator.prepare: collect shards it itself, without repeated samples."
        )
    table, notes = table_or_note(tokenizer)
    bar = f"attention of {name}" if name else "attention"
    collector: _Collector | None = None
    error: BaseException | None = None
    first_index = 0
    try:
        with evaluation_mode(model), torch.no_grad():
            for number, batch in enumerate(with_progress(batches, progress and rank == 0, total, bar)):
                size = _batch_size(batch)
                if collector is None:
                    wanted, relations = _wanted_groups(groups, batch, table), len(UNIVERSAL_RELATIONS)
                    options = SumOptions(wanted, max_distance, relations, alignment_threshold, density_threshold)
                    present = _present_sites(model, sites)
                    collector = _Collector(model, options, present, table, tokenizer, tuple(interrogatives))
                if number % world == rank:
                    try:
                        collector.run(batch, first_index)
                    except (ValueError, TypeError, IndexError, RuntimeError) as problem:
                        if isinstance(problem, torch.OutOfMemoryError):
                            raise
                        text = f"batch {number} (sentences {first_index} to {first_index + size - 1}): {problem}"
                        if on_error == "raise":
                            error = ValueError(text)
                            error.__cause__ = problem
                            break
                        notes.append(f"Left out {text}")
                first_index += size
    except KeyboardInterrupt as stop:
        if world > 1 or collector is None or collector.statistics.num_sentences == 0:
            raise
        notes.append(f"Interrupted: only the first {collector.statistics.num_sentences:,} sentences were read.")
        error = stop
    if collector is None:
        raise ValueError("there is no data: the stream of batches is empty.")
    statistics = collector.finish(name or getattr(model, "name_or_path", "") or type(model).__name__, notes)
    if isinstance(error, KeyboardInterrupt):
        statistics.info.setdefault("device", describe_device(model))
        raise AnalysisInterrupted(statistics) from error
    if accelerator is not None:
        error = gather_collection(statistics, accelerator, error)
    if error is not None:
        raise AnalysisError(str(error), statistics) from error
    if statistics.num_sentences == 0:
        raise AnalysisError("no batch could be used. " + " ".join(statistics.notes), statistics)
    statistics.info.setdefault("device", describe_device(model))
    return statistics


class _Collector:
    """State of one run: sums by site, sentences remembered, calls counted."""

    def __init__(
        self,
        model: Any,
        options: SumOptions,
        sites: frozenset[str],
        table: TokenTable | None,
        tokenizer: Any,
        interrogatives: tuple[str, ...],
    ) -> None:
        self.model, self.options, self.table, self.tokenizer = model, options, table, tokenizer
        self.interrogatives, self.statistics = interrogatives, AttentionStatistics()
        self.sums: dict[str, SiteSums] = {}
        relations = UNIVERSAL_RELATIONS if "dependency" in options.groups else ()
        for site in [site for site in SITES if site in sites]:
            modules = [module for module in attention_sites(model) if module.site == site]
            layers = [LayerInfo(module.name, place, module.num_heads) for place, module in enumerate(modules)]
            heads, device = [layer.num_heads for layer in layers], next(model.parameters()).device
            self.sums[site] = SiteSums(site, heads, options, device)
            self.statistics.sites[site] = SiteStatistics(site, layers, {}, options.max_distance, relations)
        self.rows = {(layer.name, 0): layer.layer for site in self.statistics.sites.values() for layer in site.layers}
        self._batches = 0
        self._remembered: dict[str, dict[int, Tensor]] = {}

    def run(self, batch: Mapping[str, Any], first_index: int) -> None:
        """Run the model on one batch and add what its attention shows."""
        info = prepare_batch(self.model, batch)
        contexts: dict[tuple[str, int, int, int], SiteContext] = {}
        densities: dict[str, dict[int, Tensor]] = {}

        def observer(call: AttentionCall) -> None:
            module, weights = call.site, call.weights
            if module.site not in self.sums:
                return
            if isinstance(weights, Tensor) and weights.device.type == "mps":
                weights = weights.cpu()
            info.learn_padding(call)
            row = self._row(module, call.index)
            shape = (weights.shape[0], weights.shape[2], weights.shape[3])
            key = (module.site, *shape)
            if key not in contexts:
                groups = self.options.groups
                contexts[key] = build_context(module.site, shape, info, groups, self.table, self.interrogatives)
            density = self.sums[module.site].update(row, weights, contexts[key])
            if density is not None and contexts[key].per_sentence:
                densities.setdefault(module.site, {})[row] = density

        # A batch counts whole or not at all, in every layer, whatever stops it.
        before = {site: {name: value.clone() for name, value in sums.sums.items()} for site, sums in self.sums.items()}
        try:
            with observe_attention(self.model, observer, sparse=True):
                self.model(**info.inputs)
            if not contexts:
                raise ValueError("the model ran without calling any attention module of the sites asked for.")
        except BaseException:
            for site, sums in self.sums.items():
                sums.sums = before[site]
            raise
        tokens = self.statistics.num_tokens
        for site, context in {context.site: context for context in contexts.values()}.items():
            tokens[site] = tokens.get(site, 0) + int(context.query_counts.sum())
        self.statistics.num_sentences += info.size
        self._remember(info, contexts.values(), densities, first_index)

    def _row(self, module: AttentionSite, call: int) -> int:
        key = (module.name, call)
        if key not in self.rows:
            # A module shared among layers (ALBERT) is called once per layer: each call is a layer of its own.
            self.rows[key] = self.sums[module.site].add_row(module.num_heads)
            layer = LayerInfo(module.name, self.rows[key], module.num_heads)
            self.statistics.sites[module.site].layers.append(layer)
        return self.rows[key]

    def _remember(
        self, info: BatchInfo, contexts: Iterable[SiteContext], densities: dict[str, dict[int, Tensor]], first: int
    ) -> None:
        self._batches += 1
        lengths = {c.site: c.query_counts.long().cpu() for c in contexts if c.per_sentence}
        for site, rows in densities.items():
            shape = (self.statistics.sites[site].num_layers, info.size, self.statistics.sites[site].num_heads)
            stacked = torch.full(shape, float("nan"), dtype=torch.float64)
            for row, density in rows.items():
                stacked[row, :, : density.shape[1]] = density.cpu()
            extremes = self.statistics.extremes.setdefault(site, SentenceExtremes(0, 0))
            extremes.update(stacked, lengths[site], first)
            ids, mask = info.tokens(site)
            if ids is not None and self.tokenizer is not None:
                kept = self._remembered.setdefault(site, {})
                keep = mask if mask is not None else torch.ones_like(ids, dtype=torch.bool)
                wanted = extremes.wanted()
                for place in range(info.size):
                    if first + place in wanted:
                        kept[first + place] = ids[place][keep[place]].cpu()
        if self._batches % _PRUNE_EVERY == 0:
            self._prune()

    def _prune(self) -> None:
        for site, extremes in self.statistics.extremes.items():
            wanted = extremes.wanted()
            self._remembered[site] = {key: ids for key, ids in self._remembered.get(site, {}).items() if key in wanted}

    def finish(self, name: str, notes: list[str]) -> AttentionStatistics:
        """Bring the sums to the CPU and complete the statistics."""
        self._prune()
        for site, remembered in self._remembered.items():
            read = lambda ids: self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)  # noqa: E731
            self.statistics.extremes[site].texts = {index: read(ids) for index, ids in remembered.items()}
        statistics, options = self.statistics, self.options
        statistics.name, statistics.notes, statistics.alphas = name, notes, _alphas(self.model, statistics)
        for site, sums in self.sums.items():
            statistics.sites[site].sums = sums.finished()
        thresholds = {what: getattr(options, what) for what in ("density_threshold", "alignment_threshold")}
        statistics.info = {"groups": sorted(options.groups), **thresholds}
        if is_patched(self.model) and (scaling := scaling_in_words(self.model)):
            statistics.info["length_scaling"] = scaling
        return statistics


def _check_options(groups, sites, max_distance, alignment_threshold, density_threshold, on_error) -> None:
    for what, given, allowed in (("groups", groups, GROUPS), ("sites", sites, SITES)):
        if isinstance(given, str):
            raise TypeError(f"{what} must be a sequence of names, got the string {given!r}; write [{given!r}].")
        if unknown := [value for value in given or () if value not in allowed]:
            raise ValueError(f"{what} holds {str(unknown)[1:-1]}; allowed are {', '.join(map(repr, allowed))}.")
    if max_distance < 1:
        raise ValueError(f"max_distance is {max_distance}; it must be at least 1 token.")
    for what, value in (("alignment_threshold", alignment_threshold), ("density_threshold", density_threshold)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{what} is {value}; it must lie in [0, 1).")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}; allowed are 'raise' and 'skip'.")


def _wanted_groups(groups: Sequence[str] | None, batch: Mapping[str, Any], table: TokenTable | None) -> frozenset[str]:
    if groups is not None:
        return frozenset(groups)
    keys = {"words": "word_ids", "dependency": "dependency_heads", "alignment": "sure_links"}
    given = {group for group, key in keys.items() if batch.get(key) is not None}
    words = {"words"} if table is not None else set()
    return frozenset({"sparsity", "diversity", "position", "roles", "statistics", *words, *given})


def _present_sites(model: Any, sites: Sequence[str] | None) -> frozenset[str]:
    present = {module.site for module in attention_sites(model)}
    if not present:
        raise ValueError(
            f"{type(model).__name__} has no attention module that goes through Transformers' attention interface, so there "
            "are no attention weights to look at. Models supported by hf_entmax.patch_model can be analysed."
        )
    if missing := sorted(set(sites or ()) - present):
        raise ValueError(
            f"{type(model).__name__} has no {', '.join(missing)} attention, only {', '.join(sorted(present))}."
        )
    return frozenset(sites) if sites else frozenset(present)


def _batch_size(batch: Mapping[str, Any]) -> int:
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch must be a dict of tensors as a data collator returns it, got {type(batch).__name__}.")
    return next((int(value.shape[0]) for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0), 0)


def _alphas(model: Any, statistics: AttentionStatistics) -> dict[str, Tensor]:
    """Return alpha by site, one row per layer; layers that keep their softmax have 1."""
    modules = {module.name: module for module in attention_sites(model)}
    if not any(HEADS_MODULE in module.module._modules for module in modules.values()):
        return {}
    result = {}
    for name, site in statistics.sites.items():
        rows = []
        for info in site.layers:
            heads = modules[info.name].module._modules.get(HEADS_MODULE)
            value = heads() if heads is not None else 1.0
            if isinstance(value, Mapping):  # another mapping than entmax
                value = float("nan")
            rows.append(torch.as_tensor(value, dtype=torch.float64).detach().cpu().expand(info.num_heads))
        table = pad_sequence(rows, batch_first=True, padding_value=float("nan"))
        if not bool(table.isnan().all()):
            result[name] = table
    return result


def with_progress(batches: Iterable[Any], show: bool, total: int | None, title: str) -> Iterable[Any]:
    """Wrap the batches in a progress bar if ``show``."""
    if not show:
        return batches
    from tqdm.auto import tqdm

    if total is None and hasattr(batches, "__len__"):
        total = len(batches)  # type: ignore[arg-type]
    return tqdm(batches, total=total, desc=title, unit="batch", leave=False)
