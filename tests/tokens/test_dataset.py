"""Token identifiability over a dataset: tables count from 0, and confidence stays within what a rate can be."""

from pathlib import Path

import pandas as pd
import pytest

from identikit.errors import InputError
from identikit.runs.store import Store
from identikit.tokens.dataset import IdentifiabilityOptions, identifiability_tables
from identikit.tokens.experiments import summary
from tests.models import tiny

TEXTS = [f"w{i} w{i + 3} w{i + 1} w{i + 7} w{i + 9}" for i in range(3, 27)]


def test_tables_count_from_0_and_follow_the_options(tmp_path: Path):
    options = IdentifiabilityOptions(experiment="across layers", maps=("ridge",), distances=("cosine",), folds=2)
    tables = identifiability_tables(tiny.loaded("bert"), TEXTS, Store(tmp_path / "run", {}), options)
    rates = tables["rates"]
    lengths = [len(one) for one in tiny.loaded("bert").encode(TEXTS)]
    assert tables["texts"]["tokens"].tolist() == lengths
    assert len(rates) == 3 * 3 * 2  # layers, tested layers, folds
    for name in ("layer", "test_layer"):
        assert sorted(rates[name].unique()) == [0, 1, 2]
    assert sorted(rates["fold"].unique()) == [0, 1] and len(tables["summary"]) == 9
    assert tables["texts"]["first"].tolist() == TEXTS
    assert pd.read_parquet(tmp_path / "run" / "rates.parquet").equals(rates)
    again = identifiability_tables(tiny.loaded("bert"), TEXTS, Store(tmp_path / "again", {}), options)
    assert again["rates"].equals(rates)
    whole, second = (sorted((tmp_path / name).iterdir()) for name in ("run", "again"))
    assert [path.name for path in whole] == [path.name for path in second]
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in second]


def test_confidence_is_within_what_a_rate_can_be():
    common = {"model": "m", "map": "ridge", "distance": "cosine", "layer": 0, "test_layer": 0, "target": "input"}
    common |= {"offset": 0, "data_share": 1.0, "split": "test", "chance": 0.1, "duplicates": 0.0, "n_tokens": 10}
    for near, wide in (([1.0, 1.0, 0.9], "high"), ([0.0, 0.0, 0.1], "low")):
        rates = pd.DataFrame({"fold": range(3), "rate": near, "unique_rate": near, **common})
        (row,) = summary(rates).to_dict("records")
        assert 0 <= row["low"] < row["rate"] < row["high"] <= 1
        assert row[wide] == (1.0 if wide == "high" else 0.0)  # wider without the limit


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path):
    store = Store(tmp_path / "run", {})
    for texts, options in ((TEXTS, IdentifiabilityOptions(maps=("magic",))), (TEXTS[:3], IdentifiabilityOptions())):
        with pytest.raises(InputError):
            identifiability_tables(tiny.loaded("bert"), texts, store, options)
    assert not (tmp_path / "run").exists()
