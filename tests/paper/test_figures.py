"""Every figure of the paper: its data are what the tables say, and what is drawn is its data."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from identikit.paper.evidence import Evidence
from identikit.paper.figures.catalogue import FIGURES
from identikit.tokens.experiments import summary
from tests.paper.drawn import DEEP, NAMES, SHOWN, causal, data, drawing, figure, made
from tests.paper.made import PASSAGE, SENTENCE, evidence

MAPS = {"naive": "naive", "linear": "linear", "mlp": "MLP"}
DISTANCES = {"cosine": "cosine", "l2": "L2"}
Numbers = dict[tuple[Hashable, ...], float]


def rows(table: str) -> list[dict[str, Any]]:
    return made().tables[table].to_dict("records")


def numbers(name: str, keys: list[str], value: str) -> Numbers:
    """The data of a figure as a plain mapping; each row has keys of its own."""
    frame = data(name)
    found = {tuple(row[key] for key in keys): row[value] for row in frame.to_dict("records")}
    assert len(found) == len(frame)
    return found


def means(found: Iterable[tuple[tuple[Hashable, ...], float]]) -> Numbers:
    groups: dict[tuple[Hashable, ...], list[float]] = {}
    for key, value in found:
        groups.setdefault(key, []).append(value)
    return {key: fmean(values) for key, values in groups.items()}


def plotted(axes: Axes) -> dict[tuple[str, float], float]:
    """The points of all lines that the legend names."""
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [line.get_label() for line in lines]
    points = [(line, zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in lines]
    return {(line.get_label(), round(x)): y for line, found in points for x, y in found}


def assert_same(found: dict[Any, float], expected: dict[Any, float]) -> None:
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


def assert_drawn(axes: Axes, expected: Numbers, label: Callable[..., str]) -> None:
    """Each number is a point of the line that its key names; the last part of a key is its place on x."""
    assert_same(plotted(axes), {(label(*key[:-1]), key[-1]): value for key, value in expected.items()})


def test_every_figure_of_the_paper_is_there():
    assert list(FIGURES) == NAMES
    assert all(figure.name == name for name, figure in FIGURES.items())


def test_collapse():
    table = made().tables["collapse"]
    frame = data("collapse").set_index(["panel", "product", "quantity"])["value"]
    for which in ("query-key", "value"):
        rows_of = table[table["product"] == which]
        ratio = rows_of["operations_collapsed"] / rows_of["operations_factored"]
        assert frame["b", which, "operations"] == pytest.approx(ratio.mean())
        assert frame["b", which, "time"] == pytest.approx(rows_of["time_ratio"].mean())
        assert frame["a", which, "float32"] == rows_of["error_float32"].max()


def test_datasets_are_the_papers():
    used = {name: (entry.data, entry.only) for name, entry in FIGURES.items()}
    expected = dict.fromkeys(NAMES, ("mrpc", False))
    expected |= dict.fromkeys(
        ["fig1a", "fig1b", "fig1c", "fig5", "fig1a-sharp", "fig1bc-sharp", "sinks"], ("wikitext", False)
    )
    expected |= dict.fromkeys(["fig6", "collapse", *(f"fig{number}" for number in range(19, 26))], ("", False))
    expected |= {"fig13": ("cola", True), "fig39": ("mnli-500", True)}
    expected |= dict.fromkeys(["fig38", "fig40", "fig41"], ("cola", True))
    expected |= dict.fromkeys(["fig42", "fig43"], ("mnli", True))
    assert used == expected


def test_needs_name_tables_that_suffice():
    for name in SHOWN:
        entry = FIGURES[name]
        needed = replace(made(), tables={table: made().tables[table] for table in entry.needs})
        assert entry.draw(needed).data.equals(data(name)), name


def numbers_drawn(axes: Axes) -> set[float]:
    """Every number that lines, points, bands, error bars, bars and maps of these axes stand for."""
    found = [line.get_ydata() for line in axes.get_lines()]
    found += [np.asarray(cloud.get_offsets())[:, 1] for cloud in axes.collections]
    found += [path.vertices[:, 1] for band in axes.collections for path in band.get_paths()]
    found += [[bar.get_height()] for bar in axes.patches if isinstance(bar, Rectangle)]
    found += [np.ma.filled(image.get_array(), np.nan) for image in axes.get_images()]
    return {round(float(number), 9) for part in found for number in np.ravel(np.asarray(part, float))}


def test_every_number_of_the_data_is_drawn():
    """As each figure declares it: which columns it shows, by which columns that tell its rows apart."""
    for name in SHOWN:
        shown, keys = (columns.split(", ") for columns in FIGURES[name].shows.split(" by "))
        frame = data(name)
        assert not frame.duplicated(keys).any(), name
        drawn = set.union(*map(numbers_drawn, figure(name).axes))
        expected = {round(float(number), 9) for number in np.ravel(frame[shown]) if not np.isnan(number)}
        assert expected and expected <= drawn, f"{name} does not draw {sorted(expected - drawn)[:3]}"


def test_captions_are_sentences_and_name_the_norm():
    for entry in FIGURES.values():
        assert entry.caption.endswith(".") and 40 < len(entry.caption) < 300
        assert entry.caption[0].isupper() or entry.caption.startswith("(a) ")
    named = {name for name, entry in FIGURES.items() if "Frobenius norm" in entry.caption}
    shown = {name for name, entry in FIGURES.items() if any("frobenius" in table for table in entry.needs)}
    assert named == shown | {name for name, entry in FIGURES.items() if "sentence" in entry.needs}


def test_a_model_too_shallow_or_causal_is_told_why():
    subject = made().subject
    assert FIGURES["fig32"].why_not(subject) == "not applicable: MiniLM has 6 layers"
    assert [name for name in NAMES if FIGURES[name].why_not(subject)] == DEEP
    other = replace(subject, n_layers=12, causal=True)
    missing = [name for name in NAMES if FIGURES[name].why_not(other)]
    assert missing == ["fig5", "fig18a", "fig18b", "fig19", "fig25"]
    assert "causal" in (FIGURES["fig5"].why_not(other) or "")


TO_TYPES = "map == '{}' and source == 'all' and target in ('cls', 'sep', 'punctuation')"
TO_SEPARATORS = "map in ('raw', 'effective') and source in ('sep', 'rest') and target == 'sep'"
BOX = ["low", "lower", "median", "upper", "high"]
ROWS: dict[str, tuple[str, str, list[str]]] = {
    "fig1a": ("correlation", "tokens > 0", ["text", "tokens", "pearson"]),
    "fig1b": ("types", TO_TYPES.format("raw"), ["target", "layer", "head", "attention"]),
    "fig1c": ("types", TO_TYPES.format("effective"), ["target", "layer", "head", "attention"]),
    "fig5": ("types", TO_SEPARATORS, ["map", "source", "layer", "head", "attention"]),
    "fig3a": ("own frobenius", "layer > 0", ["layer", *BOX]),
    "fig3b": ("own frobenius", "layer > 0", ["layer", "outweighed"]),
    "fig40": ("own frobenius", "layer > 0", ["layer", *BOX, "outweighed"]),
    "fig26": ("tags frobenius", "layer == 1", ["tag", "tokens", *BOX]),
    "fig31": ("tags frobenius", "layer == 6", ["tag", "tokens", *BOX]),
    **{
        name: ("sentence", f"output == {SENTENCE.split().index(token)}", ["layer", "input", "contribution"])
        for name, token in (("fig19", "[CLS]"), ("fig22", "fit"), ("fig25", "[SEP]"))
    },
}
"""Figures that show rows of a table as they are: the table, which rows, and their columns."""


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_those_of_the_table(name: str):
    table, chosen, columns = ROWS[name]
    expected = made().tables[table].query(chosen)[columns].reset_index(drop=True)
    assert data(name)[columns].reset_index(drop=True).equals(expected) and len(expected)


def test_certain_mass_stands_beside_the_correlation():
    mass: dict[int, list[tuple[float, int]]] = {}
    for row in rows("intervals"):
        mass.setdefault(row["text"], []).append((row["certain_mass"], row["rows"]))
    expected = {
        (row["tokens"], row["pearson"]): sum(one * n for one, n in mass[row["text"]])
        / sum(n for _, n in mass[row["text"]])
        for row in rows("correlation")
    }
    assert_same(numbers("fig1a-sharp", ["tokens", "pearson"], "certain_mass"), expected)
    assert f"{sum(row['rows'] for row in rows('intervals')):,} rows" in drawing("fig1a-sharp").label


def row_means(found: Iterable[dict[str, Any]], by: list[str], weight: str) -> Numbers:
    """Means over all rows that were drawn."""
    sums: dict[tuple[Hashable, ...], list[float]] = {}
    for row in found:
        if row["rows"]:
            total = sums.setdefault(tuple(row[name] for name in by), [0.0, 0.0])
            total[0], total[1] = total[0] + row["rows"] * row[weight], total[1] + row["rows"]
    return {key: total / count for key, (total, count) in sums.items()}


@pytest.mark.parametrize("other", [made(), causal()], ids=["encoder", "causal"])
def test_the_range_of_attention_to_types(other: Evidence):
    drawn = FIGURES["fig1bc-sharp"].draw(other)
    frame = drawn.data
    wanted = ["first", "punctuation"] if other.subject.causal else ["cls", "sep", "punctuation"]
    table = [row for row in other.tables["groups"].to_dict("records") if row["group"] in wanted]
    assert len({axes.get_ylim() for axes in drawn.sheet().axes}) == 1
    for name in ("raw", "effective", "lower", "upper"):
        found = {(row["group"], row["layer"]): row[name] for row in frame.to_dict("records")}
        assert_same(found, row_means(table, ["group", "layer"], name))


@pytest.mark.parametrize(("other", "group"), [(made(), "special"), (causal(), "first")], ids=["encoder", "causal"])
def test_sinks(other: Evidence, group: str):
    drawn = FIGURES["sinks"].draw(other)
    frame = drawn.data
    assert set(frame["group"]) == {group}
    table = [row for row in other.tables["groups"].to_dict("records") if row["group"] == group]
    expected = row_means(table, ["layer", "head"], "lower")
    found = {(row["layer"], row["head"]): row["lower"] for row in frame.to_dict("records")}
    assert_same(found, expected)
    sizes = means(((row["layer"], row["head"]), row["value_size"]) for row in table)
    assert_same({(row["layer"], row["head"]): row["value_size"] for row in frame.to_dict("records")}, sizes)


def test_raw_and_effective_attention_have_one_scale():
    limits = [figure(name).axes[0].get_ylim() for name in ("fig1b", "fig1c")]
    limits += [axes.get_ylim() for axes in figure("fig5").axes]
    assert limits[0] == limits[1] and limits[2] == limits[3]
    for name, (least, most) in zip(("fig1b", "fig1c"), limits, strict=False):
        assert least < data(name)["attention"].min() and data(name)["attention"].max() < most


def test_a_causal_model_is_shown_what_it_has():
    drawn = FIGURES["fig1b"].draw(causal())
    assert set(drawn.data["target"]) == {"cls", "punctuation"}
    legend = drawn.sheet().axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["opens a text", "period, comma"]  # no [CLS]
    offsets = FIGURES["fig4b"].draw(causal()).data["offset"]
    assert (offsets.min(), offsets.max()) == (-30, -1)
    assert FIGURES["fig5"].draw(causal()).data.empty and FIGURES["fig18a"].draw(causal()).data.empty
    passage = FIGURES["fig6"].draw(causal())
    later = (passage.data["key"] > passage.data["query"]).sum()
    assert np.ma.count_masked(passage.sheet().axes[0].get_images()[0].get_array()) >= later > 0
    table = causal().tables["passage"]  # the first key chooses the head where there are no special tokens
    first = table[table["key"] == 0].groupby("head")["raw"].mean()
    assert passage.data["head"].unique().tolist() == [first.idxmax()]


def test_passage():
    tokens = PASSAGE.split()
    special = {place for place, token in enumerate(tokens) if token in ("[CLS]", "[SEP]")}
    idle = means(((row["head"],), row["raw"]) for row in rows("passage") if row["key"] in special)
    (head,) = max(idle, key=lambda key: idle[key])
    chosen = {(row["query"], row["key"]): row for row in rows("passage") if row["head"] == head}
    far = [row for row in chosen.values() if abs(row["query"] - row["key"]) > 1 and row["key"] not in special]
    best = max(far, key=lambda row: row["effective"])
    frame = data("fig6")
    marked = frame[frame["highlighted"]]
    assert (marked["query"].tolist(), marked["key"].tolist()) == ([best["query"]], [best["key"]])
    assert (best["query_token"], best["key_token"]) == ("make", "them")

    queries = sorted({query for query, _ in chosen})
    keys = sorted({*queries, *special, best["key"]})
    parts = {place: row for place, row in chosen.items() if place[1] in keys}
    for kind in ("raw", "effective", "null"):
        assert_same(numbers("fig6", ["query", "key"], kind), {place: row[kind] for place, row in parts.items()})
    assert f"layer 2, head {head} (counted from 1)" in figure("fig6").get_suptitle()


def test_the_passage_says_what_it_does_not_show():
    label = drawing("fig6").label
    shown = data("fig6")
    table = made().tables["passage"]
    table = table[table["head"] == shown["head"].iloc[0]]
    rest = (table["raw"].sum() - shown["raw"].sum()) / shown["query"].nunique()
    assert f"{shown['key'].nunique()} keys shown; the others hold {100 * rest:.0f} % of raw" in label


def kind_of_map(map: str, distance: str) -> str:
    return f"{MAPS[map]}, {DISTANCES[distance]}"


def side(offset: int) -> str:
    return f"{'previous' if offset < 0 else 'next'} {abs(offset)}"


def tuned(distance: str, after: bool) -> str:
    return f"{DISTANCES[distance]}, {'fine-tuned' if after else 'before'}"


Wanted = dict[str, tuple[Hashable, ...]]
KINDS: dict[str, Wanted] = {
    f"{map} {distance}": {"map": (map,), "distance": (distance,)} for map in ("linear", "mlp") for distance in DISTANCES
}
PLAIN = ["map", "distance", "layer"]
NAMED: Wanted = {"layer": (1, 3, 5, 6), "test_layer": tuple(range(1, 7))}
AROUND: Wanted = {"offset": (-3, -2, -1, 1, 2, 3)}
STEP: Wanted = {"map": ("naive",), "target": ("previous",)}
LEARNED: Wanted = {"map": ("linear", "mlp"), "distance": ("l2",), "split": ("train", "test")}
RATES: dict[str, tuple[str, list[str], Callable[..., str], Wanted]] = {
    **dict.fromkeys(("fig2a", "fig38", "fig39"), ("rates", PLAIN, kind_of_map, {})),
    "fig11": ("previous", PLAIN, kind_of_map, {"target": ("previous",)}),
    "fig2b": ("rates", ["layer", "test_layer"], str, NAMED | KINDS["linear cosine"]),
    "fig8": ("rates", ["layer", "test_layer"], str, NAMED | KINDS["linear l2"]),
    "fig9": ("rates", ["layer", "test_layer"], str, NAMED | KINDS["mlp l2"]),
    "fig10": ("rates", ["layer", "test_layer"], str, NAMED | KINDS["mlp cosine"]),
    "fig7": ("rates", ["map", "split", "layer"], lambda map, split: f"{MAPS[map]}, {split}", LEARNED),
    **dict.fromkeys(("fig12", "fig13"), ("untuned finetuned", ["distance", "finetuned", "layer"], tuned, STEP)),
    "fig14": ("neighbours", ["offset", "layer"], side, AROUND | KINDS["linear cosine"]),
    "fig15": ("neighbours", ["offset", "layer"], side, AROUND | KINDS["mlp cosine"]),
    "fig16": ("neighbours", ["offset", "layer"], side, AROUND | KINDS["mlp l2"]),
    "fig17": ("neighbours", ["offset", "layer"], side, AROUND | KINDS["linear l2"]),
}
"""Figures of rates: their tables, the columns that tell points apart, a line's label, and which rows they show."""


