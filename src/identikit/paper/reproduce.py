"""The whole paper on a model: its figures are drawn, its claims judged, and all of it is shown on one page."""

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
from identikit.paper.inputs import INPUT_OF, TAGS
from identikit.paper.page import Picture, gallery
from identikit.paper.texts import PASSAGE, SAMPLES, SENTENCE, SUBSETS, dataset_of, paper_texts
from identikit.paper.work import PAPER, SAMPLE, Work
from identikit.plots.forms import save
from identikit.progress import Progress, silent
from identikit.runs.engines import Engine, Local
from identikit.runs.manifest import note_command
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
        for subset, dataset in SUBSETS.items():
            if subset in self.datasets:
                raise InputError(
                    f"Reproducing the paper: give --data {dataset}, not {subset}. Figures take the part they need."
                )
        unknown = [name for name in self.names if name not in {ALL, EVERY_CLAIM, *FIGURES, *CLAIMS}]
        if unknown:
            raise InputError(
                f"Reproducing the paper: {shortened(unknown[0])} is not known. Use {ALL!r}, {EVERY_CLAIM!r}, "
                f"a figure (fig1a, …, fig43, collapse) or a claim ({next(iter(CLAIMS))}, …); --list shows them all."
            )

    @property
    def datasets(self) -> list[str]:
        """The datasets, by their names in lower case, and the files, each once."""
        names = [name.lower() if name.lower() in KNOWN else name for name in self.data]
        return list(dict.fromkeys(names))

    @property
    def figures(self) -> list[Figure]:
        """The figures to draw, in the paper's order."""
        return [figure for name, figure in FIGURES.items() if ALL in self.names or name in self.names]

    @property
    def claims(self) -> list[Claim]:
        """The claims to judge, in the paper's order."""
        if ALL in self.names or EVERY_CLAIM in self.names:
            return list(CLAIMS.values())
        return [claim for name, claim in CLAIMS.items() if name in self.names]

    def data_of(self, entry: Figure | Claim) -> str | None:
        """Return the data that a figure is drawn from or a claim judged on; None if no given dataset will do."""
        if not entry.data:
            return EXAMPLES
        if dataset_of(entry.data) in self.datasets:
            return entry.data
        return None if entry.only else self.datasets[0]


@dataclass(frozen=True)
class Report:
    """What `reproduce` wrote into the folder `out`.

    - `drawn`: names of figures; `claims`: the judged claims
    - `listed`: what was not drawn, judged or used, each with the reason
    """

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
    """Compute, draw and judge everything in the plan into a folder; what the folder keeps is not computed again.

    `arguments` are those of the command line, noted so that the run can be resumed from its folder alone.
    """
    if model.modality != "text":
        raise InputError(
            f"Reproducing the paper: {model.name} reads {model.modality}s, but the paper's figures are about texts. "
            "Use a text model."
        )
    engine = engine or Local()
    run = _Run(model, plan, out, engine, progress)
    about = {
        "command": "reproduce",
        "weights": model.fingerprint,
        "version": __version__,
        "threads": engine.threads,
    }
    recorded = {"model": {"name": model.name}}
    page = Store(out, about, recorded)
    files = Store(f"{out}/figures", about, recorded)
    run.prepare()
    with page.held():
        if arguments is not None:
            note_command(page, "reproduce", arguments)
        return run.write(page, files)


class _UnavailableError(Exception):
    """A figure, a claim or a table is not available; the message says why."""


