"""The rehearsal of BERT-base computes what `reproduce` computes, on a model that is saved as the hub's is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import identikit as ik
from identikit.maths.jacobian import NORMS
from identikit.paper.inputs import INPUT_OF, INPUTS
from identikit.paper.reproduce import Plan
from tools import rehearse
from tools.rehearse import DATA, KINDS, PARTS, Clock, Enough, packaged_vocabulary, save_bert

TINY = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48}
SHARED = Path(__file__).parents[3] / "shared" / "data"


def test_the_parts_are_those_that_figures_and_claims_need():
    plan = Plan(data=DATA)
    entries = [*plan.figures, *plan.claims]
    needed = {
        (plan.data_of(entry), INPUT_OF[name].name)
        for entry in entries
        for need in entry.needs
        for norm in NORMS
        if (name := need.format(norm=norm)) != "lengths"
    }
    assert set(PARTS) == needed and len(PARTS) == len(needed)
    assert KINDS.keys() <= INPUTS.keys()


def test_the_model_is_saved_as_on_the_hub_and_is_read(tmp_path: Path):
    folder = save_bert(tmp_path, packaged_vocabulary(), seed=0, **TINY)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.beta", "cls.predictions.bias"} <= names
    assert not any("LayerNorm.weight" in name or "LayerNorm.bias" in name for name in names)
    model = ik.load(str(folder))
    assert (model.n_layers, model.n_heads, model.limit) == (2, 3, 512)
    (encoded,) = model.encode("An unbelievable text.")
    assert encoded.tokens == ("[CLS]", "an", "unbelievable", "text", ".", "[SEP]")
    assert len(model.tokenizer) == 30_522


def test_missing_data_are_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["rehearse", str(tmp_path / "out"), "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^Reading mrpc: .* holds none of .*Pass the folder that does\.$"):
        rehearse.main()
    assert not (tmp_path / "out").exists()


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that clocks see, in a list of one."""
    now = [0.0]
    monkeypatch.setattr(rehearse.time, "perf_counter", lambda: now[0])
    return now


def test_a_stopped_part_counts_as_long_as_all_of_it_would_take(passing: list[float]):
    clock = Clock(10.0)
    passing[0] = 2.0  # spent before the stage begins, once
    clock("tokens", 0, 100)
    passing[0] = 8.0
    clock("tokens", 10, 100)
    passing[0] = 14.0
    with pytest.raises(Enough):
        clock("tokens", 20, 100)
    assert clock.whole(14.0, longer=100) == pytest.approx(2 + 12 * 5)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="no datasets beside the repository (shared/data)")
def test_it_computes_measures_and_draws(tmp_path: Path):
    """On a tiny model: every figure that two layers have."""
    sizes = ["--layers", "2", "--width", "24", "--heads", "3"]
    command = [sys.executable, rehearse.__file__, str(tmp_path), "--data-dir", str(SHARED), "--first", "20", *sizes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert len(costs) == len(PARTS) and {cost["ended"] for cost in costs} == {"done"}  # spectral out, figures in
    limited = [*command, "--seconds", "0.1", "--parts", "mrpc/attribution-sum"]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (cost,) = json.loads((tmp_path / "costs.json").read_text())
    assert cost["ended"] == "stopped" and cost["whole"] > cost["seconds"]
