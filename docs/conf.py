"""Sphinx builds these pages as a site: `make docs`. Pages are Markdown (MyST), the API reference comes from docstrings.

A warning is an error: a link to nothing, a page in no list, a docstring that cannot be read. Docstrings are plain text in which
`name` is code. Nothing is downloaded and nothing but the package is imported; what torch and its kind give is mocked.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from chronicle import __version__  # noqa: E402 the path to it stands above

project, author, release = "chronicle", "the authors of chronicle", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
exclude_patterns = ["results/*/*", "api/README.md"]
default_role = "code"
nitpicky = False

html_theme = "furo"
html_title = "chronicle"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_sourcelink = html_copy_source = html_show_copyright = False
smartquotes = False  # `--from` has two hyphens
html_theme_options = {
    # the colours of the run pages: one meaning each, readable by the colour-blind
    "light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"},
    "dark_css_variables": {"color-brand-primary": "#6db3f2", "color-brand-content": "#6db3f2"},
}
pygments_style, pygments_dark_style = "tango", "github-dark"

autodoc_mock_imports = ["torch", "numpy", "accelerate", "deepspeed", "transformers", "lightning", "webdataset"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True

# Pages whose text is a file at the root of the repository.
ROOT_PAGES = ("contributing", "security", "changelog")
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./|docs/)?)([\w./-]+\.\w+|[\w./-]*/)(#[^)]*)?\)")


def onto_the_site(app: Any, name: str, source: list[str]) -> None:
    """Links as they are in the repository become links of the site; a file that is no page is named as code."""
    is_root = name in ROOT_PAGES
    text = (ROOT / f"{name.upper()}.md").read_text(encoding="utf-8") if is_root else source[0]
    here = ROOT if is_root else (ROOT / "docs" / name).parent

    def moved(link: re.Match[str]) -> str:
        words, _, _, anchor = link.groups()
        target = (here / f"{link[2]}{link[3]}").resolve()
        if not target.exists():
            return link[0]  # Sphinx says so
        if target.parent == ROOT and target.stem.lower() in ROOT_PAGES:
            target = ROOT / "docs" / f"{target.stem.lower()}.md"
        if not target.is_relative_to(ROOT / "docs"):
            return f"{words} (`{target.relative_to(ROOT)}`)"
        if target.is_dir():
            target = target / "README.md"
        page = Path(os.path.relpath(target, ROOT / "docs" if is_root else here))
        return f"[{words}]({page.as_posix()}{anchor or ''})"

    source[0] = LINK.sub(moved, text)


def plain_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings here are plain text: `*args` and `name_` are no markup in it."""
    code = re.compile(r"(`[^`]*`)")
    for place, line in enumerate(lines):
        if not line.startswith("    "):
            parts = code.split(line)
            lines[place] = "".join(part if part[:1] == "`" else re.sub(r"([*|_])", r"\\\1", part) for part in parts)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", onto_the_site)
    app.connect("autodoc-process-docstring", plain_docstring)
