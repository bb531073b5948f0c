"""Lay the files of a cloned public repository out as the recipes read them.

    git clone https://github.com/multi30k/dataset multi30k
    python -m recipes.lab.public_data multi30k multi30k
    export HF_ENTMAX_DATA=data
    python recipes/translation.py --config recipes/configs/translation_multi30k.yaml --out runs/mt

`recipes/data/README.md` lists the sets with source, licence and size. Sources are read as they are; what is written is compressed,
with nothing of the time or the machine in it, and the same for everybody: a fingerprint of each set is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Files = Iterator[tuple[str, bytes]]

LANGUAGES = (
    "arabic", "armenian", "german", "hebrew", "hindi", "hungarian", "latin", "navajo", "quechua", "russian", "spanish",
    "zulu",
)  # fmt: skip
#: Of the shared task, and not in the tables of many languages: those under other licences than CC BY-SA, and three more.
LEFT_OUT = ["basque", "finnish", "georgian", "haida", "khaling", "kurmanji", "sorani", "turkish"]


@dataclasses.dataclass(frozen=True)
class PublicSet:
    """A public repository, and which of its files become which.

    Attributes:
        url: what to clone.
        fingerprint: of the files behind the published results.
        files: pairs of a pattern in the repository and the folder for what it finds.
        more: yields further files, as names and contents, from the repository's folder.
    """

    url: str
    fingerprint: str = ""
    files: tuple[tuple[str, str], ...] = ()
    more: Callable[[Path], Files] = lambda _: iter(())


def content(path: Path) -> bytes:
    """Return what is in a file, compressed or not."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def inflection(repository: Path) -> Files:
    """Yield each of twelve languages in files of its own, and all languages in one table each."""
    paths = {path.name: path for folder in ("all", "surprise") for path in (repository / "task1" / folder).glob("*-*")}

    def rows(language: str, split: str) -> bytes:
        if f"{language}-{split}" not in paths:
            raise FileNotFoundError(f"{repository} has no task1/all/{language}-{split}, nor in task1/surprise.")
        return content(paths[f"{language}-{split}"])

    for language in LANGUAGES:
        for split in ("train-high", "train-medium", "dev", "test"):
            yield f"morph/typology12/{language}/{split}.tsv", rows(language, split)
    known = sorted(name.removesuffix("-test") for name in paths if name.endswith("-test") and "-covered" not in name)
    known = [language for language in known if language not in LEFT_OUT]
    medium = [language for language in known if f"{language}-train-medium" in paths]
    splits = {"train": "train-medium", "dev": "dev", "test": "test"}
    parts = ((f"{language}\t{split}", rows(language, splits[split])) for language in medium for split in splits)
    yield f"morph/all_medium_{len(medium)}langs.tsv", _table("lang split lemma form tags", parts)
    high = [language for language in known if f"{language}-train-high" in paths]
    parts = ((language, rows(language, "train-high")) for language in high)
    yield f"morph/all_high_train_{len(high)}langs.tsv", _table("lang lemma form tags", parts)


def _table(header: str, parts: Iterable[tuple[str, bytes]]) -> bytes:
    """Make one table with a header; each part's rows behind its own first cells."""
    lines = ["\t".join(header.split())]
    for first, rows in parts:
        lines += [f"{first}\t{row}" for row in rows.decode("utf-8").split("\n") if row]
    return "".join(f"{line}\n" for line in lines).encode()


def tatoeba(folder: Path) -> Files:
    """Yield sentence pairs, no sentence in two splits: pairs that share one in either language, whatever its case, stay together.

    A group goes where the hash of its first English sentence says.
    """
    with zipfile.ZipFile(folder / "deu-eng.zip") as archive:
        text = archive.read("deu.txt").decode("utf-8")
    pairs = list(dict.fromkeys(tuple(line.split("\t")[:2]) for line in text.split("\n") if line))
    group: dict[str, str] = {}

    def find(name: str) -> str:
        while group.setdefault(name, name) != name:
            group[name] = name = group[group[name]]
        return name

    for english, german in pairs:
        group[find(f"en {english.lower()}")] = find(f"de {german.lower()}")
    groups = [find(f"en {english.lower()}") for english, _ in pairs]
    first: dict[str, str] = {}
    for name, (english, _) in zip(groups, pairs, strict=True):
        first[name] = min(english, first.get(name, english))
    splits: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for name, pair in zip(groups, pairs, strict=True):
        place = int.from_bytes(hashlib.sha256(first[name].encode()).digest()[:4], "big") % 10_000
        if split := "test" if place < 150 else "dev" if place < 300 else "train" if place >= 450 else "":
            splits[split].append("\t".join(pair))
    for split, lines in splits.items():
        yield f"mt/tatoeba_de-en/{split}.en-de.tsv", "".join(f"{line}\n" for line in lines).encode()


def treebank(repository: Path) -> Files:
    """Yield the CoNLL-U files, in a folder of the treebank's name."""
    for path in sorted(repository.glob("*-ud-*.conllu*")):
        yield f"ud/{repository.resolve().name.removeprefix('UD_')}/{path.name.removesuffix('.gz')}", content(path)


