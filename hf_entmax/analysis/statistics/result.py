"""The result of an analysis: statistics of every site, with what is needed to merge, save and compare them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_entmax.analysis.statistics.accumulate import grown
from hf_entmax.analysis.statistics.sentences import SentenceExtremes
from hf_entmax.analysis.statistics.site import LayerInfo, SiteStatistics

if TYPE_CHECKING:
    from accelerate import Accelerator

#: Order in which sites are reported.
SITES = ("encoder_self", "cross", "decoder_self")
_FORMAT = 1
#: Fields that are saved as they are.
_PLAIN = ("name", "num_sentences", "num_tokens", "notes", "info", "scores")


def _by_site(read: Callable[[SiteStatistics], Tensor], meaning: str | None = None) -> property:
    return property(lambda self: {name: read(site) for name, site in self.sites.items()}, doc=meaning or read.__doc__)


@dataclass
class AttentionStatistics:
    """Everything that was measured on one model.

    Each property that ends in no parenthesis maps a site to a tensor, as :func:`hf_entmax.alphas` does:
    ``statistics.density["cross"]`` is [layers, heads]. More is on :class:`SiteStatistics`, at ``statistics.sites``.

    Attributes:
        name: what to call the model in tables and figures.
        sites: statistics by site.
        alphas: alpha by site, [layers, heads], for sites with entmax attention; empty for a softmax model.
        num_sentences: sentences seen.
        num_tokens: real query tokens seen, by site.
        extremes: sentences in which a head is densest and sparsest, by site.
        importance: head importance by method ("masking": nats per token that the loss rises; "gradient": mean absolute
            gradient, nats per token), each by site, [layers, heads].
        examples: attention of a few sentences, for the viewer.
        notes: what was left out, and why.
        info: settings and origin, for the record.
        scores: how good the model is, by name ("accuracy", "perplexity", ...), to stand beside its density in the report.
    """

    name: str = "model"
    sites: dict[str, SiteStatistics] = field(default_factory=dict)
    alphas: dict[str, Tensor] = field(default_factory=dict)
    num_sentences: int = 0
    num_tokens: dict[str, int] = field(default_factory=dict)
    extremes: dict[str, SentenceExtremes] = field(default_factory=dict)
    importance: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    examples: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)

    density = _by_site(SiteStatistics.density)
    mean_support = _by_site(SiteStatistics.mean_support)
    entropy = _by_site(SiteStatistics.entropy)
    max_weight = _by_site(SiteStatistics.max_weight)
    head_diversity = _by_site(SiteStatistics.head_diversity)
    head_diversity_nats = _by_site(lambda site: site.head_diversity(normalize=False), "The same in nats.")

    def positional_confidence(self, offset: int = -1) -> dict[str, Tensor]:
        """Return the mean weight at offset -1, 0 or +1 by site, [layers, heads]."""
        return {name: site.positional_confidence(offset) for name, site in self.sites.items()}

    @property
    def num_heads(self) -> int:
        """Heads of the whole model."""
        return sum(layer.num_heads for site in self.sites.values() for layer in site.layers)

    def update(self, other: AttentionStatistics) -> AttentionStatistics:
        """Take over sums that this object does not have yet, measured by another pass over gold data.

        Args:
            other: statistics of the same model.

        Returns:
            This object.

        Raises:
            ValueError: ``other`` is of a model with other sites, layers or heads.
        """
        for name, site in other.sites.items():
            mine = self.sites.get(name)
            if mine is None:
                self.sites[name] = site
                continue
            if mine.layers != site.layers:
                raise ValueError(f"{self.name!r} and {other.name!r} differ in layers or heads of {name}: two models.")
            for key, value in site.sums.items():
                mine.sums.setdefault(key, value)
            mine.relations = mine.relations or site.relations
        self.notes.extend(note for note in other.notes if note not in self.notes)
        return self

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the sums as safetensors, with everything else in its metadata; examples are not kept.

        Args:
            path: of the file; its folder is made, a file that is there is overwritten.

        Returns:
            The path, for :meth:`load`.
        """
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        for name, site in self.sites.items():
            tensors |= {f"sums/{name}/{key}": value.contiguous() for key, value in site.sums.items()}
        tensors |= {f"alphas/{name}": value.contiguous() for name, value in self.alphas.items()}
        for method, per_site in self.importance.items():
            tensors |= {f"importance/{method}/{name}": value.contiguous() for name, value in per_site.items()}
        for name, extremes in self.extremes.items():
            tensors |= {f"extremes/{name}/values": extremes.values, f"extremes/{name}/indices": extremes.indices}
        header = {
            "format": _FORMAT,
            **{name: getattr(self, name) for name in _PLAIN},
            "sites": {
                name: {
                    "layers": [dataclasses.asdict(layer) for layer in site.layers],
                    "max_distance": site.max_distance,
                    "relations": list(site.relations),
                }
                for name, site in self.sites.items()
            },
            "sentences": {name: extremes.texts for name, extremes in self.extremes.items()},
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"hf_entmax_statistics": json.dumps(header)})
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionStatistics:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not such a file, or written by a newer version.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = (file.metadata() or {}).get("hf_entmax_statistics")
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file, or a truncated one ({error}).") from error
        if metadata is None:
            raise ValueError(f"{path}: a safetensors file, but not one written by AttentionStatistics.save.")
        header = json.loads(metadata)
        if header["format"] > _FORMAT:
            raise ValueError(f"{path}: written in format {header['format']}, newer than {_FORMAT}. Update hf_entmax.")
        result = cls(**{name: header[name] for name in _PLAIN if name in header})  # older files have no scores
        for name, site in header["sites"].items():
            prefix = f"sums/{name}/"
            sums = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            layers = [LayerInfo(**layer) for layer in site["layers"]]
            result.sites[name] = SiteStatistics(name, layers, sums, site["max_distance"], tuple(site["relations"]))
        for key, value in tensors.items():
            kind, *rest = key.split("/")
            if kind == "alphas":
                result.alphas[rest[0]] = value
            elif kind == "importance":
                result.importance.setdefault(rest[0], {})[rest[1]] = value
        for name, texts in header["sentences"].items():
            values, indices = tensors[f"extremes/{name}/values"], tensors[f"extremes/{name}/indices"]
            numbered = {int(key): text for key, text in texts.items()}
            result.extremes[name] = SentenceExtremes.restore(values, indices, numbered)
        return result


