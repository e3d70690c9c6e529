"""The whole paper on a model: what is asked for is computed once, drawn, judged, and shown on one page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from identikit.checks import shortened
from identikit.errors import InputError, Unavailable
from identikit.maths.jacobian import NORMS
from identikit.models.load.load import load
from identikit.models.machine import PRECISIONS
from identikit.models.model import Model
from identikit.paper.claims.catalogue import CLAIMS, judge
from identikit.paper.claims.claim import WHOLE, Claim
from identikit.paper.claims.report import COLUMNS, JudgedClaim, rows
from identikit.paper.evidence import Evidence, Subject
from identikit.paper.figures.catalogue import FIGURES
from identikit.paper.figures.figure import Figure
from identikit.paper.inputs import GIVER, PAPER, SAMPLE, Work
from identikit.paper.page import Picture, gallery
from identikit.paper.texts import PART_OF, PASSAGE, SAMPLES, SENTENCE, paper_texts, source
from identikit.plots.forms import save
from identikit.progress import Progress, silent
from identikit.runs.command import note
from identikit.runs.engines import Engine, Local
from identikit.runs.store import COMPUTED, Store, write_tables
from identikit.texts.data import KNOWN
from identikit.texts.tags import penn_tags, tagger_missing
from identikit.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame

Made = TypeVar("Made")

ALL = "all"
EXAMPLES = "examples"  # the work on the paper's own two texts, and on the model by itself
TASKS = ("mrpc", "cola")  # what models are fine-tuned on


@dataclass(frozen=True)
class Plan:
    """What is to be reproduced, and from what.

    - `names`: figures ("fig1a"), claims, or "all"; `data`: datasets and files, by default the embedded texts
    - `sample`: use only so many texts, with less work on each; `finetuned`: folders of fine-tuned models, by task
    - `precision`: that of products on a GPU; `seed`: the random seed for folds and directions
    """

    names: tuple[str, ...] = (ALL,)
    data: tuple[str, ...] = (SAMPLES,)
    data_dir: str | None = None
    columns: tuple[str, ...] | None = None
    sample: int | None = None
    finetuned: tuple[str, ...] = ()
    precision: str = "full"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise InputError(
                f"Reproducing the paper: precision={shortened(self.precision)} is not known. Use one of {known}."
            )
        for part, whole in PART_OF.items():
            if part in self.datasets:
                raise InputError(
                    f"Reproducing the paper: give --data {whole}, not {part}. Figures take the part they need."
                )
        unknown = [name for name in self.names if name != ALL and name not in FIGURES and name not in CLAIMS]
        if unknown:
            raise InputError(
                f"Reproducing the paper: {shortened(unknown[0])} is not known. Use {ALL!r}, a figure (fig1a, …, fig43, "
                f"collapse) or a claim ({next(iter(CLAIMS))}, …); --list shows them all."
            )

    @property
    def datasets(self) -> list[str]:
        """The datasets and files asked for, each once; datasets are known by their names in lower case."""
        return list(dict.fromkeys(name.lower() if name.lower() in KNOWN else name for name in self.data))

    @property
    def figures(self) -> list[Figure]:
        """The figures asked for, in the paper's order."""
        return [figure for name, figure in FIGURES.items() if ALL in self.names or name in self.names]

    @property
    def claims(self) -> list[Claim]:
        """The claims asked for."""
        return [claim for name, claim in CLAIMS.items() if ALL in self.names or name in self.names]

    def data_of(self, entry: Figure | Claim) -> str | None:
        """Return the data that a figure is drawn from or a claim judged on; None where none of those given will do."""
        if not entry.data:
            return EXAMPLES
        if source(entry.data) in self.datasets:
            return entry.data
        return None if entry.only else self.datasets[0]


