"""The one idiom of every Result: selecting, tables, files, words, differences, and being looked at."""

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.results.files import seal_json, unseal_json
from identikit.results.measure import Attribute
from identikit.results.result import CLASSES, Result
from identikit.tokens.protocol import Settings
from tests.hostile.judging import unclear
from tests.models import tiny

TEXT = (
    "The goalkeepers stopped the penalties, one with her left foot, and nobody believed it afterwards.",
    "Afterwards nobody believed that the goalkeepers, with a left foot, had stopped the penalties of the visitors.",
)
ROW = {"layer": 4, "head": 5, "query": "foot@12"}


@pytest.fixture(scope="module")
def model() -> ik.Model:
    return ik.load()


@pytest.fixture(scope="module")
def attention(model: ik.Model):
    return ik.effective_attention(model, TEXT, layers=[0, 4], heads=[5, 7])


@pytest.fixture(scope="module")
def fit(model: ik.Model):
    texts = [*ik.sample_texts()[:24]]
    return ik.token_identifiability(model, texts, maps=["naive", "ridge"], layers=[0, 5], settings=Settings(folds=2))


@pytest.fixture(scope="module")
def results(model: ik.Model, attention: Any, fit: Any) -> dict[str, Result]:
    made = {
        "attention": attention,
        "row": attention.sel(**ROW),
        "intervals": attention.intervals(layer=4, head=5, query=[3, 12]),
        "alternative": ik.alternative_attention(model, TEXT, **ROW),
        "attribution": ik.token_attribution(model, TEXT, layers=[0, 5], probes=2),
        "output": ik.token_attribution(model, TEXT, target="similarity"),
        "anybody's": ik.scores(attention, torch.randn(2, 43, 43), name="drawn"),
        "identity": fit.identity_map(TEXT),
        "inversion": ik.invert(tiny.loaded("llama"), "w5 w9 w7", layers=[0, 2]),
        "scores": ik.head_scores(model, [TEXT, TEXT[0]], layers=[0, 4], heads=[5, 7]),
        "measure": ik.attention_measure(model, TEXT, "value norm", layers=[0, 4], heads=[5, 7]),
        "rollout": ik.attention_measure(model, TEXT[0]),
        "agreement": ik.agreement(model, [*TEXT], ["mean", "rollout"]),
        "evaluation": ik.evaluate(
            tiny.loaded("llama"), ["w5 w9 w7 w4", "w8 w3 w9 w6"], ["mean", "leave one out"], beam=1
        ),
        "rates": fit,
        "explanation": ik.explain(model, TEXT, probes=2, maps=fit, seconds=2),
    }
    assert {type(result).kind for result in made.values()} == set(CLASSES)
    return made


NAMES = [
    "attention", "row", "intervals", "alternative", "attribution", "output", "anybody's", "identity", "inversion",
    "scores", "measure", "rollout", "agreement", "evaluation", "rates", "explanation",
]  # fmt: skip
every = pytest.mark.parametrize("name", NAMES)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and np.array_equal(
        first.cpu(), second.cpu(), equal_nan=first.is_floating_point()
    )


@every
def test_it_is_short_and_says_what_it_is(results: dict[str, Result], name: str):
    result = results[name]
    assert len(repr(result)) < 300 and "\n" not in repr(result) and result.model_name in repr(result)
    told = str(result)
    assert told.startswith(repr(result)) and len(told) > len(repr(result)) + 20
    assert "nan" not in told and "tensor(" not in told


@every
def test_saved_and_opened_it_is_the_same_to_the_bit(results: dict[str, Result], name: str, tmp_path: Path):
    result = results[name]
    result.save(tmp_path / "saved")
    again = ik.open_result(tmp_path / "saved")
    assert type(again) is type(result) and repr(again) == repr(result) and str(again) == str(result)
    assert again.provenance == result.provenance and again.axes[0].values == result.axes[0].values
    on_request = {array for array, declared in result.measures.items() if declared.on_request}
    assert set(again.source.dims) == set(result.source.dims) - on_request
    for array in again.source.dims:
        assert same(again.array(array), result.array(array)), array
    assert not [path for path in (tmp_path / "saved").rglob("*") if path.suffix in (".pkl", ".pt", ".bin")]
    with pytest.raises(ik.InputError, match="not an empty folder"):
        result.save(tmp_path / "saved")


