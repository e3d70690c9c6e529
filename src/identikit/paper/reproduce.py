"""The whole paper on a model: what is asked for is computed once, drawn, judged, and put on one page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from identikit.data import KNOWN
from identikit.errors import InputError
from identikit.machine import PRECISIONS
from identikit.models.load import load
from identikit.models.model import Model
from identikit.paper.claims.catalogue import CLAIMS, DATASETS, Claim, judge
from identikit.paper.evidence import NORMS, Evidence, Subject
from identikit.paper.figures.catalogue import FIGURES, Figure
from identikit.paper.inputs import COMPUTED, GIVER, PAPER, SAMPLE, Work
from identikit.paper.page import Picture, gallery
from identikit.paper.texts import PART_OF, PASSAGE, SAMPLES, SENTENCE, paper_texts, source
from identikit.plots.forms import save
from identikit.progress import Progress
from identikit.runs.store import Store, write_tables
from identikit.tags import penn_tags, tagger_missing
from identikit.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame

ALL = "all"
EXAMPLES = "examples"  # the work on the paper's own two texts, and on the model alone
TASKS = ("mrpc", "cola")  # what models are fine-tuned on
COLUMNS = ("claim", "where", "words", "paper", "rule", "norm", "verdict", "measured", "why", "data")


@dataclass(frozen=True)
class Plan:
    """What is to be reproduced, and from what.

    - `names`: figures ("fig1a"), claims, or "all"; `data`: datasets and files, the embedded texts if none
    - `sample`: this many texts, and less work on each; `finetuned`: folders of fine-tuned models, by task
    - `precision`: of products on a GPU; `seed`: of folds and random directions
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
            raise InputError(f"reproduce: precision={self.precision!r} is not known: use {', '.join(PRECISIONS)}.")
        folded = [name.lower() if name.lower() in KNOWN else name for name in self.data]
        object.__setattr__(self, "data", tuple(dict.fromkeys(folded)))
        for part in PART_OF.keys() & set(self.data):
            raise InputError(f"reproduce: --data {part}: give {PART_OF[part]}; its figures take the part they need.")
        known = [ALL, *FIGURES, *(claim.name for claim in CLAIMS)]
        unknown = [name for name in self.names if name not in known]
        if unknown:
            raise InputError(
                f"reproduce: {unknown[0]!r} is not known: use {ALL!r}, a figure (fig1a, fig1b, … fig43, collapse) or "
                f"a claim's name ({CLAIMS[0].name}, …); --list shows them all."
            )

    @property
    def figures(self) -> list[Figure]:
        """The figures asked for, in the paper's order."""
        return [figure for name, figure in FIGURES.items() if ALL in self.names or name in self.names]

    @property
    def claims(self) -> list[Claim]:
        """The claims asked for."""
        return [claim for claim in CLAIMS if ALL in self.names or claim.name in self.names]

    def data_of(self, entry: Figure | Claim) -> str | None:
        """Return the data that a figure is drawn from or a claim judged on; None where none of those given serves."""
        if not entry.data:
            return EXAMPLES
        if source(entry.data) in self.data:
            return entry.data
        return None if entry.only else self.data[0]


@dataclass(frozen=True)
class Report:
    """What came of it: figures drawn, findings (a row for each claim and norm), and what could not be had, with why."""

    out: str
    drawn: tuple[str, ...]
    findings: "DataFrame" = field(repr=False)
    listed: tuple[tuple[str, str], ...]