@dataclass(frozen=True)
class Report:
    """What came of it: the figures drawn, the claims judged, and what could not be had, each with the reason."""

    out: str
    drawn: tuple[str, ...]
    claims: tuple[JudgedClaim, ...] = field(repr=False)
    listed: tuple[tuple[str, str], ...]


def reproduce(
    model: Model,
    plan: Plan,
    out: str,
    *,
    engine: Engine | None = None,
    arguments: Mapping[str, object] | None = None,
    progress: Progress = silent,
) -> Report:
    """Compute, draw and judge what is planned into a folder; what the folder keeps is not computed again.

    `arguments` are those of the command line, noted so that the run can be resumed from its folder alone.
    """
    if model.modality != "text":
        raise InputError(
            f"Reproducing the paper: {model.name} reads {model.modality}s, but the paper's figures are about texts. "
            "Use a text model."
        )
    run = _Run(model, plan, out, engine or Local(), progress)
    about = {
        "command": "reproduce",
        "model": model.name,
        "weights": model.fingerprint,
        "version": __version__,
        "threads": run.start.engine.threads,
    }
    page = Store(out, about)
    files = Store(f"{out}/figures", about)
    run.prepare()
    with page:
        if arguments is not None:
            note(page, "reproduce", arguments)
        return _reproduced(run, plan, page, files)


def _reproduced(run: "_Run", plan: Plan, page: Store, files: Store) -> Report:
    pictures, undrawn = _parted({figure.name: run.draw(figure, files) for figure in plan.figures})
    judged, unjudged = _parted({claim.name: run.judged(claim) for claim in plan.claims})
    listed = [*undrawn, *unjudged, *run.unused()]
    if plan.claims:
        _write_claims(page, judged)
    title = f"On Identifiability in Transformers: {run.model.name}"
    page.write("index.html", gallery(title, run.about(), pictures, judged, listed))
    page.finish()
    if pictures:
        files.finish()
    return Report(run.out, tuple(picture.name for picture in pictures), tuple(judged), tuple(listed))


def _parted(results: Mapping[str, Made | Unavailable]) -> tuple[list[Made], list[tuple[str, str]]]:
    """Return what could be made, and the names of the rest, each with the reason."""
    made = [result for result in results.values() if not isinstance(result, Unavailable)]
    return made, [(name, result.reason) for name, result in results.items() if isinstance(result, Unavailable)]


def _write_claims(page: Store, judged: Sequence[JudgedClaim]) -> None:
    from pandas import DataFrame

    write_tables(page, {"claims": DataFrame(rows(judged), columns=COLUMNS)})


