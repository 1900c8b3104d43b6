"""Hooks of MkDocs that make a site of the pages that GitHub shows (`make docs`).

The pages stay plain Markdown whose links work on GitHub. Here the pages outside of docs/ join those in it, links are
led to where their files lie on the site, and what only GitHub or the tests of the docs read is taken out. A built page
that loads something from the network, or shows a list or a table as a paragraph, fails the build.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
JOINED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "skills/whet/SKILL.md": "skill.md",
}
"""Pages outside of docs/, and their names on the site."""
REFERENCE = "reference.md"
_HOME = {there: here for here, there in JOINED.items()}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
_FENCE = re.compile(r"^( *```\w+) [^\n`]*$", re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE)
_INLINE = re.compile(r"<pre.*?</pre>|<code>[^<]*</code>", re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--\w[\w-]*")
_BLOCK = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LOADS = re.compile(
    r"<(?:script|img|source|iframe|video|audio|embed)\b[^>]*?\ssrc(?:set)?=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon|modulepreload))[^>]*?href=[\"']?(?:https?:)?//"
    r"|url\(\s*[\"']?(?:https?:)?//|@import\s+[\"'](?:https?:)?//"
)
_UNRENDERED = re.compile(r"<p>(?:(?!</p>).)*?^(?:- |\d+\. |\|[^\n]*\||```)[^\n]*", re.DOTALL | re.MULTILINE)


_BROKEN_LIST = re.compile(r"</ol>\n<div class=\"highlight\"><pre>(?:(?!</pre>).)*</pre></div>\n<ol>", re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings as GitHub does: small letters, hyphens for spaces, no other signs."""
    config.mdx_configs["toc"]["slugify"] = lambda text, _: re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, the reference, and the files of the repository that a page links."""
    for here, there in JOINED.items():
        files.append(File.generated(config, there, abs_src_path=str(ROOT / here)))
    files.append(File.generated(config, REFERENCE, content=_reference()))
    pages = [file for file in files.documentation_pages() if file.src_uri != REFERENCE]
    linked = {path for file in pages for path in _linked(_repository_path(file), Path(file.abs_src_path or ""))}
    for path in sorted(linked):
        if (ROOT / path).is_file() and files.get_file_from_path(_site_path(path)) is None:
            files.append(File.generated(config, _site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to where things are on the site, without what only GitHub and the tests read."""
    here = _repository_path(page.file)
    parts = _BLOCK.split(_PICTURE.sub(_two_pictures, _COMMENT.sub("\n", markdown)))
    prose = (_LINK.sub(lambda found: _moved(found, here, page.file), part) for part in parts[::2])
    fenced = (_FENCE.sub(r"\1", part) for part in parts[1::2])
    text = "".join(_in_turn(prose, fenced))
    if page.file.src_uri == JOINED["README.md"]:
        page.meta["hide"] = ["navigation"]  # it is the only page of its part
    return text + _list_of_decisions() if here == "docs/decisions/README.md" else text


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep options such as --bf16 together: browsers would break a line after their hyphens."""
    return _INLINE.sub(lambda found: found[0] if found[0].startswith("<pre") else _kept_together(found[0]), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page on which a list, a table or a block was not understood."""
    if found := _UNRENDERED.search(output):
        raise PluginError(f"{page.file.src_uri}: shown as a paragraph:\n{found[0][-300:]}")
    if found := _BROKEN_LIST.search(output):
        raise PluginError(f"{page.file.src_uri}: a list begins again after a block; indent that by four:\n{found[0]}")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that would load something from the network."""
    site = Path(config.site_dir)
    found = [
        f"{path.relative_to(site)}: {loads}"
        for path in sorted(site.rglob("*"))
        if path.suffix in {".html", ".css"}
        for loads in loads_from_elsewhere(path.read_text("utf-8"))
    ]
    if found:
        raise PluginError("the site would load from the network:\n" + "\n".join(found[:20]))


def loads_from_elsewhere(text: str) -> list[str]:
    """Return what HTML or CSS has a browser load from other hosts; links that a reader follows are not among it."""
    return [found[0] for found in _LOADS.finditer(text)]


def _repository_path(file: File) -> str:
    return _HOME.get(file.src_uri, f"docs/{file.src_uri}")


def _site_path(path: str) -> str:
    """Return where a file of the repository lies on the site."""
    inside = path.removeprefix("docs/")
    return JOINED.get(path, inside if inside != path else f"repository/{path}")


def _linked(here: str, page: Path) -> Iterator[str]:
    """Yield the paths, from the root of the repository, that a page links or shows."""
    text = _BLOCK.sub("", page.read_text("utf-8"))
    named = [found[1] for found in _LINK.findall(text)] + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
    for link in named:
        name = link.partition("#")[0]
        if name and "://" not in name:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(here), name))


def _moved(found: re.Match[str], here: str, file: File) -> str:
    opening, link, closing = found.groups()
    name, _, anchor = link.partition("#")
    if not name or "://" in name:
        return found[0]
    target = _site_path(posixpath.normpath(posixpath.join(posixpath.dirname(here), name)))
    led = posixpath.relpath(target, posixpath.dirname(file.src_uri) or ".")
    return f"{opening}{led}{'#' if anchor else ''}{anchor}{closing}"


def _kept_together(code: str) -> str:
    return _OPTION.sub(lambda found: f'<span class="option">{found[0]}</span>', code)


def _two_pictures(found: re.Match[str]) -> str:
    """Return GitHub's element with a light and a dark picture as two images, of which the theme shows one."""
    (dark,), (light,) = (re.findall(rf"<{tag}[^>]*src(?:set)?=\"([^\"]+)\"", found[0]) for tag in ("source", "img"))
    text = re.findall(r"alt=\"([^\"]*)\"", found[0])[0]
    return f"![{text}]({light}#only-light)![{text}]({dark}#only-dark)"


def _in_turn(prose: Iterator[str], fenced: Iterator[str]) -> Iterator[str]:
    for part in prose:
        yield part
        yield next(fenced, "")


def _reference() -> str:
    """Return the page of the public names, which mkdocstrings fills in from their docstrings."""
    tree = ast.parse((ROOT / "src/whet/__init__.py").read_text("utf-8"))
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    public = [name for name in names if not name.startswith("_")]
    return (
        "# Reference\n\nThe public names of `whet`, from their docstrings. `whet COMMAND --help all` lists the options "
        "of a command.\n\n" + "\n\n".join(f"::: whet.{name}" for name in public) + "\n"
    )


def _list_of_decisions() -> str:
    """Return a list of the pages of decisions, by number."""
    pages = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    titles = {page.name: page.read_text("utf-8").partition("\n")[0].removeprefix("# ") for page in pages}
    return "\n## All\n\n" + "\n".join(f"- [{title}]({name})" for name, title in titles.items()) + "\n"
