"""Inversion: exact against one full pass per candidate, in every causal family; noise, prefixes, ties and refusals."""

import subprocess
import sys
import warnings
from pathlib import Path

import hypothesis
import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import strategies as st

import identikit as ik
from identikit.models.model import Model
from identikit.texts.text import collate
from identikit.tokens import continuation as searching
from identikit.tokens.continuation import Continuations, vocabulary
from identikit.tokens.invert import Inversion, InversionOptions
from identikit.tokens.result import TokenInversion
from tests.models import tiny
from tests.models.real import STORIES, needs_stories
from tests.reference import inversion as reference

TEXT = "w5 w6 w7 w8 w9 w10 w11 w5 w6 w7"
SHORT = "w5 w9 w5"
SOME = {"gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"}
OTHERS = {"bert", "vit", "whisper", "qwen3_next", "falcon_h1", "gpt_oss", "mixtral", "deepseek_v2", "bloom"}
STATEFUL = {"falcon_h1", "llama4", "llama4-text"}  # a state beside attention; queries scaled by place in the batch
STORY = "Once upon a time there was a little dog who liked to play in the park with his friends."


def slow(name: str) -> ParameterSet:
    return pytest.param(name, marks=pytest.mark.slow)


def read(model: Model, text: str) -> Continuations:
    return Continuations.read(model, collate(model.encode(text), pad_id=model.pad_id))


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny.loaded("llama")


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # Llama 4 in float64
@pytest.mark.parametrize("name", [one if one in SOME | OTHERS else slow(one) for one in tiny.BUILDERS])
def test_a_candidate_comes_out_as_in_a_run_of_its_own(name: str):
    model = tiny.loaded(name, dtype=torch.float64)
    if model.modality != "text" or not model.causal or len(model.attention_layers) < model.n_layers or name in STATEFUL:
        assert name not in SOME
        wanted = r"it is not causal|it reads (images|sounds)|have softmax attention\.|more than keys|scales queries"
        with pytest.raises(ik.IdentikitError, match=wanted):
            ik.invert(model, TEXT)
        return
    text = read(model, TEXT)
    ids = text.batch.ids[0].tolist()
    candidates = list(range(0, tiny.VOCABULARY, 7))
    for position in (0, 1, len(ids) - 1):  # past the sliding windows of six too
        found = torch.stack(text.at(position, depth=model.n_layers).hidden(torch.tensor(candidates)), 1)
        expected = torch.stack(reference.candidate_hidden(model, ids[:position], candidates, text.batch.segments))
        scale = expected.abs().max()
        assert (found - expected).abs().max() <= 1e-6 * scale  # 1e-15; some families route in float32
        (first,) = text.at(position, depth=1).hidden(torch.tensor(candidates))
        assert torch.equal(first, found[:, 0])  # later blocks are not run, and nothing changes


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_the_search_finds_what_the_definition_finds(distance: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(searching, "chunk_size", lambda *_: 17)  # the last chunk is shorter
    model = tiny.loaded("mistral", dtype=torch.float64)
    text = read(model, TEXT)
    ids = text.batch.ids[0].tolist()
    result = ik.invert(model, TEXT, positions=[2, 9], distance=distance, noise=0.5, seed=3)
    sought = Inversion.of(model, InversionOptions(), steps=1, depth=3).sought(
        *ik.models.text_run.prepare_texts(model, TEXT), (0, 1, 2), (2, 9)
    )
    noisy = sought.noisy(InversionOptions(noises=(0.5,), seed=3)).vectors
    everyone = list(range(tiny.VOCABULARY))
    for column, position in enumerate((2, 9)):
        candidates = torch.stack(reference.candidate_hidden(model, ids[:position], everyone, text.batch.segments))
        for layer in range(model.n_layers):
            order = reference.ranked(noisy[layer, position], candidates[:, layer], distance)
            (first, winner), (second, runner_up) = order[:2]
            own = next(off for off, index in order if index == ids[position])
            assert int(result.winner[layer, column]) == winner
            assert int(result.runner_up[layer, column]) == runner_up
            for array, expected in (("winner_distance", first), ("runner_up_distance", second), ("own_distance", own)):
                assert float(result.array(array)[layer, column]) == pytest.approx(expected, abs=1e-9)
            best_other = second if winner == ids[position] else first
            assert float(result.margin[layer, column]) == pytest.approx(best_other - own, abs=1e-9)
            assert bool(result.recovered[layer, column]) == (winner == ids[position])


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "llama"])
def test_every_token_is_recovered_without_noise(name: str):
    model = tiny.loaded(name)
    result = ik.invert(model, SHORT)
    assert isinstance(result, TokenInversion) and result.recovered.shape == (3, 5)
    assert result.recovered.all() and result.own_distance.max() < 1e-4 < result.runner_up_distance.min()
    assert all(row == result.tokens for row in result.winners)
    assert torch.equal(result.winner[0], result.winner[2])
    again = ik.invert(model, SHORT, prefix="recovered")
    assert again.recovered.all() and torch.allclose(again.margin, result.margin, atol=1e-4)


