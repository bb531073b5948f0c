"""The analysis of one model: its statistics, the importance of its heads, what its cache reads, sentences for the viewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_entmax.analysis.collecting.collect import AnalysisInterrupted, collect
from hf_entmax.analysis.collecting.examples import collect_examples, in_seconds
from hf_entmax.analysis.collecting.importance import head_importance
from hf_entmax.analysis.reading.alignments import AlignedPair
from hf_entmax.analysis.reading.conllu import DependencySentence
from hf_entmax.analysis.reading.data import TextRecord
from hf_entmax.analysis.reading.encode import Encoder
from hf_entmax.analysis.reading.speech import SpeechEncoder
from hf_entmax.analysis.reading.words import INTERROGATIVE_WORDS
from hf_entmax.analysis.statistics.result import AttentionStatistics
from hf_entmax.batches.prepare import evaluation_mode, maximum_length, vocabulary_size
from hf_entmax.options import AnalysisOptions


@dataclass
class ModelRun:
    """The analysis of one model."""

    model: Any
    tokenizer: Any
    name: str
    accelerator: Any
    warn: Callable[[str], None]
    options: AnalysisOptions
    progress: bool
    extractor: Any = None

    def __post_init__(self) -> None:
        self.shared: dict[str, Any] = {"accelerator": self.accelerator, "progress": self.progress}
        self.sites: tuple[str, ...] | None = None
        size = vocabulary_size(self.model)
        if size is not None and len(self.tokenizer) > size:
            self.warn(
                f"{self.name}: the tokenizer has {len(self.tokenizer)} entries, the model's embedding only {size}; "
                "sentences with ids beyond it are left out."
            )

    def _encoder(self, batch_size: int | None = None) -> Encoder:
        size = self.options.batch_size if batch_size is None else batch_size
        if self.extractor is not None:
            return SpeechEncoder(self.model, self.tokenizer, self.extractor, size, self.options.max_length)
        return Encoder(self.model, self.tokenizer, size, self.options.max_length)

    def _total(self, items: Sequence[Any]) -> int:
        """Return the number of batches."""
        return -(-len(items) // self._encoder().batch_size)

    def _collect(self, batches: Any, items: Sequence[Any], what: str = "", **options: Any) -> AttentionStatistics:
        options |= {"tokenizer": self.tokenizer, "interrogatives": INTERROGATIVE_WORDS[self.options.language]}
        options |= {"name": f"{self.name} ({what})" if what else self.name, "on_error": "skip", **self.shared}
        return collect(self.model, batches, total=self._total(items), **options)

    def measure(
        self,
        results: list[AttentionStatistics],
        records: list[TextRecord],
        sentences: list[DependencySentence],
        pairs: list[AlignedPair],
    ) -> None:
        """Add the statistics of this model to the results, as soon as there are any."""
        encoder = self._encoder()
        if encoder.encoder_decoder and any(record.target is None for record in records):
            self.sites = ("encoder_self",)
        try:
            statistics = self._collect(encoder.texts(records), records, sites=self.sites)
        except AnalysisInterrupted as stop:
            results.append(stop.statistics)
            raise
        results.append(statistics)
        for note in statistics.notes:
            self.warn(f"{self.name}: {note}")
        statistics.notes += encoder.remarks()
        if isinstance(encoder, SpeechEncoder):
            statistics.info["frame_seconds"] = encoder.seconds
        if self.sites is not None:
            statistics.notes.append("The data have no target sentences: attention of the decoder is left out.")
        if sentences:
            sites = ("encoder_self",) if encoder.encoder_decoder else None
            self._gold(statistics, "dependency", "treebank", Encoder.dependencies, sentences, sites)
        if pairs and not encoder.encoder_decoder:
            kind = type(self.model).__name__
            self.warn(f"{self.name}: word alignments need cross-attention, which {kind} does not have.")
        elif pairs:
            self._gold(statistics, "alignment", "alignments", Encoder.alignments, pairs, ("cross",))

    def _gold(self, statistics: AttentionStatistics, group: str, what: str, encode: Any, gold: Any, sites: Any) -> None:
        encoder = self._encoder()
        try:
            found = self._collect(encode(encoder, gold), gold, what, groups=(group,), sites=sites)
        except ValueError as error:  # an AnalysisError is one
            self.warn(f"{self.name}: the {what} could not be used: {error}")
            statistics.notes.append(f"The {what} could not be used: {error}")
            return
        found.notes += encoder.remarks(what)
        statistics.update(found)

    def measure_importance(self, statistics: AttentionStatistics, records: list[TextRecord]) -> None:
        """Add the importance of the heads, by the methods that were asked for, or a note on why it was left out."""
        importance, records = self.options.importance, records[: self.options.importance_sentences]
        methods: Any = {"none": (), "both": ("masking", "gradient")}.get(importance, (importance,))
        if methods and self.sites is not None:
            statistics.notes.append("Head importance needs target sentences and was left out.")
            return
        for method in methods:
            try:
                batches = self._encoder().texts(records, labels=True)
                found = head_importance(self.model, batches, method=method, total=self._total(records), **self.shared)
                statistics.importance[method] = found
            except (ValueError, RuntimeError, TypeError) as error:
                statistics.notes.append(f"Head importance ({method}) was left out: {error}")

    def can_decode(self) -> bool:
        """Tell whether to generate tokens; warn where that was asked for and the model has too few positions."""
        tokens = self.options.decode
        if tokens and self.extractor is not None:
            self.warn(
                f"{self.name}: decode is {tokens} and was left out: it counts what is read after texts, not sound."
            )
            return False
        encoder = self._encoder()
        longest = maximum_length(self.model) if encoder.encoder_decoder else encoder.max_length
        if tokens == 0 or longest is None:
            return tokens > 0
        most = longest - (0 if encoder.encoder_decoder else 1 + self.tokenizer.num_special_tokens_to_add())
        if tokens > most:
            self.warn(
                f"{self.name}: decode is {tokens} and was left out: with a length of {longest} at most {most} tokens can be "
                "generated after a text."
            )
        return tokens <= most

    def decode(self, statistics: AttentionStatistics, records: list[TextRecord]) -> None:
        """Generate after the texts with the cache that reads sparsely, and keep what it read of every head."""
        encoder, tokens = self._encoder(), self.options.decode
        texts = [record.source for record in records]
        text = max(texts, key=len) if encoder.encoder_decoder else "\n".join(texts)
        room = None if encoder.max_length is None else encoder.max_length - (0 if encoder.encoder_decoder else tokens)
        try:
            inputs = self.tokenizer(text, return_tensors="pt", truncation=room is not None, max_length=room)
            options = {name: inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
            options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            # "auto" reads short caches in full.
            options |= {"cache_implementation": "exact_sparse", "cache_config": {"bits": 4}}
            with evaluation_mode(self.model):
                out = self.model.generate(**options, return_dict_in_generate=True)
        except (ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
            statistics.notes.append(f"Decoding was left out: {error}")
            return
        certificate = out.past_key_values.certificate()
        statistics.info["decoding"] = {
            "tokens": tokens,
            "text_tokens": inputs["input_ids"].shape[1],
            "violations": certificate.violations,
            "heads": certificate.rows(),
        }

    def examples(self, records: list[TextRecord]) -> list[Any]:
        """Keep sentences for the viewer; none, with a warning, where the model cannot be run on them."""
        encoder, limit = self._encoder(1), self.options.num_examples
        chosen = _varied(records, limit * 8)
        try:
            if isinstance(encoder, SpeechEncoder):
                return in_seconds(self.model, encoder, chosen[:limit], self.tokenizer)
            examples = collect_examples(self.model, encoder.texts(chosen), self.tokenizer, limit)
        except (ValueError, RuntimeError, IndexError) as error:
            self.warn(f"{self.name}: no sentence could be kept for the viewer: {error}")
            return []
        for example in examples:
            if self.sites is not None:
                example.sites = {name: site for name, site in example.sites.items() if name in self.sites}
                example.target = ""
        return examples


def _varied(records: list[TextRecord], limit: int) -> list[TextRecord]:
    """Choose candidates for the viewer: a question or two first, then sentences of middling length in their order."""
    middling = [record for record in records if 20 <= len(record.source) <= 120] or records
    questions = [record for record in middling if record.source.rstrip().endswith("?")][:2]
    return [*questions, *[record for record in middling if record not in questions]][:limit]
