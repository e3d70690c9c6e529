"""The site; `make docs` builds it from the root of the repository, so that links work there and on GitHub alike."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # pages are executed side by side
sys.path.insert(0, str(Path(__file__).parent))

from identikit import __version__

project = "identikit"
author = "The identikit authors"
copyright = "2026, The identikit authors"
version = release = __version__

extensions = ["myst_nb", "machinery.sphinx"]
root_doc = "docs/index"
include_patterns = ["docs/**", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
exclude_patterns = ["docs/_build", "docs/gallery/**about.md"]
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!identikit).*")]  # types of Python, torch, …
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_ipywidgets_js = {}  # nothing is loaded from elsewhere

html_theme = "pydata_sphinx_theme"
html_title = "identikit"
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {"docs/tutorial": []}  # it has no pages below it
html_static_path = ["static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}
html_additional_pages = {"index": "to_start.html"}
templates_path = ["templates"]
html_theme_options = {
    "navigation_with_keys": False,
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
