"""Maps from hidden vectors to input vectors: what they compute, how they start, and how they are stored."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch

from identikit.errors import InputError
from identikit.results.files import Damaged, plain, seal, unseal
from identikit.shapes import Float, Tensor
from identikit.tokens.protocol import Task, stream

_FORMAT = "identikit-maps-1"


@dataclass(frozen=True, eq=False)
class FittedMap:
    """One map for one layer and fold, with the tensors that it takes and a record of how it was fitted.

    `map` and `distance` name its kind and the distance it was fitted under; `task` says what it recovers, from the
    hidden vectors of `layer`. `fold` and `seed` say which texts it was fitted to. `parameters` are its tensors.
    `chosen` is the learning rate, or for ridge the strength, that the validation sentences chose;
    `validation_loss` is their mean distance under it. Both are None for the naive map, which has nothing to learn.
    """

    map: str
    distance: str
    layer: int
    fold: int
    task: Task
    seed: int
    parameters: Mapping[str, Tensor]
    chosen: float | None = None
    validation_loss: float | None = None

    def __call__(self, hidden: Float[Tensor, "token d"]) -> Float[Tensor, "token d_t"]:
        """Map hidden vectors to where their input vectors should be."""
        return apply_map({name: value.to(hidden) for name, value in self.parameters.items()}, hidden)


def apply_map(
    parameters: Mapping[str, Tensor], hidden: Float[Tensor, "*member token d"]
) -> Float[Tensor, "*member token d_t"]:
    r"""Compute $\hat g(e)$ for the map that has these parameters, or for a whole stack of such maps.

    No parameters: the naive $\hat g(e)=e$. Only `weight`: the linear $eW$, without bias. Four of them: the MLP
    $\mathrm{gelu}(eW_1+b_1)W_2+b_2$ of Appendix B.1, with the exact GELU.
    """
    if not parameters:
        return hidden
    if "weight" in parameters:
        return hidden @ parameters["weight"]
    inner = torch.nn.functional.gelu(hidden @ parameters["weight_in"] + parameters["bias_in"])
    return inner @ parameters["weight_out"] + parameters["bias_out"]


def glorot_start(map_name: str, widths: tuple[int, int, int], key: tuple[int, ...]) -> dict[str, Tensor]:
    """Draw the starting parameters of a linear map or MLP: Glorot uniform weights, zero biases (Appendix B.1).

    `widths` are those of the hidden vector, the MLP's hidden layer and the target. The draw depends only on
    `key`, so a map starts the same whether it is trained alone or in a stack.
    """

    def draw(fan_in: int, fan_out: int, *number: int) -> Float[Tensor, "fan_in fan_out"]:
        bound = (6 / (fan_in + fan_out)) ** 0.5
        return torch.from_numpy(stream("start", *key, *number).uniform(-bound, bound, size=(fan_in, fan_out)))

    source, inner, target = widths
    if map_name == "linear":
        return {"weight": draw(source, target)}
    return {
        "weight_in": draw(source, inner, 0),
        "bias_in": torch.zeros(1, inner, dtype=torch.float64),
        "weight_out": draw(inner, target, 1),
        "bias_out": torch.zeros(1, target, dtype=torch.float64),
    }


def sealed_maps(maps: Iterable[FittedMap], about: Mapping[str, float] | None = None) -> bytes:
    """Return fitted maps as the content of a safetensors file: parameters as tensors, all else as JSON in its header.

    `about` has more numbers for the header.
    """
    tensors = {}
    entries = []
    for number, fitted in enumerate(maps):
        tensors |= {f"{number}.{name}": value.detach() for name, value in fitted.parameters.items()}
        entry = {name: value for name, value in vars(fitted).items() if name not in ("parameters", "task")}
        entries.append(entry | {"task": asdict(fitted.task)})
    return seal(tensors, {"format": _FORMAT, "maps": plain(entries), **(about or {})})


def read_maps(content: bytes, where: str) -> list[FittedMap]:
    """Read fitted maps from the content of a file; `where` names it in errors."""
    try:
        tensors, about = unseal(content)
        if about["format"] != _FORMAT:
            raise Damaged(f"its format is {about['format']!r}, expected {_FORMAT!r}")
        parameters: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            number, _, parameter = name.partition(".")
            parameters.setdefault(int(number), {})[parameter] = value
        return [
            FittedMap(**{**entry, "task": Task(**entry["task"]), "parameters": parameters.get(number, {})})
            for number, entry in enumerate(about["maps"])
        ]
    except (Damaged, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, Damaged) else "it holds no fitted maps"
        raise InputError(f"Loading fitted maps from {where}: {reason}. Fit them again.") from None
