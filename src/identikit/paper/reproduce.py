"""The whole paper on a model: what is asked for is computed once, drawn, judged, and shown on one page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from identikit.checks import shortened
from identikit.errors import InputError
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
from identikit.paper.inputs import GIVER, TAGS
from identikit.paper.page import Picture, gallery
from identikit.paper.texts import PART_OF, PASSAGE, SAMPLES, SENTENCE, paper_texts, source
from identikit.paper.work import PAPER, SAMPLE, Work
from identikit.plots.forms import save
from identikit.progress import Progress, silent
from identikit.runs.engines import Engine, Local
from identikit.runs.manifest import note
from identikit.runs.store import COMPUTED, Store, write_tables
from identikit.texts.data import KNOWN
from identikit.texts.tags import penn_tags, tagger_missing
from identikit.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame

ALL = "all"
EVERY_CLAIM = "claims"
EXAMPLES = "examples"  # the work on the paper's own two texts, and on the model by itself
TASKS = ("mrpc", "cola")  # what models are fine-tuned on


@dataclass(frozen=True)
class Plan:
    """What is to be reproduced, and from what.

    - `names`: figures ("fig1a"), claims, "claims" for all of those, or "all"
    - `data`: datasets and files, by default the embedded texts
    - `first`: use only the first N texts, with less work on each; `finetuned`: folders of fine-tuned models, by task
    - `precision`: that of products on a GPU; `seed`: the random seed for folds and directions
    """

    names: tuple[str, ...] = (ALL,)
    data: tuple[str, ...] = (SAMPLES,)
    data_dir: str | None = None
    columns: tuple[str, ...] | None = None
    first: int | None = None
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
        unknown = [name for name in self.names if name not in {ALL, EVERY_CLAIM, *FIGURES, *CLAIMS}]
        if unknown:
            raise InputError(
                f"Reproducing the paper: {shortened(unknown[0])} is not known. Use {ALL!r}, {EVERY_CLAIM!r}, "
                f"a figure (fig1a, …, fig43, collapse) or a claim ({next(iter(CLAIMS))}, …); --list shows them all."
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
        every = ALL in self.names or EVERY_CLAIM in self.names
        return [claim for name, claim in CLAIMS.items() if every or name in self.names]

    def data_of(self, entry: Figure | Claim) -> str | None:
        """Return the data that a figure is drawn from or a claim judged on; None if none of those given will do."""
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
        "weights": model.fingerprint,
        "version": __version__,
        "threads": run.start.engine.threads,
    }
    recorded = {"model": {"name": model.name}}
    page = Store(out, about, recorded)
    files = Store(f"{out}/figures", about, recorded)
    run.prepare()
    with page.held():
        if arguments is not None:
            note(page, "reproduce", arguments)
        return run.reproduced(page, files)


class _UnavailableError(Exception):
    """A figure, a claim or a table is not available; the message says why."""


class _Run:
    """One run: works by dataset, tables by work and input, each made when it is first needed."""

    def __init__(self, model: Model, plan: Plan, out: str, engine: Engine, progress: Progress):
        self.model = model
        self.plan = plan
        self.out = out
        self.subject = Subject(model.name, model.n_layers, model.d_value, model.causal)
        self.no_tagger = tagger_missing()
        self.start = Work(
            model,
            EXAMPLES,
            [PASSAGE, SENTENCE],
            effort=PAPER if plan.first is None else SAMPLE,
            precision=plan.precision,
            seed=plan.seed,
            tagger=None if self.no_tagger else penn_tags,
            engine=engine,
            progress=progress,
        )
        self.works: dict[str, Work] = {EXAMPLES: self.start}
        self.made: dict[tuple[str, str], dict[str, DataFrame] | str] = {}  # or why not
        self.tuned = dict(map(_task_and_folder, plan.finetuned))

    def prepare(self) -> None:
        """Read all texts and models that will be used, so that mistakes in them are reported before the work starts."""
        for entry in (*self.plan.figures, *self.plan.claims):
            data = self.plan.data_of(entry)
            if data is not None:
                self.work(data)
                if "finetuned" in entry.needs:
                    self.tuned_work(data)

    def reproduced(self, page: Store, files: Store) -> Report:
        """Draw and judge everything, and write the table of claims and the page."""
        from pandas import DataFrame

        pictures: list[Picture] = []
        judged: list[JudgedClaim] = []
        listed: list[tuple[str, str]] = []
        for entry in (*self.plan.figures, *self.plan.claims):
            try:
                if isinstance(entry, Figure):
                    pictures.append(self.draw(entry, files))
                else:
                    judged.append(self.judged(entry))
            except _UnavailableError as reason:
                listed.append((entry.name, str(reason)))
        listed += self.unused()
        if self.plan.claims:
            write_tables(page, {"claims": DataFrame(rows(judged), columns=COLUMNS)})
        title = f"On Identifiability in Transformers: {self.model.name}"
        page.write("index.html", gallery(title, self.about(), pictures, judged, listed))
        page.finish()
        if pictures:
            files.finish()
        return Report(self.out, tuple(picture.name for picture in pictures), tuple(judged), tuple(listed))

    def work(self, data: str) -> Work:
        """Return the work on a dataset."""
        if data not in self.works:
            known = source(data) in KNOWN
            folder = self.plan.data_dir if known else None
            columns = None if known else self.plan.columns
            texts = paper_texts(data, data_dir=folder, columns=columns, first=self.plan.first)
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
        why_data = "not used: each figure takes the paper's dataset, or else the first one given"
        why_tuned = "not used: nothing asked for compares a model before and after"
        unused = [(data, why_data) for data in self.plan.datasets if data not in read]
        for folder in self.tuned.values():
            if not any(name.endswith(f" of {folder}") for name in self.works):
                unused.append((folder, why_tuned))
        return unused

    def data_of(self, entry: Figure | Claim) -> str:
        """Return the data that a figure is drawn from or a claim judged on."""
        data = self.plan.data_of(entry)
        if data is None:
            raise _UnavailableError(f"needs --data {source(entry.data)}")
        return data

    def source(self, data: str, name: str) -> Work:
        """Return the work that a table comes from, or raise `_UnavailableError`."""
        work = self.tuned_work(data) if name == "finetuned" else self.work(data)
        if work is None:
            folder = f"{data}=DIR" if data in TASKS else "DIR"
            raise _UnavailableError(f"needs --finetuned {folder} (`identikit finetune` makes one)")
        giver = GIVER[name]
        if self.no_tagger and name.startswith("tags") and not giver.store(work, self.out).has(TAGS):
            raise _UnavailableError(self.no_tagger)
        if unmet := giver.unmet(work):
            raise _UnavailableError(unmet)
        return work

    def table(self, work: Work, name: str) -> "DataFrame":
        """Return a table, computed if it is not kept."""
        giver = GIVER[name]
        key = (f"{work.data} {work.model.name}", giver.name)
        if key not in self.made:
            store = giver.store(work, self.out)  # a folder of another run stops everything
            try:
                self.made[key] = giver.tables(work, store)
            except InputError as reason:
                self.made[key] = f"cannot be computed: {reason}"
        made = self.made[key]
        if isinstance(made, str):
            raise _UnavailableError(made)
        return made[name]

    def evidence(self, data: str, needs: Sequence[str]) -> Evidence:
        """Return the evidence of a dataset with its tables; missing ones are reported before computing starts."""
        from pandas import DataFrame

        work = self.work(data)
        sources = {name: self.source(data, name) for name in needs if name != "lengths"}
        tables = {name: self.table(origin, name) for name, origin in sources.items()}
        tables["lengths"] = DataFrame({"text": range(len(work.texts)), "tokens": work.lengths})
        tuned = sources["finetuned"].model.name if "finetuned" in sources else None
        subject = replace(self.subject, finetuned=tuned)
        return Evidence(subject, data, len(work.texts), sum(work.lengths), self.plan.seed, tables)

    def draw(self, figure: Figure, files: Store) -> Picture:
        """Draw a figure and write its files."""
        data = self.data_of(figure)
        if missing := figure.missing(self.subject):
            raise _UnavailableError(missing)
        drawing = figure.draw(self.evidence(data, figure.needs))
        if drawing.data.empty:
            raise _UnavailableError(f"not applicable: {self.model.name} on {data} has nothing of this kind")
        png, svg = save(drawing.sheet())
        write_tables(files, {figure.name: drawing.data})
        files.write(f"{figure.name}.png", png)
        files.write(f"{figure.name}.svg", svg)
        return Picture(figure.name, figure.caption, png, svg, drawing.label)

    def judged(self, claim: Claim) -> JudgedClaim:
        """Judge a claim; one that depends on a norm is judged under each available norm."""
        data = self.data_of(claim)
        if self.plan.first is not None and claim.texts == WHOLE:
            raise _UnavailableError("needs the whole dataset: leave out --first")
        findings = {}
        reasons = []
        for norm in NORMS if claim.by_norm else ("",):
            try:
                evidence = self.evidence(data, [need.format(norm=norm) for need in claim.needs])
            except _UnavailableError as reason:
                reasons.append(reason)
            else:
                findings[norm] = judge(claim, evidence, norm)
        if not findings:
            raise reasons[0]
        return JudgedClaim(claim, data, findings)

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