def reproduce(model: Model, plan: Plan, out: str, *, told: Progress = lambda what, done, total: None) -> Report:
    """Compute, draw and judge what is planned into a folder; what the folder keeps is not computed again."""
    from pandas import DataFrame

    if model.vision:
        raise InputError(
            f"reproduce: {model.name} reads images, and the paper's figures are of texts. Use a text model."
        )
    run = _Run(model, plan, out, told)
    about = {"command": "reproduce", "model": model.name, "weights": model.fingerprint}
    about |= {"version": __version__}
    page, files = Store(out, about), Store(f"{out}/figures", about)
    entries = [(entry, data) for entry in (*plan.figures, *plan.claims) if (data := plan.data_of(entry)) is not None]
    for entry, data in entries:  # now: mistakes in data and models are told before anything is computed
        run.work(data)
        if "finetuned" in entry.needs:
            run.tuned_work(data)
    page.start()  # a run that is stopped halfway is known again by it
    pictures: list[Picture] = []
    listed: list[tuple[str, str]] = []
    for figure in plan.figures:
        drawn = run.draw(figure, files)
        pictures += [drawn] if isinstance(drawn, Picture) else []
        listed += [drawn] if isinstance(drawn, tuple) else []
    rows: list[dict[str, str]] = []
    for claim in plan.claims:
        judged = run.judged(claim)
        rows += judged if isinstance(judged, list) else []
        listed += [(claim.name, judged)] if isinstance(judged, str) else []
    sources = {source(data) for _, data in entries}
    listed += [
        (data, "not used: each figure takes the paper's data, or the first given")
        for data in plan.data
        if data not in sources
    ]
    listed += [(folder, "not used: nothing asked for compares a model with itself before") for folder in run.idle()]
    findings = DataFrame(rows, columns=COLUMNS)
    if plan.claims:
        write_tables(page, {"claims": findings})
    title = f"On Identifiability in Transformers: {model.name}"
    page.write("index.html", gallery(title, run.about(), pictures, findings, listed))
    return Report(out, tuple(picture.name for picture in pictures), findings, tuple(listed))


