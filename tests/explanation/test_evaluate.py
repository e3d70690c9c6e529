"""Tests of explanations: by their definitions, on a model whose sources are known, and over a dataset."""

import shutil
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from pandas import DataFrame
from pandas.testing import assert_frame_equal
from typer.testing import CliRunner

import identikit as ik
from identikit import plots
from identikit.cli.main import app
from identikit.explanation.evaluation_dataset import evaluation_tables
from identikit.explanation.faithfulness import BASELINES, SCORES, EvaluationOptions
from identikit.explanation.replaced import Replacement
from identikit.runs import run as runs
from identikit.runs.engines import Local, Processes
from identikit.runs.run import Run
from identikit.runs.store import Store
from tests.models import planted, tiny
from tests.models.state import state_of
from tests.reference import faithfulness as literal
from tests.runs.made import save_model

TEXTS = ["w5 w6 w7 w8 w9", "w11 w30 w12 w40 w5 w13", "w9 w50 w33 w20"]
RIGHT = ["token attribution", "value norm", "norm", "norm with residual", "globenc", "rollout"]


def nearer(model: ik.Model, text: str) -> torch.Tensor:
    """A measure that does not read the model: nearer tokens count more."""
    (encoded,) = model.encode(text)
    places = torch.arange(len(encoded))
    return -(places[:, None] - places).abs().double() - 0.1 * places


# By their definitions


def test_every_score_is_its_definition():
    model = tiny.loaded("llama", dtype=torch.float64)
    text = TEXTS[0]
    tests = ["curves", "leave one out"]
    found = ik.evaluate(model, [text], [nearer, "mean"], tests=tests, replacement="pad", beam=64)
    (encoded,) = model.encode(text)
    ids = list(encoded.ids)
    instead = [0] * len(ids)
    last = len(ids) - 1
    sources = [at for at in range(last) if not encoded.special[at]]
    mean = ik.attention_measure(model, text, "mean").raw.mean(0)
    changed = cache(lambda replaced: literal.change(model, ids, instead, replaced, last))
    lost = cache(lambda replaced: literal.drop(model, ids, instead, replaced))
    predicted = ik.evaluate(model, text, [nearer, "mean"], target="prediction", tests=tests, replacement="pad", beam=64)
    for name, scores in (("nearer", nearer(model, text)), ("mean", mean)):
        of_last = {source: float(scores[last, source]) for source in sources}
        row = predicted.sel(measure=name)
        assert float(row.sel(score="deletion").mean) == pytest.approx(literal.deletion(lost, of_last), abs=1e-7)
        assert float(row.sel(score="insertion").mean) == pytest.approx(literal.insertion(lost, of_last), abs=1e-7)
        each = {source: lost(frozenset({source})) for source in sources}
        assert float(row.sel(score="leave one out").mean) == pytest.approx(literal.correlation(each, of_last))
        row = found.sel(measure=name)
        assert float(row.sel(score="deletion").mean) == pytest.approx(literal.deletion(changed, of_last), abs=1e-7)
        assert float(row.sel(score="insertion").mean) == pytest.approx(literal.insertion(changed, of_last), abs=1e-7)
        correlations = []
        for output in range(4, len(ids)):  # from where on there are three sources
            seen = [source for source in sources if source < output]
            moved = {source: literal.change(model, ids, instead, frozenset({source}), output) for source in seen}
            correlations.append(literal.correlation(moved, {source: float(scores[output, source]) for source in seen}))
        expected = sum(correlations) / len(correlations)
        assert float(row.sel(score="leave one out").mean) == pytest.approx(expected, abs=1e-9)
        order = sorted(sources, key=lambda source: -of_last[source])
        curve = [0.0, *literal.curve(changed, order)]
        kept = [curve[round(share * len(sources))] for share in found.axis("share").values]
        torch.testing.assert_close(found.sel(curve=name).deletion_curve, torch.tensor(kept, dtype=torch.float64))
    both = found.sel(score=["deletion", "insertion"]).mean.mean(1)
    torch.testing.assert_close(found.sel(score="curves").mean, both)


