"""Is anything but the loss lost? A model made sparse beside the one it came from, on tasks.

    python -m recipes.lab.pretrained_tasks --model runs/smollm2-sparse/model --reference models/smollm2 --out runs/tasks.csv
    python -m recipes.lab.pretrained_tasks --model runs/minilm-calibrated/1 --reference models/minilm --out runs/tasks.csv

A causal model predicts the next token of WikiText-2 (``--text``) and of sentences of a treebank (``--treebank``): perplexity,
accuracy, and expected calibration error (15 bins of equal width, Guo et al. 2017). It also completes the sentences of
``recipes/data/cloze.tsv`` with one of four words. A sentence encoder (mean of the tokens) finds the partner of a text among 64
(``--pairs``), keeps or loses the order of all similarities (Spearman's correlation with the reference), and serves a logistic
regression that tells the five genres of English-EWT apart. Pairs beyond the last full 64 are left out. Each measure is a row
with a 95 % interval of the difference, from 1,000 bootstrap samples of blocks, sentences or pairs, the same for both models.
Rows that the file has are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich import print
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_entmax.analysis.reading.conllu import read_conllu
from hf_entmax.analysis.reading.tables import find, read_lists, read_rows, read_text

from ..common.sentences import embed, spearman
from .rows import RowFile, made_by, pick
from .texts import encode

FIELDS = "model reference task measure units before after difference low high command hardware versions"
CLOZE = Path(__file__).parents[1] / "data" / "cloze.tsv"
#: What one unit (a block, a sentence, a pair) contributes, and the figure that a list of such units comes to.
Units = list[Tensor]
Figure = Callable[[Tensor], float]
#: Name, units of a model, and figures of a task.
Task = tuple[str, Callable[[Any], Units], dict[str, Figure]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model that was made sparse, or a control: folder or Hub id")
    parser.add_argument("--reference", required=True, help="the model that it came from")
    parser.add_argument("--out", type=Path, required=True, help="CSV file for the rows")
    parser.add_argument("--text", default="lm/wikitext-2/test.txt.gz", help="running text for causal models")
    parser.add_argument("--treebank", default="ud/English-EWT/en_ewt-ud-{split}.conllu.gz", help="{split}: train, dev")
    parser.add_argument("--pairs", default="summ/scitldr-a/test.jsonl.gz", help="pairs of texts for sentence encoders")
    parser.add_argument("--block", type=int, default=512, help="tokens in a block, or in the longest text")
    parser.add_argument("--tokens", type=int, default=24576, help="of each text")
    parser.add_argument("--sentences", type=int, default=4000, help="of the treebank, to train the classifier on")
    return parser.parse_args()


@torch.no_grad()
def token_units(model: Any, ids: list[int], block: int) -> Units:
    """Return for each block ``[3, tokens]``: nats, whether the likeliest token is right, and its probability."""
    units = []
    for start in range(0, len(ids) - 1, block - 1):
        part = torch.tensor(ids[start : start + block])
        log_p = model(input_ids=part[None]).logits[0, :-1].float().log_softmax(-1)
        truth = part[1:]
        best = log_p.max(-1)
        nats = -log_p.gather(1, truth[:, None])[:, 0]
        units.append(torch.stack([nats, (best.indices == truth).float(), best.values.exp()]))
    return units


def calibration_error(tokens: Tensor) -> float:
    """Compute the expected calibration error of ``[3, tokens]``: mean distance of accuracy and confidence over 15 bins."""
    _, correct, confidence = tokens
    bins = (confidence * 15).long().clamp(max=14)
    gaps = torch.zeros(15).index_add_(0, bins, correct - confidence)
    return float(gaps.abs().sum() / len(bins))


@torch.no_grad()
def cloze_units(model: Any, tokenizer: Any, rows: list[tuple[str, ...]]) -> Units:
    """Return for each sentence ``[1, 1]``: whether the right word is the likeliest of the four."""
    units = []
    for prompt, *words in rows:
        start = tokenizer(prompt)["input_ids"]
        scores = []
        for word in words:
            ids = torch.tensor([start + tokenizer(" " + word, add_special_tokens=False)["input_ids"]])
            log_p = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            scores.append(float(log_p.gather(1, ids[0, 1:, None])[len(start) - 1 :].sum()))
        units.append(torch.tensor([[float(max(scores) == scores[0])]]))
    return units


def causal_tasks(args: argparse.Namespace, tokenizer: Any) -> Iterator[Task]:
    measures: dict[str, Figure] = {
        "perplexity": lambda tokens: float(tokens[0].mean().exp()),
        "accuracy": lambda tokens: float(tokens[1].mean()),
        "calibration_error": calibration_error,
    }
    sentences = [sentence.text for sentence in read_conllu(find(args.treebank.replace("{split}", "dev")))]
    for name, lines in (("text", read_text(args.text)), ("treebank", sentences)):
        ids = encode(lines, tokenizer, args.tokens)
        yield name, lambda model, ids=ids: token_units(model, ids, args.block), measures
    rows = read_rows(str(CLOZE), ("prompt", "answer", "wrong1", "wrong2", "wrong3"))
    yield "cloze", lambda model: cloze_units(model, tokenizer, rows), {"accuracy": lambda values: float(values.mean())}


def encoder_tasks(args: argparse.Namespace, tokenizer: Any) -> Iterator[Task]:
    mean: dict[str, Figure] = {"accuracy": lambda values: float(values.mean())}
    pairs = read_lists(args.pairs, ("source", "target"))
    texts, partners = [" ".join(text) for text, _ in pairs], [found[0] for _, found in pairs]
    similarities: dict[int, Tensor] = {}

    def both(model: Any) -> Tensor:
        if id(model) not in similarities:
            a, b = (embed(model, side, tokenizer, args.block) for side in (texts, partners))
            similarities[id(model)] = a @ b.T
        return similarities[id(model)]

    def partner(model: Any) -> Units:
        size = min(64, len(texts))
        blocks = both(model)[: len(texts) // size * size].split(size)
        chosen = [row[:, size * i : size * (i + 1)].argmax(1) == torch.arange(size) for i, row in enumerate(blocks)]
        return [value.view(1, 1).float() for value in torch.cat(chosen)]

    def with_reference(model: Any) -> Units:
        own = both(model)
        reference = next(iter(similarities.values()))  # of the first model that was asked
        return [torch.stack([a, b]) for a, b in zip(own, reference, strict=True)]

    yield "partner", partner, mean
    yield "similarity", with_reference, {"spearman": spearman}
    data = {}
    for split, count in (("train", args.sentences), ("dev", None)):
        found = read_conllu(find(args.treebank.replace("{split}", split)))
        count = min(count or len(found), len(found))
        found = [found[place * len(found) // count] for place in range(count)]  # the file goes genre by genre
        data[split] = [sentence.text for sentence in found], [sentence.sent_id.split("-")[0] for sentence in found]

    def genre(model: Any) -> Units:
        from sklearn.linear_model import LogisticRegression

        vectors = {split: embed(model, rows, tokenizer, args.block).numpy() for split, (rows, _) in data.items()}
        classifier = LogisticRegression(C=10, max_iter=1000).fit(vectors["train"], data["train"][1])
        correct = classifier.predict(vectors["dev"]) == data["dev"][1]
        return [torch.tensor([[float(value)]]) for value in correct]

    yield "genre", genre, mean


def interval(before: Units, after: Units, figure: Figure, samples: int = 1000) -> tuple[float, float]:
    """Return the middle 95 % of the differences over samples of the units, the same for both."""
    generator = torch.Generator().manual_seed(0)
    differences = []
    for _ in range(samples):
        chosen = torch.randint(len(before), (len(before),), generator=generator).tolist()
        old, new = (figure(torch.cat([units[i] for i in chosen], -1)) for units in (before, after))
        differences.append(new - old)
    both = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.tensor(differences, dtype=torch.float64).quantile(both).tolist()
    return low, high


def main() -> None:
    args = parse()
    results = RowFile(args.out, FIELDS)
    same = made_by("pretrained_tasks", "--out")
    tokenizer = AutoTokenizer.from_pretrained(args.reference)
    causal = any("CausalLM" in name for name in AutoConfig.from_pretrained(args.reference).architectures or ())
    auto: Any = AutoModelForCausalLM if causal else AutoModel
    models: list[Any] = []
    for task, measure, figures in (causal_tasks if causal else encoder_tasks)(args, tokenizer):
        missing = {name for name in figures if not pick(results.rows, command=same["command"], task=task, measure=name)}
        if not missing:
            continue
        if not models:
            places = (args.reference, args.model)
            models = [auto.from_pretrained(where, dtype=torch.float32).eval() for where in places]
        before, after = (measure(model) for model in models)
        for name, figure in figures.items():
            if name not in missing:
                continue
            values = [figure(torch.cat(units, -1)) for units in (before, after)]
            # Resampling ranks of all pairs of texts a thousand times takes long and says little more.
            low, high = interval(before, after, figure, 100 if name == "spearman" else 1000)
            numbers = {"before": values[0], "after": values[1], "difference": values[1] - values[0]}
            numbers |= {"low": low, "high": high}
            row = {what: "/".join(Path(getattr(args, what)).parts[-2:]) for what in ("model", "reference")}
            row |= {"task": task, "measure": name, "units": len(before)}
            results.add(**row, **{key: round(value, 5) for key, value in numbers.items()}, **same)
            print(f"{task} {name}: {values[0]:.4f} -> {values[1]:.4f} (difference {low:+.4f} ... {high:+.4f})")
    if not models:
        raise SystemExit(f"{args.out} has these rows already.")


if __name__ == "__main__":
    main()