class _Run:
    """One run: works by dataset, tables by work and input, each made when it is first needed."""

    def __init__(self, model: Model, plan: Plan, out: str, told: Progress):
        self.model, self.plan, self.out = model, plan, out
        self.no_tagger = tagger_missing()
        self.start = Work(
            model,
            EXAMPLES,
            [PASSAGE, SENTENCE],
            effort=PAPER if plan.sample is None else SAMPLE,
            precision=plan.precision,
            seed=plan.seed,
            tagger=None if self.no_tagger else penn_tags,
            told=told,
        )
        self.works: dict[str, Work] = {EXAMPLES: self.start}
        self.made: dict[tuple[str, str], dict[str, DataFrame] | str] = {}
        self.tuned = dict(map(_task_and_folder, plan.finetuned))

    def work(self, data: str) -> Work:
        """Return the work on a dataset."""
        if data not in self.works:
            folder, columns = (self.plan.data_dir, None) if source(data) in KNOWN else (None, self.plan.columns)
            texts = paper_texts(data, data_dir=folder, columns=columns, sample=self.plan.sample)
            self.works[data] = replace(self.start, data=data, texts=texts)
        return self.works[data]

    def tuned_work(self, data: str) -> Work | None:
        """Return the work of the model fine-tuned on a dataset; on data that is no task, of the first one given."""
        tuned = self.tuned if data in TASKS else {data: next(iter(self.tuned.values()), None)}
        folder = tuned.get(data)
        if folder is None:
            return None
        name = f"{data} of {folder}"
        if name not in self.works:
            model = load(folder, device=str(self.model.device))
            if (model.n_layers, model.d_model) != (self.model.n_layers, self.model.d_model):
                raise InputError(
                    f"comparing {self.model.name} with {folder}: they have {self.model.n_layers} and {model.n_layers} "
                    f"layers of {self.model.d_model} and {model.d_model}; give a fine-tuned form of the same model."
                )
            self.works[name] = replace(self.work(data), model=model)
        return self.works[name]

    def idle(self) -> list[str]:
        """Return the fine-tuned models that nothing was compared with."""
        return [
            folder for folder in self.tuned.values() if not any(name.endswith(f" of {folder}") for name in self.works)
        ]

    def source(self, data: str, name: str) -> Work | str:
        """Return the work that a table comes from, or why it cannot be had."""
        if name == "lengths":
            return self.work(data)
        work = self.tuned_work(data) if name == "finetuned" else self.work(data)
        if work is None:
            return f"needs --finetuned {f'{data}=' if data in TASKS else ''}DIR (identikit finetune makes one)"
        untagged = name.startswith("tags") and not GIVER[name].tagged(work, self.out)
        return (self.no_tagger if untagged else None) or GIVER[name].unmet(work) or work

    def table(self, work: Work, name: str) -> "DataFrame | str":
        """Return a table, computed if it is not kept, or why it cannot be had."""
        if name == "lengths":
            return _lengths(work)
        giver = GIVER[name]
        key = f"{work.data} {work.model.name}", giver.name
        if key not in self.made:
            store = giver.store(work, self.out)
            try:
                self.made[key] = giver.tables(work, store)
            except InputError as reason:
                self.made[key] = f"cannot be computed: {reason}"
        made = self.made[key]
        return made if isinstance(made, str) else made[name]

    def evidence(self, data: str, needs: Sequence[str]) -> Evidence | str:
        """Return the evidence of a dataset with the tables needed, or why it cannot be had."""
        works: dict[str, Work] = {}
        for name in needs:  # first what costs nothing to know
            found = self.source(data, name)
            if isinstance(found, str):
                return found
            works[name] = found
        tables = {}
        for name, work in works.items():
            found = self.table(work, name)
            if isinstance(found, str):
                return found
            tables[name] = found
        work, tuned = self.work(data), self.tuned_work(data) if "finetuned" in needs else None
        subject = _subject(self.model, None if tuned is None else tuned.model)
        return Evidence(subject, data, len(work.texts), sum(work.lengths), self.plan.seed, tables)

    def draw(self, figure: Figure, files: Store) -> Picture | tuple[str, str]:
        """Draw a figure and write its files; or say why it cannot be drawn."""
        data = self.plan.data_of(figure)
        if data is None:
            return figure.name, f"needs --data {source(figure.data)}"
        evidence = figure.missing(_subject(self.model)) or self.evidence(data, figure.needs)
        if isinstance(evidence, str):
            return figure.name, evidence
        frame = figure.frame(evidence)
        if frame.empty:
            return figure.name, f"not applicable: there is nothing of the kind in {self.model.name} on {data}"
        png, svg = save(figure.draw(frame, evidence))
        write_tables(files, {figure.name: frame})
        files.write(f"{figure.name}.png", png)
        files.write(f"{figure.name}.svg", svg)
        return Picture(figure.name, figure.caption, png, svg, figure.label(frame, evidence))

    def judged(self, claim: Claim) -> "list[dict[str, str]] | str":
        """Judge a claim, under each norm where it has several; or say why it cannot be judged."""
        data = self.plan.data_of(claim)
        if data is None:
            return f"needs --data {source(claim.data)}"
        if self.plan.sample is not None and claim in DATASETS:
            return "needs the whole dataset: leave --sample out"
        rows, reasons = [], []
        for norm in NORMS if claim.by_norm else ("",):
            evidence = self.evidence(data, [need.format(norm=norm) for need in claim.needs])
            if isinstance(evidence, str):
                reasons.append(evidence)
                continue
            found = judge(claim, evidence, norm)
            said = {"claim": claim.name, "where": claim.where, "words": claim.words, "paper": claim.paper}
            said |= {"rule": claim.rule, "norm": norm, "verdict": found.verdict, "measured": found.measured}
            rows.append(said | {"why": found.why, "data": data})
        return rows or reasons[0]

    def about(self) -> dict[str, str]:
        """Return what the page says of the run."""
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
            **self.computed(),
        }

    def computed(self) -> dict[str, str]:
        """Return where and with what the inputs were computed."""
        files = sorted(Path(self.out, "inputs").glob(f"*/*/{COMPUTED}")) if "://" not in self.out else []
        found: dict[str, list[str]] = {}
        for file in files:
            try:
                about = json.loads(file.read_text())
            except ValueError:
                continue
            versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
            found.setdefault(f"{about['device']} ({versions})", []).append("/".join(file.parts[-3:-1]))
        return {f"computed on {device}": ", ".join(names) for device, names in found.items()}


def _subject(model: Model, tuned: Model | None = None) -> Subject:
    name = None if tuned is None else tuned.name
    return Subject(model.name, model.n_layers, model.n_heads, model.d_value, model.causal, name)


def _lengths(work: Work) -> "DataFrame":
    from pandas import DataFrame

    return DataFrame({"text": range(len(work.texts)), "tokens": work.lengths})


def _task_and_folder(given: str) -> tuple[str, str]:
    """Return the task and the folder of TASK=FOLDER, or of a folder that says its task itself."""
    task, _, folder = given.partition("=")
    if task in TASKS:
        return task, folder
    try:
        task = json.loads(Path(given, "finetune.json").read_text())["task"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"reading the fine-tuned model in {given}: no finetune.json there says its task. Write --finetuned "
            f"mrpc={given} or cola={given}, whichever it was tuned on."
        ) from None
    return task, given
