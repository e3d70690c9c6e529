"""The texts behind the paper's figures: datasets by name, and its two examples."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from identikit.texts.data import read_texts, sample_texts
from identikit.texts.text import Text

PIECES = 128  # texts are cut there, as in the paper
SAMPLES = "samples"  # the embedded texts
SUBSETS = {"mnli-500": "mnli"}  # parts of datasets
TEXTS_TAKEN = {"mnli": 4000, "mnli-500": 500, "wikitext": 1000}  # where figures do not take all

SENTENCE: Text = (  # of Figures 19 to 25 (Appendix C.4), as MRPC writes it
    "He said the foodservice pie business doesn 't fit the company 's long-term growth strategy .",
    '" The foodservice pie business does not fit our long-term growth strategy .',
)
PASSAGE = (  # of Figure 6 (Appendix A.3)
    "research into military brats has consistently shown them to be better behaved than their civilian counterparts.",
    "hypotheses as to why brats are better behaved: firstly, military parents have a lower threshold for misbehavior "
    "in their children; secondly, the mobility of teenagers might make them less likely to attract attention to "
    "themselves, as many want to fit in and are less secure with their surroundings; and thirdly, normative "
    "constraints are greater, with brats knowing that their behavior is under scrutiny and can affect the military "
    "member's career. teenage years are typically a period when people establish independence by taking some risks "
    "away from their",
)
PASSAGE_ROWS = (  # what Figure 6 has on its vertical axis
    "the mobility of teenagers might make them less likely to attract attention to themselves, as many want to fit in "
    "and are less secure with their surroundings"
)


def dataset_of(data: str) -> str:
    """Return the dataset that a figure's data are part of."""
    return SUBSETS.get(data, data)


def paper_texts(
    data: str, *, data_dir: str | None = None, columns: Sequence[str] | None = None, first: int | None = None
) -> list[Text]:
    """Return the texts that the figures take from a dataset, or only the first `first` of them."""
    if data == SAMPLES:
        stream: Iterable[Text] = sample_texts()
    elif data == "wikitext":
        stream = segments(str(paragraph) for paragraph in read_texts(data, data_dir=data_dir))
    else:
        stream = read_texts(dataset_of(data), data_dir=data_dir, columns=columns)
    limits = [limit for limit in (TEXTS_TAKEN.get(data), first) if limit is not None]
    return list(islice(stream, min(limits, default=None)))


def segments(paragraphs: Iterable[str]) -> Iterator[Text]:
    """Yield pairs of neighbouring sentences of one paragraph of WikiText, each sentence once.

    WikiText writes hyphens, and the marks inside numbers, between @ signs; these signs are removed.
    """
    for paragraph in paragraphs:
        plain = re.sub(r" @(.)@ ", r"\1", paragraph)
        pieces = re.split(r"(?<= [.!?]) +(?=[\"'(]?[A-Z0-9])", plain)
        sentences = [piece for piece in pieces if piece.strip()]
        yield from zip(sentences[::2], sentences[1::2], strict=False)
