"""A page as a reader of its markup sees it: tables by caption, headings, text, and every address in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "link", "input", "br", "line", "path", "use", "rect", "img", "wbr"}
_ADDRESSES = {"href", "src", "action", "data", "poster", "srcset", "xlink:href", "formaction", "background"}


@dataclass
class Table:
    """The texts of a table's cells, row by row, headings included."""

    caption: str = ""
    rows: list[list[str]] = field(default_factory=list)


class Page(HTMLParser):
    """The parts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[Table] = []
        self.headings: list[tuple[int, str]] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.unclosed: list[str] = []
        self.text = ""
        self._into: list[list[str]] = []
        self.feed(text)
        self.close()
        self.unclosed += self.open

    def table(self, caption: str) -> Table:
        """Return the one table whose caption begins like this."""
        found = [one for one in self.tables if one.caption.startswith(caption)]
        assert len(found) == 1, [one.caption for one in self.tables]
        return found[0]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in _ADDRESSES]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr" and "table" in self.open:
            self.tables[-1].rows.append([])
        if tag in ("th", "td", "caption", "h1", "h2", "h3"):
            self._into.append([])
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        if not self.open or self.open[-1] != tag:
            self.unclosed.append(tag)
            return
        self.open.pop()
        if tag in ("th", "td", "caption", "h1", "h2", "h3"):
            words = " ".join("".join(self._into.pop()).split())
            if tag == "caption":
                self.tables[-1].caption = words
            elif tag in ("th", "td"):
                self.tables[-1].rows[-1].append(words)
            else:
                self.headings.append((int(tag[1]), words))

    def handle_data(self, data: str) -> None:
        if "script" in self.open or "style" in self.open:
            return
        self.text += data
        if self._into:
            self._into[-1].append(data)
