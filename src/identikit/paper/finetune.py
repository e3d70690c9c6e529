"""Fine-tuning on MRPC or CoLA, to compare a model before and after (Appendix B.4, Fig. 12 and 13).

A head reads the first vector of the last layer, that of [CLS], and the whole model is trained with it. The result is a
folder like that of any other model, which `identikit.load` reads.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.models.load.load import load, quiet_libraries
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.results.files import plain, whole_folder
from identikit.results.provenance import text_hash
from identikit.texts.data import read_labelled
from identikit.texts.text import EncodedText, Text, collate, restore_order

_Labelled = list[tuple[Text, int]]

_WARM_UP = 0.1
_WEIGHT_DECAY = 0.01
_LARGEST_GRADIENT = 1.0
_BATCHES_IN_A_POOL = 16
_OTHER_HEADS = {"t5": "its classifier sits on a decoder", "xlnet": "its classifier reads the last vector"}


@dataclass(frozen=True)
class FineTuned:
    """A model that was fine-tuned.

    - `folder`: where it is; `task`: 'mrpc' or 'cola'; `model`: the name of the model it came from
    - `training`, `development`: how many texts; `shared`: how many of the training texts are development texts too
    - `majority`: the accuracy on the development texts of always naming the larger class
    - `epochs`: after each epoch the mean training loss, and the accuracy and the F1 (MRPC) or the Matthews correlation
      (CoLA) on the development texts
    """

    folder: Path
    task: str
    model: str
    training: int
    development: int
    shared: int
    majority: float
    epochs: tuple[dict[str, float], ...]

    def to_dict(self) -> dict[str, object]:
        """Return everything as values that JSON can hold."""
        return asdict(self) | {"folder": str(self.folder), "epochs": list(self.epochs)}

    def summary(self) -> str:
        """Return it in words, one line per epoch."""
        shared = f", {self.shared} of which are in the development set too" if self.shared else ""
        lines = [
            f"{self.model} was fine-tuned on {self.training} texts of {self.task}{shared}. On {self.development} "
            f"development texts, naming the larger class has accuracy {self.majority:.3f}."
        ]
        for number, epoch in enumerate(self.epochs, 1):
            measures = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in epoch.items())
            lines.append(f"Epoch {number}: {measures}.")
        return "\n".join([*lines, f"The model is in {self.folder}, as safetensors."])


@dataclass(frozen=True)
class Training:
    """How a model is fine-tuned.

    - `epochs`: how often the training texts are read; `batch_size`: texts per step
    - `learning_rate`: the highest; the rate rises over the first tenth of the steps and then falls to 0
    - `seed`: the random seed for the head, the order of texts and dropout
    - `limit`: texts are cut at so many pieces; `sample`: how many training texts to draw, by default all
    """

    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    seed: int = 0
    limit: int = 128
    sample: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"Fine-tuning: {name} is {value}. Give a number above 0.")


def finetune(
    model_source: str | Path | None,
    task: str,
    training: Training = Training(),  # noqa: B008 - frozen
    *,
    data_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    device: str | torch.device | None = None,
    progress: Progress = silent,
) -> FineTuned:
    """Fine-tune a model on 'mrpc' or 'cola' and save it to the folder `out`, which must be new or empty.

    `model_source` is a folder, a hub id, or None for the packaged MiniLM-L6; `data_dir` holds the task's training and
    development files. AdamW minimises the cross entropy. All development texts are read, even where the training texts
    are a sample. `progress` counts steps.

    The same call gives the same bytes again on the same CPU. The folder is written whole or not at all. Beside the
    model it holds `finetune.json`: what the model was made from, and the measures after each epoch.
    """
    if task.lower() not in _TASKS:
        raise InputError(f"Fine-tuning: the task {shortened(task)} is not known. Use one of {', '.join(_TASKS)}.")
    spec = _TASKS[task.lower()]
    folder = _free_folder(out)
    texts, development = _read_labelled(spec.name, data_dir, training)
    base = load(model_source, device=device)
    _refuse_unfit(base)
    ones = sum(label for _, label in development)
    tuned = FineTuned(
        folder,
        spec.name,
        base.name,
        training=len(texts),
        development=len(development),
        shared=len({text for text, _ in texts} & {text for text, _ in development}),
        majority=max(ones, len(development) - ones) / len(development),
        epochs=(),
    )
    with torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []):
        torch.manual_seed(training.seed)
        model = _with_head(base, spec)
        try:
            with whole_folder(folder) as partial:
                base.tokenizer.save_pretrained(partial)  # now: cutting texts changes what a tokenizer saves
                tuned = replace(tuned, epochs=tuple(_epochs(model, spec, training, texts, development, progress)))
                with quiet_libraries():
                    model.hf.save_pretrained(partial)
                load(partial)  # proves it: weights that are not finite are never handed over
                origin = base.provenance(texts[0][0], **asdict(training))
                origin = replace(origin, text=text_hash([text for text, _ in texts]))
                about = {name: value for name, value in tuned.to_dict().items() if name != "folder"} | asdict(origin)
                written = json.dumps(plain(about), indent=1, allow_nan=False) + "\n"
                (partial / "finetune.json").write_text(written, encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"Fine-tuning into {folder}: it cannot be written ({error}). Choose another --out."
            ) from error
    return tuned


def _free_folder(out: str | os.PathLike[str]) -> Path:
    """Return the folder if it is local and new or empty."""
    if "://" in os.fspath(out):
        raise InputError(f"Fine-tuning into {out}: a model is saved to a local folder. Choose another --out.")
    folder = Path(out).resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"Fine-tuning into {out}: it is not an empty folder. Choose an empty or new one with --out.")
    return folder


# Tasks


class _Task(NamedTuple):
    """A task: what labels 0 and 1 mean, and its measure beside accuracy."""

    name: str
    labels: tuple[str, str]
    measure: str
    score: Callable[[Sequence[int], Sequence[int]], float]


def f1(predicted: Sequence[int], actual: Sequence[int]) -> float:
    """Return the F1 of class 1, 2·tp / (2·tp + fp + fn); 0 where nothing is in class 1."""
    true_positives = sum(guess * label for guess, label in zip(predicted, actual, strict=True))
    positives = sum(predicted) + sum(actual)
    return 2 * true_positives / positives if positives else 0.0


def matthews(predicted: Sequence[int], actual: Sequence[int]) -> float:
    """Return Matthews' correlation of two binary labellings, (n·tp − p·a) / √(p(n−p)·a(n−a)); 0 where one is constant.

    n is the number of texts; tp counts those that both put into class 1, p those that `predicted` puts there and a
    those that `actual` does.
    """
    n = len(actual)
    p = sum(predicted)
    a = sum(actual)
    tp = sum(guess * label for guess, label in zip(predicted, actual, strict=True))
    spread = math.sqrt(p * (n - p) * a * (n - a))
    return (n * tp - p * a) / spread if spread else 0.0


_TASKS = {
    "mrpc": _Task("mrpc", ("no paraphrase", "paraphrase"), "f1", f1),
    "cola": _Task("cola", ("unacceptable", "acceptable"), "matthews", matthews),
}


def _read_labelled(task: str, data_dir: str | os.PathLike[str], training: Training) -> tuple[_Labelled, _Labelled]:
    """Read the training texts, or a sample of them, and the development texts."""
    texts = list(read_labelled(task, data_dir=data_dir, split="train"))
    development = list(read_labelled(task, data_dir=data_dir, split="dev"))
    if training.sample is not None:
        generator = torch.Generator().manual_seed(training.seed)
        drawn = torch.randperm(len(texts), generator=generator)[: training.sample]
        texts = [texts[index] for index in drawn.tolist()]
    return texts, development


# The model


def _refuse_unfit(base: Model) -> None:
    kind = base.hf.config.model_type
    reason = None
    if base.modality != "text":
        reason = f"it reads {base.modality}s, not texts"
    elif base.causal:
        reason = "it is causal, so the first vector, which the classifier reads, sees only the first token"
    elif kind in _OTHER_HEADS:
        reason = f"{_OTHER_HEADS[kind]}, not the first vector"
    if reason is not None:
        raise InputError(f"Fine-tuning {base.name}: {reason}. Use an encoder with a [CLS] token, such as BERT.")


def _with_head(base: Model, task: _Task) -> Model:
    """Return the checkpoint of `base` under a classifier with two labels, as transformers builds it.

    The checkpoint is read again, since it may hold a pooler that its own class leaves out.
    """
    pooling = {"classifier_pooling": "cls"} if hasattr(base.hf.config, "classifier_pooling") else {}
    with quiet_libraries():
        hf = AutoModelForSequenceClassification.from_pretrained(
            str(base.hf.name_or_path),
            revision=base.revision or "main",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the head of another task is replaced
            dtype=base.dtype,
            id2label=dict(enumerate(task.labels)),
            label2id={label: index for index, label in enumerate(task.labels)},
            problem_type="single_label_classification",
            **pooling,
        )
    return Model(hf.to(base.device), base.tokenizer, name=f"{base.name} fine-tuned on {task.name}")


# The loop


def _epochs(
    model: Model, task: _Task, training: Training, labelled: _Labelled, development: _Labelled, progress: Progress
) -> Iterator[dict[str, float]]:
    """Train, and yield the measures after each epoch."""
    encoded = _encode(model, labelled, training)
    encoded_development = _encode(model, development, training)
    actual = [label for _, label in development]
    order = torch.Generator().manual_seed(training.seed)
    parameters = [parameter for parameter in model.hf.parameters() if parameter.requires_grad]
    groups = [
        {"params": [entry for entry in parameters if entry.ndim > 1], "weight_decay": _WEIGHT_DECAY},
        {"params": [entry for entry in parameters if entry.ndim < 2], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=training.learning_rate)
    steps = training.epochs * math.ceil(len(encoded) / training.batch_size)
    step = 0
    for _ in range(training.epochs):
        model.hf.train()
        total = 0.0
        for rows in like_length_batches([len(text) for text in encoded], training.batch_size, order):
            for group in optimiser.param_groups:
                group["lr"] = training.learning_rate * rate_share(step, steps)
            step += 1
            batch = collate([encoded[row] for row in rows], pad_id=model.pad_id)
            labels = torch.tensor([labelled[row][1] for row in rows], device=model.device)
            loss = F.cross_entropy(model.hf(**model.arguments(batch)).logits, labels)
            if not torch.isfinite(loss):
                raise InputError(
                    f"Fine-tuning on {task.name}: the loss is {loss.item()} at step {step} of {steps} with learning "
                    f"rate {training.learning_rate:g}. Lower the learning rate."
                )
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, _LARGEST_GRADIENT)
            optimiser.step()
            total += loss.item() * len(rows)
            progress(f"fine-tuning on {task.name}, steps", step, steps)
        model.hf.eval()
        predicted = _predict(model, encoded_development)
        hits = sum(guess == label for guess, label in zip(predicted, actual, strict=True))
        score = {"training_loss": total / len(encoded), "accuracy": hits / len(actual)}
        yield score | {task.measure: task.score(predicted, actual)}


def _encode(model: Model, labelled: _Labelled, training: Training) -> list[EncodedText]:
    return model.encode([text for text, _ in labelled], truncate=True, max_tokens=training.limit)


@torch.no_grad()
def _predict(model: Model, encoded: list[EncodedText]) -> list[int]:
    predicted = (
        (batch.order, model.hf(**model.arguments(batch)).logits.argmax(-1).tolist()) for batch in model.batches(encoded)
    )
    return restore_order(predicted, len(encoded))


def rate_share(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step, counted from 0: linearly up to 1, then linearly down to 0."""
    rising = max(1, round(_WARM_UP * steps))
    return min((step + 1) / rising, (steps - step) / max(1, steps - rising))


def like_length_batches(lengths: Sequence[int], size: int, generator: torch.Generator) -> list[list[int]]:
    """Return the rows of an epoch in batches of `size`: shuffled, and sorted by length within pools of some batches."""
    rows = torch.randperm(len(lengths), generator=generator).tolist()
    pool = size * _BATCHES_IN_A_POOL
    batches = []
    for start in range(0, len(rows), pool):
        by_length = sorted(rows[start : start + pool], key=lambda row: lengths[row])
        batches += [by_length[first : first + size] for first in range(0, len(by_length), size)]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
