"""Agreement between measures, and measures over a dataset, by their definitions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import identikit as ik
from identikit.attention.measures_dataset import MeasuresOptions, measures_tables
from identikit.runs import run as runs
from identikit.runs.run import Run
from identikit.runs.store import Store
from tests.models import tiny
from tests.runs.made import save_model

TEXTS = ["w5 w6 w7 w5 w6 w8 w9 w5 w6 w7 w10 w11", "w9 w10 w11 w5 w9 w10 w7 w8 w12", "w5"]


def constant(model: ik.Model, text: str) -> torch.Tensor:
    """A measure that no alternative moves: nearer tokens count more."""
    places = torch.arange(len(text.split()) + 2)  # with the special tokens
    return -(places[:, None] - places).abs().double()


@pytest.fixture(scope="module")
def model() -> ik.Model:
    return tiny.loaded("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def found(model: ik.Model):
    return ik.agreement(model, TEXTS, ("mean", "rollout", ik.token_attribution, constant))


def test_agreement_is_its_definition(model: ik.Model, found):
    """The mean over texts of the mean over tokens of Spearman's correlation; and the pairs whose ends are apart."""
    assert found.axes[0].values == ("mean", "rollout", "token_attribution", "constant") and found.texts == 3
    correlations = []
    shares = []
    for text in TEXTS[:2]:  # in the last one no token has three sources
        mean = ik.attention_measure(model, text, "mean")
        rollout = ik.attention_measure(model, text)
        last = ik.token_attribution(model, text).contribution[-1]
        by_token = []
        apart = []
        for output in range(3, len(mean.tokens)):
            sources = list(range(output))  # it is causal
            ranked = [
                mean.raw.mean(0)[output, sources],
                rollout.raw[-1, output, sources],
                last[sources, output],
                constant(model, text)[output, sources],
            ]
            by_token.append([[spearmanr(one, other).statistic for other in ranked] for one in ranked])
            ends = [
                (measure[0][output, sources], measure[1][output, sources])
                for measure in ((mean.lower.mean(0), mean.upper.mean(0)), (rollout.lower[-1], rollout.upper[-1]))
            ]
            apart.append(
                [
                    np.mean([bool(low[i] >= high[j] or low[j] >= high[i]) for i in sources for j in range(i)])
                    for low, high in ends
                ]
            )
        correlations.append(np.mean(by_token, axis=0))
        shares.append(np.mean(apart, axis=0))
    np.testing.assert_allclose(found.correlation, np.mean(correlations, axis=0), atol=1e-9)
    np.testing.assert_allclose(found.correlation_stderr, np.std(correlations, axis=0, ddof=1) / 2**0.5, atol=1e-9)
    np.testing.assert_allclose(found.determined[:2], np.mean(shares, axis=0), atol=1e-9)
    assert found.determined[2:].tolist() == [1.0, 1.0] and 0 < float(found.determined[1]) < 1


def test_sources_that_a_measure_has_no_number_for_are_left_out(model: ik.Model):
    def gappy(model: ik.Model, text: str) -> torch.Tensor:
        scores = constant(model, text)
        scores[:, 2] = torch.nan
        return scores

    found = ik.agreement(model, TEXTS[0], ("mean", gappy))
    mean = ik.attention_measure(model, TEXTS[0], "mean").raw.mean(0)
    by_token = []
    for output in range(4, len(mean)):  # the token before has two sources left, and no ranking
        sources = [source for source in range(output) if source != 2]
        by_token.append(spearmanr(mean[output, sources], gappy(model, TEXTS[0])[output, sources]).statistic)
    assert float(found.correlation[0, 1]) == pytest.approx(np.mean(by_token), abs=1e-9)


def test_every_text_has_its_target(model: ik.Model):
    names = ("gradient", "relevance")
    together = ik.agreement(model, TEXTS[:2], names, target="w5")
    alone = [ik.agreement(model, text, names, target="w5").correlation for text in TEXTS[:2]]
    torch.testing.assert_close(together.correlation, torch.stack(alone).mean(0))
    with pytest.raises(ik.InputError, match="none of these measures needs one"):
        ik.agreement(model, TEXTS[0], ["mean"], target="w5")


def test_a_result_of_another_text_is_refused(model: ik.Model):
    def other(model: ik.Model, text: object) -> ik.Result:
        return ik.token_attribution(model, [3] * len(ik.effective_attention(model, text).tokens))

    with pytest.raises(ik.InputError, match="other gave a result of another text"):
        ik.agreement(model, TEXTS[0], ["mean", other])


