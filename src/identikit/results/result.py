"""What every Result can do: be selected from, turned into tables, saved and opened, compared, printed, and drawn.

A Result is a few named arrays over named axes, and where they came from. The arrays come from a `Source`: tensors in
memory (`StoredArrays`), or a captured run of a model that computes each array on request, so that selecting a row of
attention never makes the whole map.
"""

import html
import math
import os
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.progress import Watched
from identikit.results.axis import Axis, Index
from identikit.results.facts import NO_FACTS, Fact
from identikit.results.files import Files, described, description_of, plain, read_folder, tensor_file, write_folder
from identikit.results.measure import NOT_FINITE, Measure, declared_in
from identikit.results.provenance import Provenance
from identikit.results.source import Source, StoredArrays
from identikit.shapes import Tensor
from identikit.texts.text import SOURCE, readable_token

if TYPE_CHECKING:
    from pandas import DataFrame
    from xarray import Dataset

FORMAT = "identikit-result-2"
LARGEST = 1 << 26  # entries of one array above which a table or a file is refused
_ARRAYS = "arrays.safetensors"
R = TypeVar("R", bound="Result")
CLASSES: dict[str, type["Result"]] = {}
"""The kinds of results there are."""


@dataclass(frozen=True, repr=False, eq=False)
class Result(ABC):
    """Named arrays over named axes, and where they came from.

    - `axes`: what the arrays range over, in order; a single axis was selected by one number or token
    - `about`: other facts, such as the norm that was used; plain values, as JSON holds them, that cannot be set
    - `provenance`: what it was computed from
    - `source`: what the arrays are read from
    """

    axes: tuple[Axis, ...]
    source: Source
    provenance: Provenance
    about: Mapping[str, Any] = NO_FACTS

    kind: ClassVar[str]
    """The name of this kind of result."""

    main: ClassVar[tuple[str, ...]]
    """The arrays of a table, which share their axes."""

    measures: ClassVar[Mapping[str, Measure]] = {}
    """The arrays that the class declares, by name; see `measure`."""

    missing_facts: ClassVar[Mapping[str, str]] = {}
    """Why facts in `about` can be missing (None)."""

    same: ClassVar[tuple[str, ...]] = ()
    """Facts that say what the arrays are: a difference is of results that share them."""

    def __init_subclass__(cls) -> None:
        cls.measures = declared_in(cls)
        if "kind" in vars(cls):
            CLASSES[cls.kind] = cls

    # Reading

    def array(self, name: str) -> Tensor:
        """Return one of the arrays; an axis selected by one number or token is left out."""
        single = {axis.name for axis in self.axes if axis.single}
        return self.read(name)[tuple(0 if dim in single else slice(None) for dim in self.source.dims[name])]

    def read(self, name: str) -> Tensor:
        """Return one of the arrays with all of its axes, also those selected by one number or token."""
        if isinstance(name, str) and name in self.source.dims:
            return self.source.read(name, {axis.name: axis.source_indices for axis in self.axes})
        if isinstance(name, str) and name in self.measures:
            raise InputError(
                f"This {self.kind} result has no {name}: it was not computed, or the result holds only some numbers "
                "because it was opened from a folder, gathered into words or subtracted. Compute it again with the "
                "model."
            )
        raise InputError(f"{self.a_kind.capitalize()} has no array {shortened(name)}: use {', '.join(self.arrays)}.")

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays, without those made only on request or kept only to compute others from."""
        return tuple(name for name in self.source.dims if not name.startswith("_") and not self._on_request(name))

    def _on_request(self, name: str) -> bool:
        return name in self.measures and self.measures[name].on_request

    def axis(self, name: str) -> Axis:
        """Return an axis by its name."""
        axes = {axis.name: axis for axis in self.axes}
        if name not in axes:
            raise InputError(f"Selecting from {self.a_kind}: it has no axis {shortened(name)}, only {', '.join(axes)}.")
        return axes[name]

    @property
    def a_kind(self) -> str:
        """The kind of the result, with an article."""
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind} result"

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens of the text."""
        return tuple(self.about.get("tokens", ()))

    def text_of(self, axis: str) -> Mapping[str, Any]:
        """Return the facts of the text that an axis ranges over: its `tokens`, which are `special`, and its `words`."""
        return self.about.get(SOURCE, self.about) if axis in ("key", "input") else self.about

    @property
    def model_name(self) -> str:
        """The name of the model."""
        return self.provenance.model

    def sel(self: R, **selection: Index) -> R:
        """Return the part with these layers, heads, positions or tokens: `sel(layer=4, head=5, query="since")`.

        Each is a number (negative ones count from the end), a token (`"the@24"` where it repeats), a slice or a list.
        An axis that is selected by one number or token is left out of the arrays.
        """
        for name in selection:
            self.axis(name)
        return replace(self, axes=tuple(axis.sel(selection.get(axis.name)) for axis in self.axes))

    # Tables and files

    def to_frame(self, *names: str) -> "DataFrame":
        """Return a tidy table with a row for each entry of the arrays; positions come with their tokens.

        `names` are arrays that share their axes; by default the main ones.
        """
        from pandas import DataFrame, MultiIndex

        names = names or self._main
        arrays = self._arrays(names)
        dims = self.source.dims[names[0]]
        if any(self.source.dims[name] != dims for name in names):
            raise InputError(f"Making a table of {', '.join(names)}: they do not have the same axes.")
        if foreign := [dim for dim in dims if all(dim != axis.name for axis in self.axes)]:
            raise InputError(f"Making a table of {names[0]}: it has a {foreign[0]} for each entry. Use to_xarray().")
        axes = [self.axis(dim) for dim in dims]
        index = MultiIndex.from_product([axis.values for axis in axes], names=list(dims))
        frame = index.to_frame(index=False)
        for axis in axes:
            if axis.tokens is not None:
                tokens = {value: readable_token(token) for value, token in zip(axis.values, axis.tokens, strict=True)}
                frame[f"{axis.name}_token"] = [tokens[value] for value in frame[axis.name]]
        return DataFrame(frame.assign(**{name: _numpy(array).reshape(-1) for name, array in arrays.items()}))

    def to_xarray(self, *names: str) -> "Dataset":
        """Return arrays as an xarray Dataset with named axes and token labels; by default all of them."""
        from xarray import Dataset

        coordinates: dict[str, Any] = {}
        single = {axis.name for axis in self.axes if axis.single}
        for axis in self.axes:
            labels: dict[str, Sequence[Any]] = {axis.name: axis.values}
            if axis.tokens is not None:
                labels[f"{axis.name}_token"] = [readable_token(token) for token in axis.tokens]
            for name, values in labels.items():
                coordinates[name] = values[0] if axis.single else (axis.name, list(values))
        arrays = {
            name: ([dim for dim in self.source.dims[name] if dim not in single], _numpy(array))
            for name, array in self._arrays(names or self.arrays).items()
        }
        return Dataset(arrays, coordinates, {"kind": self.kind, "model": self.model_name})

    def to_dict(self) -> dict[str, object]:
        """Return plain lists, numbers and strings, as JSON holds them.

        NaN and infinity become None, and `null_because` says for each array why it has such entries.
        """
        axes = {axis.name: axis.values[0] if axis.single else list(axis.values) for axis in self.axes}
        arrays = self._arrays(self.arrays)
        lacking = [name for name, array in arrays.items() if not bool(array.isfinite().all())]
        lacking += [name for name in self.missing_facts if self.about.get(name, 0) is None]
        reasons = {name: declared.missing for name, declared in self.measures.items()} | dict(self.missing_facts)
        return {
            "kind": self.kind,
            "axes": axes,
            **{name: plain(array.tolist()) for name, array in arrays.items()},
            **plain(dict(self.about)),
            "null_because": {name: reasons.get(name, NOT_FINITE) for name in lacking},
            "provenance": plain(asdict(self.provenance)),
        }

    @property
    def _main(self) -> tuple[str, ...]:
        """The main arrays that this result has: some exist only for pieces, not for words."""
        return tuple(name for name in self.main if name in self.source.dims)

    def _arrays(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = tuple(names)
        self.refuse_large(names)
        return {name: self.array(name) for name in names}

    def refuse_large(self, names: Iterable[str]) -> None:
        """Refuse to write out arrays that would take too much memory."""
        for name in names:
            dims = self.source.dims.get(name, ()) if isinstance(name, str) else ()
            size = math.prod(len(axis) for axis in self.axes if axis.name in dims)
            if size > LARGEST:
                raise InputError(
                    f"Writing out all {size:,} entries of {name!r} would take too much memory. Select a part first, "
                    f"with sel({self.axes[0].name}=…)."
                )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the result to a new folder, as safetensors and JSON; `open_result` reads it."""
        write_folder(folder, self._content)

    def _content(self) -> Files:
        """Return the files that hold the result, with their description."""
        about = {
            "format": FORMAT,
            "kind": self.kind,
            "axes": [
                {"name": axis.name, "values": axis.values, "tokens": axis.tokens, "single": axis.single}
                for axis in self.axes
            ],
            "dims": {name: list(dims) for name, dims in self.source.dims.items() if not self._on_request(name)},
            "about": dict(self.about),
            "provenance": asdict(self.provenance),
        }
        return described(plain(about), self._files())

    def _files(self) -> Files:
        """Return the files that hold the arrays, and what a class adds to them."""
        return {_ARRAYS: tensor_file(self._arrays(name for name in self.source.dims if not self._on_request(name)))}

    def push_to_hub(self, repo: str, *, public: bool = False) -> str:
        """Upload the result to a dataset of the Hugging Face hub, with a card; return its address.

        `repo` is the id of a dataset, which is made if it is not there: private, unless it is to be `public`.
        """
        from identikit.results.hub import push_result

        return push_result(self, repo, public=public)

    @classmethod
    def _from_files(cls: type[R], files: Files, about: Mapping[str, Any], where: str) -> R:
        """Return the result in files whose description was read; a class reads the files that it adds."""
        axes = []
        for axis in about["axes"]:
            tokens = None if axis["tokens"] is None else tuple(axis["tokens"])
            axes.append(Axis(axis["name"], tuple(axis["values"]), tokens, single=axis["single"]))
        dims = {name: tuple(names) for name, names in about["dims"].items()}
        arrays = load(files[_ARRAYS])
        fits = dims.keys() == arrays.keys()
        for name, array in arrays.items():
            arrays[name] = array = _with_single_axes(array, dims[name], axes)
            sizes = {axis.name: len(axis) for axis in axes}
            if name not in cls.main:  # these alone may have axes of their own
                sizes = dict(zip(dims[name], array.shape, strict=False)) | sizes
            fits &= list(array.shape) == [sizes.get(dim) for dim in dims[name]]
        if not fits:
            raise InputError(f"Opening {where}: it is damaged (its arrays do not fit its axes). Save the result again.")
        provenance = about["provenance"]
        if set(provenance) != {entry.name for entry in fields(Provenance)}:
            raise InputError(f"Opening {where}: its provenance was written by another version of identikit.")
        kinds = {"model": str, "settings": dict, "versions": dict}
        if not all(isinstance(provenance[name], kind) for name, kind in kinds.items()):
            raise TypeError("provenance")
        facts = about["about"]
        if not isinstance(facts, dict) or not all(isinstance(token, str) for token in facts.get("tokens", ())):
            raise TypeError("facts")
        if any(isinstance(getattr(cls, name, None), Fact) and name not in facts for name in dir(cls)):
            raise KeyError("facts")
        return cls(tuple(axes), StoredArrays(arrays, dims), Provenance(**provenance), facts)

    # Words and differences

    def words(self: R) -> R:
        """Return the result by words instead of pieces: what pieces receive is added up, what they do is averaged.

        Special tokens stay as they are. Readings that exist only for pieces (ranks, the certificate) are left out.
        """
        from identikit.results.gathered import by_words

        return by_words(self)

    def __sub__(self: R, other: object) -> R:
        """Return this result minus another of the same kind, where tokens, layers and heads agree."""
        from identikit.results.gathered import difference

        if not isinstance(other, Result) or type(other) is not type(self):
            raise InputError(f"Subtracting {type(other).__name__} from {self.a_kind}: both must be of one kind.")
        return difference(self, other)

    # Showing it

    def __repr__(self) -> str:
        labels = {axis.name: axis.short_label for axis in self.axes if axis.single}
        layer = f"L{labels.pop('layer')}" if "layer" in labels else ""
        head = f"H{labels.pop('head')}" if "head" in labels else ""
        singles = [layer + head, *(f"{name} {label!r}" for name, label in labels.items())]
        sizes = " × ".join(axis.counted for axis in self.axes if not axis.single)
        minus = f" minus {self.about['minus']:.40}" if "minus" in self.about else ""
        return f"<{type(self).__name__} {self.model_name:.40}{minus}: {', '.join(filter(None, [*singles, sizes]))}>"

    def __str__(self) -> str:
        if "minus" not in self.about:
            return f"{self!r}\n{self.describe()}"
        largest = {name: float(self.array(name).double().abs().nan_to_num(0.0).max()) for name in self._main}
        return f"{self!r}\nLargest difference: {', '.join(f'{name} {value:.3g}' for name, value in largest.items())}."

    @abstractmethod
    def describe(self) -> str:
        """Return in words what the result shows; `print` prints this."""

    @abstractmethod
    def plot(self, **options: Any) -> Any:
        """Draw the result in the way that suits what is selected; returns matplotlib axes."""

    def save_html(self, path: str | os.PathLike[str], *, progress: Watched = None) -> None:
        """Write the result as one HTML file with views to explore; it works from disk, without a network."""
        from identikit.web.report import save_html

        save_html(self, path, progress=progress)

    def show(self) -> Any:
        """Show views to explore: in a notebook as a widget (extra `notebook`), elsewhere in the browser.

        Returns the widget, or the path of the page that was opened.
        """
        from identikit.web.report import show

        return show(self)

    def _repr_html_(self) -> str:
        """A small static picture with the words below it, without script."""
        from identikit.plots.forms import picture

        words = "".join(f"<div>{html.escape(line)}</div>" for line in str(self).splitlines())
        try:
            png = b64encode(picture(self.plot(), dpi=90)).decode()
            image = f'<img alt="{html.escape(repr(self))}" src="data:image/png;base64,{png}">'
        except InputError:  # nothing of this shape can be drawn, and a table of words will do
            image = ""
        return f'<div style="max-width:60em">{image}{words}</div>'


def saved_result(folder: str | os.PathLike[str]) -> Result:
    """Open a result that `Result.save` wrote; its class must be imported, as `explanation.result` does for all."""
    return result_of(read_folder(folder), str(folder))


def result_of(files: Files, where: str) -> Result:
    """Return the result that files hold. Its class must be imported; errors say `where` the files are."""
    about = description_of(files, where)
    if about.get("format") != FORMAT:
        raise InputError(f"Opening {where}: its format is {about.get('format')!r}, and this version reads {FORMAT!r}.")
    if not isinstance(about.get("kind"), str) or about["kind"] not in CLASSES:
        raise InputError(f"Opening {where}: results of the kind {about.get('kind')!r} are not known to this version.")
    try:
        opened = CLASSES[about["kind"]]._from_files(files, about, where)
        str(opened)  # finds wrong facts now, and not wherever they are used
        return opened
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, SafetensorError) as error:
        raise InputError(f"Opening {where}: it is damaged ({type(error).__name__}). Save the result again.") from None


def _with_single_axes(array: Tensor, dims: Sequence[str], axes: Sequence[Axis]) -> Tensor:
    """Return an array with the axes of length 1 that a file leaves out, because one entry was selected on them."""
    single = {axis.name for axis in axes if axis.single}
    for index, dim in enumerate(dims):
        if dim in single:
            array = array.unsqueeze(index)
    return array


def _numpy(array: Tensor) -> Any:
    array = array.detach().cpu()
    return (array.float() if array.dtype == torch.bfloat16 else array).numpy()
