"""What every Result can do: be selected from, turned into tables, saved and opened, compared, printed, and drawn.

A Result is a few named arrays over named axes, with where they came from. The arrays come from a `Source`: tensors that
are held (`Held`), or a captured run of a model that computes them when they are asked for, so that selecting a row of
attention never makes the whole map.
"""

import html
import math
import os
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, overload, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from identikit.checks import function, shortened
from identikit.errors import InputError
from identikit.progress import Progress, silent
from identikit.results.axis import Axis, Index
from identikit.results.folders import Files, described, description_of, read_folder, write_folder
from identikit.results.provenance import Provenance
from identikit.shapes import Tensor
from identikit.texts.text import shown

if TYPE_CHECKING:
    from pandas import DataFrame
    from xarray import Dataset

FORMAT = "identikit-result-2"
LARGEST = 1 << 26  # entries of one array above which a table or a file is refused
_ARRAYS = "arrays.safetensors"
_HOMES = ("attention.result", "attribution.result", "tokens.result", "explanation.result")
R = TypeVar("R", bound="Result")
_CLASSES: dict[str, type["Result"]] = {}


@runtime_checkable
class Source(Protocol):
    """Where a Result's arrays come from: `dims` names the axes of each, `read` makes one at the places asked for."""

    @property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """The axes of each array."""
        ...

    def read(self, name: str, places: Mapping[str, Sequence[int]]) -> Tensor:
        """Return an array at these places of its axes, all of its dimensions kept."""
        ...


@dataclass(frozen=True)
class Held:
    """Arrays that are simply there."""

    arrays: Mapping[str, Tensor]
    dims: Mapping[str, tuple[str, ...]]

    def read(self, name: str, places: Mapping[str, Sequence[int]]) -> Tensor:
        """Return an array at these places of its axes."""
        found = self.arrays[name]
        for axis, dim in enumerate(self.dims[name]):
            wanted = places[dim]
            if len(wanted) != found.shape[axis] or list(wanted) != list(range(found.shape[axis])):
                found = found.index_select(axis, torch.tensor(wanted, dtype=torch.long, device=found.device))
        return found


class Array:
    """An attribute of a Result that reads the array of its own name, with the words that explain it."""

    def __init__(self, words: str):
        self.__doc__ = words

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, result: None, owner: type) -> "Array": ...
    @overload
    def __get__(self, result: "Result", owner: type) -> Tensor: ...
    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:
        """Return the array; on the class, the attribute itself."""
        return self if result is None else result.array(self.name)


class Fact(Array):
    """An attribute of a Result that reads the fact of its own name, with the words that explain it."""

    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:
        """Return the fact; on the class, the attribute itself."""
        return self if result is None else result.about[self.name]


