import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from identikit.errors import InputError
from identikit.maths.neighbours import DISTANCES
from identikit.tokens.experiments import EXPERIMENTS, fit_maps, measure, recover, run_experiment, summary
from identikit.tokens.protocol import MapChoice, Settings, Task, fold_split, sentence_blocks
from identikit.tokens.states import HiddenStates
from tests.reference import neighbours as literal
from tests.tokens.constructed import rotated, states

COLUMNS = ["model", "map", "distance", "layer", "test_layer", "target", "offset", "data_share", "fold", "split", "rate"]
QUICK = Settings(batch_size=64, epochs=30, folds=1, hidden_size=40, learning_rates=(0.03,))
RIDGE = MapChoice(maps=("ridge",), distances=("cosine",))


def run(name, states, choice, settings, *, tasks=None, **options):
    """Run an experiment, perhaps with other tasks, and return its rates and trials as tables."""
    experiment = EXPERIMENTS[name]
    experiment = experiment if tasks is None else experiment._replace(tasks=tasks)
    rates, fit = run_experiment(experiment, states, choice, settings, **options)
    trials = pd.DataFrame([result.row() for result in fit.trials])
    return SimpleNamespace(rates=pd.DataFrame(rates), trials=trials, maps=fit.maps)


same_layer, across_layers, generalisation, previous_layer, neighbouring_tokens = (
    partial(run, name) for name in EXPERIMENTS
)


def offsets(*places):
    return tuple(Task(offset=place) for place in places)


def mean_rates(experiment, *by):
    return experiment.rates.groupby(list(by))["rate"].mean()


def test_a_rotation_keeps_all_identity_and_naive_lookup_finds_none_of_it():
    given = states(sentences=120, length=(6, 13), width=16, hidden=rotated)
    rates = mean_rates(same_layer(given, MapChoice(), QUICK), "map", "distance")
    for distance in DISTANCES:
        assert rates["linear", distance] == rates["ridge", distance] == 1
        assert rates["mlp", distance] > 0.9
        assert rates["naive", distance] == pytest.approx(given.chance, abs=0.06)


def test_noise_leaves_every_map_at_chance():
    given = states(sentences=200, length=(6, 13), width=16)
    rates = mean_rates(same_layer(given, MapChoice(), replace(QUICK, epochs=3, folds=2)), "map", "distance")
    assert len(rates) == 8 and rates.tolist() == pytest.approx([given.chance] * 8, abs=0.06)


def test_rates_are_those_of_a_double_loop_over_the_test_sentences():
    given = states(hidden=lambda inputs, generator: rotated(inputs, generator) + inputs, layers=2)
    maps = fit_maps(given, MapChoice(maps=("naive", "ridge")), tasks=[Task(offset=1)], settings=Settings(folds=2)).maps
    for fitted, row in zip(maps, sorted_like(measure(given, maps), maps), strict=True):
        assert row.rate == pytest.approx(rate_by_loop(given, fitted), abs=1e-12)


def sorted_like(rates, maps):
    found = {(row.map, row.distance, row.layer, row.fold): row for row in rates}
    return [found[fitted.map, fitted.distance, fitted.layer, fitted.fold] for fitted in maps]


def rate_by_loop(given, fitted):
    hits = []
    predicted = fitted(given.layer(fitted.layer)).double().numpy()
    candidates = given.inputs.double().numpy()
    for sentence in fold_split(sentence_blocks(given.n_sentences, seed=0), fitted.fold).test.tolist():
        rows = slice(int(given.starts[sentence]), int(given.starts[sentence] + given.lengths[sentence]))
        found = literal.nearest(predicted[rows], candidates[rows], fitted.distance, fitted.task.offset)
        hits += [each[0] for each in found if each is not None]
    return sum(hits) / len(hits)


def test_a_map_tested_on_another_layer_sees_that_layer():
    """Layers 0 and 1 are the same rotation and layer 2 is another."""
    first = states(sentences=60, width=16, length=(6, 13), hidden=rotated, layers=2)
    given = HiddenStates(first.inputs, first.hidden[[0, 0, 1]], first.lengths, "three")
    rates = mean_rates(across_layers(given, RIDGE, Settings(folds=2)), "layer", "test_layer")
    assert len(rates) == 9
    assert rates[0, 1] == rates[1, 0] == rates[0, 0] == rates[2, 2] == 1
    assert max(rates[0, 2], rates[2, 0], rates[2, 1]) < 0.5


