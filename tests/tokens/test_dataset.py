"""Token identifiability and inversion over a dataset: tables count from 0, and say what results say."""

from pathlib import Path

import pandas as pd
import pytest

import identikit as ik
from identikit.errors import InputError
from identikit.runs.run import Run
from identikit.runs.store import Store
from identikit.tokens.dataset import (
    IdentifiabilityOptions,
    InversionOptions,
    identifiability_tables,
    inversion_tables,
)
from tests.models import tiny

TEXTS = [f"w{i} w{i + 3} w{i + 1} w{i + 7} w{i + 9}" for i in range(3, 27)]


def test_tables_count_from_0_and_follow_the_options(tmp_path: Path):
    options = IdentifiabilityOptions(experiment="across layers", maps=("ridge",), distances=("cosine",), folds=2)
    tables = identifiability_tables(tiny.loaded("bert"), TEXTS, Run(Store(tmp_path / "run", {})), options)
    rates = tables["rates"]
    lengths = [len(one) for one in tiny.loaded("bert").encode(TEXTS)]
    assert tables["texts"]["tokens"].tolist() == lengths
    assert len(rates) == 3 * 3 * 2  # layers, tested layers, folds
    for name in ("layer", "test_layer"):
        assert sorted(rates[name].unique()) == [0, 1, 2]
    assert sorted(rates["fold"].unique()) == [0, 1] and len(tables["summary"]) == 9
    assert tables["texts"]["first"].tolist() == TEXTS
    assert pd.read_parquet(tmp_path / "run" / "rates.parquet").equals(rates)
    again = identifiability_tables(tiny.loaded("bert"), TEXTS, Run(Store(tmp_path / "again", {})), options)
    assert again["rates"].equals(rates)
    whole, second = (sorted((tmp_path / name).iterdir()) for name in ("run", "again"))
    assert [path.name for path in whole] == [path.name for path in second]
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in second]


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path):
    store = Store(tmp_path / "run", {})
    with pytest.raises(InputError, match=r"maps='magic' is not known"):
        IdentifiabilityOptions(maps=("magic",))
    with pytest.raises(InputError):
        identifiability_tables(tiny.loaded("bert"), TEXTS[:3], Run(store), IdentifiabilityOptions())
    with pytest.raises(InputError, match="it is not causal"):
        inversion_tables(tiny.loaded("bert"), TEXTS, Run(store), InversionOptions())
    assert not (tmp_path / "run").exists()


def test_inversion_tables_are_the_results_of_each_text(tmp_path: Path):
    model = tiny.loaded("llama")
    texts = ["w5 w9 w5", "w8 w40"]
    options = InversionOptions(noises=(0.0, 1.5))
    told = []
    store = Store(tmp_path / "run", {})
    tables = inversion_tables(model, texts, Run(store, progress=lambda *step: told.append(step)), options)
    tokens = tables["tokens"].set_index(["text", "noise"])
    for number, text in enumerate(texts):
        for noise in (0.0, 1.5):
            result = ik.invert(model, text, noise=noise).to_frame()
            for column in ("layer", "position", "recovered", "winner", "runner_up", "winner_token"):
                assert tokens.loc[(number, noise), column].tolist() == result[column].tolist(), column
            assert tokens.loc[(number, noise), "margin"].tolist() == pytest.approx(result["margin"].tolist(), abs=1e-5)
    assert tables["texts"]["tokens"].tolist() == [5, 4]
    found = tables["inversion"].set_index(["layer", "noise"])
    assert found["tokens"].eq(9).all() and found.xs(0.0, level="noise")["rate"].eq(1).all()
    assert (found.xs(1.5, level="noise")["rate"] < 1).any()
    own = tokens.xs(1.5, level="noise").query("layer == 2")
    assert found.loc[(2, 1.5), "rate"] == pytest.approx(own["recovered"].mean())
    assert found.loc[(2, 1.5), "margin_least"] == own["margin"].min()
    assert len(tables["positions"]) == 3 * 2 * 5 and tables["positions"]["tokens"].max() == 2
    assert told[0] == ("inversion, tokens", 0, 9) and told[-1] == ("inversion, tokens", 9, 9)
    assert [path.name for path in (tmp_path / "run").glob("shard*")] == ["shard-000000.safetensors"]


def test_a_stopped_inversion_goes_on_with_the_next_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny.loaded("llama")
    texts = ["w5 w9 w5", "w8 w40"]
    options = InversionOptions(noises=(0.5,))
    whole = inversion_tables(model, texts, Run(Store(tmp_path / "whole", {})), options)

    def stop(what: str, done: int, total: int) -> None:
        if done > 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inversion_tables(model, texts, Run(Store(tmp_path / "run", {}), progress=stop), options)
    started: list[tuple[str, int, int]] = []
    again = inversion_tables(
        model, texts, Run(Store(tmp_path / "run", {}), progress=lambda *step: started.append(step)), options
    )
    assert started[0] == ("inversion, tokens", 5, 9)  # the first text is kept
    for name, table in whole.items():
        assert table.equals(again[name])