class _Run:
    """One run: the texts, models and tables it uses, each read or computed once, when it is first needed."""

    def __init__(self, model: Model, plan: Plan, out: str, engine: Engine, progress: Progress):
        self.model = model
        self.plan = plan
        self.subject = Subject(model.name, model.n_layers, model.d_value, model.causal)
        self.no_tagger = tagger_missing()
        options = PAPER if plan.first is None else SAMPLE
        self.examples = Work(
            model,
            EXAMPLES,
            [PASSAGE, SENTENCE],
            out,
            replace(options, precision=plan.precision, seed=plan.seed),
            tagger=None if self.no_tagger else penn_tags,
            engine=engine,
            progress=progress,
        )
        self.works = {EXAMPLES: self.examples}
        self.finetuned_works: dict[tuple[str, str], Work] = {}  # by dataset and folder
        self.finetuned_folders = dict(map(_task_and_folder, plan.finetuned))
        self.tables: dict[tuple[str, str, str], dict[str, DataFrame] | str] = {}  # or why there are none

    def prepare(self) -> None:
        """Read all texts and models that will be used, so that mistakes in them are reported before the work starts."""
        for entry in (*self.plan.figures, *self.plan.claims):
            data = self.plan.data_of(entry)
            if data is not None:
                self.work(data)
                if "finetuned" in entry.needs:
                    self.finetuned_work(data)

    def write(self, page: Store, files: Store) -> Report:
        """Draw and judge everything, and write the table of claims and the page."""
        from pandas import DataFrame

        pictures: list[Picture] = []
        judged: list[JudgedClaim] = []
        listed: list[tuple[str, str]] = []
        for entry in (*self.plan.figures, *self.plan.claims):
            data = self.plan.data_of(entry)
            try:
                if data is None:
                    raise _UnavailableError(f"needs --data {dataset_of(entry.data)}")
                if isinstance(entry, Figure):
                    pictures.append(self.draw(entry, data, files))
                else:
                    judged.append(self.judge(entry, data))
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
        return Report(self.examples.out, tuple(picture.name for picture in pictures), tuple(judged), tuple(listed))

    def draw(self, figure: Figure, data: str, files: Store) -> Picture:
        """Draw a figure and write its files."""
        if why := figure.why_not(self.subject):
            raise _UnavailableError(why)
        drawing = figure.draw(self.evidence(data, figure.needs))
        if drawing.data.empty:
            raise _UnavailableError(f"not applicable: {self.model.name} on {data} has nothing of this kind")
        png, svg = save(drawing.sheet())
        write_tables(files, {figure.name: drawing.data})
        files.write(f"{figure.name}.png", png)
        files.write(f"{figure.name}.svg", svg)
        return Picture(figure.name, figure.caption, png, svg, drawing.label)

    def judge(self, claim: Claim, data: str) -> JudgedClaim:
        """Judge a claim; one that depends on a norm is judged under each available norm."""
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

    def evidence(self, data: str, needs: Sequence[str]) -> Evidence:
        """Return the evidence of a dataset with its tables; missing ones are reported before computing starts."""
        from pandas import DataFrame

        work = self.work(data)
        sources = {name: self.source_of(name, data) for name in needs if name != "lengths"}
        tables = {name: self.table(name, source) for name, source in sources.items()}
        tables["lengths"] = DataFrame({"text": range(len(work.texts)), "tokens": work.lengths})
        finetuned = sources["finetuned"].model.name if "finetuned" in sources else None
        subject = replace(self.subject, finetuned=finetuned)
        return Evidence(subject, data, len(work.texts), sum(work.lengths), self.plan.seed, tables)

    def source_of(self, table: str, data: str) -> Work:
        """Return the work that a table is computed from, or raise `_UnavailableError`."""
        work = self.finetuned_work(data) if table == "finetuned" else self.work(data)
        if work is None:
            folder = f"{data}=DIR" if data in TASKS else "DIR"
            raise _UnavailableError(f"needs --finetuned {folder} (`identikit finetune` makes one)")
        needed = INPUT_OF[table]
        store = needed.store(work)  # stops everything if the folder is that of another run
        if self.no_tagger and table.startswith("tags") and not store.has(TAGS):
            raise _UnavailableError(self.no_tagger)
        if why := needed.why_not(work):
            raise _UnavailableError(why)
        return work

    def table(self, name: str, work: Work) -> "DataFrame":
        """Return a table, computed unless it is kept; what failed once is not tried again."""
        needed = INPUT_OF[name]
        key = (work.data, work.model.name, needed.name)
        if key not in self.tables:
            try:
                self.tables[key] = needed.read(work)
            except InputError as reason:
                self.tables[key] = f"cannot be computed: {reason}"
        tables = self.tables[key]
        if isinstance(tables, str):
            raise _UnavailableError(tables)
        return tables[name]

    def work(self, data: str) -> Work:
        """Return the work on a dataset, whose texts are read once."""
        if data not in self.works:
            known = dataset_of(data) in KNOWN
            folder = self.plan.data_dir if known else None
            columns = None if known else self.plan.columns
            texts = paper_texts(data, data_dir=folder, columns=columns, first=self.plan.first)
            self.works[data] = replace(self.examples, data=data, texts=texts)
        return self.works[data]

    def finetuned_work(self, data: str) -> Work | None:
        """Return the work of the model fine-tuned on a dataset; on data that are no task, of the first model given."""
        if data in TASKS:
            folder = self.finetuned_folders.get(data)
        else:
            folder = next(iter(self.finetuned_folders.values()), None)
        if folder is None:
            return None
        key = (data, folder)
        if key not in self.finetuned_works:
            model = load(folder, device=str(self.model.device), dtype=self.model.dtype)
            if (model.n_layers, model.d_model) != (self.model.n_layers, self.model.d_model):
                raise InputError(
                    f"Comparing {self.model.name} with {folder}: one has {self.model.n_layers} layers of width "
                    f"{self.model.d_model}, the other {model.n_layers} of width {model.d_model}. Give a model that was "
                    "fine-tuned from it."
                )
            self.finetuned_works[key] = replace(self.work(data), model=model)
        return self.finetuned_works[key]

    def unused(self) -> list[tuple[str, str]]:
        """List the data and the fine-tuned models that were given but not used, with the reason."""
        datasets_read = {dataset_of(data) for data in self.works}
        folders_read = {folder for _, folder in self.finetuned_works}
        why_data = "not used: each figure takes the paper's dataset, or else the first one given"
        why_tuned = "not used: nothing asked for compares a model before and after"
        unused = [(data, why_data) for data in self.plan.datasets if data not in datasets_read]
        folders = self.finetuned_folders.values()
        return unused + [(folder, why_tuned) for folder in folders if folder not in folders_read]

    def about(self) -> dict[str, str]:
        """Return what the page says about the run."""
        works = [work for data, work in self.works.items() if data != EXAMPLES]
        sizes = [f"{work.data}: {len(work.texts):,} texts, {sum(work.lengths):,} tokens" for work in works]
        options = self.examples.options
        return {
            "model": self.model.name,
            "data": ", ".join(work.data for work in works) or "the paper's two examples",
            "n": "; ".join(sizes),
            "seed": str(self.plan.seed),
            "weights": self.model.fingerprint,
            "layers, heads, values": f"{self.model.n_layers}, {self.model.n_heads}, {self.model.d_value}",
            "attribution": "exact" if options.probes == "exact" else f"{options.probes} random directions",
            "learned maps": f"{options.folds} folds, {len(options.learning_rates)} learning rates",
            "precision": self.plan.precision,
            **computed_on(self.examples.out),
        }


def computed_on(out: str) -> dict[str, str]:
    """Return each device and its versions with the names of the inputs in a folder that were computed there."""
    files = sorted(Path(out, "inputs").glob(f"*/*/{COMPUTED}")) if "://" not in out else []
    inputs: dict[str, list[str]] = {}
    for file in files:
        try:
            about = json.loads(file.read_text())
        except ValueError:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        inputs.setdefault(f"computed on {about['device']} ({versions})", []).append("/".join(file.parts[-3:-1]))
    return {machine: ", ".join(names) for machine, names in inputs.items()}


def _task_and_folder(finetuned: str) -> tuple[str, str]:
    """Split TASK=FOLDER, or find the task in the folder's finetune.json."""
    task, _, folder = finetuned.partition("=")
    if task in TASKS:
        return task, folder
    try:
        task = json.loads(Path(finetuned, "finetune.json").read_text())["task"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"Reading the fine-tuned model in {finetuned}: no finetune.json there names its task. Write --finetuned "
            f"mrpc={finetuned} or cola={finetuned}, whichever it was tuned on."
        ) from None
    return task, finetuned
