"""Fine-tuning of tiny models on made-up tasks: a text is in class 1 where it holds the word w9 and not w10."""

import importlib.metadata
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

import identikit
from identikit.errors import InputError
from identikit.paper import finetune as module
from identikit.paper.finetune import FineTuned, Training, f1, like_length_batches, matthews, rate_share
from identikit.progress import silent
from identikit.texts.data import read_labelled
from identikit.texts.text import collate
from tests.hostile.made import content
from tests.models import tiny
from tests.models.real import SHARED, needs_data

MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
ENCODERS = ["bert-mlm", "albert", "distilbert", "modernbert", "deberta-v2"]  # one per kind of head and layers


def sentence(draw: random.Random, label: int) -> str:
    words = [f"w{draw.randrange(12, 59)}" for _ in range(draw.randrange(2, 9))]
    words.insert(draw.randrange(len(words)), "w9" if label else "w10")
    return " ".join(words)


def write_cola(folder: Path, training: int = 128, development: int = 40) -> Path:
    draw = random.Random(0)
    folder.mkdir()
    for file, count in (("train.tsv", training), ("dev.tsv", development)):
        lines = [f"made\t{number % 2}\t\t{sentence(draw, number % 2)}" for number in range(count)]
        (folder / file).write_text("\n".join(lines))
    return folder


def write_mrpc(folder: Path) -> Path:
    """Write twelve pairs, of which the training file holds all and the development file those with an ID from 8 on."""
    draw = random.Random(1)
    folder.mkdir()
    pairs = [f"{i % 2}\t{i}\t{i + 100}\t{sentence(draw, i % 2)}\t{sentence(draw, i % 2)}" for i in range(12)]
    (folder / "msr_paraphrase_train.txt").write_text("\n".join([MRPC_HEADER, *pairs]))
    (folder / "mrpc_dev.tsv").write_text("\n".join([MRPC_HEADER, *pairs[8:]]))
    return folder


