"""The data of the multilabel study: Mulan ARFF files, synthetic documents, and texts with sets of labels."""

from __future__ import annotations

import dataclasses
import gzip
import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_entmax.analysis.reading.tables import find, read_rows

MULAN_SOURCE = "https://github.com/tsoumakas/mulan/tree/master/data/multi-label"


@dataclasses.dataclass
class Split:
    """Features ``[N, F]`` (or texts) and labels ``[N, K]`` of one part of a data set."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Tensor) -> Split:
        """Return the rows of that index."""
        return Split(self.features[index], self.labels[index])


def _open(path: Path) -> io.StringIO:
    zipped = path.with_name(path.name + ".gz")
    if path.exists():
        return io.StringIO(path.read_text(encoding="utf-8"))
    if zipped.exists():
        return io.StringIO(gzip.decompress(zipped.read_bytes()).decode("utf-8"))
    raise FileNotFoundError(f"Neither {path} nor {zipped} exists.")


def read_mulan(name: str) -> tuple[Split, Split]:
    """Read the published training and test rows of a Mulan data set, features standardised by the training rows.

    Nominal features become one column per value. The labels are the attributes that the XML file names.

    Raises:
        FileNotFoundError: if the folder ``multilabel/NAME`` is not found.
    """
    from scipy.io import arff

    try:
        folder = find(f"multilabel/{name}")
    except FileNotFoundError as error:
        files = f"{name}-train.arff, {name}-test.arff and {name}.xml"
        raise FileNotFoundError(f"{error} {files} come from {MULAN_SOURCE}.") from error
    root = ElementTree.parse(_open(folder / f"{name}.xml")).getroot()
    wanted = [_plain(element.attrib["name"]) for element in root if element.tag.endswith("label")]
    parts = []
    for part in ("train", "test"):
        rows, meta = arff.loadarff(_open(folder / f"{name}-{part}.arff"))
        columns, labels = [], {}
        for attribute in meta.names():
            kind, values = meta[attribute]
            if _plain(attribute) in wanted:
                labels[_plain(attribute)] = (rows[attribute] == b"1").astype(np.float32)
            elif kind == "nominal":
                columns += [(rows[attribute] == value.encode()).astype(np.float32) for value in values]
            else:
                columns.append(rows[attribute].astype(np.float32))
        if missing := sorted(set(wanted) - set(labels)):
            raise ValueError(f"{folder}: the labels {missing} of {name}.xml are no attributes of {name}-{part}.arff.")
        parts.append((np.stack(columns, 1), np.stack([labels[label] for label in wanted], 1)))
    mean, std = parts[0][0].mean(0), parts[0][0].std(0)
    std[std == 0] = 1.0
    train, test = (Split(torch.from_numpy((x - mean) / std).float(), torch.from_numpy(y)) for x, y in parts)
    return train, test


def _plain(name: str) -> str:
    return name.replace("\\", "").strip().strip("'\"").strip()


def synthetic_documents(
    counts: tuple[int, ...] | None,
    *,
    mean_labels: int,
    length: int,
    seed: int,
    n_samples: int = 5000,
    vocabulary: int = 10,
    n_labels: int = 10,
) -> Split:
    """Draw bags of words with sets of topics, by ``sklearn.datasets.make_multilabel_classification``.

    Args:
        counts: the numbers of labels that rows have, each equally often; None leaves them Poisson distributed.
        mean_labels: mean of that Poisson distribution (conditioned on 1 to ``n_labels``).
        length: mean number of words.
        seed: of the generator: another seed is another set of topics.
        n_samples: how many rows.
        vocabulary: number of different words.
        n_labels: number of topics, K.

    Returns:
        Word counts divided by ``length`` and 0/1 labels.

    Raises:
        ValueError: if a number of labels is impossible, or so rare that the generator did not make enough such rows.
    """
    from sklearn.datasets import make_multilabel_classification

    if counts is not None and not all(1 <= c <= n_labels for c in counts):
        raise ValueError(f"counts={counts} is not allowed: rows have between 1 and {n_labels} labels.")
    size, options = n_samples, {"length": length, "allow_unlabeled": False, "random_state": seed}
    while True:
        x, y = make_multilabel_classification(
            n_samples=size, n_features=vocabulary, n_classes=n_labels, n_labels=mean_labels, **options
        )
        if counts is None:
            chosen = np.arange(n_samples)
            break
        per_count = [np.flatnonzero(y.sum(1) == c) for c in counts]
        need = [n_samples // len(counts) + (i < n_samples % len(counts)) for i in range(len(counts))]
        if all(len(have) >= n for have, n in zip(per_count, need, strict=True)):
            chosen = np.concatenate([have[:n] for have, n in zip(per_count, need, strict=True)])
            break
        share = min(len(have) / n for have, n in zip(per_count, need, strict=True))
        if size > 64 * n_samples or share == 0:
            raise ValueError(f"counts={counts} are too rare around mean_labels={mean_labels}: {size} rows had too few.")
        size = int(size * 1.2 / share)
    order = np.random.default_rng(seed).permutation(chosen)
    return Split(torch.from_numpy(x[order] / length).float(), torch.from_numpy(y[order]).float())


def split_rows(data: Split, shares: tuple[float, ...], seed: int) -> list[Split]:
    """Cut shuffled rows into consecutive parts; the last part takes what is left."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    cuts = [round(sum(shares[: i + 1]) * len(data)) for i in range(len(shares) - 1)]
    return [data.rows(part) for part in torch.tensor_split(order, cuts)]