@pytest.mark.parametrize("name", RATES)
def test_rates(name: str):
    tables, keys, label, wanted = RATES[name]
    points = []
    for table in tables.split():
        for row in rows(table):
            usual = {"target": ("input",), "offset": (0,), "data_share": (1.0,), "split": ("test",)}
            chosen = usual | {"test_layer": (row["layer"],)} | wanted
            if all(row[column] in values for column, values in chosen.items()):
                row["finetuned"] = table == "finetuned"
                points.append((tuple(row[key] for key in keys), row["rate"]))
    expected = means(points)
    assert len(expected) in (24, 36)
    assert_same(numbers(name, keys, "rate"), expected)
    assert_drawn(figure(name).axes[0], expected, label)
    for line in figure(name).axes[0].get_lines() if "finetuned" in keys else ():
        assert ("fine-tuned" in str(line.get_label())) == (line.get_linestyle() == "-")


def test_rates_say_what_they_rest_on():
    for name in RATES:
        frame = data(name)
        one = name == "fig11" or "offset" in frame
        assert set(frame["folds"]) == {1 if one else 3} and set(frame["tokens"]) == {150}
        words = "one fold of 150 tokens" if one else "3 folds of about 150 tokens"
        assert drawing(name).label.endswith(f"seed 0 · rates over {words}")
        assert ("first fold" if one else "Means over folds") in FIGURES[name].caption


