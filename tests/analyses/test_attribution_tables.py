"""Attribution over a dataset: shards merge to the whole, tables hold what the figures are drawn from."""

from pathlib import Path

import pytest
import torch

import identikit as ik
from identikit.analyses.attribution_tables import attribution_tables, pack, unpack
from identikit.engine import local
from identikit.maths.mixing import mixing
from identikit.store import Store
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


def test_statistics_survive_a_file():
    contribution = torch.rand(2, 6, 6, dtype=torch.float64)
    contribution /= contribution.sum(1, keepdim=True)
    before = mixing(contribution, causal=False, cls=0, separator=3, tags=list("aabbcc"))
    after = unpack(pack(before))
    assert torch.equal(after.own, before.own) and torch.equal(after.to_cls.sums, before.to_cls.sums)
    assert set(after.by_tag) == {"a", "b", "c"} and after.tokens == 6
