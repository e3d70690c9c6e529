"""What is computed of each input."""

from pathlib import Path

import pandas as pd
import pytest

from identikit.paper.inputs import INPUTS, from_one
from identikit.paper.work import Effort, Work
from tests.models import tiny

TEXTS = [f"w{i % 40 + 3} w{i * 7 % 40 + 3} w{i + 4}" for i in range(22)]


@pytest.mark.parametrize("name", ["untuned", "finetuned"])
def test_maps_that_need_no_training_have_all_folds(name: str, tmp_path: Path):
    work = Work(tiny.loaded("bert"), "made up", [*TEXTS], effort=Effort(folds=4))
    given = INPUTS[name]
    table = given.tables(work, given.store(work, str(tmp_path)))[name]
    assert set(table["map"]) == {"naive"} and set(table["target"]) == {"previous"}
    folds = table.groupby(["distance", "layer"])["fold"].nunique()
    assert folds.tolist() == [4] * len(folds) and len(folds) == 2 * work.model.n_layers


def test_the_paper_counts_from_one(tmp_path: Path):
    work = Work(tiny.loaded("bert"), "made up", [*TEXTS], effort=Effort(probes=2, folds=1))
    layers = [*range(1, work.model.n_layers + 1)]
    for name, tables in (
        ("attention", ("correlation_by_layer", "correlation_by_head", "null_dimension", "types")),
        ("intervals", ("intervals", "groups")),
        ("attribution-sum", ("own sum", "groups sum", "offsets sum")),
        ("untuned", ("untuned",)),
    ):
        found = INPUTS[name].tables(work, INPUTS[name].store(work, str(tmp_path)))
        for table in tables:
            assert sorted(set(found[table]["layer"])) == layers, table
            if "head" in found[table]:
                assert sorted(set(found[table]["head"])) == [*range(1, work.model.n_heads + 1)]
    before = pd.DataFrame({"layer": [0], "test_layer": [2], "head": [1], "offset": [0]})
    after = from_one({"a": before})["a"]
    assert after.to_dict("records") == [{"layer": 1, "test_layer": 3, "head": 2, "offset": 0}]
    assert before["layer"].tolist() == [0]
