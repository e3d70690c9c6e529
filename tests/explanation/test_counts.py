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
from identikit.maths import effective
from identikit.maths.polytope import rows
from identikit.models.model import Model
from identikit.texts.data import sample_text

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

    decompose = rows.decomposed
    encode_texts = Model.encode
    patch.setattr(rows, "decomposed", decomposed)
    patch.setattr(effective, "effective_factors", counting("factorisations", effective.effective_factors))
    patch.setattr(scipy.optimize, "linprog", counting("linear programs", scipy.optimize.linprog))
    patch.setattr(model.hf, "forward", counting("runs", model.hf.forward))
    patch.setattr(Model, "encode", encode)


def test_values_are_decomposed_once(counted: Counted):
    heads = sum(layer.call.value.shape[1] for layer in counted.layers)
    assert counted.counts["decomposed heads"] == heads


def test_a_layer_is_factorised_for_its_ranks_and_no_more(counted: Counted):
    """For effective attention with its ranks, for the ranks of [T, 1] where there is time, and in a coarser unit."""
    assert 2 * len(counted.layers) < counted.counts["factorisations"] <= 3 * len(counted.layers)


def test_no_linear_program_is_left_to_a_general_solver(counted: Counted):
    assert counted.counts["linear programs"] == 0


def test_the_model_runs_to_be_read_and_to_be_verified(counted: Counted):
    assert counted.counts["runs"] in (1, 2)  # on a busy machine there may be no time to verify it


def test_texts_are_encoded_once(counted: Counted):
    assert (counted.counts[TEXT], counted.counts[SAMPLES]) == (1, 0)
