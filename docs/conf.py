"""How Sphinx builds the site: `make docs` writes it to build/docs."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx

import pmaf

project = "pmaf"
author = "The pmaf authors"
project_copyright = "The pmaf authors"
version = release = pmaf.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
# sphinx-gallery leaves copies of the scripts beside the pages that it writes.
exclude_patterns = ["gallery/**/*.ipynb", "gallery/**/*.py", "gallery/**/*.zip"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
nitpicky = True
nitpick_ignore_regex = [
    # The site is built without a network, so that it has no inventory of other projects.
    (r"py:.*", r"(torch|nn|collections|typing)\b.*"),
    (r"py:.*", r"(Tensor|Module|Any|ClassVar|Callable|Sequence|NamedTuple|Generator|optional)"),
    # Base classes and types of results that users do not handle.
    (r"py:.*", r"pmaf\.(runtime|tangent|linalg|krylov|autograd|native)\..*"),
]

# Markdown. Links to headings work here as they do on the pages of a Git server.
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
myst_dmath_double_inline = True

# Docstrings are in the style of Google, with names and formulas in single backticks.
default_role = "name"
add_module_names = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",  # what runs; other scripts are shown
    "image_scrapers": ("matplotlib",),
    "capture_repr": (),
    "matplotlib_animations": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": float("inf"),
    "download_all_examples": False,
    "plot_gallery": "True",
}

html_theme = "furo"
html_title = "pmaf"
html_static_path = ["static"]
html_css_files = ["pmaf.css"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ee", "color-brand-content": "#7fb2ee"},
}

PUBLIC = (pmaf, pmaf.solvers, pmaf.gradients, pmaf.operators)
NAMES = {
    name: f"{module.__name__}.{name}"
    for module in PUBLIC
    for name in module.__all__
    if name not in ("gradients", "metrics", "operators", "solvers")
}
MODULES = ("solvers", "gradients", "operators", "metrics")


def target_of(text: str) -> str | None:
    """The full name of the public thing that a piece of code is, such as `Auto()`."""
    name = text.removesuffix("()").removeprefix("pmaf.")
    name = re.sub(rf"^({'|'.join(MODULES)})\.(?=\w)", "", name)
    return NAMES.get(name) if re.fullmatch(r"\w+", name) else None


def name_role(
    role: str, raw: str, text: str, line: int, inliner: Any, options=None, content=()
) -> tuple[list[nodes.Node], list[nodes.Node]]:
    """Code in single backticks; a link, if it is a public name."""
    # Docutils writes a backslash before a character as a null byte.
    text = text.replace("\x00", "\\")
    target = target_of(text)
    if target is None:
        return [nodes.literal(raw, text)], []
    from sphinx.addnodes import pending_xref

    reference = pending_xref(
        "", nodes.literal(raw, text), refdomain="py", reftype="obj", reftarget=target
    )
    reference["refdoc"] = inliner.document.settings.env.docname
    reference["refwarn"] = True
    return [reference], []


def link_pages(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings name pages as files of the repository; on the site these are links."""
    text = "\n".join(lines)
    lines[:] = re.sub(r"\bdocs/([\w-]+)\.md", r":doc:`/\1`", text).split("\n")


def two_themes(app: Sphinx, page: str, source: list[str]) -> None:
    """A Git server shows the picture for its theme by `<picture>`; here the theme has a switch."""

    def images(match: re.Match[str]) -> str:
        dark, alt, light = match.groups()
        return "\n".join(
            f"```{{image}} {path}\n:class: only-{theme}\n:alt: {alt}\n```\n"
            for path, theme in ((light, "light"), (dark, "dark"))
        )

    pattern = (
        r'<picture>\s*<source [^>]*srcset="(.*?)">\s*<img alt="(.*?)" src="(.*?)">\s*</picture>'
    )
    source[0] = re.sub(pattern, images, source[0])


def inline_math(writer: Any, node: nodes.math) -> None:
    """Browsers draw MathML themselves, without a script from elsewhere."""
    writer.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(writer: Any, node: nodes.math_block) -> None:
    writer.body.append('<div class="math">')
    writer.body.append(latex2mathml.tex2mathml(node.astext(), as_block=True))
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("name", name_role)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("source-read", two_themes)
    app.connect("autodoc-process-docstring", link_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
