"""Attribution over a dataset: shards merge to the whole, tables hold what the figures are drawn from."""

from pathlib import Path

import pytest
import torch

import identikit as ik
from identikit.attention.dataset import attention_tables
from identikit.attribution.dataset import attribution_tables, pack, unpack
from identikit.errors import InputError
from identikit.maths.mixing import mixing
from identikit.runs import local
from identikit.runs.store import Store
from tests.models import tiny

TEXTS = [f"w{i} w{i + 3} w{i + 1} w{i + 7} w{(i * 5) % 40 + 3} w{i + 2}" for i in range(3, 20)]


def parity(encoded) -> tuple[str, ...]:
    return tuple("special" if special else "even" if i % 2 else "odd" for i, special in enumerate(encoded.special))


def test_tables_of_shards_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny.loaded("llama", dtype=torch.float64)
    whole = attribution_tables(model, TEXTS, Store(tmp_path / "whole", {}), tagger=parity)
    monkeypatch.setattr(local, "SHARD", 5)
    parts = attribution_tables(model, TEXTS, Store(tmp_path / "parts", {}), tagger=parity)
    assert set(whole) == {"own", "groups", "offsets", "tags"}
    for name, frame in whole.items():
        assert frame.equals(parts[name])
    own = whole["own"].set_index("layer")
    results = ik.token_attribution(model, TEXTS)
    diagonal = torch.cat([result.contribution.diagonal(dim1=1, dim2=2) for result in results], dim=1)
    for layer in range(3):
        assert own["median"][layer + 1] == pytest.approx(float(diagonal[layer].quantile(0.5)), abs=1e-4)
    shares = whole["offsets"].query("view == 'offsets'").groupby("layer")["share"].sum()
    assert shares.tolist() == pytest.approx([1.0] * 3)
    assert whole["offsets"].query("view == 'offsets' and offset > 0")["share"].sum() == 0  # causal
    assert set(whole["tags"]["tag"]) == {"special", "even", "odd"}
    assert whole["tags"].query("layer == 1")["tokens"].sum() == sum(len(result.tokens) for result in results)


@pytest.mark.parametrize("marked", [True, False])
def test_statistics_survive_a_file(tmp_path: Path, marked: bool):
    """With [CLS] and [SEP], and of one text without them, two of whose readings are the same empty one."""
    contribution = torch.rand(2, 6, 6, dtype=torch.float64)
    contribution /= contribution.sum(1, keepdim=True)
    places = {"cls": 0, "separator": 3} if marked else {}
    before = mixing(contribution, causal=not marked, **places, tags=list("aabbcc"))
    store = Store(tmp_path / "run", {})
    store.write_tensors("shard.safetensors", pack(before), {})
    after = unpack(store.read_tensors("shard.safetensors")[0])
    packed = pack(after)
    assert packed.keys() == pack(before).keys() and after.tokens == 6
    assert all(torch.equal(packed[name], tensor) for name, tensor in pack(before).items())
    assert set(after.by_tag) == {"a", "b", "c"}


def test_a_shard_of_one_text_without_cls(tmp_path: Path):
    """Written by the first run, read by the second."""
    model, store = tiny.loaded("llama"), Store(tmp_path / "run", {})
    first = attribution_tables(model, TEXTS[:1], store)
    second = attribution_tables(model, TEXTS[:1], store)
    assert all(frame.equals(second[name]) for name, frame in first.items())
    shares = first["offsets"].groupby("view")["share"].sum()
    assert shares["offsets"] == pytest.approx(3.0) and shares["to_cls"] == shares["around_separator"] == 0


def test_progress_moves_with_tokens_over_the_whole_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "SHARD", 5)
    model = tiny.loaded("bert")
    lengths = [len(one) for one in model.encode(TEXTS)]
    ends = [sum(lengths[:count]) for count in range(len(TEXTS) + 1)]
    for tables, what in (
        (attribution_tables, "attribution, tokens"),
        (attention_tables, "effective attention, tokens"),
    ):
        told: list[tuple[str, int, int]] = []

        def tell(*report: object, told: list = told) -> None:
            told.append(report)

        store = Store(tmp_path / what, {})
        tables(model, TEXTS, store, progress=tell)
        assert {(name, total) for name, _, total in told} == {(what, sum(lengths))}
        done = [tokens for _, tokens, _ in told]
        assert done == sorted(done) and set(ends) <= set(done)  # text by text, from none to all
        (tmp_path / what / "shard-000001.safetensors").unlink()
        told.clear()
        tables(model, TEXTS, store, progress=tell)
        kept = sum(lengths) - sum(lengths[5:10])
        assert told[0] == (what, kept, sum(lengths)) and told[1][1] == kept + lengths[5]
        assert told[-1] == (what, sum(lengths), sum(lengths))


def test_options_of_the_tables(tmp_path: Path):
    model = tiny.loaded("albert")
    store = Store(tmp_path / "run", {})
    for tables, option in (
        (attribution_tables, "layers"),
        (attribution_tables, "targets"),
        (attention_tables, "layers"),
    ):
        with pytest.raises(InputError, match=f"{tables.__name__}: {option}= cannot be given: use .*All layers and all"):
            tables(model, TEXTS, store, **{option: [0]})
    for refused in ({"source": "nowhere"}, {"source": "before", "probes": model.d_model}):
        with pytest.raises(InputError, match="token_attribution: "):
            attribution_tables(model, TEXTS, store, **refused)

    def missing(encoded: object) -> tuple[str, ...]:
        raise InputError("tagging parts of speech: spaCy is not installed.")

    with pytest.raises(InputError, match="spaCy is not installed"):
        attribution_tables(model, TEXTS, store, tagger=missing)
    with pytest.raises(InputError, match="tokens and the model reads at most"):
        attention_tables(model, [*TEXTS, "w3 " * 100], store)
    assert not (tmp_path / "run").exists()  # what is refused leaves nothing behind
    after = attribution_tables(model, TEXTS, store, source="after")["own"]
    results = ik.token_attribution(model, TEXTS, source="after")
    own = torch.cat([result.contribution.diagonal(dim1=1, dim2=2) for result in results], dim=1)
    assert after["median"].tolist() == pytest.approx(own.double().quantile(0.5, dim=1).tolist(), abs=1e-4)