@dataclass(frozen=True, repr=False, eq=False)
class Result(ABC):
    """Named arrays over named axes, and where they came from.

    - `axes`: what the arrays range over, in order; a single axis was selected by one number or token
    - `about`: other facts, such as the norm that was used; plain values, as JSON holds them
    - `provenance`: what it was computed from
    - `source`: what the arrays are read from
    """

    axes: tuple[Axis, ...]
    source: Source
    provenance: Provenance
    about: Mapping[str, Any] = field(default_factory=dict)

    kind: ClassVar[str]
    """What a result of this class is called."""

    main: ClassVar[tuple[str, ...]]
    """The arrays of a table, which share their axes."""

    by_word: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """How arrays are gathered into words along their axes of tokens: "sum", "mean", "all" or "min"."""

    missing: ClassVar[Mapping[str, str]] = {}
    """Why entries of arrays can be missing (NaN)."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            _CLASSES[cls.kind] = cls

    # Reading

    def array(self, name: str) -> Tensor:
        """Return one of the arrays; an axis selected by one number or token is left out."""
        whole = self._read(name)
        return whole[tuple(0 if self._axis(dim).single else slice(None) for dim in self.source.dims[name])]

    def _read(self, name: str) -> Tensor:
        """Return one of the arrays with all of its axes."""
        if not isinstance(name, str) or name not in self.source.dims:
            raise InputError(
                f"{self._a_kind().capitalize()} has no array {shortened(name)}: use {', '.join(self.arrays)}."
            )
        return self.source.read(name, {dim: self._axis(dim).places for dim in self.source.dims[name]})

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays, without those that are kept only to compute others from."""
        return tuple(name for name in self.source.dims if not name.startswith("_"))

    def _axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise InputError(
            f"Selecting from {self._a_kind()}: it has no axis {shortened(name)}, only {self._axis_names()}."
        )

    def _a_kind(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind} result"

    def _axis_names(self) -> str:
        return ", ".join(axis.name for axis in self.axes)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens of the text."""
        return tuple(self.about.get("tokens", ()))

    @property
    def model_name(self) -> str:
        """What the model is called."""
        return self.provenance.model

    def sel(self: R, **wanted: Index) -> R:
        """Return the part with these layers, heads, positions or tokens: `sel(layer=4, head=5, query="since")`.

        Each is a number (negative ones count from the end), a token (`"the@24"` where it repeats), a slice or a list.
        An axis that is selected by one number or token is left out of the arrays.
        """
        for name in wanted:
            self._axis(name)
        return replace(self, axes=tuple(axis.sel(wanted.get(axis.name)) for axis in self.axes))

    # Tables and files

    def to_frame(self, *names: str) -> "DataFrame":
        """Return a tidy table with a row for each place of the axes; positions come with their tokens.

        `names` are arrays that share their axes; by default the main ones.
        """
        from pandas import DataFrame, MultiIndex

        names = names or self._main
        arrays = self._checked(names)
        dims = self.source.dims[names[0]]
        if any(self.source.dims[name] != dims for name in names):
            raise InputError(f"Making a table of {', '.join(names)}: they do not have the same axes.")
        axes = [self._axis(dim) for dim in dims]
        index = MultiIndex.from_product([axis.values for axis in axes], names=list(dims))
        frame = index.to_frame(index=False)
        for axis in axes:
            if axis.tokens is not None:
                tokens = {value: shown(token) for value, token in zip(axis.values, axis.tokens, strict=True)}
                frame[f"{axis.name}_token"] = [tokens[value] for value in frame[axis.name]]
        return DataFrame(frame.assign(**{name: _numpy(array).reshape(-1) for name, array in arrays.items()}))

    def to_xarray(self, *names: str) -> "Dataset":
        """Return arrays as an xarray Dataset with named axes and token labels; by default all of them."""
        from xarray import Dataset

        coordinates: dict[str, Any] = {}
        for axis in self.axes:
            named: dict[str, Sequence[Any]] = {axis.name: axis.values}
            if axis.tokens is not None:
                named[f"{axis.name}_token"] = [shown(token) for token in axis.tokens]
            for name, values in named.items():
                coordinates[name] = values[0] if axis.single else (axis.name, list(values))
        arrays = {
            name: ([dim for dim in self.source.dims[name] if not self._axis(dim).single], _numpy(array))
            for name, array in self._checked(names or self.arrays).items()
        }
        return Dataset(arrays, coordinates, {"kind": self.kind, "model": self.model_name})

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, as JSON holds them.

        What is NaN or infinite becomes None, and `null_because` says for each array why it has such entries.
        """
        axes = {axis.name: axis.values[0] if axis.single else list(axis.values) for axis in self.axes}
        found = self._checked(self.arrays)
        lacking = [name for name, array in found.items() if not bool(array.isfinite().all())]
        lacking += [name for name in self.missing if name in self.about and self.about[name] is None]
        arrays = {name: plain(array.tolist()) for name, array in found.items()}
        return {
            "kind": self.kind,
            "axes": axes,
            **arrays,
            **plain(dict(self.about)),
            "null_because": {name: self.missing.get(name, "It is not a finite number.") for name in lacking},
            "provenance": plain(asdict(self.provenance)),
        }

    @property
    def _main(self) -> tuple[str, ...]:
        """The main arrays that are there: some exist only for pieces, not for words."""
        return tuple(name for name in self.main if name in self.source.dims)

    def _checked(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = tuple(names)
        self._refuse_large(names)
        return {name: self.array(name) for name in names}

    def _refuse_large(self, names: Iterable[str]) -> None:
        for name in names:
            dims = self.source.dims.get(name, ()) if isinstance(name, str) else ()
            size = math.prod(len(self._axis(dim)) for dim in dims)
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
            "axes": [asdict(replace(axis, places=tuple(range(len(axis))))) for axis in self.axes],
            "dims": {name: list(dims) for name, dims in self.source.dims.items()},
            "about": dict(self.about),
            "provenance": asdict(self.provenance),
        }
        return described(plain(about), self._files())

    def _files(self) -> Files:
        """Return the files that hold the arrays, and what a class adds to them."""
        arrays = self._checked(self.source.dims)
        # The format refuses tensors that share memory, so each is written from a copy of its own.
        copies = {name: array.cpu().clone(memory_format=torch.contiguous_format) for name, array in arrays.items()}
        return {_ARRAYS: save(copies)}

    @classmethod
    def _opened(cls: type[R], files: Files, about: Mapping[str, Any], where: str) -> R:
        """Return the result of files whose description was read; files that a class adds are read by the class."""
        axes = tuple(Axis(**{name: _tupled(value) for name, value in axis.items()}) for axis in about["axes"])
        dims = {name: tuple(names) for name, names in about["dims"].items()}
        sizes, single = {axis.name: len(axis) for axis in axes}, {axis.name for axis in axes if axis.single}
        arrays = load(files[_ARRAYS])
        for name, array in arrays.items():  # single axes were left out of the file
            for place, dim in enumerate(dims[name]):
                array = array.unsqueeze(place) if dim in single else array
            arrays[name] = array
        if {name: [sizes[dim] for dim in dims[name]] for name in dims} != {
            name: list(array.shape) for name, array in arrays.items()
        }:
            raise InputError(f"Opening {where}: it is damaged (its arrays do not fit its axes). Save the result again.")
        given = about["provenance"]
        known = {one.name for one in fields(Provenance)}
        if set(given) != known:
            raise InputError(f"Opening {where}: its provenance was written by another version of identikit.")
        return cls(axes, Held(arrays, dims), Provenance(**given), about["about"])

    # Words and differences

    def words(self: R) -> R:
        """Return the result by words instead of pieces: what pieces receive is added up, what they do is averaged.

        Special tokens stay as they are. Readings that exist only for pieces (ranks, the certificate) are left out.
        """
        spans = [tuple(span) for span in self.about.get("words") or ()]
        if not self.by_word:
            raise InputError(f"{self._a_kind().capitalize()} has no tokens to gather into words.")
        if self.about.get("words", ()) is None:
            raise InputError(f"This {self.kind} result is by words already.")
        if not spans:
            raise InputError(
                f"Gathering {self._a_kind()} into words: its tokens are not aligned with words. Pass a text instead of "
                "token ids, and use a tokenizer that keeps offsets (a fast one)."
            )
        groups = word_groups(len(self.tokens), spans)
        axes = {axis.name: axis for axis in self.axes}
        for name in {name for ways in self.by_word.values() for name in ways}:
            axis = axes[name]
            if axis.single:
                continue
            if axis.tokens != self.tokens:
                raise InputError(
                    f"Gathering {self._a_kind()} into words: call words() before selecting some {axis.plural}."
                )
            axes[name] = Axis(name, tuple(range(len(groups))), tuple(joined(self.tokens, group) for group in groups))
        names = [name for name in self.by_word if name in self.arrays]
        self._refuse_large(names)
        arrays = {name: self._gathered(name, self.by_word[name], groups) for name in names}
        dims = {name: self.source.dims[name] for name in arrays}
        about = {**self.about, "tokens": [joined(self.tokens, group) for group in groups], "words": None}
        kept = tuple(replace(axes[axis.name], places=tuple(range(len(axes[axis.name])))) for axis in self.axes)
        return replace(self, axes=kept, source=Held(arrays, dims), about=about)

    def _gathered(self, name: str, ways: Mapping[str, str], groups: Sequence[Sequence[int]]) -> Tensor:
        found = self._read(name)
        for place, axis in enumerate(map(self._axis, self.source.dims[name])):
            if axis.name in ways and not axis.single:
                gather = _WAYS[ways[axis.name]]
                found = torch.stack([gather(found[(slice(None),) * place + (list(g),)], place) for g in groups], place)
        return found

    def __sub__(self: R, other: object) -> R:
        """Return this result minus another of the same kind, where tokens, layers and heads agree."""
        if type(other) is not type(self):
            raise InputError(f"Subtracting {type(other).__name__} from {self._a_kind()}: both must be of one kind.")
        for mine, theirs in zip(self.axes, other.axes, strict=True):
            if (mine.values, mine.tokens, mine.single) != (theirs.values, theirs.tokens, theirs.single):
                raise InputError(
                    f"Subtracting {self.kind} results: they differ on the {mine.name} axis ({mine.summary()} against "
                    f"{theirs.summary()}). Select the same parts, of the same tokens."
                )
        names = [name for name in self.arrays if name in other.arrays]
        self._refuse_large(names)
        arrays = {}
        for name in names:
            first = self._read(name)
            second = other._read(name).to(first.device)
            dtype = torch.float64 if first.is_floating_point() else torch.long
            arrays[name] = first.to(dtype) - second.to(dtype)
        dims = {name: self.source.dims[name] for name in names}
        axes = tuple(replace(axis, places=tuple(range(len(axis)))) for axis in self.axes)
        about = {**self.about, "minus": other.model_name}
        return replace(self, axes=axes, source=Held(arrays, dims), about=about)

    # Being looked at

    def __repr__(self) -> str:
        names = {axis.name: axis.label for axis in self.axes if axis.single}
        place = "".join(
            f"{letter}{names.pop(name)}" for name, letter in (("layer", "L"), ("head", "H")) if name in names
        )
        singles = [place, *(f"{name} {label!r:.20}" for name, label in names.items())]
        many = " × ".join(axis.counted for axis in self.axes if not axis.single)
        minus = f" minus {self.about['minus']:.40}" if "minus" in self.about else ""
        return f"<{type(self).__name__} {self.model_name:.40}{minus}: {', '.join(filter(None, [*singles, many]))}>"

    def __str__(self) -> str:
        if "minus" in self.about:
            return f"{self!r}\n{self._difference()}"
        return f"{self!r}\n{self.said()}"

    @abstractmethod
    def said(self) -> str:
        """Say in words what the result shows; `print` prints this."""

    def _difference(self) -> str:
        largest = {name: float(self.array(name).double().abs().nan_to_num(0.0).max()) for name in self._main}
        return "Largest difference: " + ", ".join(f"{name} {value:.3g}" for name, value in largest.items()) + "."

    @abstractmethod
    def plot(self, **options: Any) -> Any:
        """Draw the result in the way that suits what is selected; returns matplotlib axes."""

    def save_html(self, path: str | os.PathLike[str], *, progress: Progress = silent) -> None:
        """Write the result as one HTML file with views to explore; it works from disk, without a network."""
        from identikit.web.report import save_report

        save_report(self, path, progress=function("progress", progress))

    def show(self) -> Any:
        """Show views to explore: in a notebook as a widget (extra `notebook`), elsewhere in the browser.

        Returns the widget, or the path of the page that was opened.
        """
        from identikit.web.show import show

        return show(self)

    def _repr_html_(self) -> str:
        """A small static picture with the words below it, without script."""
        from identikit.plots.thumbnail import thumbnail

        words = "".join(f"<div>{html.escape(line)}</div>" for line in str(self).splitlines())
        try:
            image = (
                f'<img alt="{html.escape(repr(self))}" src="data:image/png;base64,{_encoded(thumbnail(self.plot))}">'
            )
        except InputError:  # nothing of this shape can be drawn, and a table of words will do
            image = ""
        return f'<div style="max-width:60em">{image}{words}</div>'