@every
def test_it_can_be_pickled(results: dict[str, Result], name: str):
    again = pickle.loads(pickle.dumps(results[name]))
    assert str(again) == str(results[name]) and again.provenance == results[name].provenance
    assert all(same(again.array(array), results[name].array(array)) for array in again.arrays)


@every
def test_what_it_hands_out_is_a_copy(results: dict[str, Result], name: str, tmp_path: Path):
    result = results[name]
    result.save(tmp_path / "saved")
    for kept in (result, ik.open_result(tmp_path / "saved")):
        for array in kept.source.dims:
            before = kept.array(array).clone()
            kept.array(array).zero_()
            kept.read(array).zero_()
            if before.ndim and array in kept.arrays:
                kept.to_xarray(array)[array].values[...] = 0
            assert same(kept.array(array), before), array


@every
def test_the_table_and_the_dataset_are_the_arrays(results: dict[str, Result], name: str):
    result = results[name]
    data, frame = result.to_xarray(), result.to_frame()
    for array in result.arrays:
        expected = result.array(array).cpu().numpy()
        assert data[array].shape == expected.shape
        assert np.array_equal(data[array], expected, equal_nan=expected.dtype.kind == "f")
    for array in result.main:
        expected = result.array(array).cpu().numpy().reshape(-1)
        assert np.array_equal(frame[array], expected, equal_nan=expected.dtype.kind == "f")
    assert data.attrs == {"kind": result.kind, "model": result.model_name}
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["kind"] == result.kind


SELECTIONS: dict[str, dict[str, Any]] = {
    "attention": {"layer": 4, "head": [5], "query": "left@11", "key": "foot@12"},
    "row": {"key": "her"},
    "intervals": {"query": "foot@12", "key": "her"},
    "alternative": {"key": "her"},
    "attribution": {"layer": -1, "output": "her", "input": ["left@11", 2]},
    "output": {"input": ["her", 2]},
    "anybody's": {"layer": -1, "output": "her", "input": ["left@11", 2]},
    "identity": {"layer": -1, "token": "her"},
    "inversion": {"layer": -1, "position": "w9"},
    "scores": {"score": "induction", "layer": -1, "head": [7]},
    "measure": {"layer": 4, "head": 5, "query": "foot@12", "key": ["her", 2]},
    "rollout": {"layer": -1, "output": "her", "input": [0, 2]},
    "agreement": {"measure": "rollout", "other": ["mean"]},
    "evaluation": {"measure": "mean", "score": ["curves", "leave one out"], "depth": -1, "curve": "mean", "share": 0.2},
    "rates": {"map": "ridge", "layer": 5, "fold": [1]},
    "explanation": {"layer": 2, "token": "her"},
}


@every
def test_a_selection_is_a_part_with_fewer_axes(results: dict[str, Result], name: str):
    result, wanted = results[name], SELECTIONS[name]
    part = result.sel(**wanted)
    assert type(part) is type(result)
    places = {axis.name: axis.indices_of(wanted.get(axis.name)) for axis in result.axes}
    for array in result.arrays:
        expected, dims = result.array(array), [dim for dim in result.source.dims[array] if not result.axis(dim).single]
        for place, dim in enumerate(dims):
            expected = expected.index_select(place, torch.tensor(places[dim]))
        dropped = tuple(0 if part.axis(dim).single else slice(None) for dim in dims)
        assert torch.allclose(
            part.array(array).double(), expected[dropped].double(), rtol=0, atol=1e-6, equal_nan=True
        ), array
    assert len(repr(part)) < 300 and str(part)
    with pytest.raises(ik.InputError, match="it has no axis 'colour', only"):
        result.sel(colour=1)


@every
def test_a_notebook_shows_a_picture_without_script(results: dict[str, Result], name: str):
    shown = results[name]._repr_html_()
    assert shown.startswith("<div") and "<script" not in shown.lower() and "http" not in shown
    assert "data:image/png;base64," in shown and len(shown) < 400_000


@every
def test_a_difference_of_a_result_with_itself_is_nothing(results: dict[str, Result], name: str):
    result = results[name]
    nothing = result - result
    for array in nothing.arrays:
        assert not nothing.array(array).double().nan_to_num().any()
    assert "minus" in repr(nothing) and "Largest difference" in str(nothing)
    with pytest.raises(ik.InputError, match="both must be of one kind"):
        _ = result - 3