def save(name: str, folder: Path) -> Path:
    tiny.build(name).save_pretrained(folder)
    (tiny.reader(name) if name == "vit" else tiny.tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save("bert", tmp_path / "base")


def tune(source: str | Path | None, task: str, *, data_dir, out, device=None, progress=silent, **training) -> FineTuned:
    """Fine-tune, with the fields of `Training` beside the other options."""
    chosen = Training(**training)
    return module.finetune(source, task, chosen, data_dir=data_dir, out=out, device=device, progress=progress)


def test_a_learnable_task_is_learnt(tmp_path, bert):
    calls = []
    data = write_cola(tmp_path / "data")
    options = {"epochs": 8, "batch_size": 16, "learning_rate": 5e-3, "progress": lambda *call: calls.append(call)}
    tuned = tune(bert, "cola", data_dir=data, out=tmp_path / "out", **options)
    first, last = tuned.epochs[0], tuned.epochs[-1]
    assert last["training_loss"] < 0.5 * first["training_loss"]
    assert tuned.majority == 0.5 and last["accuracy"] >= 0.9 and last["matthews"] >= 0.8
    assert calls == [("fine-tuning on cola, steps", step, 64) for step in range(1, 65)]
    # the measures of the last epoch are those of the model that was saved
    model = identikit.load(tmp_path / "out")
    lines = [line.split("\t") for line in (tmp_path / "data/dev.tsv").read_text().splitlines()]
    (batch,) = model.batches(model.encode([line[3] for line in lines]))
    guesses = model.trace(batch).logits.argmax(-1)
    labels = torch.tensor([int(lines[row][1]) for row in batch.order])
    assert (guesses == labels).double().mean().item() == last["accuracy"]


def test_the_same_call_gives_the_same_bytes(tmp_path, bert):
    data = write_mrpc(tmp_path / "data")

    def run(out: str, **options) -> dict[str, bytes]:
        tune(bert, "mrpc", data_dir=data, out=tmp_path / out, epochs=2, batch_size=3, **options)
        return content(tmp_path / out)

    torch.manual_seed(7)
    first = run("first")
    torch.manual_seed(8)
    state = torch.random.get_rng_state()
    assert run("again") == first
    assert torch.equal(torch.random.get_rng_state(), state)
    assert run("seed", seed=1)["model.safetensors"] != first["model.safetensors"]


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_trains_from_its_weights_and_loads(tmp_path, name):
    base = save(name, tmp_path / "base")
    if name == "modernbert":  # whose head may average over all vectors
        config = json.loads((base / "config.json").read_text()) | {"classifier_pooling": "mean"}
        (base / "config.json").write_text(json.dumps(config))
    before = content(base)
    options = {"data_dir": write_mrpc(tmp_path / "data"), "batch_size": 4}
    tune(base, "mrpc", out=tmp_path / "still", epochs=1, learning_rate=1e-30, **options)
    tune(base, "mrpc", out=tmp_path / "out", epochs=1, learning_rate=1e-3, **options)
    own, still, tuned = (identikit.load(folder) for folder in (base, tmp_path / "still", tmp_path / "out"))
    batch = own.sample((7, 5))
    hidden = [model.trace(batch).hidden for model in (own, still, tuned)]
    for layer in range(own.n_layers):
        assert torch.equal(hidden[0][layer], hidden[1][layer])
        assert (hidden[0][layer] - hidden[2][layer]).abs().max() > 1e-4
    assert tuned.trace(batch).logits.shape == (2, 2)
    assert getattr(tuned.hf.config, "classifier_pooling", "cls") == "cls"
    assert content(base) == before


def test_the_folder_says_what_it_is_and_development_pairs_are_not_trained_on(tmp_path, bert, monkeypatch):
    data = write_mrpc(tmp_path / "data")
    seen = []

    def watched(texts, **options):
        seen.extend(text.text for text in texts)
        return collate(texts, **options)

    monkeypatch.setattr(module, "collate", watched)
    options = {"epochs": 2, "batch_size": 4, "sample": 6, "seed": 3, "limit": 12}
    tuned = tune(bert, "MRPC", data_dir=data, out=tmp_path / "new/out", **options)
    development = set(identikit.read_texts("mrpc", data_dir=data))
    assert len(development) == 4 and development.isdisjoint(seen)
    assert len(seen) == 12 and len(set(seen)) == 6
    assert tuned.folder == tmp_path / "new/out"
    saved = json.loads((tuned.folder / "tokenizer.json").read_text())  # cutting texts has not changed it
    assert saved == json.loads((bert / "tokenizer.json").read_text()) and saved["truncation"] is None
    assert {path.name for path in tuned.folder.iterdir()} == {
        "config.json", "finetune.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert list(tuned.folder.parent.iterdir()) == [tuned.folder]
    about = json.loads((tuned.folder / "finetune.json").read_text())
    assert (about["task"], about["model"], about["weights"]) == ("mrpc", "base", identikit.load(bert).fingerprint)
    assert about["settings"] == options | {"learning_rate": 5e-5}
    assert (about["training"], about["development"], about["shared"], about["majority"]) == (6, 4, 0, 0.5)
    assert about["epochs"] == list(tuned.epochs) and set(about["epochs"][0]) == {"training_loss", "accuracy", "f1"}
    assert about["versions"]["torch"] == importlib.metadata.version("torch")
    assert json.loads(json.dumps(tuned.to_dict()))["folder"] == str(tuned.folder)
    told = tuned.summary().splitlines()
    assert told[0] == (
        "base was fine-tuned on 6 texts of mrpc. On 4 development texts, naming the larger class has accuracy 0.500."
    )
    assert told[2].startswith("Epoch 2: training loss 0.")
    assert told[3] == f"The model is in {tuned.folder}, as safetensors."


def test_the_head_of_another_task_is_no_hindrance_and_texts_in_both_sets_are_told(tmp_path, bert):
    BertForSequenceClassification.from_pretrained(bert, num_labels=5).save_pretrained(bert)
    data = write_cola(tmp_path / "data", training=8, development=8)
    (data / "train.tsv").write_bytes((data / "dev.tsv").read_bytes())
    tuned = tune(bert, "cola", data_dir=data, out=tmp_path / "out", epochs=1)
    assert load_file(tmp_path / "out/model.safetensors")["classifier.weight"].shape == (2, 24)
    assert tuned.shared == 8 and "8 of which are in the development set too" in tuned.summary()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "sst"}, "the task 'sst' is not known. Use one of mrpc, cola"),
        ({"epochs": 0}, "epochs is 0. Give a number above 0"),
        ({"data_dir": "nowhere"}, r"mrpc: nowhere holds none of MRPC/msr_paraphrase_train.txt"),
        ({"out": "memory://out"}, "a model is saved to a local folder"),
        ({"learning_rate": 1e30}, "the loss is .* at step .* with learning rate 1e[+]30. Lower the learning rate"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(tmp_path, bert, options, message):
    given_ = {"task": "mrpc", "data_dir": write_mrpc(tmp_path / "data"), "out": tmp_path / "out", "batch_size": 2}
    with pytest.raises(InputError, match=message) as raised:
        tune(bert, **(given_ | options))
    assert "\n" not in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "data"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama", "it is causal, so the first vector"),
        ("t5", "its classifier sits on a decoder, not the first vector"),
        ("vit", "it reads images, not texts"),
    ],
)
def test_models_without_a_cls_vector_are_refused(tmp_path, name, message):
    if name == "vit":
        pytest.importorskip("PIL", reason="Pillow is not installed (extra [vision])")
    base, data = save(name, tmp_path / "base"), write_mrpc(tmp_path / "data")
    with pytest.raises(InputError, match=f"Fine-tuning base: {message}.*Use an encoder"):
        tune(base, "mrpc", data_dir=data, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "out").mkdir()
    kept = tmp_path / "out/kept.txt"
    kept.write_text("mine")
    for out in (tmp_path / "out", kept):
        with pytest.raises(InputError, match="it is not an empty folder"):
            tune("no such model", "mrpc", data_dir="nowhere", out=out)
    assert kept.read_text() == "mine"