def test_unlike_numbers_of_tokens_are_averaged_over_folds_and_told_from_least_to_most():
    table = made().tables["rates"].assign(n_tokens=lambda table: 1000 + 10 * table["fold"] + 2 * table["layer"])
    other = evidence(6, tables={"rates": table})
    label = FIGURES["fig2a"].draw(other).label
    assert label.endswith("rates over 3 folds of about 1,012 to 1,022 tokens")


def test_confidence_is_that_of_the_summary():
    rates = made().tables["rates"].query("layer == test_layer and split == 'test'")
    expected = summary(rates).set_index(["map", "distance", "layer"])["low"].clip(0, 1).to_dict()
    assert_same(numbers("fig2a", ["map", "distance", "layer"], "low"), expected)


GROUPS = {"1": "1st", "2": "2nd", "3": "3rd", "4-5": "4th–5th", "6-10": "6th–10th", "11-": "11th on"}


@pytest.mark.parametrize("name", ["fig4a", "fig41"])
def test_neighbour_groups(name: str):
    expected = {(row["distance"], row["layer"]): row["share"] for row in rows("groups frobenius")}
    frame = data(name) if name == "fig4a" else data(name)[data(name)["panel"] == "a"]
    assert frame.set_index(["distance", "layer"])["share"].to_dict() == expected
    assert_drawn(figure(name).axes[0], expected, GROUPS.__getitem__)
    assert "neighbours by distance" in figure(name).axes[0].get_legend().get_title().get_text()