def alignments(repository: Path) -> Files:
    """Yield German and English sentences whose words were aligned by hand; links beyond a sentence are left out."""
    name = "German-English_WordAlignment"
    with zipfile.ZipFile(repository / f"{name}.zip") as archive:
        german, english, gold = (
            archive.read(f"{name}/{file}").decode("utf-8-sig").splitlines()
            for file in ("test.de", "test.en", "de-en.wa")
        )
    lines = []
    for number, (*texts, links) in enumerate(zip(german, english, gold, strict=True), 1):
        source, target = (text.split() for text in texts)
        sure = sorted([int(place) for place in link.split("-")] for link in links.split())
        sure = [link for link in sure if link[0] < len(source) and link[1] < len(target)]
        row = {"id": f"deen-{number}", "src": source, "tgt": target, "sure": sure, "possible": []}
        lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")))
    yield "alignments/de-en.jsonl", "".join(f"{line}\n" for line in lines).encode()


_MULTI30K = tuple(
    (f"data/task1/raw/{split}.*", "mt/multi30k_task1_raw")
    for split in ("train", "val", "test_2016_flickr", "test_2017_flickr")
)
_MULAN = tuple(
    (f"data/multi-label/{name}/{name}{end}*", f"multilabel/{name}")
    for name in ("birds", "emotions", "scene")
    for end in (".xml", "-train.arff", "-test.arff")
)
_ENJA = (("*.en", "mt/small_parallel_enja"), ("*.ja", "mt/small_parallel_enja"))
_SCITLDR = (("SciTLDR-Data/SciTLDR-A/*.jsonl", "summ/scitldr-a"),)
_SHAKESPEARE = (("data/tinyshakespeare/input.txt", "lm/tinyshakespeare"),)
_WIKITEXT = (("word_language_model/data/wikitext-2/*.txt", "lm/wikitext-2"),)
_EWT = tuple((f"en_ewt-ud-{split}.conllu*", "ud/English-EWT") for split in ("train", "dev"))
_UD = "https://github.com/UniversalDependencies"

SETS = {
    "alignments": PublicSet("https://github.com/bicici/SMTData", "f102ddd07abfa587", more=alignments),
    "enja": PublicSet("https://github.com/odashi/small_parallel_enja", "682492058972a8e0", _ENJA),
    "inflection": PublicSet("https://github.com/sigmorphon/conll2018", "9c4ba7e76f1323f1", more=inflection),
    "mulan": PublicSet("https://github.com/tsoumakas/mulan", "842e68c05f192a1e", _MULAN),
    "multi30k": PublicSet("https://github.com/multi30k/dataset", "65b543a274b61810", _MULTI30K),
    "scitldr": PublicSet("https://github.com/allenai/scitldr", "5b9cd03e3c0373e5", _SCITLDR),
    "shakespeare": PublicSet("https://github.com/karpathy/char-rnn", "643b200a345deffd", _SHAKESPEARE),
    "tatoeba": PublicSet("https://www.manythings.org/anki/deu-eng.zip", "482610b641058a89", more=tatoeba),
    "treebank": PublicSet(f"{_UD}/UD_English-PUD", "b1dc5cc2101f0d94", more=treebank),
    "treebank-ewt": PublicSet(f"{_UD}/UD_English-EWT", "ebe4b4d44ec07e8f", _EWT),
    "treebank-german": PublicSet(f"{_UD}/UD_German-PUD", "4afff20657d91f7d", more=treebank),
    "wikitext-2": PublicSet("https://github.com/pytorch/examples", "f565b10fea033a4c", _WIKITEXT),
}


def files_of(name: str, repository: Path) -> Files:
    """Yield what a set consists of, as names and contents.

    Raises:
        FileNotFoundError: if the repository does not hold it.
    """
    source = SETS[name]
    for pattern, folder in source.files:
        found = sorted(repository.glob(pattern))
        if not found:
            raise FileNotFoundError(f"{repository} has no {pattern}: clone {source.url} and give its folder.")
        for path in found:
            yield f"{folder}/{path.name.removesuffix('.gz')}", content(path)
    yield from source.more(repository)


def lay_out(name: str, repository: Path, out: Path) -> str:
    """Write a set under ``out``; returns its fingerprint, of the names and contents of all files.

    Raises:
        FileNotFoundError: if the repository does not hold it; nothing is written then.
    """
    files = list(files_of(name, repository))
    if not files:
        raise FileNotFoundError(f"{repository} holds no file of {name}: clone {SETS[name].url} and give its folder.")
    digest = hashlib.sha256()
    for where, data in files:
        digest.update(f"{where}\n{hashlib.sha256(data).hexdigest()}\n".encode())
        path = out / (where if where.endswith(".xml") else f"{where}.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if where.endswith(".xml") else gzip.compress(data, mtime=0))
        print(f"{path}: {len(data):,} bytes")
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(SETS))
    parser.add_argument("repository", type=Path, help="folder of the clone; tatoeba: folder of deu-eng.zip")
    parser.add_argument("--out", type=Path, default=Path("data"), help="what $HF_ENTMAX_DATA is to name")
    args = parser.parse_args()
    try:
        found, published = lay_out(args.name, args.repository, args.out), SETS[args.name].fingerprint
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    same = "that of the published results" if found == published else f"the published results are from {published}"
    print(f"fingerprint {found}: {same}")


if __name__ == "__main__":
    main()
