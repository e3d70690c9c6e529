"""Effective attention over a dataset: tables count from 0, hold what each text gives, and shards merge to the whole."""

from pathlib import Path

import pytest
import torch

import identikit as ik
from identikit.attention.dataset import AttentionOptions, attention_tables
from identikit.attention.token_types import type_sums
from identikit.errors import InputError
from identikit.runs import run as runs
from identikit.runs.run import Run
from identikit.runs.store import Store
from tests.attribution.test_dataset import TEXTS, check_progress
from tests.models import tiny


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_tables_hold_what_each_text_gives(name: str, tmp_path: Path):
    model = tiny.loaded(name, dtype=torch.float64)
    tables = attention_tables(model, TEXTS, Run(Store(tmp_path / "run", {})), AttentionOptions(mass=True))
    results = ik.effective_attention(model, TEXTS, mass=True)
    n = len(TEXTS)
    for table, by, axes in (
        ("correlation", None, ["text"]),
        ("correlation_by_layer", "layer", ["text", "layer"]),
        ("correlation_by_head", "head", ["text", "layer", "head"]),
    ):
        frame = tables[table]
        expected = torch.stack([result.pearson(by) for result in results])
        assert [*frame] == [axes[0], "tokens", *axes[1:], "pearson"]
        assert len(frame) == expected.numel() and not frame.duplicated(axes).any()
        for text, result in enumerate(results):
            rows = frame[frame["text"] == text].sort_values(axes)
            assert rows["tokens"].unique().tolist() == [len(result.tokens)]
            assert rows["pearson"].tolist() == pytest.approx(expected[text].flatten().tolist(), abs=1e-9)
    assert tables["correlation_by_head"]["layer"].unique().tolist() == [0, 1, 2]
    assert tables["correlation_by_head"]["head"].unique().tolist() == [0, 1, 2, 3]
    null = tables["null_dimension"].set_index(["text", "layer"])
    assert len(null) == 3 * n and (null["slack_least"] >= 0).all()
    for text, result in enumerate(results):
        assert null["least"][text].tolist() == result.null_dim.amin((1, 2)).tolist()
        assert null["greatest"][text].tolist() == result.null_dim.amax((1, 2)).tolist()
        assert null["residual"][text].tolist() == pytest.approx(result.residual.amax(1).tolist())


def test_types_are_added_up_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch):
    result = ik.effective_attention(tiny.loaded("bert"), TEXTS[0])
    whole, _ = type_sums(result)
    monkeypatch.setattr("identikit.models.taps.tap.ROW_BYTES", 512)
    assert len(list(result.captured().layers[0].row_chunks())) > 1
    some, _ = type_sums(result)
    torch.testing.assert_close(some, whole, atol=1e-6, rtol=0)


def test_types_add_up_and_no_cell_reads_as_missing(tmp_path: Path):
    import pandas as pd

    attention_tables(tiny.loaded("bert"), TEXTS, Run(Store(tmp_path / "run", {})), AttentionOptions())
    types = pd.read_csv(tmp_path / "run" / "types.csv")  # plainly: no word there is one that pandas drops
    assert not types.isna().any(axis=None) and set(types["map"]) == {"raw", "effective", "null_space"}
    axes = ["layer", "head", "source", "target"]
    parts = {name: part.set_index(axes)["attention"] for name, part in types.groupby("map")}
    assert (parts["raw"] - parts["effective"] - parts["null_space"]).abs().max() < 1e-11  # in units of 2^-40
    sums = parts["raw"].groupby(["layer", "head", "source"]).sum()
    assert sums.min() == pytest.approx(1.0) and sums.max() == pytest.approx(1.0)
    assert types["layer"].min() == types["head"].min() == 0


def test_a_resumed_run_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    model, options = tiny.loaded("bert"), AttentionOptions(intervals=5)
    attention_tables(model, TEXTS, Run(Store(tmp_path / "whole", {})), options)
    attention_tables(model, TEXTS, Run(Store(tmp_path / "again", {})), options)
    for path in (tmp_path / "again").iterdir():
        if path.name not in ("run.json", "shard-000000.safetensors"):
            path.unlink()
    attention_tables(model, TEXTS, Run(Store(tmp_path / "again", {})), options)
    whole, again = (sorted((tmp_path / name).glob("*.*[tv]")) for name in ("whole", "again"))  # all tables
    assert [path.name for path in whole] == [path.name for path in again] and len(whole) == 2 * 10
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in again]


def test_progress_moves_with_tokens_over_the_whole_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    check_progress(attention_tables, AttentionOptions(), tmp_path, "effective attention, tokens")


def test_long_texts_are_refused_or_cut(tmp_path: Path):
    model, store = tiny.loaded("bert"), Store(tmp_path / "run", {})
    long = [*TEXTS, "w3 " * 100]
    with pytest.raises(InputError, match="tokens and the model reads at most"):
        attention_tables(model, long, Run(store), AttentionOptions())
    assert not (tmp_path / "run").exists()
    assert attention_tables(model, long, Run(store), AttentionOptions(truncate=True))["texts"]["tokens"].max() == 64