@dataclasses.dataclass
class TextData:
    """Texts as character ids ``[N, T]`` (0 is padding, 1 begins a text) with labels ``[N, K]``."""

    splits: dict[str, Split]
    characters: list[str]
    label_names: list[str]


def load_texts(config: Any) -> TextData:
    """Return the texts as ids of characters, with their labels."""
    if config.data == "english_verbs":
        return english_verb_texts(config.limit)
    return read_texts(config.files, config.text_column, config.label_column, config.limit)


def read_texts(files: dict[str, str], text_column: int, label_column: int, limit: int | None) -> TextData:
    """Read texts with semicolon-separated labels from TSV files, plain or gzipped.

    Args:
        files: paths by split name; ``"train"`` fixes the characters and the labels.
        text_column: column of the text, from 0.
        label_column: column of the labels, from 0.
        limit: use at most so many rows of each file.

    Raises:
        ValueError: if a row has too few columns.
    """
    columns = (str(text_column), str(label_column))
    tables = {
        split: [(text, labels.split(";")) for text, labels in read_rows(path, columns)[:limit]]
        for split, path in files.items()
    }
    return _encoded(tables, tables["train"])


def english_verb_texts(limit: int | None = None) -> TextData:
    """Read forms of English verbs with the names of the cells they fill: a small text task that needs no download."""
    cells = ("lemma", "third_person", "past", "past_participle", "present_participle")
    filled: dict[str, set[str]] = {}
    for row in read_rows(str(Path(__file__).parents[1] / "data" / "english_verbs.tsv"), cells, blank=True):
        for cell, forms in zip(cells, row, strict=True):
            for form in filter(None, forms.split("|")):
                filled.setdefault(form, set()).add(cell)
    rows = [(form, sorted(own)) for form, own in sorted(filled.items())]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()[:limit]
    data = _encoded({"all": [rows[i] for i in order]}, [rows[i] for i in order])
    parts = split_rows(data.splits["all"], (0.8, 0.1, 0.1), seed=0)
    return dataclasses.replace(data, splits=dict(zip(("train", "validation", "test"), parts, strict=True)))


def _encoded(tables: dict[str, list[tuple[str, list[str]]]], known: list[tuple[str, list[str]]]) -> TextData:
    """Make tensors of texts and labels; what ``known`` has not is the unknown character 2, and no label."""
    characters = sorted({character for text, _ in known for character in text})
    labels = sorted({label for _, own in known for label in own})
    index, place = {c: i + 3 for i, c in enumerate(characters)}, {label: i for i, label in enumerate(labels)}
    longest = max(len(text) for rows in tables.values() for text, _ in rows) + 1
    splits = {}
    for split, rows in tables.items():
        ids, targets = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), len(labels))
        for i, (text, own) in enumerate(rows):
            ids[i, : len(text) + 1] = torch.tensor([1, *(index.get(c, 2) for c in text)])
            targets[i, [place[label] for label in own if label in place]] = 1.0
        splits[split] = Split(ids, targets)
    return TextData(splits, characters, labels)