def open_result(folder: str | os.PathLike[str]) -> Result:
    """Open a result that `Result.save` wrote. It has no model, so it cannot be verified or continued."""
    return result_of(read_folder(folder), str(folder))


def result_of(files: Files, where: str) -> Result:
    """Return the result that files hold; `where` they are is said if it cannot be."""
    about = description_of(files, where)
    if about.get("format") != FORMAT:
        raise InputError(f"Opening {where}: its format is {about.get('format')!r}, and this version reads {FORMAT!r}.")
    for module in _HOMES:  # the classes note their kinds as they are loaded
        import_module(f"identikit.{module}")
    if about.get("kind") not in _CLASSES:
        raise InputError(f"Opening {where}: results of the kind {about.get('kind')!r} are not known to this version.")
    try:
        return _CLASSES[about["kind"]]._opened(files, about, where)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"Opening {where}: it is damaged ({type(error).__name__}). Save the result again.") from None


def word_groups(n: int, spans: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the pieces of each word in order; a token that belongs to no word stands alone."""
    starts = {span[0]: span[1] for span in spans}
    groups, place = [], 0
    while place < n:
        stop = starts.get(place, place + 1)
        groups.append(list(range(place, stop)))
        place = stop
    return groups


def joined(tokens: Sequence[str], group: Sequence[int]) -> str:
    """Return a word out of its pieces."""
    pieces = [tokens[place] for place in group]
    return "".join([pieces[0], *(piece.removeprefix("##") for piece in pieces[1:])])


_WAYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda part, axis: part.sum(axis),
    "mean": lambda part, axis: part.mean(axis),
    "all": lambda part, axis: part.all(axis),
    "min": lambda part, axis: part.amin(axis),
}


def _numpy(array: Tensor) -> Any:
    array = array.detach().cpu()
    return (array.float() if array.dtype == torch.bfloat16 else array).numpy()


def plain(value: Any) -> Any:
    """Return a value as JSON holds it, with None in place of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _encoded(image: bytes) -> str:
    return b64encode(image).decode()


def strongest(
    result: Result, name: str, count: int, values: Tensor | None = None
) -> Iterator[tuple[float, dict[str, str]]]:
    """Yield the largest entries of an array by size, each with the label of its place on every axis that is left.

    `values` are other numbers over the axes of that array.
    """
    array = result.array(name) if values is None else values
    axes = [axis for dim in result.source.dims[name] if not (axis := result._axis(dim)).single]
    flat = array.flatten()
    for place in flat.abs().nan_to_num(-1).topk(min(count, flat.numel())).indices.tolist():
        where = torch.unravel_index(torch.tensor(place), array.shape)
        labels = {axis.name: axis.name_of(int(at)) for axis, at in zip(axes, where, strict=True)}
        yield float(flat[place]), labels