def test_hidden_vectors_alone_are_enough(llama: Model):
    hidden = read(llama, TEXT).trace.hidden[1][0]
    result = ik.invert(llama, hidden, layer=1)
    assert result.recovered is None and result.own_distance is None and result.prefix == "recovered"
    assert result.tokens == result.winners[0] == llama.encode(TEXT)[0].tokens
    assert "Recovered from layer 1" in str(result) and (result.margin > 0.1).all()
    with_text = ik.invert(llama, TEXT, layer=1, prefix="recovered")
    assert torch.allclose(result.winner_distance, with_text.winner_distance, atol=1e-5)
    first, second = ik.invert(llama, [hidden.numpy(), hidden[:4].double()], layer=1)
    assert first.winners == result.winners and second.tokens == result.tokens[:4]
    gpt = tiny.loaded("gpt2")  # its tokenizer gives token types, which the model reads
    assert ik.invert(gpt, read(gpt, TEXT).trace.hidden[2][0], layer=2).tokens == result.tokens


def test_layers_and_positions_are_chosen(llama: Model):
    whole = ik.invert(llama, TEXT)
    part = ik.invert(llama, TEXT, layers=[2, 0], positions=["w9", -1])
    assert part.axes[0].values == (2, 0) and part.axes[1].values == (5, 11)
    assert torch.allclose(part.margin, whole.margin[[2, 0]][:, [5, 11]], atol=1e-5)
    one = ik.invert(llama, TEXT, layer=-1, positions="w9", prefix="recovered")
    assert one.margin.shape == (1,) and torch.allclose(one.margin, whole.margin[2, 5], atol=1e-5)
    several = ik.invert(llama, [TEXT, "w9 w8"], layer=0)
    assert [len(one.tokens) for one in several] == [12, 4]


def test_an_error_carries_on_when_winners_are_appended(llama: Model):
    given, recovered = (ik.invert(llama, TEXT, noise=1.5, prefix=prefix) for prefix in ("given", "recovered"))
    assert torch.equal(given.winner[:, 0], recovered.winner[:, 0])  # nothing is before the first
    for layer in range(3):
        lost = (~recovered.recovered[layer]).nonzero()[:, 0]
        first = int(lost[0])
        assert torch.allclose(given.margin[layer, : first + 1], recovered.margin[layer, : first + 1], atol=1e-4)
    assert recovered.own_distance.mean() > given.own_distance.mean()


def test_noise_is_seeded_and_of_its_size(llama: Model):
    first, same, other = (ik.invert(llama, TEXT, layer=1, noise=0.4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.margin, same.margin) and not torch.equal(first.margin, other.margin)
    assert float(first.own_distance.mean()) == pytest.approx(0.4, rel=0.2)
    assert torch.equal(first.margin, ik.invert(llama, TEXT, layers=[0, 1], noise=0.4, seed=1).margin[1])


@hypothesis.given(st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.8, 2.0]), min_size=1, max_size=2), st.integers(0, 99))
@hypothesis.settings(max_examples=3, deadline=None)
def test_margins_follow_from_distances(noises: list[float], seed: int):
    model = tiny.loaded("qwen3")
    for noise in noises:
        result = ik.invert(model, SHORT, noise=noise, seed=seed)
        assert (result.winner_distance <= result.runner_up_distance).all()
        assert (result.winner_distance <= result.own_distance).all()
        assert torch.equal(result.recovered, result.margin > 0)
        assert torch.equal(result.recovered, result.winner == torch.tensor(model.encode(SHORT)[0].ids))


