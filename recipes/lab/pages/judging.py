"""The rule by which a claim of a paper is said to hold, or not.

That one setting is better than another counts as *found* when the difference of the means has the paper's sign and is more than
twice its standard error over seeds, as *same direction* when it is smaller, as *opposite* when it is as far on the other
side, and otherwise as *not found*; that it is as good counts as found when it loses at most a margin. Where a side has one
seed only, the verdict says so and rests on the difference alone. Of a claim about many settings it counts at how many of
them the means over seeds show it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from ..rows import Row, grouped, numbers

#: What a setting that is "as good" as another may lose: BLEU, or % of accuracy.
MARGIN = 0.3

#: Output and attention alpha of a model; those of the softmax model.
Key = tuple[str, str]
SOFTMAX = ("1.0", "softmax")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One claim.

    Attributes:
        claim: what the paper says, with where.
        paper: its figure.
        here: ours.
        verdict: found, same direction, not found or opposite, perhaps with a reservation.
        tried: of what does not hold, what was looked at.
    """

    claim: str
    paper: str
    here: str
    verdict: str
    tried: str = ""

    @property
    def holds(self) -> bool:
        """Whether the verdict is in the paper's favour."""
        return self.verdict.startswith(("found", "same direction"))


def found(holds: bool, reservation: str = "") -> str:
    """The verdict on what is plainly so or not, e.g. *not found (one seed)*."""
    return ("found" if holds else "not found") + (f" ({reservation})" if reservation else "")


def judge(better: Sequence[float], worse: Sequence[float], margin: float = 0.0) -> tuple[float, str]:
    """Difference of two means, and what it says about the claim that it is positive (or, with a margin, not below it)."""
    gap = statistics.fmean(better) - statistics.fmean(worse)
    above = gap >= -margin if margin else gap > 0
    if min(len(better), len(worse)) == 1:
        return gap, found(above, "one seed")
    error = math.sqrt(sum(statistics.variance(side) / len(side) for side in (better, worse)))
    if above:
        return gap, "found" if margin or gap > 2 * error else "same direction"
    return gap, "opposite" if gap < -2 * error else "not found"


def judge_settings(gaps: Sequence[float], margin: float) -> tuple[int, str]:
    """At how many settings a difference is at least ``-margin`` (above 0 without one), and what that says of the claim."""
    shown = sum(gap >= -margin if margin else gap > 0 for gap in gaps)
    return shown, "found" if shown == len(gaps) else "not found" if shown < len(gaps) / 2 else "found in part"


def compare(
    rows: Sequence[Row], claim: str, paper: str, better: Key, worse: Key, name: str, unit: str, margin: float = 0.0
) -> list[Finding]:
    """That a setting (output and attention alpha) has more of something than another, or as much; none while one is missing."""
    groups = grouped(rows, "output_alpha", "attention")
    if not (groups.get(better) and groups.get(worse)):
        return []
    ours, theirs = (numbers(groups[key], name) for key in (better, worse))
    gap, verdict = judge(ours, theirs, margin)
    return [Finding(claim, paper, f"{gap:+.2f} {unit}: {seeds(ours)} against {seeds(theirs)}", verdict)]


def seeds(values: Sequence[float], unit: str = "") -> str:
    """A mean, with the number of seeds behind it where there are several."""
    many = f" ({len(values)} seeds)" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{unit}{many}"
