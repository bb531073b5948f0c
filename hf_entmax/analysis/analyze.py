"""The whole analysis: models and data in, report and tables out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_entmax.analysis.collecting.model_run import ModelRun
from hf_entmax.analysis.reading.alignments import read_alignments
from hf_entmax.analysis.reading.conllu import read_conllu
from hf_entmax.analysis.reading.data import TextRecord, read_data
from hf_entmax.analysis.reading.speech import feature_extractor, names_sound, read_speech
from hf_entmax.analysis.reading.words import INTERROGATIVE_WORDS
from hf_entmax.analysis.report import write_report
from hf_entmax.analysis.statistics.result import AttentionStatistics
from hf_entmax.options import AnalysisOptions

#: Task -> the Auto class that loads it.
TASKS = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "feature-extraction": "AutoModel",
}
#: Task -> how the names of classes end that do it.
_CLASSES_OF_TASK = {
    "seq2seq": ("ForConditionalGeneration", "ForSeq2SeqLM", "MTModel", "EncoderDecoderModel"),
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "masked-lm": ("ForMaskedLM", "ForPreTraining"),
    "sequence-classification": ("ForSequenceClassification",),
    "token-classification": ("ForTokenClassification",),
}


@dataclass
class Analysis:
    """What :func:`analyze` returns.

    Attributes:
        statistics: of every model, the main one first.
        report: the HTML file, or None on processes other than the main one.
        problems: parts that failed and are missing from the report.
    """

    statistics: list[AttentionStatistics]
    report: Path | None
    problems: list[str] = field(default_factory=list)


def analyze(
    model: Any,
    data: str | os.PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    scores: Mapping[str, Sequence[float]] | None = None,
    progress: bool = True,
    warn: Callable[[str], Any] | None = None,
    **options: Any,
) -> Analysis:
    """Measure what the heads of one or several models do on some text, and write a report.

    Under ``accelerate launch`` the data are shared out among the processes. What can be measured is measured: a broken
    gold file or a batch that cannot be used is reported and left out, everything else goes on.

    Args:
        model: Hub id, folder, or a loaded Transformers model; patched or plain.
        data: text file, table or Hub data set, see :func:`hf_entmax.analysis.reading.data.read_data`; default: the sentences
            of ``conllu`` or the pairs of ``alignments``. For a speech model that writes, a table with a column ``audio``, see
            :func:`hf_entmax.analysis.reading.speech.read_speech`.
        tokenizer: for a loaded ``model``; default: loaded from its name or path.
        scores: how good the models are, to stand beside their density, see :func:`hf_entmax.analysis.write_report`.
        progress: show progress bars.
        warn: called with every problem as it comes up; default: nothing, they are in the result and the report.
        options: fields of :class:`hf_entmax.options.AnalysisOptions`, which says what they mean; ``compare`` takes loaded
            models too.

    Returns:
        The statistics, the path of the report and the list of problems.

    Raises:
        FileNotFoundError: no such file or data set.
        TypeError: an unknown option.
        ValueError: an option out of range, no data, attention that cannot be seen.
        KeyboardInterrupt: Ctrl-C, after a report of what had been measured until then was written (with one process).
    """
    from accelerate import Accelerator

    chosen = AnalysisOptions(**options)
    _check_options(chosen)
    models = [model, *(chosen.compare or ())]
    names = _names(models, chosen.names)
    accelerator = Accelerator(cpu=chosen.device == "cpu")
    problems: list[str] = []

    def report_problem(text: str) -> None:
        problems.append(text)
        if warn is not None and accelerator.is_main_process:
            warn(text)

    limit = chosen.max_sentences
    sentences = _read_gold(read_conllu, chosen.conllu, limit, "dependencies", report_problem)
    pairs = _read_gold(read_alignments, chosen.alignments, limit, "alignments", report_problem)
    sound = data is not None and names_sound(data)
    if sound and chosen.target_column:
        raise ValueError(
            f"target_column is {chosen.target_column!r}; recordings have a text, and no target: leave it out."
        )
    if data is not None and sound:
        records: list[Any] = list(read_speech(data, limit, chosen.source_column or "text"))
    elif data is not None:
        names_of_data = ("source_column", "target_column", "split", "dataset_config")
        records = read_data(data, **{name: getattr(chosen, name) for name in names_of_data}, limit=limit)
    else:
        records = [TextRecord(" ".join(pair.source), " ".join(pair.target)) for pair in pairs]
        records = records or [TextRecord(sentence.text) for sentence in sentences]
    if not records:
        raise ValueError(
            "there is no text to analyse: pass data (a file or a Hub data set), or a readable treebank or alignment file."
        )
    statistics: list[AttentionStatistics] = []
    stopped: KeyboardInterrupt | None = None
    try:
        for place, (entry, name) in enumerate(zip(models, names, strict=True)):
            device = chosen.device or accelerator.device
            loaded, words = _load(entry, tokenizer if place == 0 else None, chosen.task, device)
            extractor = feature_extractor(loaded) if sound else None
            run = ModelRun(loaded, words, name, accelerator, report_problem, chosen, progress, extractor)
            decodes = accelerator.is_main_process and run.can_decode()
            run.measure(statistics, records, sentences, pairs)
            run.measure_importance(statistics[-1], records)
            if decodes:
                run.decode(statistics[-1], records)
            if chosen.num_examples and accelerator.is_main_process:
                statistics[-1].examples = run.examples(records)
            del loaded, run
    except KeyboardInterrupt as stop:
        if accelerator.num_processes > 1 or not statistics:
            raise
        stopped = stop
    path = None
    if accelerator.is_main_process:
        for other in statistics:
            other.info |= {"data": str(data or chosen.conllu or chosen.alignments), "max_sentences": limit}
        path = write_report(statistics, chosen.out, title=chosen.title, scores=scores, figures=chosen.figures)
        for place, other in enumerate(statistics):
            other.save(path.parent / f"statistics-{place}.safetensors")
    if stopped is not None:
        report_problem(f"interrupted: {path} shows what had been measured until then.")
        raise stopped
    accelerator.wait_for_everyone()
    return Analysis(statistics, path, problems)


def _check_options(options: AnalysisOptions) -> None:
    if options.task is not None and options.task not in TASKS:
        raise ValueError(f"task is {options.task!r}; allowed are {', '.join(TASKS)}.")
    if options.importance not in ("none", "gradient", "masking", "both"):
        raise ValueError(f"importance is {options.importance!r}; allowed are none, gradient, masking and both.")
    if options.language not in INTERROGATIVE_WORDS:
        known = ", ".join(INTERROGATIVE_WORDS)
        raise ValueError(f"language is {options.language!r}; question words are known for {known}.")
    for what, least in {"max_sentences": 1, "importance_sentences": 1, "num_examples": 0, "decode": 0}.items():
        if (value := getattr(options, what)) < least:
            raise ValueError(f"{what} is {value}; it must be at least {least}.")


def _read_gold(read: Callable[[Any], list[Any]], path: Any, limit: int, what: str, warn: Callable[[str], None]) -> list:
    try:
        return [] if path is None else read(path)[:limit]
    except ValueError as error:
        warn(f"{error} Statistics of {what} are left out.")
        return []


def infer_task(config: Any) -> str:
    """Infer the task of a configuration from its architecture, else from its kind."""
    for name in getattr(config, "architectures", None) or []:
        for task, endings in _CLASSES_OF_TASK.items():
            if name.endswith(endings):
                return task
    return "seq2seq" if getattr(config, "is_encoder_decoder", False) else "feature-extraction"


def _load(entry: Any, tokenizer: Any, task: str | None, device: Any) -> tuple[Any, Any]:
    import transformers

    if not isinstance(entry, (str, os.PathLike)):
        if tokenizer is None:
            if not getattr(entry, "name_or_path", ""):
                raise ValueError("a model without a name or path needs its tokenizer: pass tokenizer=.")
            tokenizer = transformers.AutoTokenizer.from_pretrained(entry.name_or_path)
        return entry, tokenizer
    entry = os.fspath(entry)
    config = transformers.AutoConfig.from_pretrained(entry)
    # The class that was saved, unless the user wants another head.
    own = (getattr(config, "architectures", None) or [None])[0]
    loader = getattr(transformers, str(own), None) if task is None else None
    loader = loader or getattr(transformers, TASKS[task or infer_task(config)])
    try:
        loaded = loader.from_pretrained(entry)
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            kind = type(config).__name__
            raise ValueError(
                f"{entry}: a {kind} model does not load as {task or infer_task(config)}; pass another task ({', '.join(TASKS)})."
            ) from error
        raise
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(entry)
    except (OSError, ValueError) as error:
        raise ValueError(f"{entry}: no tokenizer can be loaded there ({error}). Save it with the model.") from error
    return loaded.to(device), tokenizer


def _names(entries: Sequence[Any], names: Sequence[str] | None = None) -> list[str]:
    """Return the names given, or the shortest ends of the models' paths that tell them apart; number equal paths."""
    if names is not None:
        count = len(entries)
        if isinstance(names, str) or len(names) != count or len(set(names)) < count or not all(names):
            raise ValueError(f"names is {names!r}; give {count} different name(s), one for each model.")
        return list(names)
    paths = [
        entry if isinstance(entry, (str, os.PathLike)) else getattr(entry, "name_or_path", "") or type(entry).__name__
        for entry in entries
    ]
    parts = [Path(path).parts or (str(path),) for path in paths]
    lengths = range(1, max(map(len, parts)) + 1)
    candidates = [[str(Path(*part[-length:])) for part in parts] for length in lengths]
    ends = next(ends for ends in candidates if len(set(ends)) == len(set(parts)))
    return [end if end not in ends[:i] else f"{end} ({ends[: i + 1].count(end)})" for i, end in enumerate(ends)]
