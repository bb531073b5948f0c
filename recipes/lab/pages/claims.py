"""The table of claims: what the papers found and what we aim for, with the paper's figure and how our rows are judged.

Papers: Peters, Niculae and Martins 2019; Correia, Niculae and Martins 2019; Laha et al. 2018.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ..rows import SITES, Rows, table
from . import judges_heads as heads
from .judges import (
    MARGIN,
    SOFTMAX,
    Judge,
    Verdict,
    best_alpha,
    better,
    causal_aim,
    certainty,
    conversion,
    encoder_aim,
    ensembles,
    lambdas,
    speed,
    words_with_weight,
    worst_alpha,
    zeros_for_free,
)


class Claim(NamedTuple):
    """What is claimed, where; the paper's figure; how it is judged."""

    source: str
    claim: str
    paper: str
    judge: Judge

    @property
    def text(self) -> str:
        """The claim with its source."""
        return f"{self.source}: {self.claim}"


def _translation(group: str, pair: str, both: str, sparsemax: str, fixed: str, learned: str) -> tuple[Claim, ...]:
    """Table 2 of Peters et al. and table 1 of Correia et al. for one pair of languages, with the papers' gaps in BLEU."""
    score = {"measure": "bleu", "unit": "BLEU"}
    peters, correia = f"Peters et al., table 2 ({pair})", f"Correia et al., table 1 ({pair})"
    return (
        Claim(peters, "1.5 for output and attention translates better than softmax", f"{both} BLEU",
              better(group, ("1.5", "1.5"), SOFTMAX, **score)),
        Claim(peters, "softmax translates better than sparsemax for both", f"{sparsemax} BLEU",
              better(group, SOFTMAX, ("2.0", "2.0"), **score)),
        Claim(correia, "attention with alpha 1.5 is as good as softmax", f"{fixed} BLEU",
              better(group, ("1.0", "1.5"), SOFTMAX, **score, margin=MARGIN)),
        Claim(correia, "attention with learned alpha is as good as softmax", f"{learned} BLEU",
              better(group, ("1.0", "learned"), SOFTMAX, **score, margin=MARGIN)),
    )  # fmt: skip


def _mappings(group: str, task: str, measure: str, unit: str, gaps: dict[str, str]) -> tuple[Claim, ...]:
    """Table 2 of Laha et al.: their mappings as attention."""
    return tuple(
        Claim(f"Laha et al., table 2 ({task})", f"attention by {name} is better than softmax", f"{gap} {unit}",
              better(group, ("1.0", "2.0" if name == "sparsemax" else name.replace("-", "_")), SOFTMAX, measure, unit))
        for name, gap in gaps.items()
    )  # fmt: skip


def _figures_2_to_5(study: str) -> tuple[Claim, ...]:
    """Figures 2 to 5 of Correia et al.: alphas and densities of heads."""
    source = "Correia et al., figure {}, " + study
    return (
        Claim(source.format(2), "alphas fall first and rise later", "for about 1,000 steps",
              heads.over_training(study, heads.dip)),
        Claim(source.format(2), "after the dip heads part ways", "shown", heads.over_training(study, heads.parting)),
        Claim(source.format(3), "the learned alphas of encoder self-attention have two modes", "shown",
              heads.modes(study, SITES[:1], 2)),
        Claim(source.format(3), "those of cross- and decoder self-attention have one mode", "shown",
              heads.modes(study, SITES[1:], 1)),
        Claim(source.format(4), "learned alpha spreads the densities of heads more evenly than 1.5 (entropy of a histogram "
              "of ten bins, 1 if flat)", "shown", heads.densities(study, heads.evenness, "")),
        Claim(source.format(4), "with learned alpha more heads keep at least 95 % of their weights", "shown",
              heads.densities(study, heads.dense)),
        Claim(source.format(5), "the heads of a layer differ more in density with learned alpha than with 1.5 (standard "
              "deviation)", "shown", heads.densities(study, heads.variation)),
    )  # fmt: skip