def test_differences_are_of_one_quantity(model: ik.Model):
    mean, values, norm = (ik.attention_measure(model, TEXT[0], name) for name in ("mean", "value norm", "norm"))
    with pytest.raises(ik.InputError, match=r"the measure of one is 'value norm', that of the other 'norm'.*a\.raw"):
        _ = values - norm
    with pytest.raises(ik.InputError, match="different quantities"):
        _ = mean - values
    assert not (values - values).raw.any()
    shares = [ik.token_attribution(model, TEXT[0], probes=2, seed=0, norm=norm) for norm in ("frobenius", "sum")]
    with pytest.raises(ik.InputError, match="the norm of one is 'frobenius', that of the other 'sum'"):
        _ = shares[0] - shares[1]


@every
def test_nothing_of_it_can_be_set_from_outside(results: dict[str, Result], name: str):
    result = results[name]
    with pytest.raises(TypeError, match="does not support item assignment"):
        result.about["tokens"] = ["other"]  # pyright: ignore[reportIndexIssue]
    for attribute in ("about", "axes", *result.measures):
        with pytest.raises(AttributeError):
            setattr(result, attribute, {})
    given = dict(result.about)
    made = replace(result, about=given)
    given["tokens"] = ["other"]
    assert made.about == result.about


def test_differences_need_the_same_tokens(model: ik.Model, attention: Any):
    other = ik.effective_attention(model, TEXT[0], layers=[0, 4], heads=[5, 7])
    with pytest.raises(ik.InputError, match="they differ on the query axis"):
        _ = attention - other
    with pytest.raises(ik.InputError, match=r"differ on the layer axis \(2 layers, 0 to 4 against 1 layer, 0\)"):
        _ = attention - attention.sel(layer=[0])
    with pytest.raises(ik.InputError, match=r"on the input axis \(b against c\)"):
        _ = ik.scores(["a", "b", "d"], torch.ones(3), name="a") - ik.scores(["a", "c", "d"], torch.ones(3), name="a")
    with pytest.raises(ik.InputError, match="one is 2 inputs, the other 2 outputs × 2 inputs"):
        _ = ik.scores(["a", "b"], [1.0, 2.0], name="a") - ik.scores(["a", "b"], torch.eye(2), name="a")
    nothing = attention.sel(head=[5]) - attention.sel(head=[5])
    assert not nothing.raw.any()
    assert torch.equal((attention.sel(head=[5]) - nothing).raw, attention.raw[:, :1].double())


def test_words_add_up_what_pieces_receive_and_average_what_they_do(results: dict[str, Result]):
    attention, words = results["attention"], results["attention"].words()
    assert len(words.tokens) < len(attention.tokens) and "goalkeepers" in words.tokens
    assert torch.allclose(words.raw.sum(-1), torch.ones(()), atol=1e-5)
    first = list(words.tokens).index("goalkeepers")
    pieces = [place for place, token in enumerate(attention.tokens) if token in ("goalkeeper", "##s")][:2]
    expected = attention.raw[..., pieces].sum(-1)[..., pieces].mean(-1)
    assert torch.allclose(words.raw[..., first, first], expected, atol=1e-6)
    with pytest.raises(ik.InputError, match="exists for pieces"):
        words.pearson()
    with pytest.raises(ik.InputError, match=r"call words\(\) before selecting some queries"):
        attention.sel(query=[1, 2]).words()
    shares = results["attribution"].words()
    assert torch.allclose(shares.contribution.sum(1), torch.ones(()), atol=1e-5)
    identity = results["identity"]
    assert torch.equal(identity.words().recovered[:, first], identity.recovered[:, pieces].all(-1))
    bounds = results["intervals"].sel(query=12).words()
    assert (bounds.lower <= bounds.raw + 1e-9).all() and (bounds.raw <= bounds.upper + 1e-9).all()
    with pytest.raises(ik.InputError, match="no tokens to gather"):
        results["rates"].words()


def test_ends_of_words_are_not_called_exact(model: ik.Model):
    """Pieces of a word may trade weight: the sum of their ends is wider than the ends of their sum."""
    measure = ik.attention_measure(model, "The goalkeepers ran.", "attention", layers=0, heads=0)
    assert measure.exact and not measure.words().exact and "outer bounds" in str(measure.words())
    whole = ik.attention_measure(model, "The dog ran.", "attention", layers=0, heads=0)
    assert whole.words().exact


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("rates", "scores", "agreement", "evaluation")])
def test_words_and_their_differences_can_be_used_like_any_result(results: dict[str, Result], name: str, tmp_path: Path):
    result = results[name].sel(query=12) if name == "intervals" else results[name]
    for made in (result.words(), result.words() - result.words(), (result - result).words()):
        assert len(made.to_frame()) and made.to_xarray() and "nan" not in str(made)
        assert json.dumps(made.to_dict(), allow_nan=False)
        made.save(tmp_path / repr(len(list(tmp_path.iterdir()))))
    assert str(ik.open_result(tmp_path / "0")) == str(result.words())
    with pytest.raises(ik.InputError, match="is already by words"):
        result.words().words()