def test_the_determined_share_is_that_of_agreement():
    model = tiny.loaded("llama", dtype=torch.float64)
    text = "w5 w6 w7 w5 w6 w8 w9 w5 w6 w7 w10 w11"
    (encoded,) = model.encode(text)
    ids = [int(token) for token in encoded.ids]
    names = ("mean", "rollout")
    found = ik.evaluate(model, text, names, tests="determined")
    agreed = ik.agreement(model, ids, names)
    # Agreement counts special tokens as sources too, so that the two differ by these alone.
    measure = ik.attention_measure(model, text, "rollout")
    lower, upper = measure.lower[-1], measure.upper[-1]
    shares = []
    for output in range(4, len(ids)):
        seen = [source for source in range(1, output) if not encoded.special[source]]
        pairs = [(one, other) for one in seen for other in seen if other < one]
        apart = [bool(lower[output, i] >= upper[output, j] or lower[output, j] >= upper[output, i]) for i, j in pairs]
        shares.append(sum(apart) / len(apart))
    assert float(found.sel(measure="rollout").mean) == pytest.approx(sum(shares) / len(shares))
    assert 0 < float(found.sel(measure="rollout").mean) < 1
    assert abs(float(found.sel(measure="mean").mean - agreed.determined[0])) < 0.2
    assert found.sel(measure=list(BASELINES)).mean.isnan().all()


# A model whose sources are known


