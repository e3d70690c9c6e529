import pytest
import torch
from safetensors.torch import save

from identikit.errors import InputError
from identikit.results.files import seal
from identikit.tokens.experiments import fit_maps
from identikit.tokens.maps import read_maps, sealed_maps
from identikit.tokens.protocol import MapChoice, Settings, Task
from tests.tokens.constructed import states


def test_maps_come_back_from_disk_as_they_were():
    given = states(layers=2)
    settings = Settings(folds=2, epochs=1, hidden_size=5, learning_rates=(0.01,), seed=3)
    maps = fit_maps(given, MapChoice(), tasks=[Task(data_share=0.9)], settings=settings).maps
    loaded = read_maps(sealed_maps(maps), "a file")
    assert len(loaded) == len(maps) == 4 * 2 * 2 * 2
    for first, second in zip(maps, loaded, strict=True):
        plain = [
            {name: value for name, value in vars(fitted).items() if name != "parameters"} for fitted in (first, second)
        ]
        assert plain[0] == plain[1]
        torch.testing.assert_close(dict(first.parameters), dict(second.parameters), rtol=0, atol=0)
        torch.testing.assert_close(first(given.layer(1)), second(given.layer(1)), rtol=0, atol=0)


def test_files_that_hold_no_maps_are_refused():
    for content, message in (
        (b"not tensors", "Loading fitted maps from a file: .*Fit them again"),
        (save({"a": torch.zeros(1)}), "it is not a sealed safetensors file"),
        (seal({}, {"format": "other"}), "its format is 'other'"),
    ):
        with pytest.raises(InputError, match=message):
            read_maps(content, "a file")
