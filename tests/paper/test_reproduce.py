"""The whole paper on a tiny model: computed once, resumed after a stop, drawn again from what was kept."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

import identikit as ik
from identikit.errors import IdentikitError, InputError
from identikit.models.model import Model
from identikit.paper import inputs, reproduce, texts, work
from identikit.paper.claims import datasets
from identikit.paper.claims.catalogue import CLAIMS
from identikit.paper.claims.claim import Verdict
from identikit.paper.claims.report import read_rows, rows
from identikit.paper.figures.catalogue import FIGURES
from identikit.paper.inputs import INPUTS, from_one
from identikit.paper.reproduce import Plan, Report
from tests.hostile.made import content
from tests.models import tiny

ALIKE = ["fig8", "fig9", "fig10", "fig15", "fig16", "fig20", "fig21", "fig23", "fig24", "fig27", "fig30", "fig31"]
ASKED = [name for name in FIGURES if name not in ALIKE]  # others are drawn from the same tables by the same functions
PAIRS = [(f"w{i % 40 + 3} w{i * 7 % 40 + 3} w{i + 4} .", f"w{i * 3 % 40 + 3} w{i + 5} w{i + 6} w9") for i in range(22)]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny.loaded("bert", dtype=torch.float64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    path.write_text("\n".join(["first\tsecond", *("\t".join(pair) for pair in PAIRS)]) + "\n")
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def little() -> Iterator[None]:
    """Train briefly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reproduce, "SAMPLE", work.PaperOptions(probes=3, folds=1, learning_rates=(0.003,), epochs=2, rows=10)
        )
        patch.setattr("identikit.paper.collapse.ROUNDS", 1)
        yield


def plan(data: str, *names: str, first: int = 22, **others: object) -> Plan:
    return Plan(names or ("all",), (data,), columns=("first", "second"), first=first, **others)  # pyright: ignore


@pytest.fixture(scope="module")
def whole(model: Model, data: str, tmp_path_factory: pytest.TempPathFactory) -> Report:
    out = tmp_path_factory.mktemp("whole") / "out"
    return reproduce.reproduce(model, plan(data, "claims", *ASKED), str(out))


@pytest.fixture
def copied(whole: Report, tmp_path: Path) -> Path:
    """A folder of that run that a test may damage."""
    return Path(shutil.copytree(whole.out, tmp_path / "run"))