class _Run:
    """One run: works by dataset, tables by work and input, each made when it is first needed."""

    def __init__(self, model: Model, plan: Plan, out: str, engine: Engine, progress: Progress):
        self.model = model
        self.plan = plan
        self.out = out
        self.no_tagger = tagger_missing()
        self.start = Work(
            model,
            EXAMPLES,
            [PASSAGE, SENTENCE],
            effort=PAPER if plan.sample is None else SAMPLE,
            precision=plan.precision,
            seed=plan.seed,
            tagger=None if self.no_tagger else penn_tags,
            engine=engine,
            progress=progress,
        )
        self.works: dict[str, Work] = {EXAMPLES: self.start}
        self.made: dict[tuple[str, str], dict[str, DataFrame] | Unavailable] = {}
        self.tuned = dict(map(_task_and_folder, plan.finetuned))

    def prepare(self) -> None:
        """Read all texts and models that will be used, so that mistakes in them are reported before the work starts."""
        for entry in (*self.plan.figures, *self.plan.claims):
            data = self.plan.data_of(entry)
            if data is not None:
                self.work(data)
                if "finetuned" in entry.needs:
                    self.tuned_work(data)

    def work(self, data: str) -> Work:
        """Return the work on a dataset."""
        if data not in self.works:
            known = source(data) in KNOWN
            folder = self.plan.data_dir if known else None
            columns = None if known else self.plan.columns
            texts = paper_texts(data, data_dir=folder, columns=columns, sample=self.plan.sample)
            self.works[data] = replace(self.start, data=data, texts=texts)
        return self.works[data]

    def tuned_work(self, data: str) -> Work | None:
        """Return the work of the model fine-tuned on a dataset; on data that are no task, of the first model given."""
        folder = self.tuned.get(data) if data in TASKS else next(iter(self.tuned.values()), None)
        if folder is None:
            return None
        name = f"{data} of {folder}"
        if name not in self.works:
            model = load(folder, device=str(self.model.device), dtype=self.model.dtype)
            if (model.n_layers, model.d_model) != (self.model.n_layers, self.model.d_model):
                raise InputError(
                    f"Comparing {self.model.name} with {folder}: one has {self.model.n_layers} layers of width "
                    f"{self.model.d_model}, the other {model.n_layers} of width {model.d_model}. Give a model that was "
                    "fine-tuned from it."
                )
            self.works[name] = replace(self.work(data), model=model)
        return self.works[name]

    def unused(self) -> list[tuple[str, str]]:
        """List the data and the fine-tuned models that were given and not used, with the reason."""
        read = {source(work.data) for work in self.works.values()}
        idle = [folder for folder in self.tuned.values() if not self._compares(folder)]
        why_data = "not used: each figure takes the paper's dataset, or else the first one given"
        why_tuned = "not used: nothing asked for compares a model before and after"
        return [
            *((data, why_data) for data in self.plan.datasets if data not in read),
            *((folder, why_tuned) for folder in idle),
        ]

    def _compares(self, folder: str) -> bool:
        return any(name.endswith(f" of {folder}") for name in self.works)

    def source(self, data: str, name: str) -> Work | Unavailable:
        """Return the work that a table comes from, or why it cannot be had."""
        if name == "lengths":
            return self.work(data)
        work = self.tuned_work(data) if name == "finetuned" else self.work(data)
        if work is None:
            folder = f"{data}=DIR" if data in TASKS else "DIR"
            return Unavailable(f"needs --finetuned {folder} (`identikit finetune` makes one)")
        if self.no_tagger and name.startswith("tags") and not GIVER[name].tagged(work, self.out):
            return Unavailable(self.no_tagger)
        return GIVER[name].unmet(work) or work

    def table(self, work: Work, name: str) -> "DataFrame | Unavailable":
        """Return a table, computed if it is not kept, or why it cannot be had."""
        if name == "lengths":
            return _lengths(work)
        giver = GIVER[name]
        key = (f"{work.data} {work.model.name}", giver.name)
        if key not in self.made:
            store = giver.store(work, self.out)
            try:
                self.made[key] = giver.tables(work, store)
            except InputError as reason:
                self.made[key] = Unavailable(f"cannot be computed: {reason}")
        made = self.made[key]
        return made if isinstance(made, Unavailable) else made[name]

    def evidence(self, data: str, needs: Sequence[str]) -> Evidence | Unavailable:
        """Return the evidence of a dataset with the tables needed, or why it cannot be had."""
        works: dict[str, Work] = {}
        for name in needs:  # first what costs nothing to know
            work = self.source(data, name)
            if isinstance(work, Unavailable):
                return work
            works[name] = work
        tables: dict[str, DataFrame] = {}
        for name, work in works.items():
            table = self.table(work, name)
            if isinstance(table, Unavailable):
                return table
            tables[name] = table
        work = self.work(data)
        tuned = self.tuned_work(data) if "finetuned" in needs else None
        subject = _subject(self.model, None if tuned is None else tuned.model)
        return Evidence(subject, data, len(work.texts), sum(work.lengths), self.plan.seed, tables)

    def draw(self, figure: Figure, files: Store) -> Picture | Unavailable:
        """Draw a figure and write its files, or say why it cannot be drawn."""
        data = self.plan.data_of(figure)
        if data is None:
            return Unavailable(f"needs --data {source(figure.data)}")
        if missing := figure.missing(_subject(self.model)):
            return Unavailable(missing)
        evidence = self.evidence(data, figure.needs)
        if isinstance(evidence, Unavailable):
            return evidence
        drawing = figure.draw(evidence)
        if drawing.data.empty:
            return Unavailable(f"not applicable: {self.model.name} on {data} has nothing of this kind")
        png, svg = save(drawing.sheet())
        write_tables(files, {figure.name: drawing.data})
        files.write(f"{figure.name}.png", png)
        files.write(f"{figure.name}.svg", svg)
        return Picture(figure.name, figure.caption, png, svg, drawing.label)

    def judged(self, claim: Claim) -> JudgedClaim | Unavailable:
        """Judge a claim, under each norm where it depends on one, or say why it cannot be judged."""
        data = self.plan.data_of(claim)
        if data is None:
            return Unavailable(f"needs --data {source(claim.data)}")
        if self.plan.sample is not None and claim.texts == WHOLE:
            return Unavailable("needs the whole dataset: leave out --sample")
        norms = tuple(NORMS) if claim.by_norm else ("",)
        findings = {}
        reasons = []
        for norm in norms:
            evidence = self.evidence(data, [need.format(norm=norm) for need in claim.needs])
            if isinstance(evidence, Unavailable):
                reasons.append(evidence)
            else:
                findings[norm] = judge(claim, evidence, norm)
        return JudgedClaim(claim, data, findings) if findings else reasons[0]

    def about(self) -> dict[str, str]:
        """Return what the page says about the run."""
        used = [work for work in self.works.values() if work.model is self.model and work.data != EXAMPLES]
        sizes = [f"{work.data}: {len(work.texts):,} texts, {sum(work.lengths):,} tokens" for work in used]
        effort = self.start.effort
        return {
            "model": self.model.name,
            "data": ", ".join(work.data for work in used) or "the paper's two examples",
            "n": "; ".join(sizes),
            "seed": str(self.plan.seed),
            "weights": self.model.fingerprint,
            "layers, heads, values": f"{self.model.n_layers}, {self.model.n_heads}, {self.model.d_value}",
            "attribution": "exact" if effort.probes == "exact" else f"{effort.probes} random directions",
            "learned maps": f"{effort.folds} folds, {len(effort.learning_rates)} learning rates",
            "precision": self.plan.precision,
            **computed_on(self.out),
        }


