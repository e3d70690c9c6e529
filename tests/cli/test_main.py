"""The command line as a user meets it."""

import json
import re
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import typer

import identikit as ik
from identikit.cli.main import app
from identikit.paper.claims.catalogue import CLAIMS, sample_sizes, texts_in_words
from identikit.paper.figures.catalogue import FIGURES
from identikit.web import report
from tests.cli.made import run
from tests.hostile.made import strict_json
from tests.runs.made import save_model


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDENTIKIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_explain_gives_a_verdict_on_the_embedded_sample(monkeypatch: pytest.MonkeyPatch):
    """Nothing but the verdict is printed."""
    monkeypatch.setenv("COLUMNS", "100")
    done = run("explain")
    assert done.status == 0, done.stderr
    steps = "identikit: attribution, tokens: ", "identikit: attention intervals, rows: "
    assert all(line.startswith(steps) for line in done.stderr.splitlines())
    told = " ".join(done.stdout.split())
    assert "all-MiniLM-L6-v2 6 layers, 12 heads per layer, values of 32 dimensions per head, bidirectional." in told
    share = re.search(r"Which attention is determined\? On average, (\d+)%(?:±[\d.]+%)? of a row ", told)
    assert share and 42 <= int(share[1]) <= 62  # 52 if there is time for all rows
    assert "a query sees up to 55 keys, and a head's values have only 32 dimensions (every layer)" in told
    assert "3,960 free rows" in told
    assert "[CLS] is a sink in layers 1 to 4: on average it gets 0.45" in told
    assert re.search(r"the final hidden states (by \de-\d|bit-identical)", told)
    assert "Which token is this? The token is recovered from 100% of the hidden vectors after layer 0" in told
    assert "Where did it come from? A token contributes" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pair", "b"], "--pair needs a first text"),
        (["a", "b", "--pair", "c"], "explain takes a second text or --pair"),
        (["word " * 600], "602 tokens and the model reads at most 512"),
        (["a", "--model", "a\n\nb"], "Loading a b: there is no such folder"),
        (["a", "--seconds", "nan"], "--seconds nan cannot be used: expected a number above 0"),
        (["a", "--device", "abacus"], "The device 'abacus' cannot be used here"),
        (["a", "--probes", "1e3"], "--probes 1e3 cannot be used"),
        (["a", "--against", "b"], "--against needs --target"),
        (["--chat"], "--chat needs one text"),
        (["a", "--chat"], "the tokenizer has no chat template"),
        (["a", "--target", "similarity"], "--target similarity is of a pair of texts"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(arguments: list[str], message: str):
    assert run("explain", *arguments).refused(message)


def test_two_texts_are_explained_one_by_one_and_shown_side_by_side(tmp_path: Path):
    model = save_model(tmp_path / "model")
    page = tmp_path / "page.html"
    done = run("explain", "w5 w6 w7", "w5 w8 w7", "--model", model, "--json", "--html", page)
    first, second = json.loads(done.stdout)
    assert first["tokens"][2] == "w6" and second["tokens"][2] == "w8"
    assert first["page"] == second["page"] == str(page)
    assert page.read_text(encoding="utf-8").count('id="identikit-data-') == 2
    words = run("explain", "w5 w6 w7", "w5 w8 w7", "--model", model).stdout
    assert words.count("Which attention is determined?") == 2


def test_first_answers_are_there_while_the_rest_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page is written with what there is, says what is coming, and loads itself again; then it is whole."""
    pages = []
    written = report.write_page
    monkeypatch.setattr(report, "write_page", lambda target, page: pages.append(page) or written(target, page))
    monkeypatch.setattr("identikit.cli.main.LONG", 0.0)
    arguments = ("explain", "w5 w6 w7", "w5 w8", "--model", save_model(tmp_path / "model"))
    done = run(*arguments, "--html", tmp_path / "page.html")
    assert done.status == 0 and done.stderr.count("has this already; the rest takes about a second.") == 2
    assert ['http-equiv="refresh"' in page for page in pages] == [True, True, False]
    assert [page.count('id="identikit-data') for page in pages] == [1, 2, 2]
    headings = re.findall(r"Which attention|Which token|Where did", done.stdout)
    assert headings == ["Which attention", "Which token", "Where did"] * 2
    assert done.stdout.split("\nViews")[0].strip() == run(*arguments).stdout.strip()


def test_a_measure_of_a_target_is_read_of_it(tmp_path: Path):
    save_model(tmp_path / "llama", "llama")
    arguments = ["explain", "w5 w6 w7 w8", "--model", tmp_path / "llama", "--measure", "gradient"]
    for target, read in (("w9", "w9"), ("9", 9)):
        assert json.loads(run(*arguments, "--target", target, "--json").stdout)["target"] == read
    assert run(*arguments, "--target", "w5 w6").refused("--target w5 w6 is 2 tokens of llama")


def test_explain_says_where_an_output_comes_from():
    texts = ("The cat sat.", "--pair", "A cat was sitting.")
    done = run("explain", *texts, "--target", "similarity", "--probes", "2", "--json")
    (output,) = json.loads(done.stdout)["output"]
    assert output["target"] == "similarity of the pair" and 0.5 < output["value"] < 1 and output["probability"] is None
    assert {"cat@2", "cat@8"} & {source[0] for source in output["sources"]}
    words = run("explain", *texts, "--target", "similarity", "--probes", "2").stdout
    assert "Where does the output come from?" in words and "gradient × input" in words


def test_truncate_is_explicit(saved: Path):
    model = saved / "model"
    limit = ik.load(model).limit
    done = run("explain", "w5 " * (limit + 100), "--truncate", "--json", "--probes", "2", "--model", model)
    assert done.status == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == limit


def test_models_are_listed():
    rows = {row["family"]: row for row in json.loads(run("models", "--json").stdout)}
    assert {"bert", "llama", "xlnet", "vit", "gemma3_text"} <= set(rows)
    assert rows["llama"] | {"name": "", "checkpoints": []} == {
        "family": "llama", "name": "", "checkpoints": [], "reads": "text", "attention": "all layers",
        "decoder": "", "attribution": "exact", "identifiability": True, "inversion": True,
    }  # fmt: skip
    assert rows["t5"]["decoder"] == rows["whisper"]["decoder"] == "self and cross"
    assert (rows["xlnet"]["attribution"], rows["bert"]["inversion"]) == ("forward mode", False)
    assert rows["qwen3_next"]["attention"] == "some layers"
    assert "xlnet" in run("models").stdout
    assert run("models", "--markdown").stdout.startswith("# Models")
    assert run("--version").stdout.startswith("identikit 0.")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    pairs = ["first\tsecond", 'A "quoted" start, and more.\tAnother one.', "One two three four five.\t" + "six " * 40]
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(pairs) + "\n")
    return path


def test_attention_over_a_file(data: Path, tmp_path: Path):
    out = tmp_path / "run"
    command = ["attention", "--data", data, "--column", "first", "--column", "second", "--out", out]
    done = run(*command)
    assert done.status == 0 and done.stderr == ""
    assert done.stdout.startswith("In 2 texts, raw and effective attention correlate at 0.")
    names = "texts, correlation, correlation_by_layer, correlation_by_head, heads, null_dimension, types"
    assert f"The tables are in {out}, as .parquet and .csv: {names}.\n{out}/columns.json explains" in done.stdout
    heads = pd.read_parquet(out / "correlation_by_head.parquet")
    assert len(heads) == 2 * 6 * 12 and heads["layer"].max() == 5 and heads["head"].max() == 11
    assert heads.query("text == 0")["pearson"].min() > 1 - 1e-6  # shorter than 32 tokens
    assert pd.read_parquet(out / "correlation.parquet")["pearson"][1] < 0.9
    null = pd.read_csv(out / "null_dimension.csv")
    assert null.query("text == 1")["greatest"].tolist() == [null["tokens"].max() - 32] * 6
    assert f"The largest null space has {null['tokens'].max() - 32} dimensions." in done.stdout
    texts = pd.read_csv(out / "texts.csv")
    assert texts["first"][0] == 'A "quoted" start, and more.' and texts["second"][0] == "Another one."

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert json.loads(run(*command, "--json").stdout)["texts"] == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before  # the date of run.json as well


def test_attention_says_how_certain_it_is(saved: Path, tmp_path: Path):
    out = tmp_path / "run"
    texts = saved / "texts.txt"
    model = saved / "model"
    command = ["attention", "--data", texts, "--first", "10", "--model", model, "--intervals", "6", "--out", out]
    done = run(*command)
    assert done.status == 0 and "Intervals of 6 rows per text" in done.stdout
    by_length = pd.read_parquet(out / "intervals_by_length.parquet")
    first = by_length.iloc[0]
    assert f"\n{first['tokens_from']:.0f}–{first['tokens_to']:.0f} " in done.stdout
    assert by_length["rows"].sum() == pd.read_parquet(out / "intervals.parquet")["rows"].sum()
    told = json.loads(run(*command, "--json").stdout)
    assert told["intervals_by_length"][0]["certain_mass"] == pytest.approx(first["certain_mass"])
    assert "whose options.intervals is 6, not 'all'" in run(*command, "--intervals", "all").stderr


def test_a_run_says_what_it_was_computed_from(saved: Path, tmp_path: Path):
    texts = saved / "texts.txt"
    model = saved / "model"
    command = ["attribution", "--data", texts, "--model", model, "--first", "3", "--probes", "4"]
    out = ["--out", tmp_path / "run"]
    assert run(*command, *out, "--dtype", "float64").status == 0
    assert run(*command, *out).refused("it holds another run, whose dtype is 'float64', not 'float32'")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["run"]["command"] == "attribution" and about["run"]["dtype"] == "float64"
    data = about["run"]["data"]
    assert len(data.pop("sha256")) == 64
    assert data == {"texts": 3}  # a run is known by what was read, not by where that was
    assert {"weights", "tokenizer"} <= {*about["run"]["model"]} and "name" not in about["run"]["model"]
    assert about["run"]["options"]["probes"] == 4 and about["run"]["options"]["tags"] is False
    assert {"data", "date", "device", "machine", "model", "versions"} == {*about["recorded"]}
    assert about["recorded"]["data"] == {"source": str(texts), "columns": None, "split": None, "first": 3}
    assert {"torch", "pandas", "pyarrow", "python"} <= {*about["recorded"]["versions"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder, and texts that it reads."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    texts = [f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4}" for i in range(3, 43)]
    (folder / "texts.txt").write_text("\n".join(texts))
    return folder


def test_attribution_over_a_file(saved: Path, tmp_path: Path):
    command = ["attribution", "--data", saved / "texts.txt", "--first", "10", "--model", saved / "model", "--tags"]
    done = run(*command, "--out", tmp_path / "run")
    assert done.status == 0 and "texts, tokens, own, groups, offsets, tags." in done.stdout
    assert "in layer 0 and 0." in done.stdout and "in layer 2 (medians; frobenius norm, exact)" in done.stdout
    told = json.loads(run(*command, "--out", tmp_path / "run", "--json").stdout)
    assert len(told["own"]) == 3 and 0 < told["own"][0] < 1


def test_ctrl_c_promises_no_folder_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("identikit.load", mock.Mock(side_effect=KeyboardInterrupt))
    assert run("explain", "A short text.") == (130, "", "identikit: Interrupted.\n")


def test_tokens_over_a_file(saved: Path, tmp_path: Path):
    command = ["tokens", "--data", saved / "texts.txt", "--model", saved / "model", "--folds", "2"]
    done = run(*command, "--map", "ridge", "--distance", "cosine", "--out", tmp_path / "run")
    assert done.status == 0 and done.stdout.startswith("Recovered from layer 2: ridge cosine 0.")
    assert (tmp_path / "run" / "rates.parquet").exists() and (tmp_path / "run" / "summary.csv").exists()
    told = json.loads(run(*command[:-1], "1", "--json", "--out", tmp_path / "one").stdout)
    assert told["rates"][0]["low"] is None and told["rates"][0]["layer"] == 0  # JSON has no NaN


def test_inversion_over_a_file(saved: Path, tmp_path: Path):
    save_model(tmp_path / "llama", "llama")
    command = ["tokens", "--experiment", "inversion", "--data", saved / "texts.txt", "--first", "2"]
    causal = [*command, "--model", tmp_path / "llama", "--max-tokens", "5", "--truncate"]
    done = run(*causal, "--noise", "0", "--noise", "0.1", "--out", tmp_path / "run")
    assert done.status == 0 and done.stdout.startswith("Recovered from layer 2: noise 0: 100.0%, smallest margin 0.")
    assert (tmp_path / "run" / "positions.parquet").exists()
    told = json.loads(run(*causal, "--noise", "2", "--prefix", "recovered", "--json", "--out", tmp_path / "b").stdout)
    assert len(told["inversion"]) == 3 and told["inversion"][0]["tokens"] == 10 and told["inversion"][0]["rate"] < 1


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("attention", ["--data", "no-such-file.tsv"], "no-such-file.tsv"),
        ("attention", ["--intervals", ""], "--intervals '' cannot be used"),
        ("attention", ["--truncate", "--skip-long"], "cannot be used together"),
        ("attention", ["--shard", "3/2"], "--shard '3/2' cannot be used: expected I/N"),
        ("attribution", ["--norm", "foo"], "--norm foo is not known"),
        ("tokens", ["--experiment", "magic"], "--experiment 'magic' is not known"),
        ("tokens", ["--first", "2"], "got 2, and at least 20 are needed"),
        ("tokens", ["--noise", "1"], "--noise and --prefix are for --experiment inversion"),
        ("tokens", ["--experiment", "inversion", "--map", "ridge"], "uses no maps"),
        ("tokens", ["--experiment", "inversion"], "it is not causal"),
    ],
)
def test_refused_options_leave_nothing_behind(
    saved: Path, tmp_path: Path, command: str, options: list[str], words: str
):
    given = ["--data", saved / "texts.txt", "--model", saved / "model", *options]
    done = run(command, *given, "--out", tmp_path / "run")
    assert done.refused(words) and not (tmp_path / "run").exists(), done


def test_a_place_that_cannot_be_written_to_is_told_first(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("identikit.attention.dataset.checked_attention", mock.Mock(side_effect=AssertionError))
    (tmp_path / "file").write_text("in the way")
    data = ["--data", saved / "texts.txt", "--model", saved / "model"]
    done = run("attention", *data, "--out", tmp_path / "file" / "under")
    assert done.refused("identikit: Cannot write run.json to") and "choose another folder" in done.stderr


def test_reproduce_a_figure_and_a_claim(tmp_path: Path):
    out = tmp_path / "paper"
    command = ["reproduce", "fig1a", "fig38", "null-space-bound", "--first", "3", "--out", out]
    done = run(*command)
    assert done.status == 0 and done.stderr == ""
    told = " ".join(done.stdout.split())
    assert "1 claims: 1 hold" in told or "1 claim" in told
    assert "fig38: needs --data cola" in told
    assert told.endswith(f"1 figure is in {out}/figures; {out}/index.html shows everything on one page.")
    found = json.loads(run(*command, "--json").stdout)
    assert found["figures"] == ["fig1a"] and found["claims"][0]["verdict"] == "holds"
    assert found["listed"] == [{"name": "fig38", "why": "needs --data cola"}]


def test_what_can_be_reproduced_is_listed():
    done = run("reproduce", "--list")
    names = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert done.status == 0 and done.stderr == "" and len(names) == len({*names})
    assert {*names} == {*FIGURES, *CLAIMS}
    assert all(f"needs {texts_in_words(claim.texts)})" in done.stdout for claim in CLAIMS.values())


def test_help_says_what_every_command_does_and_cuts_nothing_short():
    told = " ".join(run("--help").stdout.split())
    commands = typer.main.get_command(app).commands
    assert len(commands) > 15
    for name, command in commands.items():
        first = " ".join(command.help.split()).split(". ")[0]
        assert f"{name} {first}" in told


def test_help_of_reproduce_says_how_many_texts_claims_need():
    told = " ".join(run("reproduce", "--help").stdout.split())
    for line in sample_sizes():
        assert line in told


def test_json_has_no_nan_in_any_command(saved: Path, tmp_path: Path):
    """One token repeated has constant attention, and one row in time leaves layers without a bounded row."""
    model = ["--model", saved / "model"]
    texts = tmp_path / "texts.txt"
    texts.write_text("w5\nw6 w6\n")
    for number, command in enumerate(
        (
            ["explain", "w5 w5 w5 w5 w5 w5 w5 w5 w5 w5", *model],
            ["explain", " ".join(f"w{i}" for i in range(4, 40)), *model, "--seconds", "1e-9"],
            ["explain", "w5 w6 w7 w8", *model, "--measure", "rollout", "--measure", "roles"],
            ["attention", "--data", texts, *model, "--intervals", "1"],
            ["attribution", "--data", texts, *model, "--probes", "2"],
        )
    ):
        out = ["--out", str(tmp_path / str(number))] if "--data" in command else []
        done = run(*command, *out, "--json")
        assert done.status == 0, done.stderr
        found = strict_json(done.stdout)
        if command[0] == "explain":
            for name, why in found["null_because"].items():
                assert "null" in json.dumps(found[name]) and why.endswith(".")


def test_no_limit_of_time_is_a_limit_too(saved: Path):
    done = run("explain", "w5 w6 w7 w8 w9 w10 w11", "--model", saved / "model", "--seconds", "inf", "--json")
    found = strict_json(done.stdout)["certain"]
    assert found["seconds"] is None and found["bounded_rows"] == found["free_rows"]
