"""Requests for attribution: the options as a caller gives them, and checked against a model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from identikit.attribution.memory import working_bytes
from identikit.checks import known_name, random_seed, shortened, whole_number
from identikit.errors import InputError
from identikit.maths import jacobian
from identikit.models.load.size import Sizes
from identikit.models.machine import PRECISIONS
from identikit.models.model import Model
from identikit.results.axis import Index, selected_indices
from identikit.shapes import Float, Int, Tensor

SOURCES = ("before", "after")
FISHER = "fisher"
Tick = Callable[[float | int], None]
"""Called with the number of tokens, or the share of one, that an engine has just finished."""


@dataclass(frozen=True)
class AttributionOptions:
    """How to attribute texts, not checked yet; a run over a dataset records them. See `token_attribution`."""

    probes: object = "exact"
    norm: str = "frobenius"
    source: str = "before"
    precision: str = "full"
    seed: object = 0
    truncate: bool = False
    max_tokens: int | None = None

    def checked(self, model: Model | Sizes, layers: Index = None) -> "Request":
        """Return these options as a request to a model; raises an InputError where one cannot be used."""
        known_name("norm", self.norm, (*jacobian.NORMS, FISHER))
        if self.norm == FISHER and isinstance(model, Model):
            layers = _last_layer(model, layers)
        known_name("source", self.source, SOURCES)
        known_name("precision", self.precision, PRECISIONS)
        limit = model.d_model if self.source == "after" else model.d_input
        probes = self.probes
        if isinstance(probes, str) and probes != "exact":
            raise InputError(
                f"probes={shortened(probes)} cannot be used: expected 'exact' or a number from 2 to {limit}."
            )
        if not isinstance(probes, str):
            probes = whole_number("probes", probes, least=2, most=limit)
        if probes != "exact" and self.norm == "spectral":
            raise InputError(
                f"probes={probes} with norm='spectral': the largest singular value cannot be estimated from a few "
                "directions. Use probes='exact', or norm='frobenius'."
            )
        options = vars(self) | {"probes": probes, "seed": random_seed(self.seed)}
        return Request(**options, layers=selected_indices("layer", layers, model.n_layers))


@dataclass(frozen=True)
class Request(AttributionOptions):
    """Options that were checked against a model, with its layers and the output positions (`targets`; None: all).

    `roots` are what the derivatives of each output are multiplied by before their norm is taken; None: nothing.
    """

    probes: int | str = "exact"
    seed: int = 0
    layers: tuple[int, ...] = ()
    targets: tuple[int, ...] | None = None
    roots: Float[Tensor, "output d d"] | None = field(default=None, compare=False, repr=False)

    @property
    def exact(self) -> bool:
        """Whether the directions are a whole basis."""
        return self.probes == "exact"

    def count(self, d: int) -> int:
        """Return how many directions of R^d to go along."""
        return d if isinstance(self.probes, str) else self.probes

    def directions(self, d: int, like: Tensor) -> Float[Tensor, "direction d"]:
        """Return the directions of R^d to go along, in the dtype and on the device of `like`."""
        if self.exact:
            return torch.eye(d, dtype=like.dtype, device=like.device)
        return jacobian.orthogonal_probes(d, self.count(d), seed=self.seed).to(like)

    def zeros(self, n: int, like: Tensor, *, outputs: int | None = None) -> Tensor:
        """Return an answer to be filled, for n inputs and as many `outputs` by default: (layer, input, output, …)."""
        if self.targets is not None:
            outputs = len(self.targets)
        outputs = n if outputs is None else outputs
        directions = [] if self.exact else [self.count(0)]
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.zeros(len(self.layers), n, outputs, *directions, dtype=dtype, device=like.device)

    def measure(
        self,
        tangents: Float[Tensor, "output feature input direction"],
        exponent: Int[Tensor, "input"] | None = None,
        *,
        outputs: Any = slice(None),
    ) -> Tensor:
        """Return the blocks' norms, or with probes the squares along each direction: (input, output, …).

        Tangents of each input that were scaled by 2^-`exponent` are measured as they were, exactly. `outputs` selects
        those of the requested outputs that the tangents are of.
        """
        measure = jacobian.block_norms if self.exact else jacobian.direction_squares
        norm = self.norm
        if self.roots is not None:
            norm = "frobenius"
            wide = torch.promote_types(tangents.dtype, torch.float32)
            roots = self.roots.to(tangents.device)[outputs].to(wide)
            tangents = (roots @ tangents.flatten(2).to(wide)).view_as(tangents)
        output_bytes = max(1, tangents[:1].numel() * 4)  # in half precision they may be copied to float32 for it
        step = max(1, working_bytes(tangents.device) // output_bytes)
        measured = torch.cat([measure(portion, norm) for portion in tangents.split(step)]).transpose(0, 1)
        if exponent is None:
            return measured
        power = exponent if self.exact else 2 * exponent
        return torch.ldexp(measured, power.view(-1, *[1] * (measured.ndim - 1)))


def _last_layer(model: Model, layers: Index) -> list[int]:
    """Return the last layer, the only one that has Fisher's norm; refuse others, and a model without a vocabulary."""
    last = model.n_layers - 1
    if model.modality != "text" or model.hf.get_output_embeddings() is None:
        raise InputError(
            f"norm='fisher' is of the probabilities of tokens, and {model.name} gives none. Use norm='frobenius', or a "
            "model with a language-model head."
        )
    if layers is not None and selected_indices("layer", layers, model.n_layers) != (last,):
        raise InputError(
            f"norm='fisher' is of the last layer, {last}, from which the probabilities of tokens are made. Leave "
            "layers= out."
        )
    return [last]
