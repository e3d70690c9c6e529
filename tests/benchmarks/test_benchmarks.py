"""Benchmarks run at the smallest sizes: the rows they promise come back. How fast they are is never tested."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks import attention, attribution, intervals, inversion, readings, runs, sampled, threads, tokens
from benchmarks.__main__ import bench
from benchmarks.measure import Row, best_seconds, cuda_peak_gib, extra_mib, table, time_rows
from benchmarks.shapes import made_up_llama, shape_of
from identikit.cli.endings import run as run_command
from identikit.errors import InputError
from identikit.maths.jacobian import contributions
from identikit.models.load.check import prove
from identikit.texts.text import collate
from tests.models import tiny

TEXT = "w5 w9 w7"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.build("bert").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def named(rows: list[Row]) -> dict[tuple[str, str], Row]:
    assert len({(row.case, row.what) for row in rows}) == len(rows)
    for row in rows:
        assert math.isfinite(row.figure) and row.figure >= 0
        if row.to:
            beside = next(other for other in rows if (other.case, other.what) == (row.case, row.to))
            assert row.ratio == pytest.approx(row.figure / beside.figure)
        else:
            assert row.ratio is None
    return {(row.case, row.what): row for row in rows}


def test_the_timer_takes_tasks_in_turn_and_the_best_of_those_that_count(monkeypatch):
    done, clock = [], map(float, [0, 90, 0, 90, 0, 5, 0, 7, 0, 3, 0, 8])  # the first round is slow and does not count
    monkeypatch.setattr("benchmarks.measure.time.perf_counter", lambda: next(clock))
    taken = best_seconds({"one": lambda: done.append(1), "two": lambda: done.append(2)}, repeats=2)
    assert done == [1, 2, 1, 2, 1, 2]
    assert taken == {"one": 3, "two": 7}


def test_ratios_are_to_what_is_named(capsys: pytest.CaptureFixture[str]):
    rows = time_rows("case", {"slow": 6.0, "fast": 2.0}, {"slow": "fast"})
    assert rows == [Row("case", "slow", 6.0, "s", 3.0, "fast"), Row("case", "fast", 2.0, "s")]
    Console(width=100).print(table(rows))
    told = capsys.readouterr().out
    assert "3 × fast" in told and "6 s" in told


def take(mib: int):
    def task() -> None:
        torch.ones(mib, 2**18)

    return task


def test_memory_is_what_a_task_takes_beyond_its_inputs():
    assert 90 < extra_mib(take, 100) < 130
    assert cuda_peak_gib(lambda: None) >= 0


@pytest.mark.slow
def test_attention():
    rows = named(attention.run((8,), memory_tokens=128, repeats=1))
    assert [row.what for row in rows.values()][:5] == [
        attention.FORWARD, attention.FACTORS, attention.CAUSAL, attention.MAPS, attention.SVD,
    ]  # fmt: skip
    assert rows["8 tokens", attention.SVD].to == attention.MAPS
    assert rows["128 tokens", f"{attention.FACTORS} of a layer, extra memory"].unit == "MiB"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_made_up_model_is_read_like_any_other(dtype):
    model = made_up_llama("tiny", dtype=dtype, layers=1)
    assert (model.n_layers, model.n_heads, model.n_key_value_heads, model.d_value) == (1, 4, 2, 8)
    assert model.dtype == dtype and prove(model) == 1
    assert model.encode("w3 w5")[0].ids == (3, 5) and model.encode([3, 5])[0].tokens == ("w3", "w5")
    embedding = model.hf.get_input_embeddings().weight
    assert float(embedding.detach().float().std()) == pytest.approx(0.02, rel=0.1)
    with pytest.raises(InputError, match="'9b' is not known"):
        made_up_llama("9b")


def test_attention_of_an_llm():
    given = ["--shape", "tiny", "--tokens", "24", "--repeats", "1", "--dtype", "float32", "--json"]
    shown = CliRunner().invoke(bench, ["attention", *given])
    assert shown.exit_code == 0, shown.output
    found = named([Row(**row) for row in json.loads(shown.stdout)["rows"]])
    case = "tiny, 2 layers, float32, 24 tokens"
    assert {what for _, what in found} == {attention.FORWARD, *attention.LLM_BESIDE, attention.LATER}
    assert found[case, attention.BY_ROW].to == attention.FIRST
    with pytest.raises(InputError, match="the dtype 'int3' is not known"):
        attention.run_llm(attention.Llm("tiny", dtype="int3"))


def test_a_made_up_first_layer_repeats_tokens_and_its_outputs_are_attention():
    options = attention.Llm("tiny", dtype="float32")
    first, later = (attention.made_up_layer(shape_of("tiny"), 40, options, repeated) for repeated in (True, False))
    assert len(first.values[0].unique(dim=0)) < 40 == len(later.values[0].unique(dim=0))
    factors = attention.effective_factors(first)
    weights = attention.effective_rows(factors) @ first.values.double().repeat_interleave(2, 0)
    torch.testing.assert_close(weights, first.output.double(), atol=1e-5, rtol=0)


def test_the_svd_is_what_effective_attention_is_compared_with():
    (A, V, output), *_ = attention.random_layers(80)
    effective = attention.effective_rows(attention.effective_factors(attention.attention_heads(V, output)))
    by_svd = attention.by_svd(A[0], V[0], torch.eye(attention.WIDTH))
    torch.testing.assert_close(effective[0], by_svd, atol=1e-5, rtol=0)


def test_intervals(saved: str):
    told = []
    options = intervals.Options(shapes=((6, 2),), tokens=(24,), model=saved, repeats=1)
    rows = named(intervals.run(options, progress=lambda *call: told.append(call)))
    single, of_model, text = dict.fromkeys(case for case, _ in rows)
    assert single == "random, 6 keys, d_v = 2" and "L1H0, 24 keys" in of_model and "24 tokens, " in text
    for case in (single, of_model):
        assert rows[case, intervals.LINPROG].to == intervals.IDENTIKIT
        assert rows[case, "largest difference of an end"].figure < 1e-7
        assert 0 <= rows[case, "determined share"].figure <= 1 + 1e-9
    for slower in (intervals.CERTIFIED, intervals.BY_ROW):
        assert rows[text, slower].to == intervals.EXACT and rows[text, slower].ratio > 0
    assert rows[text, "largest gap, exact"].figure < 1e-9
    assert rows[text, "largest difference from linprog"].figure < 1e-7
    assert told == [("intervals", done, 3) for done in range(4)]


def test_attribution_on_a_cpu(saved: str):
    model = attribution.load(saved)
    rows = named(attribution.against_the_plain_ways(model, TEXT, 2))
    case = f"{model.name}, {len(model.encode(TEXT)[0])} tokens"
    for what in (attribution.AT_ONCE, attribution.ONE_BY_ONE, attribution.BACKWARD):
        assert rows[case, what].to == attribution.SWEEP and rows[case, what].figure > 0
    assert rows[f"{case}, bfloat16", "largest relative error above 0.0001"].figure < 0.2


def test_the_plain_ways_compute_what_the_sweep_does(saved: str):
    model = attribution.load(saved)
    batch = collate(model.encode(TEXT), pad_id=model.pad_id)
    hidden, x = attribution.hidden_states(model, batch)
    jacobian = torch.autograd.functional.jacobian(hidden, x)  # layer, output, feature, 1, input, feature
    assert isinstance(jacobian, torch.Tensor)
    norms = jacobian.norm(dim=(2, 5)).squeeze(2).transpose(1, 2)
    torch.testing.assert_close(attribution.contributions_of(model, batch), contributions(norms), atol=1e-5, rtol=1e-4)


def test_attribution_in_each_precision():
    model = tiny.shared("bert")
    rows = named(attribution.precisions(model, 5, repeats=1))
    cases = list(dict.fromkeys(case for case, _ in rows))
    assert [case.rsplit(", ")[-1] for case in cases] == ["full", "tf32", "bfloat16"]
    for case in cases:
        assert rows[case, "preparation"].to == "attribution"
        assert rows[case, "attribution's rate"].to == "matrix rate"
        assert ((case, "median relative error above 0.0001") in rows) == ("full" not in case)
        assert (case, "peak GPU memory") not in rows  # this is a CPU


@pytest.mark.parametrize(("probes", "how"), [(None, "exact"), (2, "2 probes")])
def test_attribution_of_an_llms_shape(probes: int | None, how: str):
    told = []
    options = attribution.Options(shape="tiny", tokens=(3, 5), probes=probes)
    rows = named(attribution.run(options, progress=lambda *call: told.append(call)))
    cases = list(dict.fromkeys(case for case, _ in rows))
    assert [case.split(", ")[-2:] for case in cases] == [["3 tokens", how], ["5 tokens", how]]
    for case in cases:
        (timed,) = (row for row in rows.values() if row.case == case and row.to == "planned")
        assert timed.what in ("sweep", "generic") and rows[case, "planned memory"].unit == "GiB"
    assert told == [("attribution", done, 2) for done in range(3)]


def test_attribution_of_a_dataset(saved: str, tmp_path: Path):
    (tmp_path / "texts.txt").write_text("w3 w4 w5\nw6 w7\n")
    (row,) = attribution.run(attribution.Options(model=saved, data=str(tmp_path / "texts.txt")))
    assert "2 texts" in row.case and row.what == "attribution in full" and row.unit == "s"


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> str:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((40,), 4)
    inputs, hidden = (torch.randn(*shape, generator=generator) for shape in ((160, 5), (2, 160, 5)))
    path = tmp_path_factory.mktemp("states") / "states.safetensors"
    save_file({"inputs": inputs, "hidden": hidden, "lengths": lengths}, path)
    return str(path)


def test_tokens(states: str):
    rows = named(tokens.run(tokens.Options(states, folds=1, epochs=1, parts=("together", "ridge"))))
    case = f"{states}, 14 linear maps, 1 epochs"
    assert rows[case, tokens.IN_TURN].to == tokens.TOGETHER
    assert rows[case, "largest difference of a validation loss"].figure < 1e-5
    ridge = f"{states}, naive and ridge, 1 of 10 folds"
    assert rows[ridge, "fit"].unit == "s" and 0 <= rows[ridge, "ridge, l2: rate in the last layer"].figure <= 1


def test_inversion(tmp_path: Path):
    options = inversion.Options("made-up:tiny", texts=2, tokens=5, noises=(0.0, 3.0), dtype="float32")
    rows = inversion.run(options)
    given = {row.what: row.figure for row in rows if row.case.endswith("2 texts of 5 tokens, prefix given")}
    assert given["noise 0, all layers: recovered"] == given["noise 0, layer 1: recovered"] == 1
    assert given["noise 3, all layers: recovered"] < 1 and given["noise 0, all layers: largest own distance"] < 1e-5
    assert given["noise 3, layer 0: smallest margin"] < 0 < given["noise 0, layer 0: smallest margin"]
    assert given["time per token"] > 0 and "peak memory" not in given
    appended = [row for row in rows if row.case.endswith("prefix recovered")]
    assert len(appended) == len(given) and appended[0].figure == 1
    tiny.build("llama").save_pretrained(tmp_path / "llama")
    tiny.tokenizer().save_pretrained(tmp_path / "llama")
    found = inversion.run(inversion.Options(str(tmp_path / "llama"), texts=3, tokens=7, noises=(0.0,)))
    assert found[0].case == "llama, float32, 3 texts of 7 tokens, prefix given"
    with pytest.raises(InputError, match=r"the samples make only \d+ texts of 60 tokens"):
        inversion.run(inversion.Options(str(tmp_path / "llama"), texts=9999, tokens=60))
    with pytest.raises(InputError, match="it is not causal"):
        inversion.run(inversion.Options())


@pytest.mark.slow
def test_runs(saved: str, tmp_path: Path):
    (tmp_path / "texts.txt").write_text("w5 w6 w7\nw8 w9\n")
    given = {"model": saved, "data": str(tmp_path / "texts.txt"), "counts": (3, 6), "tasks": 5, "engines": ("local",)}
    rows = named(runs.run(runs.Options(**given)))
    for command in runs.COMMANDS:
        assert rows[f"{command}, time per text", "6 texts"].to == "3 texts"
        assert rows[f"{command}, CPU time per text", "3 texts"].figure > 0
        assert rows[f"{command}, peak memory", "6 texts"].unit == "MiB"
    assert rows["5 empty tasks, 1 worker", "local"].unit == "ms per task"
    with pytest.raises(InputError, match=r"Benchmarking runs: 'all' is not known\. Use some of texts, engines\."):
        runs.Options(parts=("all",))


def test_sampled_numbers(saved: str, tmp_path: Path):
    data = tmp_path / "texts.txt"
    data.write_text("".join(" ".join(f"w{word}" for word in range(5, 5 + length)) + "\n" for length in (9, 12, 14, 70)))
    found = named(sampled.run(sampled.Options(saved, str(data), texts=2, tokens=16, draws=3, shares=(0.2,))))
    assert len({case for case, _ in found}) == 1
    rows = {what: row for (_, what), row in found.items()}
    assert rows.pop("numbers without the number of rows that they rest on").figure == 0
    kinds = {what.partition(" of the rows: ")[0] for what in rows}
    assert len(kinds) == 7 and len(rows) == 14 and all(row.unit == "%" and row.figure <= 100 for row in rows.values())
    assert any("24 numbers hold" in what for what in rows)  # heads of two texts
    with pytest.raises(InputError, match="Only 3 texts have at most 16 tokens"):
        sampled.run(sampled.Options(saved, str(data), texts=4, tokens=16))


def test_threads():
    rows = named(threads.run(threads.ThreadsOptions(widths=(3,), count=2, busy=(1,), repeats=1)))
    assert len(rows) == 2 * len(threads.FUNCTIONS)
    assert {row.to for (_, what), row in rows.items() if what == threads.DECOMPOSED} == {threads.DIRECT}


def test_rows_as_a_table_and_as_json(states: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        with pytest.raises(SystemExit) as caught:
            run_command(lambda: bench)
        return int(caught.value.code or 0), capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "200")
    command = ["tokens", "--states", states, "--part", "ridge", "--folds", "1"]
    status, told = run(*command, "--json")
    found = json.loads(told)
    assert status == 0 and found["benchmark"] == "tokens" and found["device"] == "cpu"
    assert list(found["rows"][0]) == ["case", "what", "figure", "unit", "ratio", "to"]
    status, told = run(*command)
    assert status == 0 and told.count("naive and ridge, 1 of 10 folds") == 1 and "Measured on cpu" in told
    status, told = run("--help")
    assert status == 0 and all(name in told for name in ("attention", "intervals", "attribution", "tokens"))
    assert run("nothing")[0] == 2


@pytest.mark.slow
def test_a_page_has_a_size_and_frames(saved: str):
    """In a process of its own: tests of the web keep a browser open, and Playwright allows one at a time."""
    given = f"-m benchmarks page --tokens 12 --seconds 1 --model {saved} --json"
    command = [sys.executable, *given.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    rows = named([Row(**row) for row in json.loads(done.stdout)["rows"]])
    assert rows["every page", "script and style"].figure > 10
    assert rows["12 tokens", "page"].figure > 0.05
    if shutil.which("chromium"):
        assert rows["12 tokens", "frame while hovering, median"].unit == "ms"


def test_readings_of_attention_and_tests_of_explanations(saved: str):
    options = readings.ReadingOptions(model=saved, tokens=(6, 8), repeated=4, scores=("induction",), tested=7)
    found = named(readings.run(options))
    model = Path(saved).name
    assert (f"{model}, 8 tokens", "rollout of all pairs, processor time") in found
    assert (f"{model}, 10 tokens", "head scores, induction") in found
    assert (f"{model}, the sample text", "explain, rollout, value norm, roles") in found
    assert found[f"{model}, 7 tokens", "curves, with mean"].to == "forward pass"