@pytest.mark.parametrize(
    ("name", "view", "left", "right"),
    [
        ("fig4b", "offsets", -30, 30),
        ("fig41", "offsets", -30, 30),
        ("fig18a", "to_cls", 1, 100),
        ("fig18b", "around_separator", -28, 40),
    ],
)
def test_offsets(name: str, view: str, left: int, right: int):
    expected = {
        (row["layer"], row["offset"]): float("nan") if np.isnan(row["mean"]) else row["share"]
        for row in rows("offsets frobenius")
        if row["view"] == view and row["layer"] in (1, 3, 6) and left <= row["offset"] <= right
    }
    assert len(expected) == 3 * (right - left + 1)
    frame = data(name)[data(name)["panel"] == "b"] if "panel" in data(name) else data(name)
    assert_same(frame.set_index(["layer", "offset"])["share"].to_dict(), expected)
    axes = figure(name).axes[-1]
    assert_drawn(axes, expected, lambda layer: f"layer {layer}")


def test_other_tokenizers_write_the_same_tokens():
    table = made().tables["sentence"]
    words = {"[CLS]": "<s>", "[SEP]": "</s>"}
    spelt = {
        f"{side}_token": table[f"{side}_token"].map(lambda word: words.get(word, f"Ġ{word}"))
        for side in ("input", "output")
    }
    other = evidence(6, tables={"sentence": table.assign(**spelt)})
    for name in ("fig19", "fig22", "fig25"):
        assert FIGURES[name].draw(other).data["contribution"].tolist() == data(name)["contribution"].tolist()
    without = evidence(6, tables={"sentence": table.assign(output_token="?")})
    empty = FIGURES["fig22"].draw(without)
    assert empty.data.empty
    assert empty.sheet().axes[0].texts[0].get_text() == "nothing to show"


def test_rare_tags_are_left_out_and_counted():
    table = made().tables["tags frobenius"]
    rare = table.assign(tokens=table["tokens"].where(~table["tag"].isin(["JJ", "VB"]), 19))
    other = evidence(6, tables={"tags frobenius": rare})
    drawn = FIGURES["fig27"].draw(other)
    assert set(data("fig27")["tag"]) - set(drawn.data["tag"]) == {"JJ", "VB"}
    assert drawn.label.endswith("· 2 tags with fewer than 20 tokens not shown (38 tokens)")
    assert drawing("fig27").label == made().label
    assert "fewer than 20 tokens" in FIGURES["fig27"].caption


def test_neither_special_tokens_nor_neighbours_are_highlighted():
    table = made().tables["passage"]
    close = (table["query"] - table["key"]).abs() <= 1
    larger = table["effective"].where(~close & ~table["key_token"].isin(["[CLS]", "[SEP]"]), 0.9)
    other = evidence(6, tables={"passage": table.assign(effective=larger)})
    assert FIGURES["fig6"].draw(other).data["highlighted"].equals(data("fig6")["highlighted"])