def test_training_rates_and_shares_of_data():
    given = states(
        sentences=60, width=16, hidden=lambda inputs, generator: inputs + torch.randn(inputs.shape, generator=generator)
    )
    experiment = generalisation(given, RIDGE, Settings(folds=2), tasks=(Task(data_share=0.1), Task()))
    rates = mean_rates(experiment, "data_share", "split")
    assert rates[0.1, "train"] > rates[0.1, "test"]
    assert rates[1.0, "test"] > rates[0.1, "test"]
    tokens = experiment.rates.groupby(["data_share", "split"])["n_tokens"].sum()
    assert tokens[0.1, "train"] < tokens[1.0, "train"] and tokens[0.1, "test"] == tokens[1.0, "test"]


def test_the_previous_layer_is_the_target_of_the_next():
    """Layer 0 is noise and layer 1 a rotation of it: lost from the inputs, found again from layer 0."""
    noise = states(sentences=60, width=16, length=(6, 13))
    hidden = torch.stack([noise.hidden[0], rotated(noise.hidden[0], torch.Generator().manual_seed(9))])
    given = HiddenStates(noise.inputs, hidden, noise.lengths, "m")
    step = previous_layer(given, RIDGE, Settings(folds=2))
    assert set(step.rates["target"]) == {"previous"}
    assert mean_rates(step, "layer")[1] == 1
    assert mean_rates(step, "layer")[0] < 0.3
    assert mean_rates(same_layer(given, RIDGE, Settings(folds=2)), "layer")[1] < 0.3


def test_neighbours_are_found_at_their_offset_and_tokens_without_are_left_out():
    """Each hidden vector is the input of the next token in the sentence."""
    given = states(sentences=60, width=8, hidden=lambda inputs, _: inputs.roll(-1, 0))
    experiment = neighbouring_tokens(given, RIDGE, Settings(folds=2), tasks=offsets(-1, 1))
    rates = mean_rates(experiment, "offset")
    assert rates[1] == 1 and rates[-1] < 0.5
    rows = experiment.rates.query("fold == 0 and offset == 1")
    same = same_layer(given, RIDGE, Settings(folds=1)).rates
    sentences = 60 * 3 // 20
    assert int(rows["n_tokens"].iloc[0]) == int(same["n_tokens"].iloc[0]) - sentences


def test_duplicates_are_reported_beside_the_rate_of_unique_tokens():
    given = states(
        sentences=60,
        width=8,
        hidden=rotated,
        inputs=lambda tokens, generator: torch.randn(5, 8, generator=generator)[
            torch.randint(5, (tokens,), generator=generator)
        ],
    )
    row = same_layer(given, RIDGE, Settings(folds=1)).rates.iloc[0]
    assert row["rate"] == row["unique_rate"] == 1
    assert 0.3 < row["duplicates"] < 0.9


def test_summary_averages_over_folds_with_a_corrected_interval():
    rates = pd.DataFrame(
        {
            "model": "m",
            "map": "ridge",
            "data_share": 1.0,
            "fold": range(4),
            "rate": [0.5, 0.6, 0.7, 0.8],
            "unique_rate": [0.5, 0.6, 0.7, math.nan],
            "duplicates": 0.25,
            "n_tokens": 10,
        }
    )
    (row,) = summary(rates).to_dict("records")
    deviation = math.sqrt(sum((rate - 0.65) ** 2 for rate in (0.5, 0.6, 0.7, 0.8)) / 3)
    half = 3.182446305 * deviation * math.sqrt(1 / 4 + 3 / 14)
    assert (row["model"], row["map"], row["folds"]) == ("m", "ridge", 4)
    assert row["rate"] == pytest.approx(0.65)
    assert row["unique_rate"] == pytest.approx(0.6)
    assert [row["low"], row["high"]] == pytest.approx([0.65 - half, 0.65 + half])
    near_one = summary(rates.assign(rate=[1.0, 1.0, 1.0, 0.9]))
    assert near_one["high"].tolist() == [1.0] and 0 < near_one["low"].item() < near_one["rate"].item()
    single = summary(rates[:1])
    assert single["low"].isna().all() and single["rate"].tolist() == [0.5]


