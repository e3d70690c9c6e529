"""How certain attention is over a dataset: rows are drawn fairly and repeatably, and tables hold what they say."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import identikit as ik
from identikit.attention.certainty import ALL, GROUPS, _length_range, drawn_rows, frames, length_table
from identikit.attention.dataset import AttentionOptions, attention_statistics, attention_tables
from identikit.errors import InputError
from identikit.runs import run as runs
from identikit.runs.run import Run
from identikit.runs.store import Store
from tests.models import tiny
from tests.reference.certainty import mean_and_error, value_size

WORDS = [f"w{number}" for number in range(4, 60) if not 30 <= number < 40]  # w3 is what the tokenizer does not know
TEXTS = [" ".join(WORDS[start : start + length]) for start, length in ((0, 3), (5, 9), (11, 10), (2, 20))]
PAIRS = [(TEXTS[1], TEXTS[0]), (TEXTS[2], TEXTS[1])]


def tables(name: str, texts: Any, folder: Path, **options: Any) -> dict[str, Any]:
    model = tiny.loaded(name, dtype=torch.float64)
    return attention_tables(model, texts, Run(Store(folder, {})), AttentionOptions(**options))


@pytest.mark.parametrize(("name", "groups"), [("bert", GROUPS[:4]), ("llama", GROUPS[:2])])
def test_tables_are_what_the_public_functions_say(name: str, groups: tuple[str, ...], tmp_path: Path):
    """With all rows drawn, every number is the mean over the rows of a head."""
    model = tiny.loaded(name, dtype=torch.float64)
    found = tables(name, PAIRS, tmp_path / "run", intervals=ALL)
    rows = found["intervals"].set_index(["text", "layer", "head"])
    sinks = found["groups"].set_index(["group", "text", "layer", "head"])
    assert set(found["groups"]["group"]) == {*groups}
    for text, pair in enumerate(PAIRS):
        att = ik.effective_attention(model, pair)
        ends = att.intervals()
        n, special = len(att.tokens), [place for place, one in enumerate(att.tokens) if one in ("<s>", "</s>")]
        members = {"special": special, "first": [0], "cls": special[:1], "sep": special[1:]}
        sums = att.intervals(groups={group: members[group] for group in groups})
        for layer, head in ((0, 0), (1, 3), (2, 1)):
            row = rows.loc[text, layer, head]
            best = ends.raw[layer, head].argmax(-1)
            width = [float((ends.upper - ends.lower)[layer, head, query, best[query]]) for query in range(n)]
            assert (row["rows"], row["free"]) == (n, int((att.null_dim[layer, head] > 0).sum()))
            assert row["undecided"] == int(ends.strongest_is_certain[layer, head].isnan().sum())
            assert row["certain_mass"] == pytest.approx(float(ends.certain_mass[layer, head].mean()), abs=1e-9)
            assert row["strongest"] == pytest.approx(float(ends.raw[layer, head].amax(-1).mean()), abs=1e-9)
            assert row["width"] == pytest.approx(fmean(width), abs=1e-7) and row["free"] > 0
            assert row["certain"] == pytest.approx(float(ends.strongest_is_certain[layer, head].nanmean()))
            for place, group in enumerate(groups):
                sink = sinks.loc[group, text, layer, head]
                effective = att.effective[layer, head][:, members[group]].sum(-1).mean()
                assert sink["effective"] == pytest.approx(float(effective), abs=1e-9)
                for end in ("raw", "lower", "upper"):
                    assert sink[end] == pytest.approx(float(getattr(sums, end)[layer, head, :, place].mean()), abs=1e-7)
                part = att.captured().layers[layer]  # pyright: ignore
                values = part.plain.values[head * len(part.plain.values) // 4].numpy()
                literal = value_size(values, part.projection[head].double().numpy(), members[group])
                assert sink["value_size"] == pytest.approx(literal, rel=1e-9)
    groups_table = found["groups"]
    assert (groups_table["lower"] <= groups_table["raw"] + 1e-9).all()
    assert (groups_table["raw"] <= groups_table["upper"] + 1e-9).all()


def test_lengths_are_summarised_with_standard_errors(tmp_path: Path):
    found = tables("bert", TEXTS, tmp_path / "run", intervals=30)
    heads, groups = found["intervals"], found["groups"].query("group == 'first' and rows > 0")
    by_text = {
        name: [sum(part[name] * part["rows"]) / sum(part["rows"]) for _, part in table.groupby("text")]
        for name, table in (("certain_mass", heads), ("width", heads), ("effective", groups), ("upper", groups))
    }
    summary = found["intervals_by_length"].set_index("tokens_to")
    assert summary["texts"].to_dict() == {16: 3, 24: 1} and summary["rows"].to_dict() == {16: 90, 24: 30}
    assert summary["tokens_from"].to_dict() == {16: 1, 24: 17}
    assert summary["tokens"][16] == fmean([5, 11, 12])
    for column, name in (("certain_mass",) * 2, ("width",) * 2, ("first_effective", "effective")):
        mean, error = mean_and_error(by_text[name][:3])
        assert summary[column][16] == pytest.approx(mean) and summary[f"{column}_error"][16] == pytest.approx(error)
        assert summary[column][24] == pytest.approx(by_text[name][3])
    assert summary["first_upper"][24] == pytest.approx(by_text["upper"][3])
    assert summary["certain_mass_error"].isna().tolist() == [False, True]
    cells = length_table(found["intervals_by_length"]).cells()
    mean, error = mean_and_error(by_text["certain_mass"][:3])
    assert cells[0][:4] == ["1–16", "3", "0.67", f"{mean:.2f}±{error:.2f}"]  # of three texts two are free
    assert cells[1][:4] == ["17–24", "1", "1.00", f"{by_text['certain_mass'][3]:.2f}"]


def test_short_texts_are_certain_and_long_ones_are_not(tmp_path: Path):
    found = tables("bert", TEXTS, tmp_path / "run", intervals=ALL)["intervals"]
    short, long = found.query("tokens <= 6"), found.query("tokens > 6")
    assert short["free"].sum() == 0 and short["certain_mass"].min() == pytest.approx(1.0)
    assert short["width"].max() == 0 and short["certain"].min() == 1
    assert (long["free"] == long["rows"]).all() and long["certain_mass"].max() < 0.999


def test_rows_do_not_depend_on_other_texts_or_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = tables("llama", TEXTS, tmp_path / "whole", intervals=9)
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    parts = tables("llama", TEXTS[::-1], tmp_path / "parts", intervals=9)
    for name in ("intervals", "groups"):
        turned = parts[name].assign(text=3 - parts[name]["text"]).sort_values("text", kind="stable", ignore_index=True)
        assert whole[name].round(9).equals(turned.round(9))
    summaries = (found["intervals_by_length"].round(9) for found in (whole, parts))
    assert next(summaries).equals(next(summaries))
    other = tables("llama", TEXTS, tmp_path / "other", intervals=9, seed=1)
    places = [found["intervals"].filter(["text", "layer", "head"]).values.tolist() for found in (whole, other)]
    assert places[0] != places[1]


def test_intervals_can_be_gathered_alone(tmp_path: Path):
    model, options = tiny.loaded("bert", dtype=torch.float64), AttentionOptions(intervals=5)
    run = Run(Store(tmp_path / "alone", {}))
    alone = frames(attention_statistics(model, [*TEXTS], run, options, only_intervals=True))
    beside = attention_tables(model, TEXTS, Run(Store(tmp_path / "beside", {})), options)
    assert [*alone] == [*beside][-3:] and all(alone[name].equals(beside[name]) for name in alone)


@given(st.tuples(*[st.integers(1, 6)] * 3), st.integers(1, 300) | st.just(ALL), st.integers(0, 5))
def test_rows_are_drawn_once_each_and_in_order(shape: tuple[int, int, int], rows: int | str, seed: int):
    places = drawn_rows("a text", shape, rows, seed)
    total = shape[0] * shape[1] * shape[2]
    assert places == sorted({*places}) and len(places) == (total if rows == ALL else min(int(rows), total))
    assert all(0 <= part < size for place in places for part, size in zip(place, shape, strict=True))
    assert places == drawn_rows("a text", shape, rows, seed)


def test_every_row_is_as_likely_as_any_other():
    counts = torch.zeros(3, 4, 5)
    for text in range(1000):
        for place in drawn_rows(str(text), (3, 4, 5), 12, 0):
            counts[place] += 1
    assert counts.sum() == 12_000 and counts.min() > 140 and counts.max() < 260  # 200, give or take 13


@given(st.integers(1, 100_000))
def test_lengths_fall_into_one_length_range(tokens: int):
    least, most = _length_range(tokens)
    assert least <= tokens <= most and _length_range(least) == _length_range(most) == (least, most)
    assert least == 1 or _length_range(least - 1)[1] == least - 1


@pytest.mark.parametrize("rows", [-1, "many", True])
def test_a_wrong_number_of_rows_is_told(rows: Any):
    with pytest.raises(InputError, match="expected a number of rows per text, or 'all'"):
        AttentionOptions(intervals=rows)