def test_every_figure_is_drawn_or_listed(whole: Report, model: Model):
    reasons = dict(whole.listed)
    assert {*whole.drawn} | {name for name in reasons if name in FIGURES} == {*ASKED}
    kinds = "fig2a fig3a fig5 fig11 fig17 fig28 fig1a-sharp fig1bc-sharp sinks collapse"
    assert {*kinds.split()} <= {*whole.drawn}
    assert reasons["fig18b"].endswith("has nothing of this kind")  # its tokenizer has no [CLS]
    assert reasons["fig12"].startswith("needs --finetuned DIR")
    assert reasons["fig38"] == "needs --data cola" and reasons["fig39"] == "needs --data mnli"
    assert reasons["fig29"] == "not applicable: tiny bert has 3 layers"
    assert "the model reads at most 64" in reasons["fig6"]
    for name in whole.drawn:
        parquet = pd.read_parquet(Path(whole.out, "figures", f"{name}.parquet"))
        csv = pd.read_csv(Path(whole.out, "figures", f"{name}.csv"), keep_default_na=False, na_values=[""])
        assert len(parquet) == len(csv) > 0 and list(parquet) == list(csv)
        assert Path(whole.out, "figures", f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in Path(whole.out, "figures", f"{name}.svg").read_bytes()
    drawn = pd.read_parquet(Path(whole.out, "figures", "fig1a.parquet"))  # the numbers of the public function
    expected = [float(one.pearson()) for one in ik.effective_attention(model, PAIRS)]
    assert drawn["pearson"].tolist() == pytest.approx(expected)


def test_every_claim_is_judged_or_listed(whole: Report):
    judged, listed = {one.claim.name: one for one in whole.claims}, dict(whole.listed)
    assert {*judged} | {name for name in listed if name not in FIGURES} == {*CLAIMS}
    assert {listed[claim.name] for claim in datasets.claims.values()} == {
        *(f"needs --data {data}" for data in ("mrpc", "cola", "mnli"))
    }
    assert {*judged["own-contribution-falls"].findings} == {"frobenius", "sum"}  # spectral needs every direction
    found = judged["mostly-identifiable"].findings[""]
    assert (found.verdict, found.why) == (Verdict.UNDECIDED, "only 22 texts; it takes 200")
    page = Path(whole.out, "index.html").read_text()
    assert all(f"figures/{name}.csv" in page for name in whole.drawn)
    assert rows(read_rows(pd.read_parquet(Path(whole.out, "claims.parquet")))) == rows(whole.claims)


def test_a_second_run_only_draws(whole: Report, model: Model, data: str, monkeypatch: pytest.MonkeyPatch):
    before = content(Path(whole.out))
    before = {name: before[name] for name in before if name.startswith(("inputs", "figures"))}
    for path in Path(whole.out, "figures").glob("fig2a.*"):
        path.unlink()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    for name in ("run_experiment", "hidden_states"):
        monkeypatch.setattr(f"identikit.tokens.dataset.{name}", refuse)
    monkeypatch.setattr(inputs, "token_attribution", refuse)
    monkeypatch.setattr("identikit.attention.dataset.checked_attention", refuse)
    monkeypatch.setattr("identikit.attribution.dataset.attribute", refuse)
    names = ("fig1a", "fig2a", "fig3a", "fig11", "fig14", "fig26", "collapse")
    assert reproduce.reproduce(model, plan(data, *names), whole.out).drawn == names
    after = content(Path(whole.out))
    assert before.items() <= after.items()


@pytest.mark.parametrize(
    ("stop", "names"),
    [
        ("attention intervals, tokens", ("fig1a", "sinks")),
        pytest.param("training maps", ("fig1a", "fig2a"), marks=pytest.mark.slow),
        pytest.param("frobenius attribution, tokens", ("fig1a", "fig3a"), marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(
    whole: Report, model: Model, data: str, tmp_path: Path, stop: str, names: tuple[str, ...]
):
    """Stopped halfway through one of its steps; that is in the second shard of texts, where there are shards."""
    asked = plan(data, *names)

    def killed(what: str, done: int, total: int) -> None:
        if what == stop and 2 * done >= total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(model, asked, str(tmp_path / "run"), progress=killed)
    kept = {name: held for name, held in content(tmp_path / "run").items() if name.startswith("inputs")}
    reproduce.reproduce(model, asked, str(tmp_path / "run"))
    after = content(tmp_path / "run")
    assert kept and kept.items() <= after.items()
    straight = content(Path(whole.out))
    own = [name for name in after if name.startswith(("inputs", "figures"))]
    own = [name for name in own if "shard-" not in name and "SHA256SUMS" not in name]  # shards hold times
    assert own and all(after[name] == straight[name] for name in own)


def test_only_what_is_asked_for_is_computed(model: Model, data: str, tmp_path: Path):
    few = plan(data, "fig1a", "fig2a", "correlation-falls-with-length", first=6)
    report = reproduce.reproduce(model, few, str(tmp_path / "few"))  # few texts are no reason to stop
    assert report.drawn == ("fig1a",) and [one.claim.name for one in report.claims] == ["correlation-falls-with-length"]
    assert dict(report.listed) == {"fig2a": "needs at least 20 texts"}
    assert [path.name for path in (tmp_path / "few" / "inputs").glob("*/*")] == ["attention"]
    asked = Plan(("claims", "fig1a"))
    assert len(asked.claims) == len(CLAIMS) and [figure.name for figure in asked.figures] == ["fig1a"]


def test_what_can_be_known_beforehand_costs_nothing(
    model: Model, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without a tagger and without a fine-tuned model nothing is computed for the figures that need them."""
    monkeypatch.setattr(reproduce, "tagger_missing", lambda: "tagging parts of speech: spaCy is not installed.")
    report = reproduce.reproduce(model, plan(data, "fig12", "fig26", "mrpc-size"), str(tmp_path / "run"))
    assert dict(report.listed) == {
        "fig12": "needs --finetuned DIR (`identikit finetune` makes one)",
        "fig26": "tagging parts of speech: spaCy is not installed.",
        "mrpc-size": "needs --data mrpc",
    }
    assert not (tmp_path / "run" / "inputs").exists() and not (tmp_path / "run" / "figures").exists()


def test_inputs_depend_only_on_their_own_settings(whole: Report, model: Model, data: str):
    """Another seed or precision: what they do not touch is taken as it is kept."""
    names = ("fig1a", "correlation-falls-with-length")
    again = reproduce.reproduce(model, plan(data, *names, seed=7, precision="tf32"), whole.out)
    assert again.drawn == ("fig1a",)
    with pytest.raises(InputError, match="another run, whose precision is 'full', not 'tf32'"):
        reproduce.reproduce(model, plan(data, "fig2a", precision="tf32"), whole.out)


def save(model: Model, folder: Path) -> str:
    """Save it as a model fine-tuned on MRPC."""
    model.hf.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return f"mrpc={folder}"


def test_inputs_and_hidden_vectors_of_different_size(data: str, tmp_path: Path):
    albert = tiny.loaded("albert")
    asked = plan(data, "fig12", "finetuning-hurts-l2-mrpc", finetuned=(save(albert, tmp_path / "tuned"),))
    reasons = dict(reproduce.reproduce(albert, asked, str(tmp_path / "run")).listed)
    assert all("there is no naive map" in why for why in reasons.values()) and len(reasons) == 2


def test_a_finetuned_model_is_compared(model: Model, data: str, tmp_path: Path):
    given = (save(model, tmp_path / "tuned"),)
    report = reproduce.reproduce(model, plan(data, "fig12", finetuned=given), str(tmp_path / "run"))
    assert report.drawn == ("fig12",)
    frame = pd.read_parquet(tmp_path / "run" / "figures" / "fig12.parquet")
    assert len(frame) == 2 * 2 * 3 and set(frame["finetuned"]) == {True, False}


def test_what_was_left_or_damaged_is_computed_again_and_a_bad_text_stops_only_one_input(
    copied: Path, model: Model, data: str, monkeypatch: pytest.MonkeyPatch
):
    for folder in (copied, *copied.glob("inputs/*/attention")):
        for path in folder.glob("*.*"):
            path.unlink()
    for folder in copied.glob("inputs/*/attention"):  # as if killed while the input's manifest was written
        (folder / f".run.json.{'0a' * 16}.partial").write_text('{"da')
    (copied / "run.json").write_bytes((copied / "figures" / "run.json").read_bytes())
    (kept,) = copied.glob("inputs/*/previous/part-naive.json")
    before = kept.read_bytes()
    kept.write_text('[{"a"')
    for path in copied.glob("inputs/*/previous/computed.json"):
        path.write_text("")
    with pytest.warns(UserWarning, match="part-naive.json: it is not a sealed JSON file. Its contents will"):
        report = reproduce.reproduce(model, plan(data, "fig1a", "fig11"), str(copied))
    assert report.drawn == ("fig1a", "fig11") and kept.read_bytes() == before

    def refuse(*_: object, **__: object) -> None:
        raise InputError("text 28 has 1 token: leave it out.")

    monkeypatch.setattr("identikit.tokens.dataset.hidden_states", refuse)
    kept.unlink()
    report = reproduce.reproduce(model, plan(data, "fig1a", "fig11"), str(copied))
    assert report.drawn == ("fig1a",)
    assert dict(report.listed) == {"fig11": "cannot be computed: text 28 has 1 token: leave it out."}


def test_a_tagger_may_come_and_go(model: Model, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a tagger the rest is computed; with one only the tags are; and what is kept is drawn without it."""
    out = str(tmp_path / "run")

    def run(tagger: bool) -> Report:
        with monkeypatch.context() as patch:
            patch.setattr(reproduce, "tagger_missing", lambda: None if tagger else "no tagger")
            return reproduce.reproduce(model, plan(data, "fig3a", "own-contribution-falls", "fig26", first=8), out)

    assert dict(run(tagger=False).listed) == {"fig26": "no tagger"}
    monkeypatch.setattr("identikit.attribution.dataset.attribute", lambda *_, **__: pytest.fail("it computes"))
    drawn = run(tagger=True)
    assert "fig3a" in drawn.drawn and "no tagger" not in dict(drawn.listed).values()
    before = content(Path(out))
    assert run(tagger=False).drawn == drawn.drawn
    assert content(Path(out)) == before


def test_mistakes_are_told(model: Model, data: str, tmp_path: Path, whole: Report):
    with pytest.raises(InputError, match=r"'fig99' is not known\. Use 'all', 'claims', a figure"):
        Plan(("fig99",))
    with pytest.raises(InputError, match="give --data mnli, not mnli-500"):
        Plan(("fig39",), ("mnli-500",))
    out = tmp_path / "run"
    with pytest.raises(InputError, match="say which folder holds it"):
        reproduce.reproduce(model, Plan(("fig1a",), ("mrpc",)), str(out))
    assert not (out / "inputs").exists()
    with pytest.raises(InputError, match="holds another run, whose seed is 0, not 1"):
        reproduce.reproduce(model, plan(data, "fig3a", seed=1), whole.out)
    (tmp_path / "tuned").mkdir()
    with pytest.raises(InputError, match=r"no finetune.json there names its task. Write --finetuned mrpc="):
        reproduce.reproduce(model, plan(data, "fig12", finetuned=(str(tmp_path / "tuned"),)), str(out))
    nowhere = f"mrpc={tmp_path / 'nowhere'}"
    with pytest.raises(IdentikitError, match="nowhere"):
        reproduce.reproduce(model, plan(data, "fig1a", "fig12", finetuned=(nowhere,)), str(out))
    assert not out.exists()
    report = reproduce.reproduce(model, plan(data, "fig1a", finetuned=(nowhere,)), whole.out)
    assert "not used" in dict(report.listed)[str(tmp_path / "nowhere")]


# Inputs


def test_wikitext_gives_pairs_of_neighbouring_sentences():
    paragraph = "It is a well @-@ known bird . It was 1 @.@ 5 m tall ! Was it ? The end . "
    pairs = list(texts.segments([paragraph, "One sentence only ."]))
    assert pairs[0] == ("It is a well-known bird .", "It was 1.5 m tall !")
    assert pairs[1:] == [("Was it ?", "The end . ")]


def test_texts_are_cut_as_in_the_paper_and_layers_and_heads_count_from_one(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = model.limit
    assert texts.PIECES == 128
    for module in (inputs, work):
        monkeypatch.setattr(module, "PIECES", 10)
    cut = work.Work(model, "made up", ["w4 " * 30, "w5 w6 w7"], str(tmp_path))
    assert cut.lengths[0] == 10 > cut.lengths[1]
    assert cut.states.of(model).lengths.tolist() == cut.lengths
    counted: dict[str, set[int]] = {"layer": set(), "head": set()}
    for name in ("attention", "intervals", "attribution-sum"):
        tables = INPUTS[name].read(cut)
        for column, places in counted.items():
            places.update(place for table in tables.values() if column in table for place in table[column])
        lengths = tables.get("correlation", pd.DataFrame({"tokens": cut.lengths}))["tokens"].tolist()
        assert lengths == cut.lengths
    assert counted == {"layer": {1, 2, 3}, "head": {1, 2, 3, 4}}
    assert model.limit == before
    before = pd.DataFrame({"layer": [0], "test_layer": [2], "head": [1], "offset": [0]})
    after = from_one({"a": before})["a"]
    assert after.to_dict("records") == [{"layer": 1, "test_layer": 3, "head": 2, "offset": 0}]
    assert before["layer"].tolist() == [0]


@pytest.mark.parametrize("name", ["untuned", "finetuned"])
def test_maps_that_need_no_training_have_all_folds(name: str, model: Model, tmp_path: Path):
    made_up = work.Work(model, "made up", [*PAIRS], str(tmp_path), work.PaperOptions(folds=4))
    table = INPUTS[name].read(made_up)[name]
    assert set(table["map"]) == {"naive"} and set(table["target"]) == {"previous"}
    folds = table.groupby(["distance", "layer"])["fold"].nunique()
    assert folds.tolist() == [4] * len(folds) and len(folds) == 2 * 3


def test_the_papers_examples_are_the_papers(tmp_path: Path):
    """Appendix C.4 prints its sentence in BERT's pieces; the packaged model reads the same, and Fig. 6's rows."""
    printed = (
        "[CLS] he said the foods ##er ##vic ##e pie business doesn ' t fit the company ' s long - term growth "
        'strategy . [SEP] " the foods ##er ##vic ##e pie business does not fit our long - term growth strategy . [SEP]'
    )
    packaged = ik.load()
    assert " ".join(packaged.encode(texts.SENTENCE)[0].tokens) == printed
    examples = work.Work(packaged, "examples", [texts.PASSAGE], str(tmp_path))
    table = INPUTS["passage"].read(examples)["passage"]
    shown = table.drop_duplicates("query")
    assert shown["query_token"].iloc[[0, -1]].tolist() == ["the", "surroundings"]
    assert shown["query"].diff().dropna().eq(1).all() and set(table["layer"]) == {2}