def computed_on(out: str) -> dict[str, str]:
    """Return the devices and versions that the inputs in a folder were computed with, and which inputs by each."""
    files = sorted(Path(out, "inputs").glob(f"*/*/{COMPUTED}")) if "://" not in out else []
    places: dict[str, list[str]] = {}
    for file in files:
        try:
            about = json.loads(file.read_text())
        except ValueError:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        places.setdefault(f"computed on {about['device']} ({versions})", []).append("/".join(file.parts[-3:-1]))
    return {place: ", ".join(names) for place, names in places.items()}


def _subject(model: Model, tuned: Model | None = None) -> Subject:
    name = None if tuned is None else tuned.name
    return Subject(model.name, model.n_layers, model.n_heads, model.d_value, model.causal, name)


def _lengths(work: Work) -> "DataFrame":
    from pandas import DataFrame

    return DataFrame({"text": range(len(work.texts)), "tokens": work.lengths})


def _task_and_folder(given: str) -> tuple[str, str]:
    """Return task and folder of TASK=FOLDER, or of a folder whose finetune.json names its task."""
    task, _, folder = given.partition("=")
    if task in TASKS:
        return task, folder
    try:
        task = json.loads(Path(given, "finetune.json").read_text())["task"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"Reading the fine-tuned model in {given}: no finetune.json there names its task. Write --finetuned "
            f"mrpc={given} or cola={given}, whichever it was tuned on."
        ) from None
    return task, given
