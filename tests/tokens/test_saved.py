"""Maps fitted to hidden vectors that another tool saved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import identikit as ik
from identikit.tokens.protocol import Settings
from identikit.tokens.result import TokenIdentifiability
from tests.models import tiny

TEXTS = [f"w{5 + at} w{9 + at % 7} w{12 + at % 5} w{20 + at % 3}" for at in range(24)]
FITTED: dict[str, Any] = {"maps": ["naive", "ridge"], "distances": "cosine", "settings": Settings(folds=2)}


def vectors(model: ik.Model, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters the first block, and every block's output, layers first; and the token ids."""
    (encoded,) = model.encode([text])
    (batch,) = model.batches([encoded])
    assert batch.ids is not None
    trace = model.trace(batch)
    return torch.stack([trace.inputs[0], *(states[0] for states in trace.hidden)]), batch.ids[0]


@pytest.fixture(scope="module")
def model() -> ik.Model:
    return tiny.loaded("llama")


@pytest.fixture(scope="module")
def expected(model: ik.Model) -> TokenIdentifiability:
    return ik.token_identifiability(model, TEXTS, **FITTED)


@pytest.mark.parametrize("kind", ["vllm", "numpy"])
def test_vectors_of_another_tool_give_what_the_model_gives(
    model: ik.Model, expected: TokenIdentifiability, tmp_path: Path, kind: str
):
    for at, text in enumerate(TEXTS):
        hidden, ids = vectors(model, text)
        if kind == "vllm":
            kept = {"hidden_states": hidden.transpose(0, 1).contiguous(), "token_ids": ids}
            save_file(kept, tmp_path / f"{at:03}.safetensors")
        else:
            np.save(tmp_path / f"{at:03}.npy", hidden.numpy())
            np.save(tmp_path / f"{at:03}.token_ids.npy", ids.numpy())
    found = ik.token_identifiability(states=tmp_path, **FITTED)
    torch.testing.assert_close(found.rate, expected.rate, rtol=0, atol=0, equal_nan=True)
    assert found.chance == expected.chance
    assert found.provenance.settings == expected.provenance.settings
    assert found.rates["model"].unique().tolist() == [tmp_path.name]
    found.save(tmp_path / "saved")
    again = ik.open_result(tmp_path / "saved")
    torch.testing.assert_close(again.array("rate"), found.rate, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ik.InputError, match="made of saved vectors"):
        found.identity_map(TEXTS[0])


def test_vectors_of_8_bits_are_read_as_the_numbers_that_they_are(model: ik.Model, tmp_path: Path):
    for dtype in (torch.float8_e4m3fn, torch.float32):
        (tmp_path / str(dtype)).mkdir()
        for at, text in enumerate(TEXTS):
            hidden, ids = vectors(model, text)
            hidden = hidden.transpose(0, 1).contiguous().to(torch.float8_e4m3fn).to(dtype)
            save_file({"hidden_states": hidden, "token_ids": ids}, tmp_path / str(dtype) / f"{at:03}.safetensors")
    rates = [ik.token_identifiability(states=folder, **FITTED).rate for folder in sorted(tmp_path.iterdir())]
    torch.testing.assert_close(*rates, rtol=0, atol=0, equal_nan=True)


SPOILED: dict[str, tuple[Any, str]] = {
    "no first layer": (lambda hidden, ids: (hidden[:, 1:], ids), "these are not input vectors"),
    "layers first": (lambda hidden, ids: (hidden.transpose(0, 1), ids), "token ids"),
    "no ids": (lambda hidden, ids: (hidden, None), "token_ids is missing"),
    "not finite": (lambda hidden, ids: (hidden * torch.nan, ids), "all finite"),
    "ids as complex numbers": (lambda hidden, ids: (hidden, ids.to(torch.complex64)), "torch.complex64"),
    "ids as floats": (lambda hidden, ids: (hidden, ids.float()), r"ids of \(6,\), torch.float32"),
}


@pytest.mark.parametrize("what", [*SPOILED, "one with fewer layers", "cut short"])
def test_what_cannot_be_read_is_refused(model: ik.Model, tmp_path: Path, what: str):
    change, why = SPOILED.get(what, (lambda *kept: kept, ""))
    for at, text in enumerate(TEXTS):
        hidden, ids = vectors(model, text)
        hidden, ids = change(hidden.transpose(0, 1), ids)
        if what == "one with fewer layers" and at == 5:
            hidden, why = hidden[:, :2], "Keep the texts of one model in a folder"
        kept = {"hidden_states": hidden.contiguous()} | ({} if ids is None else {"token_ids": ids})
        save_file(kept, tmp_path / f"{at:03}.safetensors")
    if what == "cut short":
        (tmp_path / "000.safetensors").write_bytes(b"1234")
        why = "Reading .*000.safetensors"
    with pytest.raises(ik.InputError, match=why):
        ik.token_identifiability(states=tmp_path, **FITTED)


def test_what_is_no_such_folder_is_refused(model: ik.Model, tmp_path: Path):
    with pytest.raises(ik.InputError, match="no hidden vectors in it"):
        ik.token_identifiability(states=tmp_path)
    with pytest.raises(ik.InputError, match="is not a folder"):
        ik.token_identifiability(states=tmp_path / "nowhere")
    with pytest.raises(ik.InputError, match="instead of a model and texts"):
        ik.token_identifiability(model, TEXTS, states=tmp_path)
    (tmp_path / "a.npy").write_bytes(b"zebra")
    with pytest.raises(ik.InputError, match=r"Reading .*a\.npy"):
        ik.token_identifiability(states=tmp_path)
