"""Configuration of the documentation site: `python3 run.py docs` builds it with Sphinx, MyST and furo."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes  # type: ignore[import-untyped]
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

# Sphinx sets the folder of this file as the working directory, not the root of the checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# A checkout has the folder janitor/ at its top; an installation has it in the package.
_janitor = ModuleType("flask_idempotency.janitor")
_janitor.__path__ = [str(Path(__file__).resolve().parents[1] / "janitor")]
sys.modules[_janitor.__name__] = _janitor

project = "flask_idempotency"
author = "the flask_idempotency authors"
project_copyright = "MIT licensed"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["**/__pycache__"]
# Docstrings write code in single backticks.
default_role = "code"
# Backticks in Markdown are literals. A name of the API links by {py:class}`…`.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r".*")]

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "fieldlist", "substitution"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
# Each API page says what to import from where.
add_module_names = False

# Nothing is downloaded while the site is built: CI has to pass when another project's site is away.
intersphinx_mapping: dict[str, tuple[str, None]] = {}

# Each page has its own folder, so that `type` of a problem is the address of its page.
html_theme = "furo"
html_title = "flask_idempotency"
html_static_path = ["_static"]
# https://llmstxt.org asks for this one at the root of the site.
html_extra_path = ["llms.txt"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd3a6", "color-brand-content": "#5fd3a6"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

# `python3 run.py docs linkcheck` follows the links to other sites. CI does not: they answer as they like.
linkcheck_timeout = 20


class InlineDiagrams(SphinxTransform):
    """Put a diagram's SVG into the page, so that it follows the site's switch between light and dark.

    Pages show it as an image, because GitHub shows that too.
    """

    default_priority = 500

    def apply(self, **arguments: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            folder, _, name = image["uri"].rpartition("/")
            if not folder.endswith(("_static/diagrams", "_static/charts")):
                continue
            path = Path(__file__).parent / "_static" / Path(folder).name / name
            self.env.note_dependency(str(path))
            drawn = path.read_text(encoding="utf-8")
            # The frame scrolls where a page is narrower than the drawing, also by the arrow keys.
            frame = f'<div class="diagram" tabindex="0" role="group" aria-label="Diagram">{drawn}</div>'
            image.replace_self(nodes.raw("", frame, format="html"))


def setup(app: Sphinx) -> None:
    app.add_transform(InlineDiagrams)