def describe_device(model: torch.nn.Module) -> str:
    """Return the device and dtype of a model, for the record."""
    parameter = next(model.parameters())
    return f"{parameter.device.type}, {str(parameter.dtype).removeprefix('torch.')}"


def gather_collection(
    statistics: AttentionStatistics, accelerator: Accelerator, error: Exception | None
) -> Exception | None:
    """Replace the statistics of every process, in place, by those of all together.

    ``error`` is what stopped this process. Returns the first error of any process, or None.
    """
    if accelerator.num_processes == 1:
        return error
    from accelerate.utils import gather_object

    mine = (statistics, None if error is None else str(error))
    everyone: list[tuple[AttentionStatistics, str | None]] = gather_object([mine])
    parts = [other for other, _ in everyone]
    for name, site in statistics.sites.items():
        site.layers = max((part.sites[name].layers for part in parts), key=len)  # fewer where no batch was seen
        sums = [part.sites[name].sums for part in parts]
        site.sums = {}
        for key in dict.fromkeys(key for one in sums for key in one):
            found = [one[key] for one in sums if key in one]
            widest = (len(site.layers), *(max(sizes) for sizes in zip(*(one.shape[1:] for one in found), strict=True)))
            site.sums[key] = torch.stack([grown(one, widest) for one in found]).sum(0)
    statistics.num_sentences = sum(part.num_sentences for part in parts)
    statistics.num_tokens = dict(sum((Counter(part.num_tokens) for part in parts), Counter()))
    statistics.notes = list(dict.fromkeys(note for part in parts for note in part.notes))
    statistics.extremes = {}
    for part in parts:
        for site, extremes in part.extremes.items():
            statistics.extremes.setdefault(site, SentenceExtremes(0, 0)).merge(extremes)
    for extremes in statistics.extremes.values():
        wanted = extremes.wanted()
        extremes.texts = {index: text for index, text in sorted(extremes.texts.items()) if index in wanted}
    first = next((text for _, text in everyone if text is not None), None)
    return error if error is not None or first is None else ValueError(first)
