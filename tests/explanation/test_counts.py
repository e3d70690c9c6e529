"""How often the costly things are done, from `explain` to the page: numbers that may only become smaller."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import scipy.optimize

import identikit as ik
from identikit.attention.layer import Layer
from identikit.attention.result import EffectiveAttention
from identikit.errors import IdentikitError
from identikit.explanation import explain as explaining
from identikit.maths import effective
from identikit.maths.polytope import rows
from identikit.models.model import Model
from identikit.texts.data import sample_text, sample_texts

SAMPLES = "sample texts"
TEXT = "the text"


class Counted(NamedTuple):
    """How often things were done for an explanation and its page, and the layers that it is of."""

    counts: Counter[str]
    layers: tuple[Layer, ...]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Explain the sample text with maps from the cache, write the page, and count."""
    folder = tmp_path_factory.mktemp("counts")
    try:
        model = ik.load()
    except IdentikitError as error:
        pytest.skip(f"needs the packaged model: {error}")
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDENTIKIT_CACHE", str(folder / "cache"))
        patch.setattr(explaining, "sample_texts", lambda: sample_texts()[:24])  # enough to fit maps to
        count_calls(patch, model, counts)
        ik.explain(model, "A first text, for which maps are fitted.", probes=2, seconds=0.01)
        counts.clear()  # that one has also proved that the model is read well
        explanation = ik.explain(model, seconds=2)
        explanation.save_html(folder / "page.html")
    assert isinstance(explanation.attention, EffectiveAttention)
    return Counted(counts, explanation.attention.captured().layers)


def count_calls(patch: pytest.MonkeyPatch, model: Model, counts: Counter[str]) -> None:
    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            counts[name] += 1  # only what came to its end: attribution runs the embedding alone
            return result

        return call

    def decomposed(values: Any) -> Any:
        counts["decomposed heads"] += len(values)
        return decompose(values)

    def encode(self: Model, texts: Any, **options: Any) -> Any:
        several = texts if isinstance(texts, list) else [texts]
        counts[TEXT] += several == [sample_text()]
        counts[SAMPLES] += len(several) > 1
        return encode_texts(self, texts, **options)

    decompose = rows.decompose_values
    encode_texts = Model.encode
    patch.setattr(rows, "decompose_values", decomposed)
    patch.setattr(effective, "effective_factors", counting("factorisations", effective.effective_factors))
    patch.setattr(scipy.optimize, "linprog", counting("linear programs", scipy.optimize.linprog))
    patch.setattr(model.hf, "forward", counting("runs", model.hf.forward))
    patch.setattr(Model, "encode", encode)


def test_costly_things_are_done_once(counted: Counted):
    counts, layers = counted
    assert counts["decomposed heads"] == sum(layer.call.value.shape[1] for layer in layers)
    # Factorised for effective attention with its ranks, for ranks of [T, 1] where there is time, and in a coarser unit.
    assert 2 * len(layers) < counts["factorisations"] <= 3 * len(layers)
    assert counts["linear programs"] == 0  # none is left to a general solver
    assert counts["runs"] in (1, 2)  # read and verified; on a busy machine there may be no time for the second
    assert (counts[TEXT], counts[SAMPLES]) == (1, 0)
