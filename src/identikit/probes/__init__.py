"""Token identifiability on arrays: maps from hidden vectors to input vectors, trained together, and how well they do.

Everything starts from :class:`HiddenStates`; no model is needed here. ``identikit.probes.experiments`` holds the
paper's experiments as tables and needs pandas; the rest runs with torch, numpy and safetensors alone.
"""

from identikit.probes.dataset import HiddenStates
from identikit.probes.evaluate import IdentityMap, Rate, identity_map, measure
from identikit.probes.fit import fit_maps
from identikit.probes.maps import FittedMap, load_maps, save_maps
from identikit.probes.protocol import Probes, Progress, Settings, Task
from identikit.probes.train import Grid, Trial

__all__ = [
    "HiddenStates",
    "Probes",
    "Task",
    "Settings",
    "Progress",
    "fit_maps",
    "Grid",
    "Trial",
    "FittedMap",
    "save_maps",
    "load_maps",
    "measure",
    "Rate",
    "identity_map",
    "IdentityMap",
]
