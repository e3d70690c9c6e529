"""Hidden Token Attribution of MiniLM on the first MRPC pair, against a file; run as a module, this writes it anew."""

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from identikit.attribution.attribute import token_attribution
from identikit.attribution.result import TokenAttribution
from identikit.models.load.load import load
from identikit.paper.texts import SENTENCE

GOLDEN = Path(__file__).parents[1] / "golden" / "attribution_minilm_mrpc0.safetensors"


def write_golden() -> None:
    result = token_attribution(load(), SENTENCE)
    header = {"tokens": json.dumps(result.tokens), "provenance": json.dumps(dataclasses.asdict(result.provenance))}
    GOLDEN.parent.mkdir(exist_ok=True)
    save_file({"contribution": result.contribution.contiguous()}, GOLDEN, metadata=header)


def assert_golden(result: TokenAttribution) -> None:
    with safe_open(GOLDEN, "pt") as stored:
        expected = stored.get_tensor("contribution")
        header = stored.metadata()
    assert result.tokens == tuple(json.loads(header["tokens"]))
    expected = expected[list(result.layers)][:, :, list(result.targets)]
    assert (result.contribution - expected).abs().max() <= 1e-5


def test_golden_contributions_of_some_targets():
    assert_golden(token_attribution(load(), SENTENCE, layers=[1], targets=[13]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attribution takes")  # that it takes over a minute
def test_golden_contributions():
    assert_golden(token_attribution(load(), SENTENCE))


if __name__ == "__main__":
    write_golden()
