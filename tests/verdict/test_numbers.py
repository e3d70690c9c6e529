"""The verdict on one text as numbers: where tokens come from, what is left out and why, what is refused."""

import json
import sys
import warnings

import pytest
import torch
import transformers as hf

from identikit.attribution import attribute as attribution
from identikit.attribution.attribute import CostWarning, token_attribution
from identikit.errors import InputError
from identikit.models.model import Model
from identikit.verdict.numbers import explain
from tests.models import tiny

TEXT = "w5 w6 w5 w7 w8"


@pytest.fixture(autouse=True)
def no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps are not fitted here; the package's own name `explain` is the function, so the module is found by name."""
    monkeypatch.setattr(sys.modules["identikit.verdict.numbers"], "_identity", lambda *asked: None)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(attribution, "product_rate", lambda *place: 1.0)


def told(model: Model, **options):
    """Return the JSON of an explanation as a program reads it."""
    return json.loads(json.dumps(explain(model, TEXT, **options).to_dict(), default=str))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_sources_say_where_they_stand(name: str):
    model = tiny.loaded(name)
    found = told(model, probes="exact")
    contribution = token_attribution(model, TEXT)[0].contribution
    rows = found["mixing"]["tokens"]
    assert [row["position"] for row in rows] == list(range(7))
    for row in rows:
        assert found["tokens"][row["position"]] == row["token"]
        assert row["own"] == pytest.approx(float(contribution[2, row["position"], row["position"]]))
        for layer, sources in zip((0, 1, 2), row["sources"], strict=True):
            column = contribution[layer, :, row["position"]]
            expected = [weight for weight in column.sort(descending=True).values.tolist() if weight][:3]
            assert [source["contribution"] for source in sources] == pytest.approx(expected)
            for source in sources:
                assert found["tokens"][source["position"]] == source["token"]
                assert source["contribution"] == pytest.approx(float(column[source["position"]]))


def test_an_outweighed_token_is_not_its_own_first_source():
    rows = told(tiny.loaded("t5"), probes="exact")["mixing"]["tokens"]
    assert {row["outweighed"] for row in rows} == {True, False}
    for row in rows:
        first = row["sources"][-1][0]
        assert row["outweighed"] == (first["position"] != row["position"]) == (first["contribution"] > row["own"])


def test_a_small_model_takes_as_many_probes_as_it_has_dimensions():
    small = hf.BertConfig(
        vocab_size=60, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12
    )
    found = told(Model(hf.BertModel(small).eval(), tiny.tokenizer(), name="small"))
    assert found["mixing"]["probes"] == 8 and found["mixing"]["error"] == 0.0
    assert found["mixing_omitted"] is None


@pytest.mark.parametrize("probes", [None, 4, "exact"])
def test_what_does_not_fit_in_memory_leaves_the_rest(probes: int | str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attribution, "free_bytes", lambda device: 1 << 10)
    found = told(tiny.loaded("bert"), probes=probes)
    assert found["mixing"] is None and len(found["layers"]) == 3
    assert "needs at least" in found["mixing_omitted"] and "\n" not in found["mixing_omitted"]


@pytest.mark.parametrize("probes", [0, 1, 25, "all"])
def test_a_wrong_number_of_probes_is_an_error(probes: int | str):
    with pytest.raises(InputError, match=f"probes={probes!r}: expected 'exact' or a number from 2 to 24"):
        explain(tiny.loaded("bert"), TEXT, probes=probes)


@pytest.mark.usefixtures("slow")
def test_what_takes_long_is_left_out_unless_it_is_asked_for():
    found = told(tiny.loaded("bert"))
    assert found["mixing"] is None
    assert "with probes=16, will take about" in found["mixing_omitted"]
    assert found["mixing_omitted"].endswith("Ask for probes=16 to have it all the same.")
    with pytest.warns(CostWarning, match="with probes=16, will take about"):
        found = told(tiny.loaded("bert"), probes=16)
    assert found["mixing"]["probes"] == 16 and found["mixing_omitted"] is None


@pytest.mark.parametrize("probes", [None, 4])
def test_other_warnings_pass_through(probes: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attribution, "_announce", lambda *asked: warnings.warn("something else", stacklevel=2))
    with pytest.warns(UserWarning, match="something else"):
        found = told(tiny.loaded("bert"), probes=probes)
    assert found["mixing"] is not None and found["mixing_omitted"] is None


def test_nothing_is_near_where_there_is_nothing_else():
    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    found = explain(Model(tiny.build("gpt2"), words, name="tiny gpt2"), "w5").mixing
    assert found is not None and found.near is None
    assert [row.own for row in found.tokens] == pytest.approx([1.0])
    found = explain(tiny.loaded("gpt2"), TEXT).mixing
    assert found is not None and found.near is not None
    assert torch.tensor(found.near).gt(0).all() and torch.tensor(found.near).le(1).all()


def test_progress_is_told():
    seen: list[tuple[int, int]] = []
    explain(tiny.loaded("llama"), TEXT, probes="exact", progress=lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [7] * len(seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and seen[-1] == (7, 7)
