"""What to cite for a result: `cite`."""

from identikit.version import __version__

PAPER = r"""@inproceedings{brunner2020identifiability,
  title     = {On Identifiability in Transformers},
  author    = {Brunner, Gino and Liu, Yang and Pascual, Dami{\'a}n and Richter, Oliver and Ciaramita, Massimiliano
               and Wattenhofer, Roger},
  booktitle = {International Conference on Learning Representations},
  year      = {2020},
  url       = {https://arxiv.org/abs/1908.04211}
}"""

INVERSION = r"""@misc{nikolaou2025injective,
  title  = {Language Models are Injective and Hence Invertible},
  author = {Nikolaou, Giorgos and Mencattini, Tommaso and Crisostomi, Donato and Santilli, Andrea and Panagakis, Yannis
            and Rodol{\`a}, Emanuele},
  year   = {2025},
  url    = {https://arxiv.org/abs/2510.15511}
}"""

SOFTWARE = f"""@misc{{identikit,
  title        = {{identikit: what a transformer's attention and hidden vectors really say}},
  author       = {{{{The identikit authors}}}},
  howpublished = {{Python package}},
  note         = {{Version {__version__}}}
}}"""


class Citation(str):
    """A text that a notebook shows unchanged."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def cite() -> Citation:
    """Return what to cite, in words and as BibTeX: the paper whose methods these are, and this version of identikit.

    `print(identikit.cite())` shows it; so does `identikit cite` on the command line.
    """
    return Citation(
        "Effective attention, token identifiability and Hidden Token Attribution are the methods of this paper:\n\n"
        f"{PAPER}\n\n"
        "If you invert hidden vectors, the idea is from this paper:\n\n"
        f"{INVERSION}\n\n"
        f"Intervals of attention and everything else were computed with identikit {__version__}:\n\n"
        f"{SOFTWARE}\n"
    )