def integrated_gradients(model: ik.Model, text: str) -> torch.Tensor:
    """Captum's, of each hidden vector along one drawn direction."""
    direction = torch.randn(model.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def along(output: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda hidden: hidden[0, output] @ direction

    outputs = range(len(model.encode(text)[0]))
    found = [ik.captum_attribution(model, text, target=along(output), baseline="pad") for output in outputs]
    return torch.stack([each.score.abs() for each in found])


@pytest.fixture(scope="module")
def truthful() -> ik.Result:
    model = planted.planted()
    return ik.evaluate(
        model,
        planted.TEXTS,
        [*RIGHT, integrated_gradients, "mean"],
        tests=["curves", "leave one out"],
        truth=planted.truth(model),
        beam=2,
        probes="exact",
    )


def test_on_the_planted_model_the_right_source_wins(truthful: ik.Result):
    for name in (*RIGHT, "integrated_gradients", "mean"):
        row = truthful.sel(measure=name)
        assert float(row.sel(score="truth").mean) == 1.0, name
        assert float(row.sel(score="curves").mean) == pytest.approx(1.0, abs=2e-3), name  # the head leaks some 0.003
    scores = truthful.sel(score=["deletion", "insertion", "curves", "truth"])
    reverse = scores.sel(measure="reversed").mean
    assert (scores.mean >= reverse).all() and reverse.max() < 2e-3
    assert float(truthful.sel(measure="reversed", score="leave one out").mean) == pytest.approx(-1.0)


def test_on_the_planted_model_random_orders_are_at_chance(truthful: ik.Result):
    random = truthful.sel(measure="random")
    sources = [len(text.split()) for text in planted.TEXTS]
    chances = []
    for n in sources:
        outputs = range(4, n + 2)  # with a source that can be told from two others
        chances.append(sum(1 / (min(output, n + 1) - 1) for output in outputs) / len(outputs))
    for score, chance in (("curves", 0.5), ("leave one out", 0.0), ("truth", sum(chances) / len(chances))):
        row = random.sel(score=score)
        assert SCORES[score].chance in (chance, None)
        assert float(row.low) <= chance <= float(row.high), score


def test_a_head_that_adds_nothing_misleads_attention_and_its_range_says_so():
    model = planted.planted(misled=True)
    texts = planted.TEXTS[:4]
    found = ik.evaluate(
        model, texts, [*RIGHT, "mean", "attention"], tests="determined", truth=planted.truth(model, texts)
    )
    truth = found.sel(score="truth")
    assert truth.sel(measure=RIGHT).mean.tolist() == [1.0] * len(RIGHT)
    assert truth.sel(measure=["mean", "attention"]).mean.tolist() == [0.0, 0.0]
    determined = found.sel(score="determined")
    assert determined.sel(measure=["mean", "attention"]).mean.tolist() == [0.0, 0.0]
    assert float(determined.sel(measure="norm").mean) > 0.2
    effective = ik.attention_measure(model, texts[3], "mean").effective.mean(0)
    for output in range(4, len(effective)):
        seen = effective[output, :output]
        assert float(seen[planted.SOURCES[output]]) > float(seen.max()) - 1e-9  # tokens of equal values share it
        assert (seen > float(seen.max()) - 1e-9).sum() < output / 2


# What it leaves, and what it says


def test_the_model_leaves_as_it_came_and_a_measure_that_does_not_read_it_is_named():
    model = tiny.loaded("bert")
    before = state_of(model.hf)
    found = ik.evaluate(model, TEXTS, ["leave one out", nearer], tests="randomised")
    assert state_of(model.hf) == before
    assert found.left is not None and found.axis("depth").values == (1, 2, 3)
    assert found.sel(measure="nearer").left.tolist() == [1.0, 1.0, 1.0]
    assert "Unchanged when all layers are shuffled: nearer." in str(found)
    assert float(found.sel(measure="leave one out", score="randomised").mean) < 0.9
    assert found.deletion_curve is None and found.scores.keys() == {"randomised"}


def test_replacements_are_named_and_special_tokens_stay():
    model = tiny.shared("bert")
    encoded = model.encode(TEXTS)
    assert Replacement.of(model, None, encoded, 0).name == "draw"  # the tiny tokenizer has no mask
    assert Replacement.of(model, "pad", encoded, 0).ids == (0,)
    drawn = Replacement.of(model, "draw", encoded, 0)
    assert sorted(drawn.ids) == sorted(token for text in encoded for token in text.ids[1:-1])
    ids = torch.tensor(encoded[1].ids)
    substitutes = drawn.draw(ids, 0)
    assert not (substitutes == ids).any() and torch.equal(substitutes, drawn.draw(ids, 0))
    assert ik.evaluate(model, TEXTS[0], "leave one out", tests="leave one out", replacement="pad").replacement == "pad"
    for wrong, words in (("mask", "has no mask"), ("zebra", "not known")):
        with pytest.raises(ik.InputError, match=words):
            ik.evaluate(model, TEXTS, replacement=wrong)


def test_time_is_said_beforehand_and_kept_to(monkeypatch: pytest.MonkeyPatch):
    model = tiny.shared("bert")
    found = ik.evaluate(model, TEXTS, "leave one out", tests="leave one out", seconds=1e-6)
    assert (found.texts, found.left_out) == (1, 2) and "2 texts were not reached" in str(found)
    assert "Of one text, so without standard errors" in str(found) and "±" not in str(found)
    monkeypatch.setattr(sys.modules["identikit.explanation.evaluate"], "_LONG", 0.0)
    with pytest.warns(UserWarning, match="Testing takes up to .* runs of the model"):
        ik.evaluate(model, TEXTS, "leave one out", tests="leave one out")


def test_a_wide_beam_is_not_said_to_run_more_sets_than_there_are():
    model = tiny.shared("bert")
    options = [EvaluationOptions(tests=("curves",), beam=beam) for beam in (1, 256, 10**20)]
    narrow, wide, wider = (each.passes(model, 8) for each in options)
    assert narrow < wide == wider < 600


def test_a_text_without_sources_has_no_scores(truthful: ik.Result):
    found = ik.evaluate(tiny.shared("llama"), ["w5", "w6 w7"], "mean")
    assert found.mean.isnan().all() and "–" in str(found)
    drawn = truthful.plot()
    assert [label.get_text() for label in drawn.get_yticklabels()][-1] == "reversed"
    table = truthful.to_latex().splitlines()
    row = next(line for line in table if line.startswith("reversed & "))
    assert r"\begin{tabular}{lrrrrr}" in table and row.count("&") == 5 and r"-1.00$\pm$0.00" in row
    lines = plots.change_curves(truthful).get_lines()
    assert [line.get_label() for line in lines][-2:] == ["best found", "worst found"]


# Over a dataset

OPTIONS = EvaluationOptions(measures=("mean", "leave one out"), beam=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model and the texts."""
    save_model(tmp_path / "model", "llama")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    return tmp_path


def command(folder: Path, *words: str) -> str:
    """Run a command that ends well; return what it prints."""
    data = ["--data", str(folder / "texts.txt"), "--model", str(folder / "model")] if words[0] == "evaluate" else []
    done = CliRunner().invoke(app, [*words, *data])
    assert done.exit_code == 0, done.output
    return done.stdout


def tables(folder: Path, store: str, engine: Local | Processes | None = None) -> dict[str, DataFrame]:
    model = ik.load(str(folder / "model"))
    return evaluation_tables(model, TEXTS, Run(Store(folder / store, {}), engine or Local()), OPTIONS)


def check_same(folder: Path, *stores: str) -> None:
    """Check that folders hold the same tables, to the byte."""
    written = [{path.name: path.read_bytes() for path in (folder / store).glob("*.csv")} for store in stores]
    assert written[0] and all(tables == written[0] for tables in written)


def test_tables_hold_the_result_and_are_the_same_after_a_stop(folder: Path, monkeypatch: pytest.MonkeyPatch):
    model = ik.load(str(folder / "model"))
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    monkeypatch.setattr(runs, "SHARD_LEAST", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = tables(folder, "whole")
        found = ik.evaluate(model, TEXTS, OPTIONS.measures, beam=2)
        summary = whole["summary"].set_index(["measure", "score"])
        for array, column in (("mean", "mean"), ("stderr", "error"), ("low", "low"), ("high", "high")):
            expected = torch.tensor(summary[column].to_numpy()).reshape(found.mean.shape)
            torch.testing.assert_close(found.array(array), expected, equal_nan=True, rtol=0, atol=0)
        changes = torch.tensor(whole["curves"]["change"].to_numpy()).reshape(2, *found.deletion_curve.shape)
        assert torch.equal(changes[0], found.deletion_curve) and torch.equal(changes[1], found.insertion_curve)
        assert torch.equal(torch.tensor(whole["shuffled"]["correlation"].to_numpy()), found.left.flatten())
        shutil.copytree(folder / "whole", folder / "stopped")
        shards = sorted((folder / "stopped").glob("shard-*"))
        assert len(shards) > 1
        shards[-1].unlink()
        tables(folder, "stopped")
    check_same(folder, "whole", "stopped")


@pytest.mark.slow
def test_tables_are_the_same_for_any_engine_and_but_for_rounding_for_any_number_of_threads(folder: Path):
    one = tables(folder, "here", Local(threads=1))
    tables(folder, "apart", Processes(1, 2))
    check_same(folder, "here", "apart")
    two = tables(folder, "threads", Local(threads=2))
    tables(folder, "apart with threads", Processes(2, 1))
    check_same(folder, "threads", "apart with threads")
    for name, table in one.items():
        assert_frame_equal(table, two[name], rtol=1e-4, atol=1e-5)


def test_the_command_writes_the_tables_also_in_parts_and_says_how_measures_fare(folder: Path):
    given = ["evaluate", "--measure", "mean", "--test", "curves", "--test", "randomised", "--beam", "1"]
    given += ["--target", "prediction"]
    told = command(folder, *given, "--out", str(folder / "run"))
    assert "of the probability of the model's own prediction on 3 texts" in told
    assert "± standard errors" in told and "reversed" in told
    for part in ("1/2", "2/2"):
        command(folder, *given, "--out", str(folder / "parts"), "--shard", part)
    command(folder, "merge", str(folder / "parts"))
    check_same(folder, "run", "parts")
    names = {"texts", "scores", "summary", "shuffled", "curves"}
    assert {path.stem for path in (folder / "run").glob("*.csv")} == names
    assert "Equal" in command(folder, "diff", str(folder / "run"), str(folder / "parts"))


def test_what_was_not_tested_leaves_empty_tables_that_are_as_described(folder: Path):
    given = ["--measure", "mean", "--measure", "mean", "--test", "leave one out", "--test", "leave one out"]
    assert command(folder, "evaluate", *given, "--out", str(folder / "run")).count("\nmean ") == 1
    assert "No problems found" in command(folder, "verify", str(folder / "run"))