def _pretrained(group: str, name: str, roles: dict[str, tuple[str, str]]) -> tuple[Claim, ...]:
    """Figures 6 to 10 of Correia et al. on a model that had its heads before it was made sparse."""
    source = "Correia et al., figure {}, " + name
    return (
        *(
            Claim(source.format(figure), f"the surest head for the {what} gets surer when it is sparse",
                  "surer with learned alpha", heads.made_sparse(group, column))
            for column, (what, figure) in roles.items()
        ),
        Claim(source.format(6), "sparse heads are more diverse", "in every layer",
              heads.made_sparse(group, "head_diversity", "sites", "")),
        Claim(source.format(10), "a head is sparse in one sentence and dense in another of similar length", "shown",
              heads.contrasts(group)),
    )  # fmt: skip


_ROLES = {
    "confidence_previous": ("previous token", "7"), "subword_merging_multi": ("subwords of the same word", "8"),
    "interrogation": ("question mark", "9"),
}  # fmt: skip
_KINDS = {"1.5": "alpha 1.5", "learned": "learned alpha"}
_T1, _C = "Peters et al., table 1", "Correia et al."

CLAIMS: tuple[Claim, ...] = (
    Claim(_T1, "a sparse output (1.5) inflects better than softmax", "+2.33 %",
          better("inflection", ("1.5", "softmax"), SOFTMAX)),
    Claim(_T1, "sparse attention (1.5) inflects better than softmax", "+0.65 %",
          better("inflection", ("1.0", "1.5"), SOFTMAX)),
    Claim(_T1, "so do both together", "+2.38 %", better("inflection", ("1.5", "1.5"), SOFTMAX)),
    Claim(_T1, "a sparsemax output inflects better than softmax", "+2.40 %",
          better("inflection", ("2.0", "softmax"), SOFTMAX)),
    Claim(_T1, "both together inflect better than softmax (after 72 epochs)", "+2.38 %",
          better("inflection_epochs", ("1.5", "1.5"), SOFTMAX)),
    Claim(_T1, "an ensemble of three is better than its members", "+1.50 to +3.13 %", ensembles("inflection")),
    Claim(_T1, "an ensemble of three is better than its members (after 72 epochs)", "+1.62 to +3.13 %",
          ensembles("inflection_epochs")),
    Claim("Peters et al., section 5.1 (medium)", "a beam of 5 holds every possible answer", "79 %",
          certainty("exhaustive", 79)),
    Claim("Peters et al., section 5.1 (medium)", "there is only one possible answer", "66 %", certainty("single", 66)),
    Claim("Peters et al., figure 4", "the best output alpha is near 1.33", "1.33", best_alpha),
    Claim("Peters et al., figure 4", "an output alpha above 2 is worse than one between", "far below", worst_alpha),
    *_translation("translation", "de-en", "+0.47", "+1.01", "+0.04", "+0.11"),
    # For ja-en the paper's model with learned alpha is 0.39 worse than with 1.5: nothing to be found again.
    Claim("Correia et al., table 1 (de-en)", "learned alpha is as good as 1.5", "+0.07 BLEU",
          better("translation", ("1.0", "learned"), ("1.0", "1.5"), "bleu", "BLEU", MARGIN)),
    *_translation("translation_enja", "ja-en", "+0.33", "+1.68", "+0.56", "+0.17"),
    Claim("Peters et al., table 3", "most source words and nearly all target words get no weight (1.5)",
          "5.55 of 24.25 source, 16.13 of 17,993 target words have some", words_with_weight),
    Claim("Beside the papers, 94 languages", "a sparse output (1.5) classifies better than softmax", "",
          better("classification", ("1.5", "softmax"), SOFTMAX)),
    *(
        Claim("Beside the papers, 94 languages", f"attention with {what} is as good as softmax", "",
              better("classification", ("1.0", kind), SOFTMAX, margin=MARGIN))
        for kind, what in _KINDS.items()
    ),
    *_mappings("translation_mappings", "translation", "bleu", "BLEU",
               {"sparsemax": "+0.35", "sparsegen-lin": "+0.89", "sparsehourglass": "+0.25"}),
    *_mappings("summarization", "summarisation", "rouge1", "R-1",
               {"sparsemax": "+0.09", "sparsegen-lin": "+1.10", "sparsehourglass": "+0.34"}),
    *_figures_2_to_5("translation"),
    *_figures_2_to_5("inflection"),
    *(
        Claim(f"Correia et al., figure 6, {group}", f"heads with {what} are more diverse at every site", "in every layer",
              heads.diversity(group, output, kind))
        for group, output in (("translation", "1.0"), ("inflection", "1.5")) for kind, what in _KINDS.items()
    ),
    Claim(_C, "previous-token heads are surer (figure 7)", "softmax 93.5 %, 1.5 94.4 %, learned 95.9 %",
          heads.role("confidence_median_previous")),
    Claim(_C, "heads that merge subwords are surer (figure 8)", "softmax below 80 %, 1.5 85.6 %, learned 89.8 %",
          heads.role("subword_merging")),
    Claim(_C, "a head finds the question mark, surest with learned alpha (figure 9)",
          "softmax 98.5 %, 1.5 97.0 %, learned 99.5 %", heads.role("interrogation")),
    *(
        Claim("Correia et al., figure 7, on letters", f"with {what} the {which} surer", paper, heads.letters(kind, count))
        for (kind, what), best in zip(_KINDS.items(), ("94.4 % against 93.5 %", "95.9 % against 93.5 %"), strict=True)
        for count, which, paper in (
            (1, "surest previous-token head is", best), (4, "four surest previous-token heads are", ""),
        )
    ),
    Claim("Correia et al., section 4", "training speed with 1.5, of softmax's", "90 % (GPUs)", speed("1.5", 0.9)),
    Claim("Correia et al., section 4", "training speed with learned alpha, of softmax's", "75 % (GPUs)",
          speed("learned", 0.75)),
    Claim("Laha et al., figures 8 and 9", "attention becomes sparser as lambda grows", "shown", lambdas),
    Claim("Our aim", "a finished softmax model with at most 20 % of its weights left loses at most 0.3 BLEU", "",
          conversion("convert_mt", "BLEU", 0.3)),
    Claim("Our aim", "a finished softmax model with at most 20 % of its weights left loses at most 2 % perplexity", "",
          conversion("convert_lm", "% perplexity", 2.0)),
    Claim("Our aim", "SmolLM2-135M-Instruct, no weight trained, at least 50 % of the weights zero at 1 % perplexity", "",
          zeros_for_free),
    Claim("Our aim", "all-MiniLM-L6-v2, at most 10 % of the weights left, similarity correlation of at least 0.995", "",
          encoder_aim),
    Claim("Our aim", "SmolLM2-135M-Instruct, at most 5 % of the weights left at no more loss than the softmax control", "",
          causal_aim),
    # The words of a decoder do not see the end of their sentence: no figure 9.
    *_pretrained(heads.SMOLLM2, "SmolLM2", dict(list(_ROLES.items())[:2])),
    *_pretrained(heads.MINILM, "MiniLM", _ROLES),
)  # fmt: skip


