"""The data dictionary: every column of every table is described, as it is written, and so it is in the docs."""

import json
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from pandas.api.types import infer_dtype

from identikit.attention.dataset import AttentionOptions, attention_tables
from identikit.attention.measures_dataset import MeasuresOptions, measures_tables
from identikit.attention.tables import ATTENTION, MEASURES
from identikit.attribution.dataset import AttributionOptions, attribution_tables
from identikit.attribution.tables import ATTRIBUTION
from identikit.explanation.evaluation_dataset import evaluation_tables
from identikit.explanation.faithfulness import EvaluationOptions
from identikit.explanation.tables import EVALUATION
from identikit.results.provenance import text_hash
from identikit.results.table import markdown, texts_table
from identikit.runs.run import Run
from identikit.runs.store import Store, write_tables
from identikit.tokens.dataset import (
    IdentifiabilityOptions,
    InversionOptions,
    identifiability_tables,
    inversion_tables,
)
from identikit.tokens.tables import INVERSION, TOKENS
from tests.models import tiny

TABLES = {
    "attention": ATTENTION,
    "attribution": ATTRIBUTION,
    "tokens": TOKENS,
    "tokens --experiment inversion": INVERSION,
    "measures": MEASURES,
    "evaluate": EVALUATION,
}
TEXTS = [f"w{i} w{i + 3} w{i + 1} w{i + 7}" for i in range(3, 27)]
DOCS = Path(__file__).parents[2] / "docs" / "tables.md"