def test_agreement_says_and_draws_what_it_found(found, tmp_path: Path):
    assert "rollout: at least 0." in str(found) and "token_attribution" in str(found) and "±" in str(found)
    assert [*found.to_frame()] == ["measure", "other", "correlation", "correlation_stderr"]
    found.save(tmp_path / "saved")
    assert str(ik.open_result(tmp_path / "saved")) == str(found)
    assert len(found.plot().texts) == 16 and len(found.sel(measure="mean").plot().texts) == 4
    with pytest.raises(ik.InputError, match="expected"):
        ik.agreement(tiny.shared("llama"), TEXTS[0], [lambda model, text: torch.zeros(2, 2)])


def test_what_was_not_bounded_in_time_is_not_determined_and_said(model: ik.Model, found, tmp_path: Path):
    """The limit holds for all texts together; correlations are of raw readings, and stay."""
    late = ik.agreement(model, TEXTS[:2], ("mean", "rollout", constant), seconds=1e-9)
    assert late.bounded_texts.tolist() == [0, 0, 2] and found.bounded_texts.tolist() == [3, 3, 3, 3]
    assert late.determined.isnan().tolist() == [True, True, False]
    assert "rollout: no text was bounded in time" in str(late) and "in time" not in str(found)
    torch.testing.assert_close(late.correlation, found.correlation[[0, 1, 3]][:, [0, 1, 3]])
    late.save(tmp_path / "late")
    assert str(ik.open_result(tmp_path / "late")) == str(late)


def test_tables_hold_what_each_text_gives_and_a_resumed_run_the_same_bytes(
    model: ik.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    options = MeasuresOptions(measures=("attention", "rollout", "alti"), scores=("previous", "induction"))
    tables = measures_tables(model, TEXTS, Run(Store(tmp_path / "whole", {})), options)
    rows = tables["measures"].set_index(["text", "measure"])
    for text, name in ((0, "attention"), (0, "rollout"), (1, "alti"), (2, "rollout")):
        measure = ik.attention_measure(model, TEXTS[text], name)
        order = measure.certain_order if name == "attention" else measure.certain_order[-1]
        share = measure.certain_share if name == "attention" else measure.certain_share[-1]
        known = order.clamp(min=0).double()
        row = rows.loc[text, name]
        decided = measure.order_is_decided if name == "attention" else measure.order_is_decided[-1]
        assert (row["rows"], row["undecided"]) == (order.numel(), int((order < 0).sum()))
        assert row["order_undecided"] == int((~decided).sum())
        assert row["determined"] == pytest.approx(float(share.mean()))
        assert row["strongest"] == pytest.approx(float((known > 0).double().mean()))
        assert row["order"] == pytest.approx(float(known.mean()))
    scores = ik.head_scores(model, TEXTS, scores=["previous", "induction"])
    roles = tables["roles"].set_index(["score", "layer", "head"])
    assert roles.loc[("induction", 2, 3), "texts"] == int(scores.scored_texts[1]) == 2
    for name in ("raw", "effective", "lower", "upper"):
        found = torch.tensor(roles[name].to_numpy()).reshape(scores.raw.shape)
        torch.testing.assert_close(found, scores.array(name))
        errors = torch.tensor(roles[f"{name}_error"].to_numpy()).reshape(scores.raw.shape)
        torch.testing.assert_close(errors, scores.array(f"{name}_stderr"))
    for path in (tmp_path / "whole").glob("shard-00000[1-9]*"):
        path.unlink()
    again = measures_tables(model, TEXTS, Run(Store(tmp_path / "whole", {})), options)
    for name, table in tables.items():
        assert table.equals(again[name])


def test_the_command_writes_the_tables_and_says_what_is_determined(tmp_path: Path):
    from typer.testing import CliRunner

    from identikit.cli.main import app

    save_model(tmp_path / "model", "llama")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = ["--data", tmp_path / "texts.txt", "--model", tmp_path / "model", "--measure", "rollout"]
    done = CliRunner().invoke(app, ["measures", *map(str, options), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0 and "Means over texts" in done.stdout and "rollout" in done.stdout
    assert {path.stem for path in (tmp_path / "run").glob("*.csv")} == {"texts", "measures", "roles"}
    options[-1] = "zebra"
    done = CliRunner().invoke(app, ["measures", *map(str, options), "--out", str(tmp_path / "other")])
    assert done.exit_code != 0