def test_a_stopped_run_leaves_nothing_and_an_empty_folder_is_filled(tmp_path, bert):
    data, out = write_mrpc(tmp_path / "data"), tmp_path / "out"
    out.mkdir()

    def interrupt(what, done, total):
        assert not any(out.iterdir())
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(bert, "mrpc", data_dir=data, out=out, batch_size=2, progress=interrupt)
    assert not any(out.iterdir()) and {path.name for path in tmp_path.iterdir()} == {"base", "data", "out"}
    tune(bert, "mrpc", data_dir=data, out=out, epochs=1)
    assert (out / "model.safetensors").is_file()


def test_a_place_that_cannot_be_written_is_told_before_training(tmp_path, bert):
    (tmp_path / "file").write_text("")
    data = write_mrpc(tmp_path / "data")
    with pytest.raises(InputError, match="it cannot be written"):
        tune(bert, "mrpc", data_dir=data, out=tmp_path / "file/out", progress=lambda *_: pytest.fail("it trains"))


def set_dropout(folder: Path, share: float) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": share, "attention_probs_dropout_prob": share}
    (folder / "config.json").write_text(json.dumps(config))


def test_dropout_is_on_only_in_training(tmp_path, bert):
    """At a vanishing rate the training losses of two epochs differ only by dropout, and measures not at all."""
    data = write_cola(tmp_path / "data", training=16, development=200)
    losses = {}
    for share in (0.0, 0.5):
        set_dropout(bert, share)
        tuned = tune(bert, "cola", data_dir=data, out=tmp_path / f"{share}", epochs=2, learning_rate=1e-30)
        losses[share] = [epoch["training_loss"] for epoch in tuned.epochs]
        assert tuned.epochs[0]["matthews"] == tuned.epochs[1]["matthews"] != 0
    assert losses[0.0][0] == pytest.approx(losses[0.0][1], rel=1e-6)
    assert losses[0.5][0] != pytest.approx(losses[0.5][1], rel=1e-3)