def test_identity_map_reads_one_sentence_layer_by_layer():
    given = states(sentences=60, width=8, hidden=rotated, layers=2)
    maps = fit_maps(given, MapChoice(maps=("naive", "ridge")), tasks=[Task()], settings=Settings(folds=2)).maps
    rows = given.rows(torch.tensor([7]))
    one = HiddenStates(given.inputs[rows], given.hidden[:, rows], given.lengths[[7]], "constructed")
    for name in ("naive", "ridge"):
        read = recover(one, maps, map=name, distance="l2")
        assert [*read] == [0, 1]
        for layer, nearest in read.items():
            (fitted,) = [
                each for each in maps if (each.map, each.distance, each.layer, each.fold) == (name, "l2", layer, 0)
            ]
            expected = literal.nearest(fitted(one.layer(layer)).double().numpy(), one.inputs.double().numpy(), "l2")
            assert nearest.hit.tolist() == [bool(each[0]) for each in expected]
            assert nearest.winner.tolist() == [each[1] for each in expected]
            assert nearest.margin.tolist() == pytest.approx([each[2] for each in expected], abs=1e-5)
    assert all(nearest.hit.all() for nearest in read.values())


def test_progress_tells_what_is_being_done():
    calls = []
    same_layer(
        states(layers=2),
        MapChoice(),
        Settings(folds=1, epochs=3, hidden_size=3),
        progress=lambda *call: calls.append(call),
    )
    assert [call for call in calls if call[1] == call[2]] == [
        ("training maps", 6, 6),
        ("fitting ridge maps", 2, 2),
        ("looking tokens up", 2, 2),
    ]


def narrow():
    """Hidden vectors wider than the inputs, as in ALBERT."""
    given = states(layers=2)
    return HiddenStates(given.inputs[:, :3], given.hidden, given.lengths, "narrow")


def test_maps_go_from_the_hidden_width_to_the_width_of_the_target():
    probes = MapChoice(maps=("linear", "mlp", "ridge"))
    tasks = [Task(), Task(target="previous")]
    maps = fit_maps(narrow(), probes, tasks=tasks, settings=Settings(folds=1, epochs=1, hidden_size=5)).maps
    assert len(maps) == 2 * 3 * 2 * 2
    for fitted in maps:
        width = 6 if fitted.task.target == "previous" and fitted.layer == 1 else 3
        assert fitted(narrow().layer(fitted.layer)).shape[1] == width


def test_tasks_fitted_together_give_the_tables_of_one_after_another():
    given = states(hidden=rotated, layers=2, dtype=torch.float64)
    probes = MapChoice(maps=("naive", "linear", "ridge"))
    settings = replace(QUICK, epochs=2, folds=2, learning_rates=(0.03, 0.01))
    together = neighbouring_tokens(given, probes, settings, tasks=offsets(2, -1))
    apart = [neighbouring_tokens(given, probes, settings, tasks=offsets(offset)) for offset in (2, -1)]
    for name in ("rates", "trials"):
        expected = pd.concat([getattr(each, name) for each in apart], ignore_index=True)
        pd.testing.assert_frame_equal(getattr(together, name), expected)
    assert " ".join(together.trials.columns[:8]) == "map distance layer fold learning_rate target offset data_share"
    chosen = together.trials.groupby(["map", "distance", "layer", "fold", "offset"])["validation_loss"].min()
    for first, second in zip(together.maps, apart[0].maps + apart[1].maps, strict=True):
        if first.map == "linear":
            cell = (first.map, first.distance, first.layer, first.fold, first.task.offset)
            assert chosen[cell] == first.validation_loss
        for name in ("map", "distance", "layer", "fold", "task"):
            assert getattr(first, name) == getattr(second, name)
        torch.testing.assert_close(dict(first.parameters), dict(second.parameters))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: same_layer(narrow(), MapChoice(), QUICK),
            "naive map to layer 0 of narrow: hidden vectors have 6 numbers",
        ),
        (lambda: neighbouring_tokens(states(), RIDGE, QUICK, tasks=offsets(9)), "offset 9: no train text of fold 0"),
        (
            lambda: recover(states(sentences=1), [], map="ridge", distance="l2"),
            "no ridge map for l2 distance and fold 0 was fitted. Use one of those that were: none",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(act, message):
    with pytest.raises(InputError, match=message):
        act()
