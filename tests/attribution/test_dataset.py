"""Attribution over a dataset: shards merge to the whole, tables hold what the figures are drawn from."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import identikit as ik
from identikit.attribution.dataset import AttributionOptions, attribution_tables, pack, unpack
from identikit.errors import InputError
from identikit.maths.mixing import mixing
from identikit.runs import run as runs
from identikit.runs.run import Run
from identikit.runs.store import Store
from tests.models import tiny

TEXTS = [f"w{i} w{i + 3} w{i + 1} w{i + 7} w{(i * 5) % 40 + 3} w{i + 2}" for i in range(3, 11)]


def parity(encoded) -> tuple[str, ...]:
    return tuple("special" if special else "even" if i % 2 else "odd" for i, special in enumerate(encoded.special))


def test_tables_of_shards_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny.loaded("llama", dtype=torch.float64)
    whole = attribution_tables(model, TEXTS, Run(Store(tmp_path / "whole", {})), AttributionOptions(), tagger=parity)
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    parts = attribution_tables(model, TEXTS, Run(Store(tmp_path / "parts", {})), AttributionOptions(), tagger=parity)
    assert set(whole) == {"texts", "tokens", "own", "groups", "offsets", "tags"}
    for name, frame in whole.items():
        assert frame.equals(parts[name])
    own = whole["own"].set_index("layer")
    results = ik.token_attribution(model, TEXTS)
    diagonal = torch.cat([result.contribution.diagonal(dim1=1, dim2=2) for result in results], dim=1)
    for layer in range(3):
        assert own["median"][layer] == pytest.approx(float(diagonal[layer].quantile(0.5)), abs=1e-4)
    shares = whole["offsets"].query("view == 'offsets'").groupby("layer")["share"].sum()
    assert shares.tolist() == pytest.approx([1.0] * 3)
    assert whole["offsets"].query("view == 'offsets' and offset > 0")["share"].sum() == 0  # causal
    assert set(whole["tags"]["tag"]) == {"special", "even", "odd"}
    assert whole["tags"].query("layer == 0")["tokens"].sum() == sum(len(result.tokens) for result in results)


def test_every_token_has_its_own_contribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    model = tiny.loaded("bert", dtype=torch.float64)
    run = Run(Store(tmp_path / "run", {}))
    tokens = attribution_tables(model, TEXTS, run, AttributionOptions(norm="sum"))["tokens"]
    results = ik.token_attribution(model, TEXTS, norm="sum")
    assert len(tokens) == 3 * sum(len(result.tokens) for result in results)
    for text, result in enumerate(results):
        rows = tokens[tokens["text"] == text]
        assert rows["token"].tolist() == [token for token in result.tokens for _ in range(3)]
        assert rows["position"].tolist() == [place for place in range(len(result.tokens)) for _ in range(3)]
        assert rows["layer"].tolist() == [0, 1, 2] * len(result.tokens)
        own = result.contribution.diagonal(dim1=1, dim2=2).mT.flatten()
        assert rows["own_contribution"].tolist() == own.tolist()
        largest = result.contribution.argmax(1)  # (layer, output)
        others = largest != torch.arange(len(result.tokens))
        assert rows["outweighed"].tolist() == others.mT.flatten().tolist()
    assert tokens["outweighed"].nunique() == 2


@pytest.mark.parametrize("marked", [True, False])
def test_statistics_survive_a_file(tmp_path: Path, marked: bool):
    """With [CLS] and [SEP], and of one text without them, two of whose readings are the same empty one."""
    contribution = torch.rand(2, 6, 6, dtype=torch.float64)
    contribution /= contribution.sum(1, keepdim=True)
    places = {"cls": 0, "separator": 3} if marked else {}
    before = mixing(contribution, causal=not marked, **places)
    store = Store(tmp_path / "run", {})
    store.write_tensors("shard.safetensors", pack(before), {})
    after = unpack(store.read_tensors("shard.safetensors")[0])
    packed = pack(after)
    expected = pack(before)
    assert packed.keys() == expected.keys()
    assert all(torch.equal(packed[name], tensor) for name, tensor in expected.items())


def test_a_shard_of_one_text_without_cls(tmp_path: Path):
    """Written by the first run, read by the second."""
    model = tiny.loaded("llama")
    store = Store(tmp_path / "run", {})
    first = attribution_tables(model, TEXTS[:1], Run(store), AttributionOptions())
    second = attribution_tables(model, TEXTS[:1], Run(store), AttributionOptions())
    assert all(frame.equals(second[name]) for name, frame in first.items())
    shares = first["offsets"].groupby("view")["share"].sum()
    assert shares["offsets"] == pytest.approx(3.0) and shares["to_cls"] == shares["around_separator"] == 0


def test_progress_moves_with_tokens_over_the_whole_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    check_progress(attribution_tables, AttributionOptions(), tmp_path, "attribution, tokens")


def check_progress(tables: Callable[..., object], options: object, folder: Path, what: str) -> None:
    """Reports reach the end of every text, from none to all; in a resumed run, from what is kept."""
    model = tiny.loaded("bert")
    lengths = [len(one) for one in model.encode(TEXTS)]
    ends = [sum(lengths[:count]) for count in range(len(TEXTS) + 1)]
    told: list[tuple[str, int, int]] = []
    store = Store(folder, {})
    tables(model, TEXTS, Run(store, progress=lambda *report: told.append(report)), options)
    assert {(name, total) for name, _, total in told} == {(what, sum(lengths))}
    done = [tokens for _, tokens, _ in told]
    assert done == sorted(done) and set(ends) <= set(done)
    (folder / "shard-000001.safetensors").unlink()
    told.clear()
    tables(model, TEXTS, Run(store, progress=lambda *report: told.append(report)), options)
    kept = sum(lengths) - lengths[1]
    assert told[0] == (what, kept, sum(lengths)) and kept < told[1][1] <= kept + lengths[1]
    assert kept + lengths[5] in [tokens for _, tokens, _ in told]
    assert told[-1] == (what, sum(lengths), sum(lengths))


def test_options_of_the_tables(tmp_path: Path):
    model = tiny.loaded("albert")
    store = Store(tmp_path / "run", {})
    for refused in (AttributionOptions(source="nowhere"), AttributionOptions(probes=model.d_model)):
        with pytest.raises(InputError, match=r"is not known|cannot be used"):
            attribution_tables(model, TEXTS, Run(store), refused)

    def missing(encoded: object) -> tuple[str, ...]:
        raise InputError("tagging parts of speech: spaCy is not installed.")

    with pytest.raises(InputError, match="spaCy is not installed"):
        attribution_tables(model, TEXTS, Run(store), AttributionOptions(), tagger=missing)
    with pytest.raises(InputError, match="tokens and the model reads at most"):
        attribution_tables(model, [*TEXTS, "w3 " * 100], Run(store), AttributionOptions())
    assert not (tmp_path / "run").exists()  # what is refused leaves nothing behind
    after = attribution_tables(model, TEXTS, Run(store), AttributionOptions(source="after"))["own"]
    results = ik.token_attribution(model, TEXTS, source="after")
    own = torch.cat([result.contribution.diagonal(dim1=1, dim2=2) for result in results], dim=1)
    assert after["median"].tolist() == pytest.approx(own.double().quantile(0.5, dim=1).tolist(), abs=1e-4)