def test_the_loop_is_adamw_as_written(tmp_path, bert):
    """Against a literal loop over whole-set batches: clipping, moments, decay of matrices, rates that rise and fall."""
    set_dropout(bert, 0.0)
    hf = BertForSequenceClassification.from_pretrained(bert)
    torch.nn.init.normal_(hf.classifier.weight)
    hf.save_pretrained(bert)
    data = write_mrpc(tmp_path / "data")
    tune(bert, "mrpc", data_dir=data, out=tmp_path / "out", epochs=6, learning_rate=1e-2)
    pairs = list(read_labelled("mrpc", data_dir=data, split="train"))
    firsts, seconds = zip(*(pair for pair, _ in pairs), strict=True)
    inputs = tiny.tokenizer()(list(firsts), list(seconds), padding=True, return_tensors="pt")
    labels = torch.tensor([label for _, label in pairs])
    moments = {name: (torch.zeros_like(entry), torch.zeros_like(entry)) for name, entry in hf.named_parameters()}
    for step, share in enumerate([1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5], 1):
        rate = 1e-2 * share
        chance = torch.softmax(hf(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits, -1)
        hf.zero_grad()
        (-chance[torch.arange(len(labels)), labels].log().mean()).backward()
        norm = sum(float(entry.grad.double().square().sum()) for entry in hf.parameters()) ** 0.5
        with torch.no_grad():
            for name, entry in hf.named_parameters():
                gradient = entry.grad * min(1.0, 1.0 / norm)
                mean, square = moments[name]
                mean.mul_(0.9).add_(0.1 * gradient)
                square.mul_(0.999).add_(0.001 * gradient**2)
                decay = 0.01 if entry.ndim == 2 else 0.0
                entry.mul_(1 - rate * decay)
                entry.sub_(rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8))
    found = load_file(tmp_path / "out/model.safetensors")
    for name, entry in hf.named_parameters():
        if "key.bias" not in name:  # attention does not depend on it: its gradient is rounding
            torch.testing.assert_close(found[name], entry.detach(), rtol=0, atol=1e-4)


labelled = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1)


@given(labelled)
def test_measures_are_those_of_the_definition(pairs):
    predicted, actual = (list(side) for side in zip(*pairs, strict=True))
    constant = len(set(predicted)) == 1 or len(set(actual)) == 1
    expected = 0.0 if constant else np.corrcoef(predicted, actual)[0, 1]
    assert matthews(predicted, actual) == pytest.approx(expected, abs=1e-12)
    hits = sum(guess == label == 1 for guess, label in pairs)
    precision, recall = (hits / sum(side) if sum(side) else 0.0 for side in (predicted, actual))
    expected = 2 * precision * recall / (precision + recall) if hits else 0.0
    assert f1(predicted, actual) == pytest.approx(expected)


@given(st.integers(1, 500))
def test_the_rate_rises_over_a_tenth_and_falls_to_the_end(steps):
    shares = [rate_share(step, steps) for step in range(steps)]
    peak = shares.index(max(shares))
    assert max(shares) <= 1 and min(shares) > 0 and abs(peak - steps / 10) <= 1.5
    assert shares[: peak + 1] == sorted(shares[: peak + 1]) and shares[peak:] == sorted(shares[peak:], reverse=True)
    assert steps < 10 or (max(shares) > 0.85 and shares[-1] <= 1 / (0.85 * steps))


@given(st.lists(st.integers(1, 128), min_size=1, max_size=300), st.integers(1, 9), st.integers(0, 5))
def test_batches_hold_every_text_once(lengths, size, seed):
    batches = like_length_batches(lengths, size, torch.Generator().manual_seed(seed))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert len(batches) == -(-len(lengths) // size) and max(map(len, batches)) <= size
    assert batches == like_length_batches(lengths, size, torch.Generator().manual_seed(seed))


def test_batches_are_of_like_length():
    draw = random.Random(0)
    lengths = [draw.randrange(5, 100) for _ in range(640)]
    batches = like_length_batches(lengths, 32, torch.Generator().manual_seed(0))
    padded = sum(max(lengths[row] for row in batch) * len(batch) for batch in batches)
    assert padded < 1.15 * sum(lengths)


@needs_data
@pytest.mark.slow
def test_minilm_on_a_few_pairs_of_mrpc(tmp_path):
    options = {"epochs": 2, "sample": 32, "batch_size": 4, "learning_rate": 2e-4}
    tuned = tune(None, "mrpc", data_dir=SHARED / "data", out=tmp_path / "out", **options)
    assert (tuned.training, tuned.development, tuned.shared) == (32, 408, 0)
    assert tuned.majority == pytest.approx(279 / 408)
    assert tuned.epochs[-1]["training_loss"] < tuned.epochs[0]["training_loss"]
    assert identikit.load(tuned.folder).fingerprint != identikit.load().fingerprint