def test_what_words_do_not_have_is_refused_in_words(results: dict[str, Result]):
    attention, identity = results["attention"].words(), results["identity"].words()
    for read in (lambda: attention.rank, lambda: identity.winner, lambda: identity.winners):  # pyright: ignore
        with pytest.raises(ik.InputError, match=r"result has no (rank|winner): it was not computed"):
            read()


def test_derived_facts_and_numbers_follow_words_and_selections(results: dict[str, Result]):
    pieces: Any = results["attribution"]
    words = pieces.words()
    assert pieces.tokens[pieces.separator] == words.tokens[words.separator] == "[SEP]"
    assert words.cls == 0 and words.separator < pieces.separator
    last = pieces.sel(layer=-1)
    assert torch.equal(last.own, pieces.own[-1]) and torch.equal(last.outweighed, pieces.outweighed[-1])


def test_missing_rates_do_not_hide_differences(fit: Any):
    assert fit.rate.isnan().any()  # maps were tested only on their own layers
    made = fit - fit
    made.source.arrays["rate"].add_(0.25)
    assert "rate 0.25" in str(made)


def test_one_rate_can_be_drawn(fit: Any):
    one = fit.sel(map="ridge", distance="l2", layer=5, test_layer=5, target="input", offset=0, data_share=1.0, fold=0)
    assert "data:image/png" in one.sel(split="test")._repr_html_()


def test_an_explanation_says_only_what_is_selected(results: dict[str, Result]):
    explanation: Any = results["explanation"]
    part = explanation.sel(layer=2)
    assert "Which attention is determined?" in str(explanation) and "Which attention is determined?" not in str(part)
    assert f"pearson {float(explanation.array('pearson')[2]):.3g}" in str(part)
    assert (explanation - explanation).to_dict().get("sources") is None


def test_bounds_that_were_not_computed_are_not_said(attention: Any):
    late = attention.intervals(layer=4, head=5, query=[3, 12], seconds=1e-9)
    plain = late.to_dict()
    assert plain["gap"][0][0] is None and plain["null_because"] == {"gap": "The edge was not bounded in time."}
    count = late.raw.numel()
    assert f"{count} of {count} weights were not bounded in time" in str(late)
    assert "At least 0% of a row on average is determined" in str(late)
    assert "The widest" not in str(late)
    known = attention.intervals(layer=4, head=5, query=[3, 12])
    assert "The widest interval is" in str(known)
    assert "in all alternatives, which are attention with the same output" in str(known)


def test_an_opened_result_has_no_model_and_says_so(results: dict[str, Result], tmp_path: Path):
    needs: dict[str, Callable[[Any], Any]] = {
        "attention": lambda result: result.verify(),
        "row": lambda result: result.intervals(),
        "rates": lambda result: result.identity_map("Some text."),
    }
    for name, use in needs.items():
        results[name].save(tmp_path / name)
        with pytest.raises(ik.InputError, match="needs the model"):
            use(ik.open_result(tmp_path / name))
    assert ik.open_result(tmp_path / "attention").pearson() == results["attention"].pearson()


