import pytest
import torch
from safetensors.torch import save_file

from identikit.errors import InputError
from identikit.tokens.fit import fit_maps
from identikit.tokens.maps import load_maps, save_maps
from identikit.tokens.protocol import MapChoice, Settings, Task
from tests.tokens.constructed import states


def test_maps_come_back_from_disk_as_they_were(tmp_path):
    given = states(layers=2)
    settings = Settings(folds=2, epochs=1, hidden_size=5, learning_rates=(0.01,), seed=3)
    maps = fit_maps(given, MapChoice(), tasks=[Task(data_share=0.9)], settings=settings).maps
    save_maps(tmp_path / "maps.safetensors", maps)
    loaded = load_maps(tmp_path / "maps.safetensors")
    assert len(loaded) == len(maps) == 4 * 2 * 2 * 2
    for first, second in zip(maps, loaded, strict=True):
        plain = [
            {name: value for name, value in vars(fitted).items() if name != "parameters"} for fitted in (first, second)
        ]
        assert plain[0] == plain[1]
        torch.testing.assert_close(dict(first.parameters), dict(second.parameters), rtol=0, atol=0)
        torch.testing.assert_close(first(given.layer(1)), second(given.layer(1)), rtol=0, atol=0)


def test_files_that_hold_no_maps_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"Loading fitted maps from .*missing.*\. Give a file that save_maps wrote"):
        load_maps(tmp_path / "missing")
    (tmp_path / "text").write_text("not tensors")
    with pytest.raises(InputError, match=r"Loading fitted maps from .*text"):
        load_maps(tmp_path / "text")
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(InputError, match="it is not a sealed safetensors file"):
        load_maps(tmp_path / "other")