def by_parity(encoded) -> tuple[str, ...]:
    return tuple("even" if place % 2 else "odd" for place in range(len(encoded)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every command, with all the tables that it can write."""
    folder = tmp_path_factory.mktemp("runs")
    model = tiny.shared("bert")
    attention_tables(model, TEXTS, Run(Store(folder / "attention", {})), AttentionOptions(intervals=7))
    attribution_tables(model, TEXTS, Run(Store(folder / "attribution", {})), AttributionOptions(), tagger=by_parity)
    measures = MeasuresOptions(measures=("mean", "rollout"), scores=("previous",))
    measures_tables(model, TEXTS[:3], Run(Store(folder / "measures", {})), measures)
    evaluation = EvaluationOptions(measures=("mean",), beam=1)
    evaluation_tables(model, TEXTS[:2], Run(Store(folder / "evaluate", {})), evaluation)
    options = IdentifiabilityOptions(experiment="generalisation", folds=1)
    identifiability_tables(model, TEXTS, Run(Store(folder / "tokens", {})), options)
    inversion = InversionOptions(noises=(0.0, 2.0))
    store = Store(folder / "tokens --experiment inversion", {})
    inversion_tables(tiny.shared("llama"), TEXTS[:3], Run(store), inversion)
    return folder


@pytest.mark.parametrize("command", TABLES)
def test_every_column_is_described_as_it_is_written(runs: Path, command: str):
    written = {path.stem for path in (runs / command).glob("*.parquet")}
    assert written == {*TABLES[command]} == {path.stem for path in (runs / command).glob("*.csv")}
    described = json.loads((runs / command / "columns.json").read_text())
    assert described.keys() == written
    for name, table in TABLES[command].items():
        schema = pq.read_schema(runs / command / f"{name}.parquet")
        types = {field.name: str(field.type).removeprefix("large_") for field in schema}
        assert types == {column: about.type for column, about in table.columns.items()}
        assert [*described[name]] == [*table.columns]
        assert all(described[name][column]["meaning"] for column in types)
        assert [column for column, about in described[name].items() if about["key"]] == [*table.keys] != []
        frame = pd.read_parquet(runs / command / f"{name}.parquet")
        assert not frame.duplicated([*table.keys]).any(), name
        missing = frame.isna().any()
        allowed = {column for column, about in table.columns.items() if about.missing != "never"}
        assert {column for column, found in missing.items() if found} <= allowed
        for column, about in table.columns.items():
            if about.type == "string" and "," in about.range:
                assert {*frame[column]} <= {*about.range.split(", ")}, (name, column)
            if about.range == "0 to 1":
                assert frame[column].dropna().between(0, 1).all(), (name, column)
            if column in ("layer", "head", "text", "position", "fold"):
                assert frame[column].min() == 0, (name, column)


def test_a_table_that_is_not_described_is_refused(tmp_path: Path):
    with pytest.raises(KeyError, match="unknown"):
        write_tables(Store(tmp_path, {}), {"unknown": pd.DataFrame({"a": [1]})}, TABLES["attention"])


def test_the_docs_hold_the_dictionary():
    assert DOCS.read_text().endswith(markdown(TABLES)), "paste what identikit.results.table.markdown returns"


def test_texts_are_there_to_join_on(runs: Path):
    texts = pd.read_parquet(runs / "attribution" / "texts.parquet")
    assert texts["first"].tolist() == TEXTS and texts["second"].isna().all()
    assert texts["sha256"].tolist() == [text_hash(text) for text in TEXTS]
    tokens = pd.read_parquet(runs / "attribution" / "tokens.parquet")
    joined = tokens.merge(texts, on="text")
    assert len(joined) == len(tokens) == 3 * texts["tokens"].sum()
    pairs = texts_table([("a b", "null"), ("c", "d")], [7, 5])
    assert pairs["second"].tolist() == ["null", "d"] and pairs["tokens"].tolist() == [7, 5]


WORDS = ["null", "NA", "nan", "None", "N/A", "NULL", "n/a", " the", 'qu"ote', "a,b", "two\nlines", "1", "Ġx"]


def test_words_that_pandas_takes_for_missing(tmp_path: Path):
    """Parquet is exact; CSV is with the reading that the docs give."""
    frame = pd.DataFrame({"token": WORDS, "share": [float("nan"), *range(1, len(WORDS))]})
    write_tables(Store(tmp_path, {}), {"tokens": frame})
    assert pd.read_parquet(tmp_path / "tokens.parquet").equals(frame)
    assert pd.read_csv(tmp_path / "tokens.csv")["token"].isna().sum() == 7  # what the docs warn of
    read = pd.read_csv(tmp_path / "tokens.csv", keep_default_na=False, na_values=[""])
    assert read["token"].tolist() == WORDS and read["share"].isna().tolist() == [True] + [False] * 12


TYPES = {  # of polars and DuckDB
    "int64": ("Int64", "BIGINT"),
    "double": ("Float64", "DOUBLE"),
    "float": ("Float32", "FLOAT"),
    "string": ("String", "VARCHAR"),
    "bool": ("Boolean", "BOOLEAN"),
}


def read_by_all(path: Path) -> dict[str, pd.DataFrame]:
    """A table as pandas, polars and DuckDB read it, from Parquet and from CSV as the docs say."""
    csv = path.with_suffix(".csv")
    docs = DOCS.read_text()
    assert "pl.read_csv(path, infer_schema_length=None)" in docs
    assert 'pd.read_csv(path, keep_default_na=False, na_values=[""])' in docs
    assert "read_csv('tokens.csv', sample_size=-1)" in docs
    return {
        "polars": pl.read_parquet(path).to_pandas(),
        "duckdb": duckdb.read_parquet(str(path)).df(),
        "duckdb, csv": duckdb.read_csv(str(csv), sample_size=-1).df(),
        "polars, csv": pl.read_csv(csv, infer_schema_length=None).to_pandas(),
        "pandas, csv": pd.read_csv(csv, keep_default_na=False, na_values=[""]),
    }


@pytest.mark.parametrize("command", TABLES)
def test_every_reader_finds_the_same(runs: Path, command: str):
    """Types too; a CSV file does not tell a float from a double, nor what is in a column without any value."""
    for path in sorted((runs / command).glob("*.parquet")):
        written = pd.read_parquet(path)
        types = [about.type for about in TABLES[command][path.stem].columns.values()]
        assert [str(kind) for kind in pl.read_parquet_schema(path).values()] == [TYPES[kind][0] for kind in types]
        assert [str(kind) for kind in duckdb.read_parquet(str(path)).types] == [TYPES[kind][1] for kind in types]
        for reader, read in read_by_all(path).items():
            assert [*read] == [*written], (path, reader)
            for column in written:
                one = written[column]
                other = read[column]
                kinds = {infer_dtype(series.dropna(), skipna=True) for series in (one, other)}
                assert len(kinds) == 1 or one.isna().all(), (path, reader, column)
                assert one.isna().tolist() == other.isna().tolist(), (path, reader, column)
                values = other.dropna().astype(one.dtype).tolist()
                assert one.dropna().tolist() == values, (path, reader, column)