def test_a_large_result_is_refused_before_memory_runs_out(
    attention: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("identikit.results.result.LARGEST", 1000)
    made = (attention.words, lambda: attention - attention)
    written = (attention.to_frame, attention.to_xarray, attention.to_dict, lambda: attention.save(tmp_path / "x"))
    for write in (*made, *written):
        with pytest.raises(ik.InputError, match=r"Select a part first, with sel\(layer=…\)"):
            write()
    assert list(tmp_path.iterdir()) == []
    assert len(attention.sel(**ROW).to_frame()) == len(attention.tokens)


def test_damaged_folders_are_refused(results: dict[str, Result], tmp_path: Path):
    folder = tmp_path / "saved"
    results["identity"].save(folder)
    arrays, about = folder / "arrays.safetensors", folder / "result.json"
    content, words = arrays.read_bytes(), about.read_text()
    arrays.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ik.InputError, match=r"it is damaged \(arrays.safetensors does not have its SHA-256\)"):
        ik.open_result(folder)
    arrays.write_bytes(content)
    known = unseal_json(words.encode())
    first = known["axes"][0]
    for wrong, message in (
        (words[:40].encode(), "it is damaged"),
        (b"[]", "it is damaged"),
        (words.replace("identity map", "identity cap").encode(), "its content does not have its SHA-256"),
        (seal_json([]), "it is damaged"),
        (seal_json(known | {"format": "identikit-result-9"}), "its format is 'identikit-result-9'"),
        (seal_json(known | {"kind": "horoscope"}), "'horoscope' are not known"),
        (seal_json(known | {"provenance": {"weight": ""}}), "another version"),
        (seal_json(known | {"axes": [first | {"values": first["values"][:-1]}, *known["axes"][1:]]}), "do not fit"),
        (seal_json(known | {"axes": []}), "it is damaged"),
        (seal_json(known | {"dims": {}}), "it is damaged"),
        *(
            (seal_json(known | {"files": files}), "files that are not its own")
            for files in ({"../x": ""}, {"/x": ""}, [])
        ),
        # The seal is right: it says that nothing happened to the file, not that we wrote it.
        (seal_json(known | {"kind": ["identity map"]}), "are not known"),
        (seal_json(known | {"about": []}), "it is damaged"),
        (seal_json(known | {"about": {}}), "it is damaged"),
        (seal_json(known | {"about": known["about"] | {"tokens": [1, 2]}}), "it is damaged"),
        (seal_json(known | {"provenance": known["provenance"] | {"model": 5}}), "it is damaged"),
        (seal_json(known | {"provenance": known["provenance"] | {"settings": []}}), "it is damaged"),
        (seal_json(known | {"axes": [first | {"name": None}, *known["axes"][1:]]}), "do not fit"),
        (seal_json(known | {"axes": 5}), "it is damaged"),
        (seal_json(known | {"dims": 5}), "it is damaged"),
    ):
        about.write_bytes(wrong)
        with pytest.raises(ik.InputError, match=message) as refusal:
            ik.open_result(folder)
        assert unclear(str(refusal.value)) == ""
    arrays.unlink()
    about.write_text(words)
    with pytest.raises(ik.InputError, match=r"there is no arrays.safetensors"):
        ik.open_result(folder)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "result.json")
    for nothing in (tmp_path / "nowhere", tmp_path / "loop", tmp_path, about):
        with pytest.raises(ik.InputError, match=r"there is no result.json|cannot be read"):
            ik.open_result(nothing)


@pytest.mark.parametrize("name", ["explanation", "rates"])
def test_a_changed_byte_of_any_file_is_noticed(results: dict[str, Result], name: str, tmp_path: Path):
    results[name].save(tmp_path / "saved")
    files = [path for path in sorted((tmp_path / "saved").rglob("*")) if path.is_file()]
    assert len(files) >= 4
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) // 3, len(content) - 1}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(ik.InputError, match="damaged"):
                ik.open_result(tmp_path / "saved")
        path.write_bytes(content[:-1])
        with pytest.raises(ik.InputError, match="damaged"):
            ik.open_result(tmp_path / "saved")
        path.unlink()
        with pytest.raises(ik.InputError, match="there is no"):
            ik.open_result(tmp_path / "saved")
        path.write_bytes(content)
    assert type(ik.open_result(tmp_path / "saved")) is type(results[name])


def test_a_result_opens_in_a_program_that_has_loaded_nothing_else(results: dict[str, Result], tmp_path: Path):
    results["row"].save(tmp_path / "saved")
    script = f"import identikit; print(identikit.open_result({str(tmp_path / 'saved')!r}).kind)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "effective attention\n", done.stderr


def test_saving_leaves_nothing_half_written(
    results: dict[str, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(results["identity"]), "_files", fail)
    with pytest.raises(ik.InputError, match=r"No space left on device\. Choose another folder"):
        results["identity"].save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ik.InputError, match="Choose another folder"):
        results["rates"].save(tmp_path / "file" / "under")


def test_every_public_name_of_a_result_is_documented():
    for found in CLASSES.values():
        for name, member in vars(found).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, property | Attribute)):
                words = member.__doc__
                assert words and re.match(r"[A-Z\[]", words), f"{found.__name__}.{name}"
