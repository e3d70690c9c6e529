"""Claims of ours, beside the paper's: what of attention is determined where effective attention loses it.

An alternative is any row of weights of at least 0 that sum to 1 and give the head's output. What all alternatives share
is determined. Numbers are means over texts, each text by the rows that were drawn from it.
"""

import numpy as np

from identikit.attention.certainty import WEIGHTS, mean_over_rows
from identikit.paper.claims.attention import MIDDLE, PEAK, all_one_in_short_texts, falls_with_length, layers_inside
from identikit.paper.claims.claim import (
    AVERAGED,
    BESIDE,
    EXACT,
    Basis,
    Claims,
    Finding,
    NotApplicableError,
    Verdict,
    decided,
)
from identikit.paper.claims.estimates import Measurement, percent
from identikit.paper.evidence import Evidence, Table

ENOUGH = 0.1  # the least raw attention that can be lost
LOST = 0.1  # effective attention loses it where it is below this share of raw attention
MOSTLY = 0.5
NEW = "not in the paper"
_INTERVALS = Basis(("intervals",), "wikitext", AVERAGED)
_GROUPS = Basis(("groups",), "wikitext", AVERAGED)

claim = Claims()


def _certain_mass(evidence: Evidence) -> Table:
    """The determined share of each text."""
    return mean_over_rows(evidence.tables["intervals"], ["certain_mass"], ["text", "tokens"])


@claim("all-certain-in-short-texts", f"{BESIDE}, next to Fig. 1a", Basis(("intervals",), "wikitext", EXACT), paper=NEW)
def _certain_where_short(evidence: Evidence) -> Finding:
    """Up to d_v tokens, no other attention gives the same output.

    Holds if: determined share at least 1 − 1e-6 in every text of at most d_v tokens.
    """
    return all_one_in_short_texts(_certain_mass(evidence), "certain_mass", evidence.subject.d_value)


@claim("certain-mass-falls-with-length", f"{BESIDE}, next to Fig. 1a", _INTERVALS, paper=NEW)
def _falls(evidence: Evidence) -> Finding:
    """Beyond d_v tokens, the determined share falls with length.

    Holds if: over texts of more than d_v tokens, the Spearman correlation of length with this share is negative with
    p < 0.01.
    """
    return falls_with_length(_certain_mass(evidence), "certain_mass", evidence.subject.d_value)


def _long(evidence: Evidence, name: str) -> Table:
    """The rows of a table that were drawn from texts with a null space."""
    limit = evidence.subject.d_value
    long = evidence.tables[name].query("tokens > @limit and rows > 0")
    if long["text"].nunique() < 2:
        raise NotApplicableError(f"no two texts have more than {limit} tokens, so there is no null space")
    return long


def _over_texts(numbers: Table, why: str = "") -> Measurement:
    """The mean of a number of each text, with its standard error; `why` no two texts have one, if so."""
    known = numbers.dropna().to_numpy(float)
    if len(known) < 2:
        raise NotApplicableError(why)
    return Measurement(np.array([known.mean()]), float(known.var(ddof=1)) / len(known))


@claim("special-mass-certain-where-effective-loses-it", f"{BESIDE}, next to Fig. 1b and 1c", _GROUPS, paper=NEW)
def _kept_where_lost(evidence: Evidence) -> Finding:
    """Where effective attention loses special tokens' mass, all alternatives keep most of it.

    Holds if: in heads where special tokens (or else the first token) get at least 0.1 of raw and less than a tenth of
    that of effective attention, more than half of the raw mass is determined; texts of more than d_v tokens.
    """
    groups = _long(evidence, "groups")
    group = "special" if (groups["group"] == "special").any() else "first"
    weights = groups[(groups["group"] == group) & (groups["raw"] >= ENOUGH)]
    lost = weights[weights["effective"].abs() < LOST * weights["raw"]]
    texts: Table = mean_over_rows(lost, WEIGHTS, ["text"])
    nowhere = f"effective attention does not lose the {group} tokens' mass in two texts"
    kept = _over_texts(texts["lower"] / texts["raw"], nowhere)
    raw, effective, lower, upper = (sum(lost[name] * lost["rows"]) / sum(lost["rows"]) for name in WEIGHTS)
    measured = (
        f"{percent(kept.value)} ± {100 * kept.error:.1f} is determined in the {lost['rows'].sum():,} of "
        f"{weights['rows'].sum():,} rows that lose it: raw {raw:.2f}, effective {effective:.3f}, possible {lower:.2f} "
        f"to {upper:.2f}"
    )
    return decided(evidence, [kept.over(MOSTLY)], measured)


@claim("sep-peak-certain", f"{BESIDE}, next to Fig. 1b and 1c", _GROUPS, paper=NEW)
def _peak_is_certain(evidence: Evidence) -> Finding:
    """The peak of raw attention to [SEP] in middle layers is in all alternatives.

    Holds if: the least possible attention to [SEP] in the layers that lie wholly within the middle half of the depth is
    above the greatest possible elsewhere; not applicable where raw attention there is below 1.5 times that elsewhere.
    """
    groups = _long(evidence, "groups").query("group == 'sep'")
    if groups.empty:
        raise NotApplicableError("these texts have no [SEP]")
    inside = layers_inside(groups["layer"], evidence.subject.n_layers, MIDDLE)
    there: Table = mean_over_rows(groups[inside], WEIGHTS, ["text"]).set_index("text")
    elsewhere: Table = mean_over_rows(groups[~inside], WEIGHTS, ["text"]).set_index("text")
    if there["raw"].mean() < PEAK * elsewhere["raw"].mean():
        raise NotApplicableError("raw attention to [SEP] has no peak there")
    margin = _over_texts(there["lower"] - elsewhere["upper"], "no two texts have rows both there and elsewhere")
    measured = (
        f"at least {there['lower'].mean():.3f} against at most {elsewhere['upper'].mean():.3f} "
        f"(effective {there['effective'].mean():.3f})"
    )
    return decided(evidence, [margin], measured)


@claim("strongest-edge-certain", f"{BESIDE}, next to Section 3.5", _INTERVALS, paper=NEW)
def _strongest_is_certain(evidence: Evidence) -> Finding:
    """Beyond d_v tokens, the strongest edge of most rows is the strongest in all alternatives.

    Holds if: in more than half of the rows of texts of more than d_v tokens.

    Judge a share of rows, of which some are not decided: they count as free, and then as determined.
    """
    rows = _long(evidence, "intervals")
    counted = rows.assign(sure=rows["certain"].fillna(0.0) * (rows["rows"] - rows["undecided"]))
    sums = counted.groupby("text")[["sure", "undecided", "rows"]].sum()
    least = _over_texts(sums["sure"] / sums["rows"])
    most = _over_texts((sums["sure"] + sums["undecided"]) / sums["rows"])
    unsure = f" ({sums['undecided'].sum():,} undecided)" if sums["undecided"].any() else ""
    measured = f"{percent(least.value)} ± {100 * least.error:.1f} of {sums['rows'].sum():,} rows{unsure}"
    at_least = decided(evidence, [least.over(MOSTLY)], measured)
    at_most = decided(evidence, [most.over(MOSTLY)], measured)
    if at_least.verdict == at_most.verdict:
        return at_least
    return Finding(Verdict.UNDECIDED, measured, "the undecided rows could decide it")
