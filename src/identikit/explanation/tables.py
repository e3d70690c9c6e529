"""The tables of `identikit evaluate`, and what their columns mean."""

from identikit.explanation.faithfulness import SCORES
from identikit.results.table import TEXT, TEXTS, DataTable, count, number, word

_MEASURE = word("the measure, or a baseline: random or reversed", key=True)
_SCORE = word(
    "the score: " + "; ".join(f"{name}: {score.meaning}" for name, score in SCORES.items()), *SCORES, key=True
)
_NONE = "no text gives it: too few sources, or the score is not of baselines"

EVALUATION = {
    "texts": TEXTS,
    "scores": DataTable(
        "The score of each measure on each text.",
        "one row per text, measure and score",
        {"text": TEXT, "measure": _MEASURE, "score": _SCORE, "value": number("the score", "any number", _NONE)},
    ),
    "summary": DataTable(
        "The scores over all texts.",
        "one row per measure and score",
        {
            "measure": _MEASURE,
            "score": _SCORE,
            "texts": count("number of texts that give the score"),
            "mean": number("mean over texts", "any number", _NONE),
            "error": number("standard error of the mean over texts", "0 or more", f"fewer than two texts, or {_NONE}"),
            "low": number("lower end of a 95% bootstrap interval over texts", "any number", "as the error"),
            "high": number("upper end of that interval", "any number", "as the error"),
        },
    ),
    "shuffled": DataTable(
        "What is left of each measure when layers are shuffled; it is empty where this was not tested.",
        "one row per measure and number of shuffled layers",
        {
            "measure": _MEASURE,
            "layers": count("how many of the last layers are shuffled", "1 to layers", key=True),
            "correlation": number("rank correlation with the measure as it was, mean over texts", "−1 to 1", _NONE),
            "error": number("standard error of the mean over texts", "0 or more", f"fewer than two texts, or {_NONE}"),
        },
    ),
    "curves": DataTable(
        "How far an output moves as sources are replaced or put back, a measure's largest first; empty where this was "
        "not tested.",
        "one row per curve, way and share of sources",
        {
            "curve": word("the measure, a baseline, or the best or the worst order that was found", key=True),
            "way": word(
                "deletion: sources are replaced; insertion: they are put back", "deletion", "insertion", key=True
            ),
            "share": number("share of the sources that are replaced or put back", "0 to 1", key=True),
            "change": number(
                "distance from the output as it was, relative to its size, or what a target's probability loses; mean "
                "over texts",
                "any number",
                _NONE,
            ),
        },
    ),
}