def judged(rows: Rows) -> list[tuple[Claim, Verdict]]:
    """All claims that the rows speak to, with their verdicts."""
    return [(claim, verdict) for claim in CLAIMS if (verdict := claim.judge(rows)) is not None]


def holds(verdict: Verdict) -> bool:
    """Whether a verdict is in the claim's favour."""
    return verdict.verdict.startswith(("found", "same direction"))


def verdicts(rows: Rows) -> str:
    """Every claim beside what was found; what does not hold stands out."""
    lines = [
        [claim.text, claim.paper, verdict.here, verdict.verdict if holds(verdict) else f"**{verdict.verdict}**"]
        for claim, verdict in judged(rows)
    ]
    return table(["claim", "paper", "here", "verdict"], lines)


def looked_at(rows: Rows) -> str:
    """What was looked at where a claim does not hold."""
    return "".join(f"- *{claim.text}*: {v.tried}.\n" for claim, v in judged(rows) if v.tried and not holds(v))


def counts(rows: Rows) -> str:
    """How many verdicts there are of each kind, by source."""
    kinds = ("found", "found for", "same direction", "not found", "opposite", "not to be told")
    by: dict[str, Counter[str]] = {}
    for claim, verdict in judged(rows):
        kind = max((kind for kind in kinds if verdict.verdict.startswith(kind)), key=len)
        by.setdefault(claim.source.partition(",")[0], Counter())[kind] += 1
    by["all"] = sum(by.values(), Counter())
    shown = [kind for kind in kinds if by["all"][kind]]
    lines = [[source, sum(own.values()), *(own[kind] or "" for kind in shown)] for source, own in by.items()]
    titles = ("found in part" if kind == "found for" else kind for kind in shown)
    return table(["", "claims", *titles], lines)
