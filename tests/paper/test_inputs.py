"""What is computed of each input."""

from pathlib import Path

import pytest

from identikit.paper.inputs import INPUTS, Effort, Work
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