def test_tokens_with_equal_embeddings_are_one_candidate(llama: Model):
    model = Model(tiny.build("llama"), tiny.tokenizer(), name="alike")
    weight = model.hf.get_input_embeddings().weight.data
    weight[40] = weight[6]
    weight[41] = -0.0 * weight[6]
    weight[42] = 0.0
    known = vocabulary(model)
    assert len(known.ids) == tiny.VOCABULARY - 2 and torch.equal(weight[known.ids[known.candidate_of]], weight + 0.0)
    result = ik.invert(model, "w40 w6 w9")
    assert result.recovered.all() and result.candidates == 58
    assert result.winners[0] == result.tokens  # named as in the text, whichever stands for both
    assert (result.runner_up != 6).all() or (result.runner_up_distance > 0).all()
    assert len(vocabulary(llama).ids) == tiny.VOCABULARY


def test_progress_counts_candidates(llama: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(searching, "chunk_size", lambda *_: 25)
    for prefix in ("given", "recovered"):
        told: list[tuple[int, int]] = []
        ik.invert(llama, TEXT, noise=2.0, prefix=prefix, progress=lambda _, *count, told=told: told.append(count))
        assert told[-1] == (12 * 60, 12 * 60) and told == sorted(told) and len(told) >= 36


def test_what_takes_long_is_said_beforehand(llama: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("identikit.tokens.invert.expected_seconds", lambda *_: 1200.0)
    with pytest.warns(UserWarning, match="12 positions among 60 tokens takes about 20 minutes"):
        ik.invert(llama, TEXT)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ik.invert(llama, TEXT)


def test_a_warning_shows_the_line_of_the_caller():
    script = """
import identikit as ik
from identikit.tokens import invert
from tests.models import tiny
invert.LONG_SECONDS = 0.0
ik.invert(tiny.loaded("llama"), "w4 w5")  # this line
"""  # in another process: here, functions are wrapped to check shapes
    done = subprocess.run([sys.executable, "-W", "always", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "<string>:6: UserWarning: Inverting" in done.stderr


def test_mistakes(llama: Model):
    hidden = read(llama, TEXT).trace.hidden[1][0]
    for model, match in ((tiny.loaded("bert"), "it is not causal"), (tiny.loaded("vit"), "it reads images")):
        with pytest.raises(ik.InputError, match=match):
            ik.invert(model, TEXT)
    for match, options in (
        ("layer= or layers=, not both", {"layer": 1, "layers": [1]}),
        ("prefix='guessed' is not known", {"prefix": "guessed"}),
        ("noise=-1 cannot be used", {"noise": -1}),
        ("There is no position", {"positions": "zebra"}),
    ):
        with pytest.raises(ik.InputError, match=match):
            ik.invert(llama, TEXT, **options)
    for match, given, options in (
        ("say which layer", hidden, {}),
        ("needs the true tokens", hidden, {"layer": 1, "prefix": "given"}),
        ("expected dense, finite vectors of 24 numbers", hidden[:, :5], {"layer": 1}),
        ("position 0 whose norm is nan", hidden * torch.nan, {"layer": 1}),
        ("whose norm is 0", hidden * 0, {"layer": 1}),
        ("whose norm is inf", hidden * 1e30, {"layer": 1}),
        ("at most 64 of them", hidden.repeat(9, 1), {"layer": 1}),
        ("sparse or on the meta device", hidden.to("meta"), {"layer": 1}),
    ):
        with pytest.raises(ik.InputError, match=match):
            ik.invert(llama, given, **options)


def test_a_model_that_carries_more_than_keys_and_values_is_refused(llama: Model, monkeypatch: pytest.MonkeyPatch):
    right = Continuations.read

    def wrong(model: Model, batch) -> Continuations:
        text = right(model, batch)
        text.trace.hidden[1][0, 3] += 1.0  # as if something beside attention had reached the position
        return text

    monkeypatch.setattr(Continuations, "read", wrong)
    assert ik.invert(llama, TEXT, layer=1, positions=2).recovered
    with pytest.raises(ik.ModelError, match=r"at position 3 differs .* in layer 1"):
        ik.invert(llama, TEXT, layer=1, positions=3)


def test_what_overflows_is_refused():
    model = tiny.loaded("llama", dtype=torch.float16)
    model.hf.get_input_embeddings().weight.data *= 1e6
    with pytest.raises(ik.ModelError, match=r"before layer 0 hold NaN .* So does its weight 'model.embed_tokens"):
        ik.invert(model, TEXT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_half_precision(name: str, dtype: torch.dtype):
    half = ik.invert(tiny.loaded(name, dtype=dtype), TEXT)
    full = ik.invert(tiny.loaded(name), TEXT)
    assert half.recovered.all() and half.margin.dtype == torch.float32
    assert half.own_distance.max() < 0.02 and half.own_distance.max() > full.own_distance.max()
    assert torch.allclose(half.margin, full.margin, atol=0.05)


@pytest.mark.slow
@needs_stories
@pytest.mark.filterwarnings("ignore:Inverting .* takes about")  # on a busy machine
def test_a_real_model_against_one_pass_for_each_candidate():
    """At the first position all 32,000 are tried literally; at a later one the two nearest, and some others."""
    model = ik.load(STORIES)
    text = read(model, STORY)
    ids = text.batch.ids[0].tolist()
    result = ik.invert(model, STORY, positions=[2, 11])
    assert result.recovered.all() and result.candidates == 32000
    assert result.own_distance.max() < 1e-5 and result.margin.min() > 0.2
    nearest = [int(array[5, 1]) for array in (result.winner, result.runner_up)]
    for column, (position, tried) in enumerate(((2, list(range(32000))), (11, [*nearest, *range(5, 32000, 4001)]))):
        candidates = torch.stack(reference.candidate_hidden(model, ids[:position], tried))
        for layer in range(model.n_layers):
            hidden = text.trace.hidden[layer][0, position]
            off = torch.linalg.vector_norm(candidates[:, layer] - hidden, dim=-1) / hidden.norm()
            near = off.topk(2, largest=False)
            second = float(result.runner_up_distance[layer, column])
            assert float(near.values[0]) < 1e-5 and float(near.values[1]) >= second - 1e-5
            if column == 0 or layer == 5:
                found = [int(array[layer, column]) for array in (result.winner, result.runner_up)]
                assert [tried[place] for place in near.indices.tolist()] == found
                assert float(near.values[1]) == pytest.approx(second, abs=1e-5)


def test_it_is_saved_and_shown(llama: Model, tmp_path: Path):
    result = ik.invert(llama, TEXT, noise=1.5)
    result.save(tmp_path / "saved")
    again = ik.open_result(tmp_path / "saved")
    assert again.winners == result.winners and str(again) == str(result)
    frame = result.to_frame()
    assert [*frame.columns[-2:]] == ["winner_token", "runner_up_token"] and len(frame) == 36
    axes = result.plot()
    lost = int((~result.recovered).sum())
    assert 0 < lost < 36 and len(axes.texts) == lost and f"{36 - lost} of 36 recovered" in axes.get_title(loc="left")
    bare = ik.invert(llama, read(llama, TEXT).trace.hidden[1][0], layer=1)
    assert bare.plot().get_title(loc="left") == "recovered tokens"
    assert result.words().recovered.shape[0] == 3


def test_the_identity_map_shows_it_beside(llama: Model, tmp_path: Path):
    texts = [f"w{i} w{i + 3} w{i + 1} w{i + 7} w{i + 9}" for i in range(4, 44)]
    fit = ik.token_identifiability(llama, texts, maps="naive", distances="cosine", layers=[0, 2])
    plain = fit.identity_map(TEXT)
    both = fit.identity_map(TEXT, invert=True)
    assert plain.invertible is None and both.invertible.shape == (2, 12) and both.invertible.all()
    assert not both.recovered.all() and torch.equal(plain.recovered, both.recovered)
    assert "Invertible, by trying the whole vocabulary: 100%, 100%." in str(both) and "Invertible" not in str(plain)
    assert both.sel(layer=2, token="w9").invertible.ndim == 0 and both.words().invertible.all()
    assert "24 invertible" in both.plot().get_title(loc="left")
    with pytest.raises(ik.InputError, match="it is not causal"):
        ik.token_identifiability(tiny.loaded("bert"), texts, maps="naive").identity_map(TEXT, invert=True)
