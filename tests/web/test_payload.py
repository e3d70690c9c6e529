"""What a page is given is what the API returns: maps from their factors, rows, vertices, and everything else."""

import json
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from identikit import attention_intervals, effective_attention, open_result, token_attribution
from identikit.attention.measure_result import AttentionMeasure
from identikit.attention.result import EffectiveAttention
from identikit.errors import InputError
from identikit.results.words import percent, weight
from identikit.web import file, payload, rows
from identikit.web.bundle import static
from identikit.web.payload import packed
from identikit.web.rows import EPSILONS
from tests.models import tiny
from tests.web.conftest import TEXT

# Plain, grouped, causal, windowed, soft-capped, with a learned sink, with biases added to the scores, half precision.
FAMILIES = ["bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "bloom", "deberta-v2", "xlnet", "qwen3_next"]


def opened(content: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the arrays and the facts of a file, read as the browser reads them."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    return load(content), json.loads(header["__metadata__"]["identikit"])


def maps_of(arrays: dict[str, torch.Tensor], about: dict[str, Any], layer: int, head: int) -> dict[str, torch.Tensor]:
    """Return a head's maps from what a file holds, as `static/head.js` does."""
    part = {name.split(".")[1]: array for name, array in arrays.items() if name.startswith(f"layer{layer}.")}
    facts = about["attention"]["layers"][layer]
    if facts["form"] == "dense":
        return {name: part[name][head].double() for name in ("raw", "effective")}
    n = len(about["tokens"])
    bits = np.unpackbits(arrays["visible"][facts["mask"]].numpy(), axis=1)[:, :n]
    seen = torch.from_numpy(bits).bool()
    scores = part["query"][head].double() @ part["key"][facts["key_head"][head]].double().mT * facts["scaling"]
    if facts["softcap"]:
        scores = torch.tanh(scores / facts["softcap"]) * facts["softcap"]
    scores = scores.masked_fill(~seen, -torch.inf)
    if facts["sink"]:
        scores = torch.cat([scores, torch.full((n, 1), facts["sink"][head])], 1)
    raw = torch.softmax(scores, -1)[:, :n]
    effective = part["coefficients"][head].double() @ part["basis"][facts["basis_head"][head]].double().mT
    effective = torch.where(part["identifiable"][head].bool()[:, None], raw, effective.masked_fill(~seen, 0.0))
    return {"raw": raw, "effective": effective}


@pytest.mark.parametrize("family", FAMILIES)
def test_maps_are_built_from_factors_in_every_kind_of_model(family: str):
    found = effective_attention(tiny.loaded(family), TEXT)
    arrays, about = opened(packed(found))
    assert about["attention"]["layer_numbers"] == list(found.layers)
    for layer in range(len(found.layers)):
        for head in range(len(found.heads)):
            for name, built in maps_of(arrays, about, layer, head).items():
                expected = getattr(found, name)[layer, head].double()
                assert (built - expected).abs().max() < 1e-5, (name, layer, head)


def test_half_precision_some_heads_and_other_readings_of_effective_attention():
    found = effective_attention(tiny.loaded("llama", dtype=torch.bfloat16), TEXT)
    arrays, about = opened(packed(found))
    assert arrays["layer0.query"].dtype == torch.bfloat16  # as it is
    assert (maps_of(arrays, about, 1, 1)["effective"] - found.effective[1, 1].double()).abs().max() < 1e-5
    model = tiny.loaded("llama")
    for options in ({"heads": [1, 3], "layers": [1]}, {"mass": True}, {"bias": False}):
        found = effective_attention(model, TEXT, **options)
        arrays, about = opened(packed(found))
        for head in range(len(found.heads)):
            built = maps_of(arrays, about, 0, head)["effective"]
            assert (built - found.effective[0, head].double()).abs().max() < 1e-5, options
    part = effective_attention(model, TEXT).sel(layer=1, head=[2])
    arrays, about = opened(packed(part))
    assert about["attention"]["head_numbers"] == [2]
    assert (maps_of(arrays, about, 0, 0)["raw"] - part.raw[0].double()).abs().max() < 1e-5


def test_an_explanation_has_every_part(explanation: Any, content: bytes):
    arrays, about = opened(content)
    places = arrays["rows.place"].tolist()
    exact = explanation.attention.intervals()
    for row in (0, len(places) // 2, len(places) - 1):
        at = tuple(places[row])
        assert (arrays["rows.lower"][row] - exact.lower[at]).abs().max() < 1e-5
        assert (arrays["rows.upper"][row] - exact.upper[at]).abs().max() < 1e-5
    assert (arrays["certain"] - exact.certain_mass).abs().max() < 1e-5
    assert (arrays["heads.certain_mass"] - exact.certain_mass.mean(-1)).abs().max() < 1e-5
    assert (arrays["heads.pearson"] - explanation.attention.pearson("head")).abs().max() < 1e-5
    simplex = explanation.attention.simplex
    assert (torch.stack([arrays[f"layer{i}.simplex"] for i in range(len(simplex))]) - simplex).abs().max() < 1e-5
    assert torch.equal(arrays["identity.recovered"].bool(), explanation.identity.recovered)
    shares = torch.zeros_like(explanation.attribution.contribution.mT).float()
    shares.scatter_(-1, arrays["attribution.input"].long(), arrays["attribution.share"])
    assert (shares.mT - explanation.attribution.contribution).abs().max() < 1e-5
    assert [one["question"] for one in about["verdict"]["sections"]] == [
        "Which attention is determined?",
        "Which token is this?",
        "Where did it come from?",
    ]
    said = " ".join(str(explanation).split())
    assert about["verdict"]["sections"][0]["paragraphs"][0] in said


def test_the_page_is_told_its_readings_and_knows_none_by_name(content: bytes):
    arrays, about = opened(content)
    readings = about["attention"]["readings"]
    declared = [name for name, measure in EffectiveAttention.measures.items() if measure.over_texts]
    assert {"entropy", "null_dim", "pearson"} <= set(declared)
    assert [one["name"] for one in readings] == [*declared, "certain_mass", "sink_mass"]
    scripts = "".join(one.read_text() for one in static().iterdir() if one.name.endswith(".js"))
    for reading in readings:
        assert reading.keys() == {"name", "label", "meaning", "code", "range", "digits"}
        assert arrays[f"heads.{reading['name']}"].shape == (3, 4)
        for words in (f'"{reading["name"]}"', reading["meaning"], reading["code"]):
            assert words not in scripts


def test_readings_of_attention_and_roles_travel_with_what_they_mean(measured: Any):
    arrays, about = opened(packed(measured))
    kept = [name for name, reading in measured.readings.items() if isinstance(reading, AttentionMeasure)]
    assert [one["name"] for one in about["measures"]] == kept
    scripts = "".join(one.read_text() for one in static().iterdir() if one.name.endswith(".js"))
    for at, one in enumerate(about["measures"]):
        reading = measured.readings[one["name"]]
        assert one["axes"] == [axis.name for axis in reading.axes] and one["exact"] == reading.exact
        assert one["meaning"] not in scripts and f'"{one["name"]}"' not in scripts
        for part in ("raw", "effective", "lower", "upper"):
            assert (arrays[f"measure{at}.{part}"] - reading.read(part)).abs().max() < 1e-5
    roles = {one["label"]: one for one in about["attention"]["readings"] if one["label"].startswith("role: ")}
    scores = measured.readings["roles"]
    assert {"role: self", "role: induction"} <= roles.keys()
    name = roles["role: self"]["name"]
    assert (arrays[f"heads.{name}.upper"] - scores.sel(score="self").upper).abs().max() < 1e-5
    assert about["sampled"][name]["said"][0].endswith(")")
    assert 'measures=["rollout", "value norm", "norm", "roles"]' in about["calls"]["explain"]


def test_readings_that_do_not_fit_are_named(measured: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(payload, "MEASURES", 100_000)
    arrays, about = opened(packed(measured))
    assert [one["name"] for one in about["measures"]] == ["rollout", "norm"]
    assert about["measures_left_out"] == "Too large for a page: value norm." and "measure2.raw" not in arrays


def test_vertices_keep_the_output_and_reach_the_ends_and_the_grid_contains_them(explanation: Any, content: bytes):
    arrays, about = opened(content)
    starts = arrays["vertex.start"].tolist()
    layers = explanation.attention.captured().layers
    assert len(arrays["vertex.row"]) > 10
    for at in range(0, len(arrays["vertex.row"]), 7):
        row, key = int(arrays["vertex.row"][at]), int(arrays["vertex.key"][at])
        layer, head, query = arrays["rows.place"][row].tolist()
        weights = torch.zeros(len(about["tokens"]), dtype=torch.float64)
        some = slice(starts[at], starts[at + 1])
        weights[arrays["vertex.keys"][some].long()] = arrays["vertex.weights"][some].double()
        end = arrays["rows.upper" if arrays["vertex.end"][at] else "rows.lower"][row, key]
        assert abs(float(weights[key] - end)) < 1e-5
        assert weights.min() >= 0
        call = layers[layer].call
        values = call.value[0, head // call.groups].double() @ layers[layer].projection[head].double()
        raw = layers[layer].rows([(head, query)]).attention[0]
        assert ((weights - raw) @ values).norm() < 1e-6 * (raw @ values).norm()
    assert about["rows"]["epsilons"] == list(EPSILONS)
    chosen = arrays["grid.row"].long()
    assert (arrays["grid.lower"] <= arrays["rows.lower"][chosen][:, None] + 1e-6).all()
    assert (arrays["grid.upper"] >= arrays["rows.upper"][chosen][:, None] - 1e-6).all()
    assert list(about["first"].values()) in arrays["rows.place"][chosen].tolist()


def test_the_opening_row_has_a_grid_however_few_rows_do(explanation: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "GRID_WORK", 0.0)
    monkeypatch.setattr(rows, "_opening_row", lambda _, ranked, __: list(ranked.values())[-1])
    arrays, about = opened(packed(explanation))
    (row,) = arrays["grid.row"].tolist()
    assert arrays["rows.place"][row].tolist() == list(about["first"].values())
    monkeypatch.setattr(rows, "ROW_WORK", 0.0)  # as if the text were very long
    assert "grid.row" not in opened(packed(explanation))[0]


def test_opened_results_and_parts_have_pages_too(explanation: Any, content: bytes, tmp_path: Any):
    explanation.save(tmp_path / "saved")
    again = open_result(tmp_path / "saved")
    arrays, about = opened(packed(again))
    expected, _ = opened(content)
    assert about["attention"]["layers"][0]["form"] == "dense"
    assert torch.equal(arrays["rows.lower"], expected["rows.lower"])
    assert "vertex.row" not in arrays
    words, _ = opened(packed(explanation.attention.words()))
    assert (words["layer0.raw"] - explanation.attention.words().raw[0]).abs().max() < 1e-6
    intervals, _ = opened(packed(explanation.attention.intervals(layer=1, head=[0, 2])))
    assert intervals["rows.place"].shape == (2 * len(explanation.tokens), 3)
    row = attention_intervals(tiny.loaded("gpt2"), TEXT, layer=1, head=0, query=-1)
    assert (opened(packed(row))[0]["rows.raw"][0] - row.raw).abs().max() < 1e-6
    for part in (explanation.identity, explanation.attribution):
        assert len(packed(part)) > 1000


def test_what_cannot_be_shown_is_refused(explanation: Any, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="select layers and heads, but not queries"):
        packed(explanation.attention.sel(query=3))
    with pytest.raises(InputError, match="groups="):
        packed(explanation.attention.intervals(groups="special"))
    monkeypatch.setattr(file, "LARGEST", 1000)
    with pytest.raises(InputError, match="Show fewer layers"):
        packed(explanation.attention)


def test_a_long_text_keeps_the_largest_sources(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(payload, "SHORT", 8)
    monkeypatch.setattr(payload, "SOURCES", 5)
    found = token_attribution(tiny.loaded("gpt2"), TEXT)
    arrays, about = opened(packed(found))
    assert about["attribution"]["kept"] == 5
    assert torch.equal(arrays["attribution.input"][1, -1].long(), found.contribution[1, :, -1].topk(5).indices)


def test_what_rests_on_drawn_rows_says_so(explanation: Any):
    """Of a page with few rows bounded, a head and a token have a range or an error, and their number of rows."""
    some = explanation.bounded.bounded.select(torch.arange(0, len(explanation.bounded.bounded.places), 9))
    arrays, about = opened(packed(replace(explanation, bounded=explanation.bounded._replace(bounded=some))))
    exact = explanation.attention.intervals().certain_mass
    least, most = arrays["tokens.certain"].double()
    assert (least <= exact.mean((0, 1)) + 1e-6).all() and (exact.mean((0, 1)) <= most + 1e-6).all()
    told = about["sampled"]["certain_mass"]
    assert all(told["sampled"]) and all("free rows bounded)" in words for words in told["said"])
    assert all("free rows bounded)" in words for words in about["certain"]["tokens"])
    assert not about["sampled"]["certain_mass"]["said"][0].startswith("1.00")


def test_shares_are_written_alike_in_python_and_on_the_page():
    """Nothing below 99.95 % is 100 %, and nothing above 0.05 % is 0 %."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    shares = [0.0, 1e-7, 1e-4, 0.001, 0.004, 0.0051, 0.45, 0.9949, 0.9951, 0.999, 0.9994, 0.9996, 0.99999, 1.0]
    written = [percent(share) for share in shares]
    assert [words for words in written if words == "100%"] == ["100%"] and written[-2] == written[-3] == ">99.9%"
    scatter = (static() / "scatter.js").read_text().replace('import { css, mixed } from "./colour.js";', "")
    readings = f"{shares}.map((share) => readingNumber({{digits: 2, range: [0, 1]}}, share))"
    estimates = "[[0.2, 0.01], [0.01, 0.01], [0.001, 0.2], [0.3, null]].map((pair) => estimatedShare(...pair))"
    told = f"\nconsole.log(JSON.stringify([{shares}.map(percent), {readings}, {estimates}]));"
    script = (static() / "parts.js").read_text() + scatter + told
    done = subprocess.run([node, "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    percentages, numbers, estimated = json.loads(done.stdout)
    assert percentages == written and numbers == [weight(share) for share in shares]
    assert estimated == ["20% ± 1%", "at most 3%", "at most 40%", "30%"]
