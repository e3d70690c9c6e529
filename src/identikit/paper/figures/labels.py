"""What stands under a figure, beside its caption: model, data, numbers and seed, and what was left out."""

from pandas import DataFrame

from identikit.paper.evidence import Evidence
from identikit.paper.figures.frames import FEWEST, passage, tags_left_out


def of_texts(frame: DataFrame, evidence: Evidence) -> str:
    """Label a figure drawn from all texts of a dataset."""
    return evidence.label


def of_rows(frame: DataFrame, evidence: Evidence) -> str:
    """Label a figure of intervals: how many rows were bounded."""
    return f"{evidence.label} · {sum(frame['rows']):,} rows drawn at random"


def of_rates(frame: DataFrame, evidence: Evidence) -> str:
    """Label a figure of rates: maps are tested on a part of the texts."""
    numbers, folds = sorted({round(tokens) for tokens in frame["tokens"]}), max(frame["folds"])
    tokens = " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1])))
    over = f"one fold of {tokens} tokens" if folds == 1 else f"{folds} folds of about {tokens} tokens"
    return f"{evidence.label} · rates over {over}"


def of_passage(frame: DataFrame, evidence: Evidence) -> str:
    """Label Fig. 6: how many keys of the passage it shows, and what the others hold."""
    whole = passage(evidence)
    keys, shown, queries = len({*whole["key"]}), len({*frame["key"]}), len({*frame["query"]})
    held = " and ".join(
        f"{100 * (sum(whole[name]) - sum(frame[name])) / queries:.0f} % of {name}" for name in ("raw", "effective")
    )
    rest = f" · {shown} keys shown; the others hold {held} attention on average" if shown < keys else ""
    return f"{_own_text(evidence, 'passage of Appendix A.3', keys)}{rest}"


def of_sentence(frame: DataFrame, evidence: Evidence) -> str:
    """Label a figure of the sentence of Appendix C.4."""
    return _own_text(evidence, "sentence of Appendix C.4", len({*frame["input"]}))


def of_tags(frame: DataFrame, evidence: Evidence, *, layer: int) -> str:
    """Label a figure by part of speech: how many tags have too few tokens to be shown."""
    rare = tags_left_out(evidence, layer=layer)
    if rare.empty:
        return evidence.label
    tags = "1 tag" if len(rare) == 1 else f"{len(rare)} tags"
    return f"{evidence.label} · {tags} with fewer than {FEWEST} tokens not shown ({rare['tokens'].sum():,} tokens)"


def of_model(frame: DataFrame, evidence: Evidence) -> str:
    """Label a figure of the model's weights, measured on made-up tokens."""
    return f"{evidence.subject.model} · made-up tokens · seed {evidence.seed}"


def _own_text(evidence: Evidence, words: str, tokens: int) -> str:
    return f"{evidence.subject.model} · {words} · n = 1 text, {tokens} tokens · seed {evidence.seed}"
